# SPDX-License-Identifier: Apache-2.0
"""Which documents a step holds: empty ones left out, where steps end, windows of similar length, random access, and memory."""

import dataclasses
import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dyn.planning import Piece, PlanConfig, Planner, PlanError
from megatron_dyn.planning import planner as planner_module
from megatron_dyn.planning import survey as survey_module
from megatron_dyn.planning import windows as windows_module
from megatron_dyn.planning.survey import documents_of, survey
from megatron_dyn.planning.windows import Windows, even_ends

ORDERS = ("shuffle", "sequential", "length-window")


# ---- the pass over all lengths, and the r-th document that is not empty


def lengths_with_holes(kind: str, count: int = 5000) -> np.ndarray:
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 90, size=count)
    if kind == "few":
        lengths[rng.integers(0, count, size=5)] = 0
    elif kind == "half":
        lengths[rng.random(count) < 0.5] = 0
    elif kind == "nearly all":
        lengths[rng.random(count) < 0.995] = 0
    elif kind == "whole blocks":
        lengths[:600] = lengths[1500:2700] = lengths[-3:] = 0
    return lengths


@pytest.mark.parametrize("kind", ["none", "few", "half", "nearly all", "whole blocks"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint16, ">i4"])
def test_survey_and_selection(kind, dtype, monkeypatch):
    monkeypatch.setattr(survey_module, "CHUNK", 1024)
    monkeypatch.setattr(survey_module, "LOOKED_AT", 2048)
    lengths = lengths_with_holes(kind).astype(dtype)
    found = survey(lengths, budget=80, fingerprint=True)
    assert (found.documents, found.tokens) == (5000, lengths.sum()) and found.empty == (lengths == 0).sum()
    above = np.flatnonzero(lengths > 80)
    assert (found.oversize, found.oversize_tokens, found.first_oversize) == (len(above), lengths[above].sum(), above[0])
    assert (found.before is None) == (kind == "none")
    expected = np.flatnonzero(lengths)
    ranks = np.random.default_rng(1).permutation(len(expected))
    assert documents_of(ranks, lengths, found).tolist() == expected[ranks].tolist()
    assert documents_of(ranks[:0], lengths, found).tolist() == []


def test_blocks_grow_with_the_corpus_and_still_find(monkeypatch):
    monkeypatch.setattr(survey_module, "MOST_BLOCKS", 2)
    lengths = lengths_with_holes("half")
    found = survey(lengths, budget=80, fingerprint=False)
    assert found.block == 4096 and len(found.before) == 3 and found.fingerprint is None
    expected = np.flatnonzero(lengths)
    assert documents_of(np.arange(len(expected)), lengths, found).tolist() == expected.tolist()


def test_the_fingerprint_of_lengths_sees_every_change(monkeypatch):
    def of(lengths):
        return survey(np.array(lengths), budget=10, fingerprint=True).fingerprint

    prints = [of(lengths) for lengths in ([1, 2, 3], [1, 3, 2], [1, 2], [1, 2, 3, 0], [1, 2, 259], [1, 2, 65539], [1, 2, 2**40])]
    assert len(set(prints)) == len(prints) and of([1, 2, 3]) == prints[0]
    monkeypatch.setattr(survey_module, "CHUNK", 512)
    assert of([1] * 512 + [257] * 512) != of([257] * 512 + [1] * 512), "the same bytes, were it not for their widths"


def test_negative_lengths_are_found_behind_the_first_chunk(monkeypatch):
    monkeypatch.setattr(survey_module, "CHUNK", 512)
    lengths = np.ones(2000, dtype=np.int32)
    lengths[1700] = -3
    with pytest.raises(PlanError, match=r"document 1700 has a negative length \(-3\)"):
        survey(lengths, budget=10, fingerprint=False)


# ---- where steps end


def steps_by_hand(lengths: np.ndarray, documents: list[int], config: PlanConfig) -> list[list[int]]:
    """The steps of a known order, by the definition, document by document."""
    steps, held = [[]], 0
    for document in documents:
        steps[-1].append(document)
        held += int(lengths[document])
        if len(steps[-1]) == config.global_batch_size or (config.global_batch_tokens and held >= config.global_batch_tokens):
            steps.append([])
            held = 0
    return steps[:-1] if config.drop_last or not steps[-1] else steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "batch", [dict(global_batch_size=s) for s in (1, 7, 1000)] + [dict(global_batch_tokens=t) for t in (1, 50, 800, 10**5)]
)
def test_steps_are_those_of_the_definition(batch, drop_last):
    lengths = np.random.default_rng(0).integers(0, 20, size=100)
    everything = np.flatnonzero(lengths).tolist()
    config = PlanConfig(max_tokens_per_microbatch=64, document_order="sequential", drop_last=drop_last, **batch)
    expected = steps_by_hand(lengths, everything, config)
    if not expected:
        with pytest.raises(PlanError, match="smaller than one global batch"):
            Planner(lengths, config)
        return
    planner = Planner(lengths, config)
    plans = [planner.plan(step) for step in range(2 * len(expected))]
    assert [plan.documents.tolist() for plan in plans] == expected * 2
    assert [plan.epoch for plan in plans] == [0] * len(expected) + [1] * len(expected)
    left_out = len(everything) - sum(map(len, expected))
    assert sum(plan.stats.drop_last_documents for plan in plans) == 2 * left_out == 2 * plans[-1].stats.drop_last_documents
    assert sum(plan.stats.empty_documents for plan in plans) == 2 * (100 - len(everything)) == 2 * plans[0].stats.empty_documents


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, PlanConfig]:
    lengths = rng.integers(0, 30, size=rng.integers(2, 30))
    lengths[-1] += 1
    batch = dict(global_batch_size=int(rng.integers(1, 15))) if rng.random() < 0.5 else dict(global_batch_tokens=int(rng.integers(1, 120)))
    config = PlanConfig(
        max_tokens_per_microbatch=int(rng.integers(10, 60)), data_parallel_size=int(rng.integers(1, 4)), seed=int(rng.integers(0, 9)),
        document_order=ORDERS[rng.integers(0, 3)], length_window=int(rng.integers(1, 40)), drop_last=bool(rng.random() < 0.3), **batch,
    )  # fmt: skip
    return lengths, config


def check_epochs(lengths: np.ndarray, config: PlanConfig) -> int:
    """Every document exactly once an epoch, steps of the right size, and plan(step) from nothing equal to iterating. Returns plans made."""
    try:
        planner = Planner(lengths, config)
    except PlanError:
        assert config.drop_last
        return 0
    plans = []
    while not plans or plans[-1].epoch < 2:
        plans.append(planner.plan(len(plans)))
    for epoch in (0, 1):
        mine = [plan for plan in plans if plan.epoch == epoch]
        documents = np.concatenate([plan.documents for plan in mine]).tolist()
        assert len(set(documents)) == len(documents), "a document comes twice"
        left_out = mine[-1].stats.drop_last_documents
        assert set(documents) <= set(np.flatnonzero(lengths))
        assert len(documents) + left_out == np.count_nonzero(lengths), "documents are lost"
        pieces = {piece.document for plan in mine for rank in plan.microbatches for mb in rank for piece in mb.pieces}
        assert pieces == set(documents)
        assert config.drop_last or left_out == 0
        for plan in mine if config.drop_last else mine[:-1]:
            assert len(plan.documents) == config.global_batch_size or plan.stats.tokens >= (config.global_batch_tokens or np.inf)
    assert planner.first_step_of(1) == [plan.epoch for plan in plans].index(1) == planner.steps_per_epoch(0)
    for step in (len(plans) - 1, len(plans) // 2):
        assert Planner(lengths, config).plan(step).digest == plans[step].digest, "random access differs"
    return len(plans)


def undivided(*, step, epoch, documents, pieces, drop_last_documents, **_):
    """Stands for `assemble`: all pieces in one microbatch."""
    rows = zip(pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist())
    microbatch = SimpleNamespace(pieces=[Piece(*row) for row in rows])
    stats = SimpleNamespace(split_documents=0, tokens=int(pieces.length.sum()), drop_last_documents=drop_last_documents)
    return SimpleNamespace(
        epoch=epoch, documents=documents, microbatches=[[microbatch]], stats=stats,
        digest=(step, epoch, documents.tolist(), drop_last_documents),
    )  # fmt: skip


def test_1000_random_lists(monkeypatch):
    rng = np.random.default_rng(99)
    plans = sum(check_epochs(*random_case(rng)) for _ in range(40))
    monkeypatch.setattr(planner_module, "assemble", undivided)
    plans += sum(check_epochs(*random_case(rng)) for _ in range(960))
    assert plans > 6000


def test_mutant_window_sort_that_leaks_documents_is_noticed(monkeypatch):
    real = windows_module.order_of_runs

    def repeats_a_run(count, **kwargs):
        order = real(count, **kwargs)
        order[0] = order[-1]
        return order

    case = random_case(np.random.default_rng(0))
    config = dataclasses.replace(case[1], document_order="length-window", global_batch_size=3, global_batch_tokens=None, length_window=20)
    check_epochs(case[0], config)
    monkeypatch.setattr(windows_module, "order_of_runs", repeats_a_run)
    with pytest.raises(AssertionError, match="comes twice"):
        check_epochs(case[0], config)


@pytest.mark.parametrize("batch", [dict(global_batch_size=5), dict(global_batch_tokens=60)])
def test_mutant_windows_that_overlap_are_noticed(monkeypatch, batch):
    config = PlanConfig(max_tokens_per_microbatch=64, document_order="length-window", length_window=20, **batch)
    lengths = np.random.default_rng(0).integers(1, 30, size=90)
    check_epochs(lengths, config)
    real = Windows._documents
    monkeypatch.setattr(Windows, "_documents", lambda self, epoch, begin, end: real(self, epoch, max(begin - 1, 0), end - (begin > 0)))
    with pytest.raises(AssertionError):
        check_epochs(lengths, config)


def test_random_access_in_token_mode_is_not_a_matter_of_what_was_read_before():
    lengths = np.random.default_rng(1).integers(1, 50, size=200)
    for order in ORDERS:
        config = PlanConfig(max_tokens_per_microbatch=64, global_batch_tokens=300, document_order=order, length_window=64)
        iterated = Planner(lengths, config)
        digests = [iterated.plan(step).digest for step in range(80)]
        jumping = Planner(lengths, config)
        for step in (79, 3, 40, 0, 41, 60, 79, 2):
            assert jumping.plan(step).digest == digests[step]
            assert jumping.epoch_of(step) == iterated.epoch_of(step)
        assert iterated.epoch_of(79) >= 3


def test_marks_are_bounded_and_forgetting_them_changes_nothing(monkeypatch):
    lengths = np.random.default_rng(1).integers(1, 50, size=200)
    config = PlanConfig(max_tokens_per_microbatch=64, global_batch_tokens=300)
    expected = [plan.documents.tolist() for plan in map(Planner(lengths, config).plan, range(120))]
    monkeypatch.setattr(planner_module, "MOST_MARKS", 8)
    planner = Planner(lengths, config)
    for step in [*range(120), 5, 77, 30, 119, 0]:
        assert planner.plan(step).documents.tolist() == expected[step]
        assert len(planner._marks) <= 8


def test_counting_steps_stops_where_it_is_told():
    lengths = np.random.default_rng(1).integers(1, 50, size=2000)
    planner = Planner(lengths, PlanConfig(max_tokens_per_microbatch=64, global_batch_tokens=300))
    all_of_them = planner.steps_per_epoch(0)
    assert [planner.steps_per_epoch(0, at_most=n) for n in (0, 5, all_of_them, 10**6)] == [0, 5, all_of_them, all_of_them]
    assert planner.steps_per_epoch(1, at_most=5) == 5
    by_size = Planner(lengths, PlanConfig(max_tokens_per_microbatch=64, global_batch_size=30))
    assert by_size.steps_per_epoch(0) == 67 and by_size.steps_per_epoch(0, at_most=9) == 9


# ---- windows of similar length

HEAVY_TAILED = np.clip(np.random.default_rng(2).lognormal(5.0, 1.2, 3000), 1, 4000).astype(np.int64)
WINDOWED = PlanConfig(max_tokens_per_microbatch=4096, global_batch_size=20, document_order="length-window", length_window=990)


def test_a_window_holds_the_shuffles_documents_sorted_into_steps():
    lengths = HEAVY_TAILED[:2995]
    shuffled, windowed = Planner(lengths, dataclasses.replace(WINDOWED, document_order="shuffle")), Planner(lengths, WINDOWED)
    steps = [windowed.plan(step).documents for step in range(150)]
    same = np.concatenate([shuffled.plan(step).documents for step in range(150)])
    for begin in (0, 1000, 2000):  # 990 documents, rounded up to whole steps; the last window ends with the last whole step
        mine = steps[begin // 20 : min(begin // 20 + 50, 149)]
        together = same[begin : begin + 1000][: 20 * len(mine)]
        assert sorted(np.concatenate(mine)) == sorted(together)
        ranges = sorted((lengths[step].min(), lengths[step].max()) for step in mine)
        assert all(one[1] <= two[0] for one, two in zip(ranges, ranges[1:])), "steps of one window do not overlap in length"
    assert steps[149].tolist() == same[2980:].tolist(), "the short last step is as random as any"


def drift(planner: Planner, steps: int) -> float:
    """Correlation of the number of a step with the mean length of its documents."""
    means = [np.log(planner.lengths[planner.plan(step).documents]).mean() for step in range(steps)]
    return float(np.corrcoef(np.arange(steps), means)[0, 1])


def test_lengths_do_not_drift_within_a_window(monkeypatch):
    assert abs(drift(Planner(HEAVY_TAILED, WINDOWED), 50)) < 0.3
    monkeypatch.setattr(windows_module, "order_of_runs", lambda count, **_: np.arange(count))  # mutant: steps left as sorted
    assert drift(Planner(HEAVY_TAILED, WINDOWED), 50) > 0.9


@pytest.mark.parametrize("batch", [dict(global_batch_size=2), dict(global_batch_size=None, global_batch_tokens=4000)])
def test_each_window_of_each_epoch_has_an_order_of_its_own(batch):
    """Lengths are all different, so the order of a window's steps is known by them: one of 120, fewer with tokens."""
    planner = Planner(np.arange(1000, 3000), dataclasses.replace(WINDOWED, length_window=10, max_tokens_per_microbatch=10**4, **batch))
    epochs = []
    for epoch in (0, 1):
        first = planner.first_step_of(epoch)
        positions = [planner.position_of(step) for step in range(first, first + planner.steps_per_epoch(epoch))]
        windows = {}
        for step, position in enumerate(positions, start=first):
            windows.setdefault(position.window, []).append(planner.lengths[planner.documents(step)].mean())
        epochs.append([tuple(np.argsort(means)) for means in windows.values() if len(means) > 1])
    assert all(len(set(orders)) > 0.4 * min(len(orders), 10) for orders in epochs), "the same in every window"
    assert np.mean([one == two for one, two in zip(*epochs)]) < 0.6, "the same in every epoch"


def test_token_windows_leave_nothing_over_and_make_even_steps():
    config = dataclasses.replace(WINDOWED, global_batch_size=None, global_batch_tokens=20_000)
    planner = Planner(HEAVY_TAILED, config)
    plans = [planner.plan(step) for step in range(planner.steps_per_epoch(0))]
    tokens = np.array([plan.stats.tokens for plan in plans[:-1]])
    assert tokens.min() >= 20_000 and tokens.mean() < 1.1 * 20_000
    spread = [np.log(HEAVY_TAILED[plan.documents]).std() for plan in plans]
    shuffled = Planner(HEAVY_TAILED, dataclasses.replace(config, document_order="shuffle"))
    assert np.mean(spread) < 0.25 * np.mean([np.log(HEAVY_TAILED[shuffled.plan(step).documents]).std() for step in range(50)])


def test_a_window_that_is_smaller_than_a_step_grows_to_one():
    lengths = np.full(1000, 10)
    config = PlanConfig(max_tokens_per_microbatch=64, global_batch_tokens=995, document_order="length-window", length_window=7)
    planner = Planner(lengths, config)
    assert [len(planner.plan(step).documents) for step in range(10)] == [100] * 10 and planner.epoch_of(10) == 1


def test_even_ends_cut_into_as_many_runs_as_can_be():
    rng = np.random.default_rng(4)
    for _ in range(300):
        lengths, target = np.sort(rng.integers(1, 40, size=rng.integers(1, 40))), int(rng.integers(1, 200))
        ends = even_ends(np.cumsum(lengths), target)
        runs = [int(lengths[a:b].sum()) for a, b in zip([0, *ends], ends)]
        most, held = 0, 0
        for length in lengths.tolist():  # as soon as possible: no way makes more of them
            held += length
            if held >= target:
                most, held = most + 1, 0
        assert ends[-1] == len(lengths) and sum(runs) == lengths.sum()
        assert len(runs) == max(most, 1) and (min(runs) >= target or most == 0)
        assert max(runs) - lengths.sum() / len(runs) <= 3 * lengths.max()


# ---- size


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch", [dict(global_batch_size=256), dict(global_batch_tokens=60_000)], ids=["size", "tokens"])
def test_nothing_of_the_size_of_the_corpus_is_made(order, batch):
    count = 1 << 22
    lengths = (np.arange(count, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(23)).astype(np.uint16)  # 0 .. 511, some empty
    config = PlanConfig(max_tokens_per_microbatch=4096, document_order=order, length_window=4096, **batch)
    tracemalloc.start()
    try:
        planner = Planner(lengths, config, fingerprint="given")
        planner.plan(0), planner.plan(1), planner.position_of(2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert planner.counts.empty_documents > 4000 and peak < 12 << 20  # ids of all documents would take 32 MiB


def test_a_far_step_is_scanned_in_chunks(monkeypatch):
    monkeypatch.setattr(windows_module, "SCANNED_TOGETHER", 1 << 10)
    monkeypatch.setattr(planner_module, "SCANNED_TOGETHER", 1 << 10)
    lengths = np.random.default_rng(3).integers(1, 50, size=50_000)
    planner = Planner(lengths, PlanConfig(max_tokens_per_microbatch=4096, global_batch_tokens=1000))
    read, real = [], Windows._documents
    monkeypatch.setattr(Windows, "_documents", lambda self, epoch, begin, end: read.append(end - begin) or real(self, epoch, begin, end))
    far = planner.plan(1000).documents.tolist()
    assert max(read) <= 1 << 10 and sum(read) < 1.2 * 1001 * 40
    read.clear()
    planner.plan(1001), planner.plan(1002)
    assert sum(read) < 4 * 70, "the step after a known one costs itself"
    plain = [planner.plan(step).documents.tolist() for step in range(1001)]
    assert plain[1000] == far


@pytest.mark.parametrize("order", ["shuffle", "sequential", "length-window"])
@pytest.mark.parametrize("batch", [dict(global_batch_size=4), dict(global_batch_tokens=200)])
def test_steps_may_be_numpy_integers_and_nothing_else(order, batch):
    planner = Planner(np.arange(1, 100), PlanConfig(max_tokens_per_microbatch=64, document_order=order, **batch))
    for kind in (np.int64, np.uint8, np.int32):
        assert planner.plan(kind(3)).digest == planner.plan(3).digest
        assert planner.documents(kind(3)).tolist() == planner.documents(3).tolist() and planner.position_of(kind(3)) == planner.position_of(3)
    for wrong in (1.5, "0", None):
        with pytest.raises(PlanError, match="is no integer"):
            planner.plan(wrong)


def test_a_planner_can_be_pickled():
    planner = Planner(np.arange(1, 100), PlanConfig(max_tokens_per_microbatch=64, global_batch_tokens=200), fingerprint="of a corpus")
    planner.plan(7)
    again = pickle.loads(pickle.dumps(planner))
    assert again.plan(7).digest == planner.plan(7).digest and again.fingerprint == "of a corpus"


def test_lengths_that_are_no_lengths_are_refused():
    config = PlanConfig(max_tokens_per_microbatch=4, global_batch_size=1, document_order="sequential")
    with pytest.raises(PlanError, match="document 1 has 9223372036854775813 tokens, more than any document can have"):
        Planner(np.array([1, 2**63 + 5], dtype=np.uint64), config)
    with pytest.raises(PlanError, match=r"cut into 25000000000 pieces of at most 4 tokens \(document 1 has 100000000000\)"):
        Planner(np.array([5, 10**11]), config).plan(1)


def test_what_is_known_of_the_epochs_of_a_tiny_corpus_does_not_grow_for_ever(monkeypatch):
    from megatron_dyn.planning import planner as module

    monkeypatch.setattr(module, "MOST_MARKS", 16)
    planner = Planner(np.array([3, 4, 5]), PlanConfig(max_tokens_per_microbatch=8, global_batch_tokens=8))
    fresh = Planner(np.array([3, 4, 5]), planner.config)
    for step in range(200):
        planner.plan(step)
    assert len(planner._epoch_starts) <= 17 and len(planner._marks) <= 17
    assert [planner.first_step_of(epoch) for epoch in range(60)] == [fresh.first_step_of(epoch) for epoch in range(60)]
