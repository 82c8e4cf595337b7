# SPDX-License-Identifier: Apache-2.0
"""How documents above the budget are cut: evenly, unless full pieces need fewer microbatches."""

import numpy as np
import pytest

from megatron_dyn.planning import PlanConfig, Planner
from megatron_dyn.planning.pieces import cut_documents


def plan_of(lengths: list[int], **settings):
    config = PlanConfig(max_tokens_per_microbatch=4096, global_batch_size=len(lengths), document_order="sequential", **settings)
    return Planner(np.array(lengths), config).plan(0)


def lengths_of(plan) -> list[int]:
    return sorted(piece.length for rank in plan.microbatches for mb in rank for piece in mb.pieces)


def test_pieces_are_even_where_that_costs_no_microbatch():
    plan = plan_of([6000])
    assert lengths_of(plan) == [3000, 3000]


def test_full_pieces_are_taken_where_even_ones_waste_microbatches():
    # Even: 3 x 3000, 5 x 3300, 2106 - no two of them fit together, so 9 microbatches. Full: 6 x 4096, and 808 + 116 + 2106.
    plan = plan_of([9000, 16_500, 2106])
    assert plan.num_microbatches == 7 and plan.stats.fill > 0.96
    assert lengths_of(plan) == [116, 808, 2106, *[4096] * 6]


def test_both_ways_hold_every_token_once():
    documents, lengths = np.arange(4), np.array([4096, 4097, 10_000, 1])
    for even in (True, False):
        pieces = cut_documents(documents, lengths, budget=4096, oversize="split", even=even)
        for document, length in zip(documents, lengths):
            mine = pieces.document == document
            assert pieces.start[mine].tolist() == np.cumsum([0, *pieces.length[mine][:-1]]).tolist()
            assert pieces.length[mine].sum() == length
            assert pieces.ends_document[mine].tolist() == [False] * (mine.sum() - 1) + [True]
        assert pieces.length.max() <= 4096 and pieces.length.min() >= 1


@pytest.mark.parametrize("seed", range(5))
def test_never_more_microbatches_than_with_either_way(seed, monkeypatch):
    from megatron_dyn.planning import planner as module

    lengths = np.random.default_rng(seed).lognormal(8.5, 0.8, 24).astype(int).tolist()
    chosen = plan_of(lengths, data_parallel_size=2).num_microbatches
    for way in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(module, "cut_documents", lambda *a, even, **k: cut_documents(*a, even=way, **k))
            assert chosen <= plan_of(lengths, data_parallel_size=2).num_microbatches
