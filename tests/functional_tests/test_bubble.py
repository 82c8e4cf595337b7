# SPDX-License-Identifier: Apache-2.0
"""The bubble in the metrics: planned, against the closed forms; measured, where one stage is slow."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from launch import launch
from reference import LLAMA, make_documents
from trained_steps import Run, Scenario
from training_run import flags, heavy_tailed_lengths, train, write_corpus

import megatron_dyn.training.step as step
from megatron_dyn.training.bubble import planned_bubble
from megatron_dyn.training.metrics_file import read_metrics


def plan_of(*costs: list[float]) -> SimpleNamespace:
    return SimpleNamespace(microbatches=[[SimpleNamespace(cost=cost) for cost in rank] for rank in costs])


@pytest.mark.parametrize("pp, vpp, k", [(2, 1, 1), (2, 1, 5), (4, 1, 8), (4, 2, 8), (8, 4, 16)])
def test_equal_microbatches_give_the_closed_form(pp, vpp, k):
    """1F1B idles PP - 1 of K + PP - 1 slots on each rank, interleaving PP - 1 of VPP K + PP - 1 (Narayanan et al. 2021, section 2.2)."""
    bubble = planned_bubble(plan_of([3.0] * k, [5.0] * k), pipeline_parallel=pp, virtual_stages=vpp)
    assert bubble == pytest.approx((pp - 1) / (vpp * k + pp - 1))


def test_data_parallel_ranks_count_by_their_time_and_fillers_idle():
    """Two ranks with bubbles of 1/2 (one microbatch) and 1/3 (two equal ones), the latter of three units of time against two."""
    assert planned_bubble(plan_of([2.0, 0.0], [2.0, 2.0]), pipeline_parallel=2) == pytest.approx(1 - (1 + 2) / (2 + 3))
    assert planned_bubble(plan_of([0.0, 0.0]), pipeline_parallel=2) == 0.0


PAUSE_SECS = 0.05


def wait_for_a_slow_stage(rank: int, world: int, case: Scenario) -> float:
    run = Run(case)
    stepper = step.Stepper(run.models, run.stepper.optimizer, run.stepper.scheduler, measure_waits=True)
    if rank == 1:
        forward = step.forward_step
        step.forward_step = lambda *call: (time.sleep(PAUSE_SECS), forward(*call))[1]
    plan, microbatches = run.microbatches(0)
    stepper.train(microbatches, loss_tokens=plan.num_loss_tokens)
    return stepper.waited_seconds


@pytest.mark.parametrize("vpp", [None, 2])
def test_the_measured_wait_is_that_for_the_slow_stage(vpp):
    documents = make_documents([9, 4, 12, 7])
    case = Scenario(documents=documents, budget=16, batch=4, gpt=LLAMA, pp=2, vpp=vpp, packing={"max_documents_per_microbatch": 1})
    first, _ = launch(2, wait_for_a_slow_stage, replace(case))
    assert first >= 2 * PAUSE_SECS  # of 4 (interleaved 8) pauses; half is left to the first stage's own work on a busy machine


def test_a_run_writes_both_bubbles(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", heavy_tailed_lengths(80, longest=90))
    pipeline = dict(pipeline_model_parallel_size=2, num_layers=4, num_virtual_stages_per_pipeline_rank=2, overlap_p2p_communication=False)
    settings = pipeline | dict(train_iters=4, eval_iters=1, log_interval=2, measure_pipeline_bubble=True)
    train(2, flags(corpus, run_dir=tmp_path / "run", **settings), tmp_path / "out")
    steps = read_metrics(tmp_path / "run").steps
    assert [step["iteration"] for step in steps if "pipeline-bubble" in step] == [2, 4]  # once for each line on the console
    for record in steps:
        by_stage = record["pipeline-bubble-measured-by-stage"]
        assert len(by_stage) == 2 and all(0.0 < share < 1.0 for share in by_stage)
        assert record["pipeline-bubble-measured"] == pytest.approx(sum(by_stage) / 2)
    # Microbatches are balanced, so the planned bubble is near that of equal ones.
    last = steps[-1]
    assert last["pipeline-bubble"] == pytest.approx(1 / (2 * last["microbatches"] + 1), abs=0.1)
