# SPDX-License-Identifier: Apache-2.0
"""The pipeline's bubble of a step: the share of time in which stages wait instead of computing.

    pipeline-bubble                     from the plan's costs: 1 - sum of work / (PP x sum of times), over the data-parallel ranks; the times
                                        are those of the simulated schedule (`planning/simulate.py`), which starts with the first forward
                                        pass and ends with the last backward pass
    pipeline-bubble-measured            on request: time in which a stage waited for others / time of the whole step, mean over the ranks
    pipeline-bubble-measured-by-stage   the same, mean over the ranks of each stage, first stage first

Waiting of data-parallel ranks for one another is not part of it (see `imbalance`).
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dyn import device
from megatron_dyn.planning.simulate import rank_times

if TYPE_CHECKING:
    from megatron_dyn.planning import StepPlan
    from megatron_dyn.training.run_config import RunConfig
    from megatron_dyn.training.step import Stepper


def planned_bubble(plan: "StepPlan", *, pipeline_parallel: int, virtual_stages: int = 1) -> float:
    """Share of the stages' time without work, from the costs of the microbatches; 0 for a step without cost."""
    cost = np.array([[microbatch.cost for microbatch in rank] for rank in plan.microbatches])
    times = rank_times(cost, pipeline_parallel=pipeline_parallel, virtual_stages=virtual_stages)
    whole = float(times.sum()) * pipeline_parallel
    return 1.0 - float(cost.sum()) / whole if whole > 0 else 0.0


def measured_bubble(waited_share: float) -> list[float]:
    """Mean over the ranks of each pipeline stage of what each of them measured. Collective over all ranks.

    Args:
        waited_share: Of this rank: seconds waited / seconds of the step.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    shares = torch.zeros(stages, dtype=torch.float64, device=device.compute_device())
    shares[parallel_state.get_pipeline_model_parallel_rank()] = waited_share
    dist.all_reduce(shares)
    return (shares * stages / dist.get_world_size()).tolist()


class BubbleMeter:
    """What the metrics say of the bubble. Nothing without a pipeline.

    Args:
        run: Settings: sizes, whether waits are measured, and the log's interval: the simulation is made for the steps with a line only.
        first: This rank writes the log.
    """

    def __init__(self, run: "RunConfig", *, first: bool):
        self._stages, self._chunks = run.parallel.pipeline_model_parallel_size, run.parallel.virtual_pipeline_model_parallel_size or 1
        self._interval, self._first = run.logging.log_interval, first
        self.measures = run.logging.measure_pipeline_bubble and self._stages > 1
        """Whether waits are measured, for which the device must have finished the step."""

    def of_step(self, plan: "StepPlan", stepper: "Stepper", *, iteration: int, step_time: float, computed: bool) -> dict[str, float | list[float]]:
        """Keys for the step's record. Collective over all ranks where waits are measured; the device must have finished the step.

        Args:
            plan: Of the step.
            stepper: Ran it.
            iteration: Its number.
            step_time: Seconds.
            computed: False where the step was passed over.
        """
        found = {}
        if self._stages == 1 or not computed:
            return found
        if self._first and iteration % self._interval == 0:
            found["pipeline-bubble"] = planned_bubble(plan, pipeline_parallel=self._stages, virtual_stages=self._chunks)
        if self.measures:
            by_stage = measured_bubble(stepper.waited_seconds / step_time)
            found["pipeline-bubble-measured"] = sum(by_stage) / len(by_stage)
            found["pipeline-bubble-measured-by-stage"] = by_stage
        return found
