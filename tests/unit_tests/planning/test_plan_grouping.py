# SPDX-License-Identifier: Apache-2.0
"""The ways of grouping beside the planned one: the same documents, pieces and loss tokens; padding where each way has it; no cap exceeded."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.microbatch import build_microbatch
from megatron_dyn.planning import PlanConfig, Planner, PlanError
from megatron_dyn.planning import grouping

SAME_DATA = ("packed-fixed", "fixed-count", "pad-to-max")


def plan_of(lengths, microbatching="dynamic", step=0, **changes):
    base = dict(max_tokens_per_microbatch=32, global_batch_size=len(lengths), document_order="sequential")
    return Planner(np.array(lengths), PlanConfig(**(base | changes), microbatching=microbatching)).plan(step)


def layout(plan):
    """(lengths, padded lengths, T) of each microbatch, by rank."""
    return [[(np.diff(mb.cu_seqlens).tolist(), np.diff(mb.cu_seqlens_padded).tolist(), mb.T) for mb in rank] for rank in plan.microbatches]


def test_fixed_count_pads_to_the_longest_of_the_microbatch():
    plan = plan_of([3, 9, 5, 2, 7, 4, 31], "fixed-count", documents_per_microbatch=3, alignment=4)
    assert layout(plan) == [[([3, 9, 5], [9, 9, 10], 28), ([2, 7, 4], [7, 7, 10], 24), ([31], [32], 32)]]
    assert plan.stats.padding == 84 - 61


def test_fixed_count_takes_fewer_where_they_would_not_fit_when_padded():
    plan = plan_of([10, 10, 10, 11, 17, 1], "fixed-count", documents_per_microbatch=3)
    assert [lengths for lengths, _, _ in layout(plan)[0]] == [[10, 10, 10], [11], [17], [1]]  # 2 x 17 > 32


def test_pad_to_max_gives_every_document_the_room_of_the_longest():
    plan = plan_of([3, 9, 5, 2, 7], "pad-to-max", data_parallel_size=2)
    assert layout(plan) == [[([3, 9, 5], [9, 9, 9], 27)], [([2, 7], [9, 9], 18)]]
    assert layout(plan_of([3, 40], "pad-to-max", global_batch_size=1, oversize="truncate")) == [[([3], [32], 32)]]  # of the corpus, at most B


def test_packed_fixed_has_one_shape_and_the_planned_microbatches():
    lengths = [3, 9, 5, 2, 7, 30, 12]
    planned, fixed = plan_of(lengths, alignment=3, data_parallel_size=2), plan_of(lengths, "packed-fixed", alignment=3, data_parallel_size=2)
    assert [[mb.pieces for mb in rank] for rank in planned.microbatches] == [[mb.pieces for mb in rank] for rank in fixed.microbatches]
    assert {mb.T for rank in fixed.microbatches for mb in rank} == {33}
    filler = plan_of([5], "packed-fixed", data_parallel_size=2).microbatches[1][0]
    assert filler.is_filler and filler.T == 32 and filler.cu_seqlens.tolist() == [0, 32]


def test_concat_chunk_cuts_the_stream_and_loses_one_label():
    plan = plan_of([20, 30, 25], "concat-chunk", alignment=2)
    assert [[tuple(piece) for piece in mb.pieces] for mb in plan.microbatches[0]] == [
        [(0, 0, 20), (1, 0, 12)], [(1, 12, 18), (2, 0, 14)], [(2, 14, 11)],
    ]  # fmt: skip
    assert [mb.T for mb in plan.microbatches[0]] == [32, 32, 12]
    assert [mb.num_loss_tokens for mb in plan.microbatches[0]] == [32, 32, 10] and plan.stats.split_documents == 2
    assert [tuple(mb.following or ()) for mb in plan.microbatches[0]] == [(1, 12, 18), (2, 14, 11), ()]
    assert plan.stats.squared_tokens == 32**2 + 32**2 + 11**2 and plan.documents_digest == plan_of([20, 30, 25]).documents_digest
    assert plan.documents_digest != plan_of([20, 30, 26, 1], step=1, global_batch_size=3).documents_digest
    two = plan_of([20, 30, 25], "concat-chunk", data_parallel_size=2)
    assert [[mb.num_tokens for mb in rank] for rank in two.microbatches] == [[32, 11], [32, 0]]


class Stream:
    """A corpus whose tokens number the stream of all documents."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.starts = np.cumsum(lengths) - lengths

    def tokens(self, document, start, length):
        return self.starts[document] + start + np.arange(length)

    def describe(self, document):
        return f"document {document}"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 40), st.integers(1, 3), st.integers(1, 4))
def test_concat_chunk_tensors_are_the_stream(lengths, budget, ranks, alignment):
    plan = plan_of(lengths, "concat-chunk", max_tokens_per_microbatch=budget, data_parallel_size=ranks, alignment=alignment)
    corpus, tokens, labels = Stream(lengths), {}, {}
    for mb in itertools.chain(*plan.microbatches):
        built = build_microbatch(mb, corpus, step=0, index=0)
        assert mb.num_tokens <= budget and built.packed_seq_params.cu_seqlens_q.tolist() == [0, mb.num_tokens or mb.T]
        rows = built.tokens[0, : mb.num_tokens].tolist()
        assert built.position_ids[0, : mb.num_tokens].tolist() == list(range(mb.num_tokens))
        tokens |= dict.fromkeys(rows)
        labels |= {row: label for row, label, mask in zip(rows, built.labels[0].tolist(), built.loss_mask[0].tolist()) if mask}
    total = sum(lengths)
    assert sorted(tokens) == list(range(total)) and labels == {row: row + 1 for row in range(total - 1)}
    assert plan.stats.loss_tokens == total - 1 and plan.stats.tokens == total


ways = st.sampled_from(SAME_DATA)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any), ways, st.integers(1, 40), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from([1, 2]), st.sampled_from(["split", "truncate", "drop"]), st.integers(1, 5), st.sampled_from([None, 100, 900]),
    st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_the_same_pieces_whatever_the_grouping(lengths, way, budget, ranks, multiple, document_alignment, oversize, count, squares, documents):
    config = PlanConfig(
        max_tokens_per_microbatch=budget, global_batch_size=16, data_parallel_size=ranks, microbatch_multiple=multiple, oversize=oversize,
        alignment=2, document_alignment=document_alignment, max_sum_squares_per_microbatch=squares, max_documents_per_microbatch=documents,
    )  # fmt: skip
    try:
        planners = [Planner(np.array(lengths), dataclasses.replace(config, microbatching=name, documents_per_microbatch=count)) for name in ("dynamic", way)]
    except PlanError as error:
        assert "no usable documents" in str(error)
        return
    for step in range(planners[0].steps_per_epoch()):
        planned, other = (planner.plan(step) for planner in planners)
        check_same_data(planned, other)
        assert planned.digest != other.digest
        every = list(itertools.chain(*other.microbatches))
        assert len({len(rank) for rank in other.microbatches}) == 1 and other.num_microbatches % multiple == 0
        for mb in every:
            lengths_of = [piece.length for piece in mb.pieces]
            assert mb.num_tokens == sum(lengths_of) <= budget and mb.T <= config.capacity and mb.T % 2 == 0
            assert sum(n * n for n in lengths_of) <= (squares or budget**2) and len(lengths_of) <= (documents or len(lengths_of))
            assert (np.diff(mb.cu_seqlens_padded) >= (lengths_of or [0])).all() and mb.cu_seqlens_padded[-1] == mb.T
            assert mb.max_seqlen == np.diff(mb.cu_seqlens_padded).max()
            assert way != "fixed-count" or len(lengths_of) <= count
            assert way != "packed-fixed" or mb.T == config.capacity


def check_same_data(planned, other):
    pieces = [sorted(piece for rank in plan.microbatches for mb in rank for piece in mb.pieces) for plan in (planned, other)]
    assert pieces[0] == pieces[1] and planned.documents_digest == other.documents_digest
    assert planned.stats.squared_tokens == other.stats.squared_tokens == sum(piece.length**2 for piece in pieces[0])
    for name in ("tokens", "loss_tokens", "documents", "split_documents", "truncated_tokens", "dropped_documents"):
        assert getattr(planned.stats, name) == getattr(other.stats, name), name


def test_mutant_another_cut_of_long_documents_is_noticed():
    """Even and full pieces have different contexts: all ways must take what the planned way takes."""
    lengths = [40] * 9  # of B = 32: even 20 + 20 needs 18 microbatches, full 32 + 8 needs 12
    check_same_data(plan_of(lengths), plan_of(lengths, "fixed-count"))
    with pytest.raises(AssertionError):
        check_same_data(plan_of(lengths), plan_of([20] * 18, "fixed-count"))
    assert plan_of(lengths).stats.microbatches < 18


def test_mutant_a_width_that_is_not_the_microbatch_s_own_is_noticed(monkeypatch):
    """Counting a piece before the row it widens is known would let a microbatch outgrow B."""
    real = grouping.round_up
    monkeypatch.setattr(grouping, "round_up", lambda value, multiple: min(real(value, multiple), 10) if isinstance(value, int) else real(value, multiple))
    plan = plan_of([3, 9, 17, 2], "fixed-count", documents_per_microbatch=3)
    assert max(mb.T for mb in plan.microbatches[0]) > 32


@pytest.mark.parametrize(
    "changes",
    [dict(oversize="truncate"), dict(max_documents_per_microbatch=4), dict(max_sum_squares_per_microbatch=100)],
)
def test_concat_chunk_refuses_caps_it_would_not_keep(changes):
    with pytest.raises(PlanError, match="concat-chunk"):
        plan_of([5, 6], "concat-chunk", **changes)


def test_unknown_way_is_refused():
    with pytest.raises(PlanError, match="microbatching='padded' is unknown: choose one of dynamic"):
        plan_of([5], "padded")
