# SPDX-License-Identifier: Apache-2.0
"""Known faults of other planners (row ids of the shared table of cases), each with its smallest input."""

import json

import numpy as np
import pytest

from megatron_dyn.planning import PlanConfig, Planner, PlanError, TokenBudgetBatchSampler, alignment_for


def make(lengths, B, **settings):
    settings.setdefault("global_batch_size", 100)
    settings.setdefault("document_order", "sequential")
    return Planner(np.array(lengths), PlanConfig(max_tokens_per_microbatch=B, **settings))


def packs(plan):
    return [[piece.document for piece in mb.pieces] for rank in plan.microbatches for mb in rank]


def test_case_02_capacity_comes_from_the_budget():
    planner = make([8, 8, 8, 8], 32, alignment=alignment_for(tensor_parallel=2, sequence_parallel=True))
    assert planner.config.capacity == 32
    assert [mb.T for mb in planner.plan(0).microbatches[0]] == [32]
    assert PlanConfig(max_tokens_per_microbatch=33, global_batch_size=1, alignment=4).capacity == 36


@pytest.mark.parametrize(
    "lengths, T, real, padded", [([5, 4, 8], 20, [0, 5, 9, 17], [0, 5, 9, 20]), ([1], 4, [0, 1], [0, 4])]
)
def test_case_03_T_is_a_multiple_of_the_alignment(lengths, T, real, padded):
    [[mb]] = make(lengths, 32, alignment=alignment_for(tensor_parallel=4, sequence_parallel=True)).plan(0).microbatches
    assert (mb.T, mb.num_tokens) == (T, sum(lengths))
    assert mb.cu_seqlens.tolist() == real and mb.cu_seqlens_padded.tolist() == padded
    assert mb.cu_seqlens.dtype == mb.cu_seqlens_padded.dtype == np.int32
    assert mb.max_seqlen == np.diff(padded).max()


def test_case_18_all_ranks_run_the_same_number_of_microbatches():
    plan = make([95] * 5 + [20] * 5, 100, data_parallel_size=2).plan(0)
    assert [len(rank) for rank in plan.microbatches] == [3, 3]  # 575 tokens need 6 packs
    assert plan.num_microbatches == 3 and plan.stats.tokens == 575 and plan.num_loss_tokens == 565


@pytest.mark.parametrize("documents, size, ranks, epochs", [(5, 4, 2, 1), (10, 6, 3, 2)])
def test_case_20_the_tail_is_divided_fairly(documents, size, ranks, epochs):
    settings = dict(global_batch_size=size, data_parallel_size=ranks, max_documents_per_microbatch=2)
    seen = {}
    for plan in TokenBudgetBatchSampler(make([3] * documents, 6, **settings), num_epochs=epochs):
        assert len({len(rank) for rank in plan.microbatches}) == 1
        assert all(mb.T > 0 and len(mb.cu_seqlens) > 1 for rank in plan.microbatches for mb in rank)
        seen.setdefault(plan.epoch, []).extend(sum(packs(plan), []))
    assert {epoch: sorted(ids) for epoch, ids in seen.items()} == {e: list(range(documents)) for e in range(epochs)}

    sampler = TokenBudgetBatchSampler(make([3] * documents, 6, drop_last=True, **settings), num_epochs=epochs)
    plans = list(sampler)
    assert len(plans) == epochs * (documents // size) == len(sampler)
    assert sampler.totals["drop_last_documents"] == epochs * (documents % size)
    assert sampler.totals["documents"] == epochs * (documents // size) * size


def test_case_21_last_document_is_kept():
    plan = make([1, 2, 3, 4, 5], 100).plan(0)
    assert packs(plan) == [[0, 1, 2, 3, 4]] and plan.microbatches[0][0].T >= 15
    assert packs(make([7], 7).plan(0)) == [[0]]


@pytest.mark.parametrize(
    "lengths, B, kept", [([9, 3], 8, [1]), ([3, 9, 2], 8, [0, 2]), ([9], 8, None), ([5, 6], 4, None)]
)
def test_case_23_documents_above_the_budget_follow_the_policy(lengths, B, kept):
    oversize = [n for n in lengths if n > B]
    first = next(i for i, n in enumerate(lengths) if n > B)
    with pytest.raises(PlanError, match=rf"document {first} has {oversize[0]} tokens, above the budget of {B}"):
        make(lengths, B, oversize="error")

    if kept is None:
        with pytest.raises(PlanError, match="no usable documents"):
            make(lengths, B, oversize="drop")
    else:
        plan = make(lengths, B, oversize="drop").plan(0)
        assert packs(plan) == [kept] and plan.documents.tolist() == list(range(len(lengths)))
        assert (plan.stats.dropped_documents, plan.stats.dropped_tokens) == (len(oversize), sum(oversize))
        assert plan.num_documents == len(kept)

    plan = make(lengths, B, oversize="truncate").plan(0)
    assert plan.stats.tokens == sum(min(n, B) for n in lengths)
    assert (plan.stats.truncated_documents, plan.stats.truncated_tokens) == (len(oversize), sum(oversize) - B * len(oversize))

    plan = make(lengths, B, oversize="split").plan(0)
    assert plan.stats.tokens == sum(lengths) and plan.stats.split_documents == len(oversize)
    assert plan.num_loss_tokens == sum(lengths) - len(lengths)  # a label crosses from piece to piece of one document
    for policy in ("split", "truncate"):
        microbatches = make(lengths, B, oversize=policy).plan(0).microbatches[0]
        assert all(mb.pieces and mb.T <= B for mb in microbatches)


def test_case_25_resume_counts_documents_not_packs():
    settings = dict(global_batch_size=1, document_order="sequential")
    sampler = TokenBudgetBatchSampler(make([5, 5, 3, 8, 2], 8, **settings), num_epochs=1)
    assert packs(next(sampler)) == [[0]]
    state = json.loads(json.dumps(sampler.state_dict()))
    unbroken = [plan.digest for plan in sampler]
    resumed = TokenBudgetBatchSampler(make([5, 5, 3, 8, 2], 8, **settings), num_epochs=1)
    resumed.load_state_dict(state)
    plans = list(resumed)
    assert [packs(plan) for plan in plans] == [[[1]], [[2]], [[3]], [[4]]]
    assert [plan.digest for plan in plans] == unbroken


@pytest.mark.parametrize("batch", [dict(global_batch_size=1), dict(global_batch_tokens=1)])
def test_case_27_epoch_boundary(batch):
    def sampler():
        return TokenBudgetBatchSampler(
            make([4, 4, 4, 4], 8, global_batch_size=batch.get("global_batch_size"),
                 global_batch_tokens=batch.get("global_batch_tokens"), document_order="shuffle", seed=7),
            num_epochs=3,
        )

    unbroken, states = [], []
    running = sampler()
    for plan in running:
        unbroken.append(plan.documents.tolist())
        states.append(running.state_dict())
    assert len(unbroken) == 12
    orders = [sum(unbroken[e * 4 : e * 4 + 4], []) for e in range(3)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders) and len(set(map(tuple, orders))) > 1
    for saved in (4, 6, 8, 12):
        resumed = sampler()
        resumed.load_state_dict(states[saved - 1])
        assert [plan.documents.tolist() for plan in resumed] == unbroken[saved:]
