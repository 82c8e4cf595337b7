# SPDX-License-Identifier: Apache-2.0
"""A NaN or an infinity is traced to its documents, told alike on every rank, and never reaches the weights."""

import json
from dataclasses import replace

import pytest
import torch
from launch import launch
from megatron.core import parallel_state
from reference import LLAMA, make_documents
from trained_steps import Run, Scenario, planner_of
from watched_loop import Watched, watch_loop

POISON = LLAMA.vocabulary - 1  # a token that one document alone has
STEPS, BATCH = 3, 4
SICK = 6  # in the second of the steps of documents 0-3, 4-7, 8-11


def documents() -> tuple:
    healthy = make_documents([9, 5, 12, 2, 7, 3, 8, 4, 6, 11, 2, 10], vocabulary=POISON)
    sick = (*healthy[SICK][:2], POISON, *healthy[SICK][3:])
    return (*healthy[:SICK], sick, *healthy[SICK + 1 :])


CASE = Scenario(
    documents=documents(), budget=16, batch=BATCH, steps=STEPS, gpt=LLAMA, packing={"max_documents_per_microbatch": 2}
)
TOPOLOGIES = {
    "one rank": CASE,
    "TP2 SP": replace(CASE, tp=2, sp=True),
    "PP2": replace(CASE, pp=2),
    "DP2": replace(CASE, dp=2),
    "DP2, distributed optimizer, overlapped": replace(
        CASE,
        dp=2,
        parallel={"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "PP2 VPP2": replace(CASE, pp=2, vpp=2),
    "PP2 DP2": replace(CASE, pp=2, dp=2),
    "PP2 VPP2 DP2, overlapped": replace(CASE, pp=2, vpp=2, dp=2, parallel={"overlap_grad_reduce": True}),
}


def bad_weight(run: Run) -> None:
    """The embedding of the poisonous token is NaN, so is the loss of its document."""
    ranks, rank = run.scenario.tp, parallel_state.get_tensor_model_parallel_rank()
    rows = LLAMA.vocabulary // ranks
    for chunk in run.chunks:
        if chunk.pre_process and POISON // rows == rank:
            with torch.no_grad():
                chunk.embedding.word_embeddings.weight[POISON % rows] = float("nan")


def bad_gradient(run: Run) -> None:
    """The loss is fine, but the gradient that comes back to the embedding of a microbatch with the poisonous token overflows."""

    def spoil(module, args, kwargs, output) -> None:
        if bool((kwargs["input_ids"] == POISON).any()) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))

    for chunk in run.chunks:
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(spoil, with_kwargs=True)


def job(rank: int, world: int, scenario: Scenario, spoil, run_dir) -> Watched:
    run = Run(scenario)
    spoil(run)
    return watch_loop(run, rank, run_dir)


def place(scenario: Scenario) -> str:
    """Where the plan puts the sick document."""
    plan = planner_of(scenario).plan(1)
    [(rank, position, microbatch)] = [
        (rank, position, microbatch)
        for rank, microbatches in enumerate(plan.microbatches)
        for position, microbatch in enumerate(microbatches)
        if SICK in [piece.document for piece in microbatch.pieces]
    ]
    names = ", ".join(f"{piece.document} (test corpus, document {piece.document})" for piece in microbatch.pieces)
    return f"microbatch {position} of data-parallel rank {rank} (T {microbatch.T}, documents {names})"


@pytest.mark.parametrize("spoil, what", [(bad_weight, "the loss is nan"), (bad_gradient, "gradient's norm is")])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_stop_names_step_microbatch_and_documents_on_every_rank(tmp_path, name, spoil, what):
    scenario = TOPOLOGIES[name]
    ranks = launch(scenario.world, job, replace(scenario, on_nan="stop"), spoil, tmp_path, timeout=120)
    [message] = {rank.stopped for rank in ranks}
    assert message is not None and message.startswith("iteration 2: ") and what in message
    assert f"from {place(scenario)}. The weights are those of iteration 1." in message
    for rank in ranks:
        assert rank.unchanged == [False] and rank.unchanged_at_the_end


@pytest.mark.parametrize("spoil", [bad_weight, bad_gradient])
@pytest.mark.parametrize("name", ["one rank", "DP2, distributed optimizer, overlapped", "PP2 VPP2", "PP2 DP2"])
def test_skip_leaves_the_step_out_and_goes_on(tmp_path, name, spoil):
    scenario = TOPOLOGIES[name]
    ranks = launch(scenario.world, job, replace(scenario, on_nan="skip"), spoil, tmp_path, timeout=120)
    for rank in ranks:
        assert rank.stopped is None
        assert rank.unchanged == [False, True, False]
        [warning] = rank.warnings
        assert warning.startswith("iteration 2: ") and place(scenario) in warning
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [1, 2, 3]
    assert records[0]["lm loss"] > 1 and records[2]["lm loss"] > 1
