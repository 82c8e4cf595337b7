# SPDX-License-Identifier: Apache-2.0
"""What holds for every plan, over random corpora and settings, and proof that each check notices a broken planner."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.planning import CostModel, PlanConfig, Planner, PlanError
from megatron_dyn.planning import assemble as assemble_module
from megatron_dyn.planning import planner as planner_module
from megatron_dyn.planning.windows import Window

corpora = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)
costs = st.sampled_from([CostModel(), CostModel(linear=1, quadratic=0), CostModel(linear=0, quadratic=3.5), CostModel(quadratic=1, window=7)])


@st.composite
def configurations(draw, oversize=("split", "truncate", "drop")):
    document_alignment = draw(st.sampled_from([1, 1, 2, 3]))
    batch = draw(st.sampled_from(["global_batch_size", "global_batch_tokens"]))
    return PlanConfig(
        max_tokens_per_microbatch=draw(st.integers(1, 50)),
        data_parallel_size=draw(st.integers(1, 4)),
        alignment=document_alignment * draw(st.integers(1, 4)),
        document_alignment=document_alignment,
        seed=draw(st.integers(0, 5)),
        oversize=draw(st.sampled_from(oversize)),
        max_documents_per_microbatch=draw(st.sampled_from([None, None, 1, 2, 5])),
        max_sum_squares_per_microbatch=draw(st.one_of(st.none(), st.integers(1, 2000))),
        microbatch_multiple=draw(st.integers(1, 3)),
        document_order=draw(st.sampled_from(["shuffle", "sequential", "length-window"])),
        length_window=draw(st.integers(1, 50)),
        cost=draw(costs),
        **{batch: draw(st.integers(1, 60 if batch == "global_batch_tokens" else 20))},
    )


def make(lengths, config):
    """A planner, or None where the corpus holds nothing that this configuration may use."""
    try:
        return Planner(np.array(lengths), config)
    except PlanError as error:
        assert "no usable documents" in str(error) and config.oversize == "drop"
        return None


def check_caps_and_layout(plan, planner):
    """Hard caps, T, boundaries, fillers, and the equal number of microbatches."""
    config, B = planner.config, planner.config.max_tokens_per_microbatch
    assert len(plan.microbatches) == config.data_parallel_size
    assert {len(rank) for rank in plan.microbatches} == {plan.num_microbatches}
    assert plan.num_microbatches > 0 and plan.num_microbatches % config.microbatch_multiple == 0
    every = list(itertools.chain(*plan.microbatches))
    pieces = sum(len(mb.pieces) for mb in every)
    assert sum(mb.is_filler for mb in every) == max(len(every) - pieces, 0) == plan.stats.fillers
    for mb in every:
        lengths = [piece.length for piece in mb.pieces]
        assert mb.num_tokens == sum(lengths) <= B
        assert all(length >= 1 for length in lengths)
        assert sum(length * length for length in lengths) <= (config.max_sum_squares_per_microbatch or B * B)
        assert len(mb.pieces) <= (config.max_documents_per_microbatch or len(every) + pieces)
        assert mb.T % config.alignment == 0 and mb.num_tokens <= mb.T <= config.capacity
        assert mb.cu_seqlens.dtype == mb.cu_seqlens_padded.dtype == np.int32
        assert mb.cu_seqlens[0] == mb.cu_seqlens_padded[0] == 0 and mb.cu_seqlens_padded[-1] == mb.T
        assert (np.diff(mb.cu_seqlens) > 0).all() and (np.diff(mb.cu_seqlens_padded) > 0).all()
        assert mb.max_seqlen == np.diff(mb.cu_seqlens_padded).max()
        if mb.is_filler:
            assert (mb.num_tokens, mb.num_loss_tokens, mb.T, mb.cost) == (0, 0, config.alignment, 0.0)
            assert mb.cu_seqlens.tolist() == [0, mb.T]
        else:
            assert np.diff(mb.cu_seqlens).tolist() == lengths
            padded = np.diff(mb.cu_seqlens_padded)
            assert (padded >= lengths).all() and (padded[:-1] % config.document_alignment == 0).all()
            assert (padded[:-1] - lengths[:-1] < config.document_alignment).all()
            assert mb.cost == pytest.approx(sum(config.cost.of(length) for length in lengths))
            ends = [int(piece.start + piece.length == planner.lengths[piece.document]) for piece in mb.pieces]
            assert mb.num_loss_tokens == sum(lengths) - sum(ends)
    assert plan.num_loss_tokens == sum(mb.num_loss_tokens for mb in every)


def check_epoch_holds_every_document_once(planner, epoch=0):
    """Every token that the policy keeps is trained on exactly once, and what it leaves out is counted."""
    longest = int((planner.config.max_sum_squares_per_microbatch or 10**9) ** 0.5)
    B, policy = min(planner.config.max_tokens_per_microbatch, longest), planner.config.oversize
    first = planner.first_step_of(epoch)
    plans = [planner.plan(first + i) for i in range(planner.steps_per_epoch(epoch))]
    assert all(plan.epoch == epoch for plan in plans) and planner.plan(first + len(plans)).epoch == epoch + 1
    assert sorted(np.concatenate([plan.documents for plan in plans])) == np.flatnonzero(planner.lengths).tolist()
    spans = {}
    for plan in plans:
        inside = {piece.document for rank in plan.microbatches for mb in rank for piece in mb.pieces}
        assert inside <= set(plan.documents.tolist()) and len(inside) == plan.num_documents
        for piece in (piece for rank in plan.microbatches for mb in rank for piece in mb.pieces):
            spans.setdefault(piece.document, []).append((piece.start, piece.start + piece.length))
    for document, length in enumerate(planner.lengths.tolist()):
        kept = {"split": length, "truncate": min(length, B), "drop": length if length <= B else 0}[policy]
        parts = sorted(spans.get(document, []))
        assert [a for a, _ in parts] == [0, *(b for _, b in parts[:-1])][: len(parts)]
        assert (parts[-1][1] if parts else 0) == kept
        assert len(parts) == -(-kept // B)
        sizes = [b - a for a, b in parts]
        assert not sizes or max(sizes) - min(sizes) <= 1 or set(sizes[:-1]) == {B}, "even, or full pieces and a rest"
    for name in ("split_documents", "truncated_documents", "truncated_tokens", "dropped_documents", "dropped_tokens",
                 "empty_documents"):
        assert sum(getattr(plan.stats, name) for plan in plans) == getattr(planner.counts, name), name
    lost = planner.counts.truncated_tokens + planner.counts.dropped_tokens
    assert sum(plan.stats.tokens for plan in plans) == planner.counts.tokens - lost


def check_documents_do_not_depend_on_division(planner, other):
    """Two divisions of one corpus see the same documents in the same order at every step."""
    steps = planner.steps_per_epoch(0) + planner.steps_per_epoch(1)
    for step in range(steps):
        ours, theirs = planner.plan(step), other.plan(step)
        assert ours.epoch == theirs.epoch and ours.documents.tolist() == theirs.documents.tolist()


@settings(max_examples=150, deadline=None)
@given(corpora, configurations())
def test_caps_layout_and_equal_counts(lengths, config):
    planner = make(lengths, config)
    for step in range(min(planner.steps_per_epoch(0), 4) if planner else 0):
        check_caps_and_layout(planner.plan(step), planner)


@settings(max_examples=150, deadline=None)
@given(corpora, configurations(), st.integers(0, 2))
def test_an_epoch_is_the_corpus(lengths, config, epoch):
    planner = make(lengths, config)
    if planner:
        check_epoch_holds_every_document_once(planner, epoch)


@settings(max_examples=100, deadline=None)
@given(corpora, configurations(oversize=("split", "truncate")), configurations())
def test_documents_do_not_depend_on_ranks_budget_alignment_cost(lengths, config, other):
    free = ("max_tokens_per_microbatch", "max_sum_squares_per_microbatch", "data_parallel_size", "alignment", "document_alignment",
            "max_documents_per_microbatch", "microbatch_multiple", "cost")
    changed = dataclasses.replace(config, **{name: getattr(other, name) for name in free})
    check_documents_do_not_depend_on_division(make(lengths, config), make(lengths, changed))


@settings(max_examples=60, deadline=None)
@given(corpora, configurations(oversize=("split",)), st.data())
def test_digests_are_equal_for_equal_plans_only(lengths, config, data):
    planner, again = make(lengths, config), make(np.array(lengths, dtype=np.int32), config)
    steps = list(range(planner.steps_per_epoch(0) + 2))
    digests = [planner.plan(step).digest for step in steps]
    shuffled = data.draw(st.permutations(steps))
    assert [again.plan(step).digest for step in shuffled] == [digests[step] for step in shuffled]  # random access
    assert len(set(digests)) == len(digests)
    longer = list(lengths)
    longer[data.draw(st.integers(0, len(lengths) - 1))] += 1
    others = [
        make(longer, config),
        Planner(np.array(lengths), config, fingerprint="another corpus of the same lengths"),
        *(make(lengths, dataclasses.replace(config, **change)) for change in (
            {"seed": config.seed + 1},
            {"alignment": config.alignment * 2},
            {"max_tokens_per_microbatch": config.max_tokens_per_microbatch + 1},
            {"data_parallel_size": config.data_parallel_size + 1},
            {"cost": CostModel(linear=7.0)},
        )),
    ]
    assert not {other.plan(0).digest for other in others} & set(digests)


def test_case_21_union_of_packs_over_1000_random_lists():
    rng = np.random.default_rng(21)
    for _ in range(1000):
        lengths = rng.integers(1, 30, size=rng.integers(1, 25))
        plan = Planner(lengths, PlanConfig(max_tokens_per_microbatch=30, global_batch_size=100)).plan(0)
        documents = [piece.document for mb in plan.microbatches[0] for piece in mb.pieces]
        assert sorted(documents) == list(range(len(lengths)))


CONFIG = PlanConfig(max_tokens_per_microbatch=8, global_batch_size=3, data_parallel_size=2)


def test_mutant_last_document_dropped_is_noticed(monkeypatch):
    check_epoch_holds_every_document_once(Planner(np.arange(1, 8), CONFIG))
    cut = planner_module.cut_documents
    monkeypatch.setattr(planner_module, "cut_documents", lambda d, n, **kw: cut(d[:-1], n[:-1], **kw))
    with pytest.raises(AssertionError):
        check_epoch_holds_every_document_once(Planner(np.arange(1, 8), CONFIG))


def test_mutant_cap_exceeded_by_one_is_noticed(monkeypatch):
    config = dataclasses.replace(CONFIG, data_parallel_size=1, global_batch_size=2)
    planner = Planner(np.array([5, 4]), config)
    check_caps_and_layout(planner.plan(0), planner)
    real = assemble_module.Caps
    monkeypatch.setattr(assemble_module, "Caps", lambda weight, **caps: real(weight=weight + 1, **caps))
    with pytest.raises(AssertionError):
        check_caps_and_layout(planner.plan(0), planner)


def test_mutant_order_depending_on_ranks_is_noticed(monkeypatch):
    one_rank = dataclasses.replace(CONFIG, data_parallel_size=1)
    lengths = np.arange(1, 8)
    check_documents_do_not_depend_on_division(Planner(lengths, one_rank), Planner(lengths, CONFIG))
    real, ranks = Window.documents_of_step, CONFIG.data_parallel_size
    rounding = Planner(lengths, CONFIG)

    def rounded(window, index):
        """The usual fault: the global batch is made divisible by the ranks."""
        documents = real(window, index)
        mine = window in rounding._kept.values()
        return documents[: max(len(documents) // ranks * ranks, 1)] if mine else documents

    monkeypatch.setattr(Window, "documents_of_step", rounded)
    with pytest.raises(AssertionError):
        check_documents_do_not_depend_on_division(Planner(lengths, one_rank), rounding)
