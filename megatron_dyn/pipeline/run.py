# SPDX-License-Identifier: Apache-2.0
"""The call of Megatron-Core's schedules: none, 1F1B or interleaved, as the process groups say, with planned messages between stages."""

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dyn.pipeline.planned_p2p import PlannedP2PCommunicator


class ScheduleRunner:
    """Runs the microbatches of a step through the stages. Needs Megatron's parallel state.

    Args:
        config: The configuration that the model's chunks share.
        measure_waits: Keep the time in which this stage waits for others.
    """

    def __init__(self, config: ModelParallelConfig, *, measure_waits: bool = False):
        self.communicator: PlannedP2PCommunicator | None = None
        """Between the stages; None without a pipeline."""
        self._schedule = get_forward_backward_func()
        self._groups: ProcessGroupCollection | None = None
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            self.communicator = PlannedP2PCommunicator(group, config, measure_waits=measure_waits)
            self._groups = _groups()
            if measure_waits:
                self._wait_for_all_stages_at_the_end(config)

    def run(
        self, forward_step: Callable, models: list[torch.nn.Module], iterators: list, *, T: Sequence[int], forward_only: bool
    ) -> list[dict]:
        """All microbatches of one step.

        Args:
            forward_step: Megatron's `forward_step_func`.
            models: This rank's chunks.
            iterators: For each chunk, the microbatches in running order.
            T: Of each microbatch.
            forward_only: No gradients.

        Returns:
            What the loss function reported of each microbatch; nothing on ranks without the last stage.

        Raises:
            ValueError: The schedule does not take this number of microbatches; before anything is sent.
            PlannedMessageError: A tensor differs from the plan.
        """
        call = dict(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=models,
            num_microbatches=len(T),
            seq_length=1,  # required by the interface; shapes come from the plan
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if self.communicator is None:
            return self._schedule(**call)
        with self.communicator.step(T, forward_only=forward_only):
            return self._schedule(**call, p2p_communicator=self.communicator, pg_collection=self._groups)

    def _wait_for_all_stages_at_the_end(self, config: ModelParallelConfig) -> None:
        """A stage that is done early waits for the others in the first collective: made one of its own, so that the wait is measured."""
        finalize = config.finalize_model_grads_func

        def finalize_when_all_are_done(*args, **kwargs):
            self.communicator.wait_for_all_stages()
            return finalize(*args, **kwargs)

        if finalize is not None:
            config.finalize_model_grads_func = finalize_when_all_are_done


def _groups() -> ProcessGroupCollection:
    """What the schedules take from the parallel state where they are not given a communicator."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups
