# SPDX-License-Identifier: Apache-2.0
"""The cap on the sum of squared lengths: kept by every stage of the division, with few microbatches, and part of the data order where it decides it."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from megatron_dyn.planning import PlanConfig, Planner, PlanError, TokenBudgetBatchSampler
from megatron_dyn.planning import assemble as assemble_module
from megatron_dyn.planning.bins import Bins
from megatron_dyn.planning.packing import Caps
from megatron_dyn.planning.squares import pack_under_squares


def sums_of_squares(plan):
    return [sum(piece.length**2 for piece in mb.pieces) for rank in plan.microbatches for mb in rank]


def heavy_tail(seed, size=400):
    return np.clip(np.random.default_rng(seed).lognormal(5.0, 1.2, size).astype(np.int64), 1, 4096)


def config(**changes):
    settings = dict(max_tokens_per_microbatch=4096, global_batch_size=400, data_parallel_size=2, max_sum_squares_per_microbatch=2_000_000)
    return PlanConfig(**(settings | changes))


def test_no_microbatch_exceeds_the_cap_and_few_are_added():
    for seed in range(20):
        lengths = heavy_tail(seed)
        plan, free = Planner(lengths, config()).plan(0), Planner(lengths, config(max_sum_squares_per_microbatch=None)).plan(0)
        assert max(sums_of_squares(plan)) <= 2_000_000 < max(sums_of_squares(free))
        assert sorted({piece.document for rank in plan.microbatches for mb in rank for piece in mb.pieces}) == list(range(400))
        pieces = np.array([piece.length for rank in plan.microbatches for mb in rank for piece in mb.pieces])
        bound = max(-(-int((pieces**2).sum()) // 2_000_000), -(-int(pieces.sum()) // 4096), int((2 * pieces**2 > 2_000_000).sum()))
        assert 2 * plan.num_microbatches <= bound + max(2, bound // 6)


def test_a_cap_that_nothing_reaches_changes_nothing():
    lengths = heavy_tail(1)
    plan, free = (Planner(lengths, config(max_sum_squares_per_microbatch=cap)).plan(0) for cap in (4096 * 4096, None))
    assert [[mb.pieces for mb in rank] for rank in plan.microbatches] == [[mb.pieces for mb in rank] for rank in free.microbatches]


def test_documents_above_the_root_are_oversize():
    lengths = np.array([50, 101, 250])
    settings = dict(max_tokens_per_microbatch=300, global_batch_size=3, data_parallel_size=1, max_sum_squares_per_microbatch=100 * 100)
    plan = Planner(lengths, config(**settings)).plan(0)
    assert plan.stats.split_documents == 2 and sum(mb.num_tokens for mb in plan.microbatches[0]) == 401
    truncated = Planner(lengths, config(**settings, oversize="truncate")).plan(0)
    assert truncated.stats.truncated_tokens == 1 + 150 and max(sums_of_squares(truncated)) <= 10_000
    assert Planner(lengths, config(**settings, oversize="drop")).plan(0).stats.dropped_documents == 2
    with pytest.raises(PlanError, match="document 1 has 101 tokens, above 100 tokens, the root of max_sum_squares_per_microbatch=10000.*raise max_sum_squares"):
        Planner(lengths, config(**settings, oversize="error"))


def test_resuming_with_another_cap_is_refused_only_where_it_decides_what_is_trained_on():
    lengths = heavy_tail(2)

    def resumed(oversize, before, after):
        first = TokenBudgetBatchSampler(Planner(lengths, config(oversize=oversize, max_sum_squares_per_microbatch=before)), data_parallel_rank=0)
        second = TokenBudgetBatchSampler(Planner(lengths, config(oversize=oversize, max_sum_squares_per_microbatch=after)), data_parallel_rank=0)
        second.load_state_dict(first.state_dict())

    resumed("split", 2_000_000, 1_000_000)
    resumed("truncate", 4096**2, 4096**2 + 1)
    with pytest.raises(PlanError, match="max-sum-squares-per-microbatch 1000000 .saved 2000000"):
        resumed("truncate", 2_000_000, 1_000_000)


@pytest.mark.parametrize("value", [0, -4, 2.5, True, 2**62])
def test_refused(value):
    with pytest.raises(PlanError, match="max_sum_squares_per_microbatch"):
        config(max_sum_squares_per_microbatch=value)


def test_number_of_bins_is_near_the_fewest_on_small_inputs():
    rng = np.random.default_rng(0)
    more = []
    for _ in range(150):
        cap = int(rng.integers(8, 30))
        caps = Caps(weight=cap, pieces=9, squares=int(rng.integers(cap * cap // 4, cap * cap)))
        longest = min(cap, int(caps.squares**0.5))
        weight = np.sort(rng.integers(1, longest + 1, size=rng.integers(1, 9)))[::-1].copy()
        bin_of, num_bins = pack_under_squares(weight, weight**2, caps=caps, multiple=1, at_least=1)
        assert np.bincount(bin_of, weight).max() <= cap and np.bincount(bin_of, weight**2).max() <= caps.squares
        more.append(num_bins - fewest_bins(weight.tolist(), caps))
    assert min(more) == 0 and max(more) <= 1 and np.mean(more) <= 0.05


def fewest_bins(weights, caps):
    """Exhaustive search."""
    for num_bins in itertools.count(1):
        @functools.cache
        def fits(index, used):
            if index == len(weights):
                return True
            w = weights[index]
            return any(
                tokens + w <= caps.weight and squares + w * w <= caps.squares
                and fits(index + 1, tuple(sorted((*used[:b], (tokens + w, squares + w * w), *used[b + 1 :]))))
                for b, (tokens, squares) in enumerate(used)
            )

        if fits(0, ((0, 0),) * num_bins):
            return num_bins


def test_mutant_exchanges_that_forget_the_squares_are_noticed(monkeypatch):
    """The first packing keeps the cap; without a look at squares the balancing afterwards breaks it."""
    real = assemble_module.Bins

    def forgetful(*, caps, **parts) -> Bins:
        return real(caps=dataclasses.replace(caps, squares=None), **parts)

    monkeypatch.setattr(assemble_module, "Bins", forgetful)
    assert any(max(sums_of_squares(Planner(heavy_tail(seed), config()).plan(0))) > 2_000_000 for seed in range(20))
