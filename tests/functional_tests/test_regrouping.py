# SPDX-License-Identifier: Apache-2.0
"""The loss and the gradients of a step do not depend on how its documents are divided into microbatches."""

import math
from dataclasses import replace

import pytest
from reference import GRADIENT_TOLERANCE, LLAMA, LOSS_TOLERANCE, check_step, largest_difference, make_documents, reference_steps
from trained_steps import RankStep, Scenario, launch_scenario

# Heavy-tailed lengths, from 1 to 256 tokens; 1,591 in all.
LENGTHS = [256, 3, 17, 130, 1, 64, 201, 9, 2, 77, 255, 31, 128, 5, 40, 99, 12, 6, 180, 1, 48, 26]
STEP = Scenario(documents=make_documents(LENGTHS, seed=5), budget=256, batch=len(LENGTHS), gpt=LLAMA)
DIVISIONS = {
    "budget 256": STEP,
    "budget 1024": replace(STEP, budget=1024),
    "one document a microbatch": replace(STEP, packing={"max_documents_per_microbatch": 1}),
    "budget 1024, DP2": replace(STEP, budget=1024, dp=2),
    "one document a microbatch, TP2 SP": replace(STEP, packing={"max_documents_per_microbatch": 1}, tp=2, sp=True),
    "packed-fixed, DP2": replace(STEP, budget=512, packing={"microbatching": "packed-fixed"}, dp=2),
    "fixed-count, TP2 SP": replace(STEP, budget=512, packing={"microbatching": "fixed-count", "documents_per_microbatch": 3}, tp=2, sp=True),
    "pad-to-max": replace(STEP, budget=512, packing={"microbatching": "pad-to-max"}),
    "budget 256, PP2 VPP2": replace(STEP, pp=2, vpp=2),
}


@pytest.fixture(scope="module")
def divided() -> dict[str, list[RankStep]]:
    """The step of each division, on each rank."""
    return {name: [steps[0] for steps in launch_scenario(scenario)] for name, scenario in DIVISIONS.items()}


@pytest.mark.parametrize("name", DIVISIONS)
def test_any_division_gives_the_loss_and_gradients_of_single_documents(divided, name):
    [expected] = reference_steps(LLAMA, STEP.document_steps())
    check_step(divided[name], expected)


@pytest.mark.parametrize("name", [name for name in DIVISIONS if name != "budget 256"])
def test_two_divisions_agree(divided, name):
    ours, other = divided["budget 256"][0], divided[name]
    for rank in other:
        assert abs(rank.loss - ours.loss) / ours.loss <= LOSS_TOLERANCE
        for parameter, gradient in rank.gradients.items():
            assert largest_difference(gradient, ours.gradients[parameter]) <= GRADIENT_TOLERANCE, parameter


def test_the_divisions_differ(divided):
    counts = {name: len(ranks[0].planned_T) for name, ranks in divided.items()}
    assert counts["budget 256"] >= math.ceil(sum(LENGTHS) / 256)
    assert counts["budget 1024"] == math.ceil(sum(LENGTHS) / 1024) == 2
    assert counts["one document a microbatch"] == len(LENGTHS)
    assert sorted(divided["one document a microbatch"][0].planned_T) == sorted(LENGTHS)
    assert max(divided["budget 1024"][0].planned_T) > 256
    assert set(divided["packed-fixed, DP2"][0].planned_T) == {512}
    assert set(divided["pad-to-max"][0].planned_T) == {512} and len(divided["pad-to-max"][0].planned_T) == len(LENGTHS) // 2
    assert len(LENGTHS) / 3 <= len(divided["fixed-count, TP2 SP"][0].planned_T) < len(LENGTHS)


def test_concat_chunk_trains_the_stream_of_a_step_cut_at_the_budget():
    """A chunk of B tokens with labels for all of them is, for the reference, one document of B + 1 tokens."""
    budget = 300
    ranks = launch_scenario(replace(STEP, budget=budget, packing={"microbatching": "concat-chunk"}, dp=2))
    stream = sum(STEP.documents, ())
    chunks = tuple(stream[at : at + budget + 1] for at in range(0, len(stream), budget))
    [expected] = reference_steps(LLAMA, (chunks,))
    for [step] in ranks:
        assert expected.loss_tokens == len(stream) - 1
        assert abs(step.loss - expected.loss) / expected.loss <= LOSS_TOLERANCE
        for name, gradient in step.gradients.items():
            assert largest_difference(gradient, expected.gradients[name]) <= GRADIENT_TOLERANCE, name
