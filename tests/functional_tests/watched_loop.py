# SPDX-License-Identifier: Apache-2.0
"""The product's training loop on one rank of a test, watched: warnings, weights after each iteration, and how it ended."""

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from trained_steps import Run, Scenario

from megatron_dyn.pipeline.agreement import new_cpu_group
from megatron_dyn.pipeline.plan_agreement import PlanAgreement
from megatron_dyn.planning import TokenBudgetBatchSampler
from megatron_dyn.training.evaluate import parameters_gathered
from megatron_dyn.training.loop import Trainer
from megatron_dyn.training.nonfinite import NonFiniteError
from megatron_dyn.training.run_log import RunLog
from megatron_dyn.training.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What one rank saw."""

    warnings: list[str]
    unchanged: list[bool]
    """For each iteration that ended: this rank's weights are those of before, to the bit (NaN equal to NaN)."""
    stopped: str | None
    """Message of the NonFiniteError that ended the loop."""
    unchanged_at_the_end: bool
    """This rank's weights are those of the last iteration that ended."""


class WatchedLog(RunLog):
    """Keeps the warnings of every rank and a copy of the weights after each iteration."""

    def __init__(self, run: Run, run_dir: Path, *, rank: int):
        super().__init__(run_dir, enabled=rank == 0, total_iterations=run.scenario.steps, tensorboard=False)
        self._run = run
        self.warnings: list[str] = []
        self.weights = [run_weights(run)]

    def step(self, record, plan=None) -> None:
        super().step(record, plan)
        self.weights.append(run_weights(self._run))

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def run_weights(run: Run) -> list[torch.Tensor]:
    """Copies of this rank's parameters, complete, with a number in place of NaN so that they can be compared."""
    with parameters_gathered(run.models):
        return [parameter.detach().nan_to_num(nan=12345.0) for chunk in run.chunks for parameter in chunk.parameters()]


def watch_loop(run: Run, rank: int, run_dir: Path) -> Watched:
    """Train all steps of the scenario. Rank 0 writes `metrics.jsonl` into `run_dir`."""
    data_parallel_rank = parallel_state.get_data_parallel_rank()
    stopped = None
    with WatchedLog(run, run_dir, rank=rank) as log:
        trainer = Trainer(
            run.run,
            stepper=run.stepper,
            corpus=run.corpus,
            planner=run.planner,
            sampler=TokenBudgetBatchSampler(run.planner, data_parallel_rank=data_parallel_rank),
            evaluator=None,
            checkpoints=None,
            agreement=PlanAgreement(
                {}, data_parallel_rank=data_parallel_rank, data_parallel_size=run.scenario.dp, group=new_cpu_group()
            ),
            log=log,
            data_parallel_rank=data_parallel_rank,
            pad_token_id=0,
            progress={"iteration": 0, "consumed_tokens": 0, "consumed_documents": 0},
        )
        try:
            trainer.train(StopRequest())
        except NonFiniteError as error:
            stopped = str(error)
    same = [all(map(torch.equal, before, after)) for before, after in zip(log.weights, log.weights[1:])]
    at_the_end = all(map(torch.equal, log.weights[-1], run_weights(run)))
    return Watched(warnings=log.warnings, unchanged=same, stopped=stopped, unchanged_at_the_end=at_the_end)


def train_watched(rank: int, world: int, scenario: Scenario, run_dir: Path) -> Watched:
    """Job of one rank."""
    return watch_loop(Run(scenario), rank, run_dir)
