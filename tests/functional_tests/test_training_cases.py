# SPDX-License-Identifier: Apache-2.0
"""Known faults of other trainers (row ids of the shared table of cases), each with its smallest input, in a real training step."""

import json
import math
from dataclasses import replace

import pytest
import torch
from launch import launch
from reference import GPT2, LLAMA, check_step, largest_difference, make_documents, reference_steps
from trained_steps import Run, Scenario, check_scenario, launch_scenario
from watched_loop import train_watched

ALONE = {"max_documents_per_microbatch": 1}
TP2 = dict(tp=2, sp=True)
SHARDED = {"use_distributed_optimizer": True}


def one_step(lengths, *, budget=32, gpt=LLAMA, **topology) -> Scenario:
    return Scenario(documents=make_documents(lengths), budget=budget, batch=len(lengths), gpt=gpt, **topology)


def the_only(seen: list) -> dict:
    [[entry]] = seen
    return entry


def test_case_03_T_is_padded_to_a_multiple_of_TP():
    case = one_step([5, 4, 8], gpt=replace(LLAMA, groups=4), tp=4, sp=True)
    results = launch_scenario(case)
    check_scenario(case, results)
    for [rank] in results:
        entry = the_only(rank.seen)
        assert (entry["T"], entry["cu_seqlens"], entry["cu_seqlens_padded"]) == (20, [0, 5, 9, 17], [0, 5, 9, 20])
        assert rank.loss_tokens == 4 + 3 + 7


def test_case_03_a_single_token_is_padded_too():
    """Its pack has no loss token; in a step with another document it changes nothing."""
    case = one_step([1, 6], gpt=replace(LLAMA, groups=4), tp=4, sp=True, packing=ALONE)
    results = launch_scenario(case)
    check_scenario(case, results)
    for [rank] in results:
        [seen] = rank.seen
        single = next(entry for entry in seen if entry["T"] == 4)
        assert (single["cu_seqlens"], single["cu_seqlens_padded"]) == ([0, 1], [0, 4])


@pytest.mark.parametrize(
    "order, topology",
    [
        ((8, 16, 4, 12), dict(pp=2, **TP2)),  # row 5
        ((4, 8, 12, 16), dict(pp=2, vpp=2)),  # row 6: equal T would hide it
        ((16, 4, 12, 8), dict(pp=2, vpp=2, **TP2)),
        ((12, 4, 16, 8), dict(pp=4)),
        ((4, 16, 8, 12), dict(gpt=replace(LLAMA, layers=8), pp=4, vpp=2)),
    ],
    ids=str,
)
def test_case_05_and_06_each_stage_sees_each_T_in_order(order, topology):
    case = one_step(order, budget=16, packing=ALONE, order_of_T=order, **topology)
    results = launch_scenario(case, timeout=60)
    check_scenario(case, results)
    for [rank] in results:
        assert len(rank.seen) == (case.vpp or 1)
        for chunk in rank.seen:
            assert [entry["T"] for entry in chunk] == list(order)


def test_case_07_every_rank_of_every_stage_has_the_packing():
    """PP 3, TP 2: middle stages and tensor-parallel ranks above 0 need cu_seqlens as much as the first."""
    case = one_step([3, 5], budget=8, gpt=replace(LLAMA, layers=3), pp=3, **TP2)
    results = launch_scenario(case)
    check_scenario(case, results)
    assert len(results) == 6
    wanted = {"T": 8, "cu_seqlens": [0, 3, 8], "cu_seqlens_padded": [0, 3, 8], "max_seqlen": 5}
    assert [the_only(rank.seen) for [rank] in results] == [wanted] * 6


def token_losses(rank: int, world: int, scenario: Scenario) -> list[torch.Tensor]:
    """Losses of each document's tokens (without the last, which has no label), in the order of the documents."""
    run = Run(scenario)
    plan, microbatches = run.microbatches(0)
    [planned] = plan.microbatches[0]
    with torch.no_grad():
        [microbatch] = microbatches
        losses = run.models[0](
            microbatch.tokens, microbatch.position_ids, None, labels=microbatch.labels, packed_seq_params=microbatch.packed_seq_params
        )[0]
    starts = planned.cu_seqlens_padded
    found = {piece.document: losses[start : start + piece.length - 1] for piece, start in zip(planned.pieces, starts)}
    return [found[document] for document in sorted(found)]


@pytest.mark.parametrize("lengths", [[3, 5, 2], [5, 3, 2, 2], [10]], ids=str)
@pytest.mark.parametrize("gpt", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("topology", [dict(), TP2], ids=str)
def test_case_10_a_packed_document_has_the_losses_it_has_alone(lengths, gpt, topology):
    case = one_step(lengths, gpt=gpt, **topology)
    [expected] = reference_steps(gpt, case.document_steps())
    for found in launch(case.world, token_losses, case):
        assert len(found) == len(lengths) == len(expected.token_losses)
        for packed, alone in zip(found, expected.token_losses):
            assert largest_difference(packed, alone) <= 1e-5


def copies_of_one_document(rank: int, world: int, scenario: Scenario) -> dict:
    run = Run(scenario)
    _, [microbatch] = run.microbatches(0)
    rotated = []
    core = run.chunks[0].decoder.layers[0].self_attention.core_attention
    core.register_forward_pre_hook(lambda module, args, kwargs: rotated.extend(args[:2]), with_kwargs=True)
    with torch.no_grad():
        logits = run.models[0](
            microbatch.tokens, microbatch.position_ids, None, packed_seq_params=microbatch.packed_seq_params
        )
    return {"positions": microbatch.position_ids[0].tolist(), "logits": logits[0], "query": rotated[0], "key": rotated[1]}


@pytest.mark.parametrize("gpt", [LLAMA, GPT2], ids=["RoPE", "learned positions"])
def test_case_11_positions_restart_in_each_document(gpt):
    [document] = make_documents([4])
    case = Scenario(documents=(document, document), budget=8, batch=2, gpt=gpt)
    [found] = launch(1, copies_of_one_document, case)
    assert found["positions"] == [0, 1, 2, 3, 0, 1, 2, 3]
    # Scores depend on differences of positions alone under RoPE, so only the rotated queries and keys show where they start.
    for name in ("query", "key"):
        assert torch.equal(found[name][:4], found[name][4:]), name
        assert not torch.equal(found[name][:1], found[name][1:2])
    assert largest_difference(found["logits"][:4], found["logits"][4:]) <= 1e-6


def pairs_with_loss(rank: int, world: int, scenario: Scenario) -> list[tuple[int, int]]:
    _, [microbatch] = Run(scenario).microbatches(0)
    rows = microbatch.loss_mask[0].nonzero().flatten().tolist()
    return [(int(microbatch.tokens[0, row]), int(microbatch.labels[0, row])) for row in rows]


def test_case_12_no_label_crosses_a_boundary():
    case = Scenario(documents=((11, 12, 13), (21, 22)), budget=8, batch=2, gpt=LLAMA)
    [pairs] = launch(1, pairs_with_loss, case)
    assert pairs == [(11, 12), (12, 13), (21, 22)]
    results = launch_scenario(case)
    assert results[0][0].loss_tokens == 3
    check_scenario(case, results)


# Given token losses ---------------------------------------------------------------------------------------------------


def train_on_given_losses(rank: int, world: int, scenario: Scenario) -> tuple[float, int, float]:
    """One step of a model whose loss at a token is (the label's id) x w, w = 1: the step's loss, its tokens, d loss / d w."""
    run = Run(scenario)
    w = run.chunks[0].decoder.final_layernorm.weight
    with torch.no_grad():
        w[0] = 1.0
    run.chunks[0].forward = lambda tokens, positions, mask, labels, packed_seq_params: labels.float() * w[0]
    step = run.train(0)
    return step.loss, step.loss_tokens, float(step.gradients["decoder.final_layernorm.weight"][0])


def given_losses(*documents: list[int], **topology) -> Scenario:
    """Every document is a microbatch; its tokens after the first are its losses."""
    return Scenario(
        documents=tuple(map(tuple, documents)), budget=16, batch=len(documents), gpt=replace(LLAMA, layers=1), packing=ALONE, **topology
    )


GIVEN = {
    "14: microbatches of 1 and 3 tokens": (given_losses([0, 4], [0, 1, 1, 1]), 7 / 4, 4),
    "14: the same tokens in one microbatch": (given_losses([0, 4, 1, 1, 1]), 7 / 4, 4),
    "15: ranks of 2 and 6 tokens": (given_losses([0, 1, 1], [0, 2, 2, 2, 2, 2, 2], dp=2), 14 / 8, 8),
    "15: the same on one rank": (given_losses([0, 1, 1], [0, 2, 2, 2, 2, 2, 2]), 14 / 8, 8),
    "16 (i): a masked microbatch": (given_losses([0, 2, 2, 2], [9]), 2.0, 3),
    "16 (ii): a rank is all masked": (given_losses([0, 2, 2, 2], [9], dp=2), 2.0, 3),
    "16 (ii): a rank has a filler only": (given_losses([0, 2, 2, 2], dp=2), 2.0, 3),
}


@pytest.mark.parametrize("name", GIVEN)
def test_case_14_15_16_loss_and_gradient_are_sums_over_all_tokens(name):
    scenario, loss, tokens = GIVEN[name]
    assert launch(scenario.world, train_on_given_losses, scenario) == [(loss, tokens, loss)] * scenario.world


@pytest.mark.parametrize("topology", [dict(), dict(dp=2), dict(pp=2, vpp=2), dict(dp=2, parallel=SHARDED)], ids=str)
def test_case_16_a_masked_microbatch_changes_nothing(topology):
    """(i), (ii): documents without a loss token, alone in their microbatches or on their rank, against the run without them."""
    case = one_step([7, 1, 1], packing=ALONE, **topology)
    results = launch_scenario(case)
    [expected] = reference_steps(LLAMA, (case.documents[:1],))
    check_step([rank for [rank] in results], expected)


@pytest.mark.parametrize("topology", [dict(), dict(dp=2), dict(pp=2, **TP2)], ids=str)
@pytest.mark.parametrize(
    "lengths, packing",
    [
        ([7, 3, 1, 1, 5, 4], {}),  # (iv) documents of one token only
        ([7, 3, 20, 30, 5, 4], {"oversize": "drop"}),  # (iii) only fillers remain
    ],
    ids=["documents of one token", "every document dropped"],
)
def test_case_16_a_step_without_loss_tokens_is_skipped(tmp_path, lengths, packing, topology):
    case = Scenario(documents=make_documents(lengths), budget=16, batch=2, steps=3, gpt=LLAMA, packing=packing, **topology)
    results = launch(case.world, train_watched, case, tmp_path)
    for rank in results:
        assert rank.unchanged == [False, True, False]
        [warning] = rank.warnings
        assert "iteration 2 " in warning and "no loss token" in warning
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {record["iteration"]: record["lm loss"] for record in records if "lm loss" in record}
    assert losses[2] is None and losses[1] > 1 and losses[3] > 1
    kept = case.documents[:2], case.documents[4:]
    for iteration, expected in zip((1, 3), reference_steps(LLAMA, kept)):
        assert math.isclose(losses[iteration], expected.loss, rel_tol=1e-6)


def test_case_18_ranks_with_unlike_documents_run_the_same_number_of_microbatches():
    case = one_step([95] * 5 + [20] * 5, budget=100, dp=2)
    results = launch_scenario(case, timeout=60)
    assert [len(rank.planned_T) for [rank] in results] == [3, 3]
    check_scenario(case, results)
    assert results[0][0].loss == results[1][0].loss
