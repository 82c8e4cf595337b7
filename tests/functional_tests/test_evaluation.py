# SPDX-License-Identifier: Apache-2.0
"""Evaluation is as exact as training, over whole documents and uneven ranks, and leaves no trace in the training that follows."""

import pytest
from launch import launch
from megatron.core import parallel_state
from reference import GPT2, LLAMA, check_step, make_documents, reference_steps
from trained_steps import Run, Scenario

from megatron_dyn.pipeline.agreement import new_cpu_group
from megatron_dyn.pipeline.plan_agreement import PlanAgreement
from megatron_dyn.training.evaluate import Evaluator

# Two steps of documents in order: the second holds one document, so that other ranks get a filler.
DOCUMENTS = make_documents([16, 13, 1, 6, 2, 9, 11])
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
TOPOLOGIES = {
    "one rank": dict(),
    "TP2 SP, dropout": dict(tp=2, sp=True, model={"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "PP2 VPP2": dict(pp=2, vpp=2),
    "DP2, distributed optimizer, overlapped": dict(dp=2, parallel=OVERLAPPED),
    "PP2 DP2, gpt2": dict(gpt=GPT2, pp=2, dp=2),
}


def evaluate_train_evaluate(rank: int, world: int, scenario: Scenario):
    run = Run(scenario)
    data_parallel_rank = parallel_state.get_data_parallel_rank()
    evaluator = Evaluator(
        run.corpus,
        run.planner,
        steps=100,  # more than one pass has
        data_parallel_rank=data_parallel_rank,
        pad_token_id=0,
        agreement=PlanAgreement({}, data_parallel_rank=data_parallel_rank, data_parallel_size=scenario.dp, group=new_cpu_group()),
    )
    return evaluator.evaluate(run.stepper), run.train(0), evaluator.evaluate(run.stepper)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_evaluation_is_exact_and_leaves_no_trace(name):
    scenario = Scenario(**{"documents": DOCUMENTS, "budget": 16, "batch": 6, "gpt": LLAMA, "steps": 1, **TOPOLOGIES[name]})
    results = launch(scenario.world, evaluate_train_evaluate, scenario)
    [over_all] = reference_steps(scenario.gpt, (DOCUMENTS,))
    trained = reference_steps(scenario.gpt, (DOCUMENTS[:6], DOCUMENTS))
    for before, step, after in results:
        for evaluation, expected in ((before, over_all), (after, trained[1])):
            assert (evaluation.tokens, evaluation.documents) == (expected.loss_tokens, 7)
            if "dropout" not in name or evaluation is before:
                assert abs(evaluation.loss - expected.loss) / expected.loss <= 1e-6
    if "dropout" not in name:
        check_step([step for _, step, _ in results], trained[0])
    else:  # training does drop: the evaluation before it was exact because dropout was off
        assert abs(results[0][1].loss - trained[0].loss) / trained[0].loss > 1e-3
