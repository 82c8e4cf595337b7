# SPDX-License-Identifier: Apache-2.0
"""The parts of the division one by one: dense packing, ranks first, floors, exchanges; against exhaustive search and definitions."""

import itertools

import numpy as np
import pytest

from megatron_dyn.planning import CostModel, PlanConfig, Planner
from megatron_dyn.planning import dense as dense_module
from megatron_dyn.planning.assemble import divide, integer_cost
from megatron_dyn.planning.balance import lower_costliest_bin
from megatron_dyn.planning.bins import Bins
from megatron_dyn.planning.dense import dense
from megatron_dyn.planning.packing import Caps, best_fit_decreasing, cost_floor, lower_bound, pack
from megatron_dyn.planning.ranks import level_then_fill, longest_first_by_rank, ranks_first


def falling(rng, low, high, size):
    return np.sort(rng.integers(low, high, size=size))[::-1].astype(np.int64)


def check_bins(bin_of, weight, cap, pieces, num_bins=None):
    assert len(bin_of) == len(weight) and bin_of.min(initial=0) >= 0
    assert np.bincount(bin_of, weight).max(initial=0) <= cap and np.bincount(bin_of).max(initial=0) <= pieces
    assert num_bins is None or bin_of.max(initial=0) < num_bins


def test_every_document_once_no_cap_exceeded_equal_counts_over_1000_random_lists():
    rng = np.random.default_rng(11)
    for number in range(1000):
        B, size = int(rng.integers(4, 200)), int(rng.integers(1, 60))
        alignment = int(rng.choice([1, 2, 4]))
        config = PlanConfig(
            max_tokens_per_microbatch=B, global_batch_size=200, data_parallel_size=int(rng.integers(1, 5)), alignment=alignment,
            document_alignment=int(rng.choice([1, alignment])), microbatch_multiple=int(rng.integers(1, 3)),
            max_documents_per_microbatch=[None, None, 3, 7][number % 4],
        )
        lengths = np.clip(rng.lognormal(3, 1.2, size), 1, 2 * B).astype(np.int64)
        plan = Planner(lengths, config).plan(0)
        every = [mb for rank in plan.microbatches for mb in rank]
        assert {len(rank) for rank in plan.microbatches} == {plan.num_microbatches}
        assert plan.num_microbatches % config.microbatch_multiple == 0
        pieces = [piece for mb in every for piece in mb.pieces]
        document, start, length = np.array(sorted(pieces)).T
        ends = np.cumsum(length)
        assert (start == ends - length - np.r_[0, np.cumsum(lengths)][document]).all() and ends[-1] == lengths.sum()
        padded = -(-np.array([piece.length for piece in pieces]) // config.document_alignment) * config.document_alignment
        count = [len(mb.pieces) for mb in every]
        rows = np.bincount(np.repeat(np.arange(len(every)), count), padded, minlength=len(every))
        assert max(mb.num_tokens for mb in every) <= B and max(mb.T for mb in every) <= config.capacity
        assert [mb.T for mb in every] == (np.maximum(-(-rows // alignment), 1) * alignment).tolist()
        assert max(count) <= (config.max_documents_per_microbatch or len(pieces))


def test_dense_keeps_its_caps_on_1000_random_lists():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        cap, pieces = int(rng.integers(3, 60)), int(rng.choice([1, 2, 3, 10**6]))
        weight = falling(rng, 1, cap + 1, rng.integers(0, 40))
        bin_of = dense(weight, cap=cap, pieces=pieces)
        check_bins(bin_of, weight, cap, pieces)
        assert set(bin_of.tolist()) == set(range(bin_of.max(initial=-1) + 1))  # none is empty


def test_dense_fills_given_rooms_or_says_no():
    rng = np.random.default_rng(1)
    outcomes = set()
    for _ in range(300):
        weight = falling(rng, 1, 20, rng.integers(1, 30))
        rooms = [(int(room), int(places)) for room, places in zip(rng.integers(0, 80, 6), rng.integers(0, 12, 6))]
        bin_of = dense(weight, cap=100, pieces=100, rooms=rooms)
        outcomes.add(bin_of is None)
        if bin_of is not None:
            used, count = np.bincount(bin_of, weight, minlength=6), np.bincount(bin_of, minlength=6)
            assert all(u <= room and n <= places for u, n, (room, places) in zip(used, count, rooms))
    assert outcomes == {True, False}
    assert dense(np.array([5, 4]), cap=9, pieces=9, rooms=[(8, 2)]) is None


def lognormal(count, B):
    drawn = np.clip(np.random.default_rng(0).lognormal(6.0, 1.2, count), 1, B).astype(np.int64)
    return np.sort(drawn)[::-1]


@pytest.mark.parametrize("B", [4096, 8192, 32768])
def test_whole_tables_are_packed_at_the_bound(B):
    weight = lognormal(100_000, B)
    assert dense(weight, cap=B, pieces=10**9).max() + 1 == -(-weight.sum() // B)


def test_mutant_no_pair_is_looked_for_is_noticed(monkeypatch):
    weight = lognormal(100_000, 4096)
    monkeypatch.setattr(dense_module, "LOOKS", 0)
    assert dense(weight, cap=4096, pieces=10**9).max() + 1 > -(-weight.sum() // 4096)


def test_dense_needs_fewer_bins_than_best_fit_decreasing_where_nothing_may_be_lost():
    rng = np.random.default_rng(2)
    ours = theirs = bound = 0
    for _ in range(100):
        weight = np.sort(np.clip(rng.lognormal(6, 1.2, int(rng.integers(20, 400))), 1, None).astype(np.int64))[::-1]
        cap = max(int(weight[0]), -(-int(weight.sum()) // int(rng.integers(2, 1 + len(weight) // 5))))
        caps = Caps(weight=cap, pieces=10**6)
        bound += lower_bound(weight, caps)
        ours += dense(weight, cap=cap, pieces=10**6).max() + 1
        theirs += best_fit_decreasing(weight, caps).max() + 1
    assert bound <= ours < bound + 20 < theirs


def test_lower_bound_counts_room_that_no_piece_fits_in():
    assert lower_bound(np.array([9, 8, 3]), Caps(weight=10, pieces=9)) == 3  # 20 tokens, but 1 and 2 are lost


def test_ranks_first_gives_each_rank_its_bins():
    rng = np.random.default_rng(3)
    outcomes = []
    for _ in range(500):
        ranks, each, cap = int(rng.integers(1, 5)), int(rng.integers(1, 4)), 40
        weight = falling(rng, 1, 30, rng.integers(1, 30))
        caps = Caps(weight=cap, pieces=int(rng.choice([3, 10**6])))
        for way in (longest_first_by_rank, level_then_fill, ranks_first):
            bin_of = way(weight, weight * (100 + weight), ranks, each, caps)
            outcomes.append((way.__name__, bin_of is None))
            if bin_of is not None:
                check_bins(bin_of, weight, cap, caps.pieces, ranks * each)
    assert len(set(outcomes)) == 6


def test_longest_first_by_rank_equals_its_definition():
    rng = np.random.default_rng(4)
    for _ in range(300):
        ranks, each, caps = int(rng.integers(2, 5)), int(rng.integers(1, 4)), Caps(weight=25, pieces=int(rng.integers(2, 9)))
        weight = falling(rng, 1, 20, rng.integers(1, 20))
        room, load, count, expected = [[25] * each for _ in range(ranks)], [[0] * each for _ in range(ranks)], {}, []
        for w in weight.tolist():
            fitting = [
                (sum(load[r]), r, load[r][b], b) for r in range(ranks) for b in range(each)
                if room[r][b] >= w and count.get((r, b), 0) < caps.pieces
            ]
            if not fitting:
                expected = None
                break
            _, r, _, b = min(fitting)
            room[r][b] -= w
            load[r][b] += w * w
            count[r, b] = count.get((r, b), 0) + 1
            expected.append(r * each + b)
        found = longest_first_by_rank(weight, weight * weight, ranks, each, caps)
        assert (found is None and expected is None) or found.tolist() == expected


def best_largest_cost(weight, cost, num_bins, cap, groups):
    """Exhaustive search: the least that the costliest group of bins can cost, or None."""
    bin_of = np.indices((num_bins,) * len(weight)).reshape(len(weight), -1)  # every division is a column
    loads = np.stack([weight @ (bin_of == b) for b in range(num_bins)])
    fits = (loads <= cap).all(axis=0)
    if not fits.any():
        return None
    costs = np.stack([cost @ (bin_of[:, fits] == b) for b in range(num_bins)])
    return int(costs.reshape(groups, num_bins // groups, -1).sum(axis=1).max(axis=0).min())


def small_step(rng, kind):
    """Lengths and settings that exhaustive search can solve: short documents only, or a giant in bins that are all but full."""
    ranks, bins = [(1, 2), (1, 3), (2, 2), (3, 3)][rng.integers(4)]
    lengths = rng.integers(500, 3000, size=int(rng.integers(6, 9)))
    B = max(int(lengths.max()), int(lengths.sum() / bins * rng.uniform(1.0, 1.3)))
    if kind == "giant":
        share = 0.8 / bins  # of all tokens, which is four fifths of a bin
        lengths[0] = int(lengths[1:].sum() * share / (1 - share))
        B = max(int(lengths.max()), int(lengths.sum() / bins * rng.uniform(1.01, 1.1)))
    return lengths, PlanConfig(
        max_tokens_per_microbatch=B, global_batch_size=9, data_parallel_size=ranks, cost=CostModel(linear=1, quadratic=2e-4)
    )


@pytest.mark.parametrize("kind", ["short", "giant"])
def test_plans_are_near_the_optimum_of_an_exhaustive_search(kind):
    """The number of bins, then the costliest bin and rank with so many; and no floor lies above an optimum."""
    rng = np.random.default_rng(5)
    above, found, of_ranks, floor_says_more = [], [], [], 0
    for _ in range(50):
        lengths, config = small_step(rng, kind)
        ranks, B = config.data_parallel_size, config.max_tokens_per_microbatch
        microbatch_of, each = divide(lengths, config)
        weight = np.sort(lengths)[::-1]
        cost = integer_cost(weight, config)
        for fewest in itertools.count(ranks, ranks):
            best = best_largest_cost(weight, cost, fewest, B, fewest)
            if best is not None:
                break
        above.append(each * ranks - fewest)
        floor = cost_floor(weight, cost, fewest, B)
        assert floor <= best
        floor_says_more += floor > 1.001 * max(cost.max(), cost.sum() / fewest)
        if above[-1] == 0:
            ours = np.bincount(microbatch_of, integer_cost(lengths, config), minlength=fewest)
            found.append(ours.max() / best)
            best = best_largest_cost(weight, cost, fewest, B, ranks) if fewest > ranks else best
            of_ranks.append(ours.reshape(ranks, -1).sum(axis=1).max() / best)
    assert min(above) == 0 and np.count_nonzero(above) <= 2
    assert min(found + of_ranks) > 1 - 1e-9  # the search was exhaustive
    assert np.mean(found) < 1.005 and max(found) < 1.12 and np.mean(of_ranks) < 1.015
    assert kind == "short" or floor_says_more > 25


def test_floor_of_full_bins():
    """Two bins, both full: the one with the giant costs at least what it weighs and the giant's excess."""
    weight = np.array([90, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10])
    cost = weight * 100 + weight * weight
    assert cost_floor(weight, cost, 2, 100) == cost[0] + cost[1] > max(cost[0], cost.sum() / 2)


@pytest.mark.parametrize("pieces", [4, 10**6])
def test_exchanges_keep_the_books_and_the_caps(pieces):
    rng = np.random.default_rng(6)
    exchanged = [0, 0]
    for _ in range(200):
        num_bins, size = int(rng.integers(2, 5)), int(rng.integers(6, 16))
        weight = falling(rng, 1, 30, size)
        cap = int(weight.sum()) // num_bins + int(rng.integers(4, 20))
        bin_of, num_bins = pack(weight, weight * (50 + weight), caps=Caps(weight=cap, pieces=pieces), multiple=num_bins)
        bins = Bins(weight=weight, cost=weight * (50 + weight), bin_of=bin_of, num_bins=num_bins, caps=Caps(weight=cap, pieces=pieces))
        for turn in range(6):
            costliest = int(np.argmax(bins.bin_cost))
            load = int(bins.bin_cost[costliest])
            mine = bins.bin_of == costliest
            give, take = np.flatnonzero(mine[:size]), np.flatnonzero(~mine)
            if turn % 2:
                take = take[take < size]
                take = take[np.argsort(bins.bin_of[take], kind="stable")]
            found = (bins.best_exchange_of_sets if turn % 2 else bins.best_exchange)(give, take, load, bins.bin_cost, load)
            if found is None:
                continue
            exchanged[turn % 2] += 1
            target = int(bins.bin_of[found.taken[0]])
            bins.exchange(found)
            assert max(bins.bin_cost[costliest], bins.bin_cost[target]) == found.load < load
            check_bins(bins.bin_of[:size], weight, cap, pieces, num_bins)
            for kept, of_piece in ((bins.bin_weight, weight), (bins.bin_cost, weight * (50 + weight)), (bins.count, np.ones(size))):
                assert (kept == np.bincount(bins.bin_of[:size], of_piece, minlength=num_bins)).all()
    assert min(exchanged) > 20


def test_full_bins_are_evened_by_sets_of_equal_weight(monkeypatch):
    """4 + 4 for 8: no exchange of two single pieces fits, and without sets (a mutant) nothing moves."""
    lengths = np.r_[[8000] * 4, [4000] * 8]
    config = PlanConfig(max_tokens_per_microbatch=16000, global_batch_size=12, cost=CostModel(linear=1, quadratic=1e-3))

    def bins():
        return Bins(
            weight=lengths, cost=integer_cost(lengths, config), bin_of=np.r_[0, 0, 1, 1, [2] * 4, [3] * 4], num_bins=4,
            caps=Caps(weight=16000, pieces=99),
        )

    even, uneven = bins(), bins()
    lower_costliest_bin(even)
    assert len(set(even.bin_cost.tolist())) == 1
    monkeypatch.setattr(Bins, "best_exchange_of_sets", lambda *args: None)
    lower_costliest_bin(uneven)
    assert uneven.bin_cost.max() > 1.2 * uneven.bin_cost.min()


def test_ranks_are_even_in_a_step_of_512_ranks():
    lengths = np.clip(np.random.default_rng(7).lognormal(6.0, 1.2, 48 * 512), 1, None).astype(np.int64)
    config = PlanConfig(max_tokens_per_microbatch=32768, global_batch_size=len(lengths), data_parallel_size=512)
    cost = config.cost.of(lengths)
    microbatch_of, each = divide(lengths, config)
    ranks = np.bincount(microbatch_of // each, cost, minlength=512)
    assert ranks.max() <= 1.005 * max(cost.max(), ranks.mean())
