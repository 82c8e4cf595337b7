# SPDX-License-Identifier: Apache-2.0
"""Process groups, seeds and the request to stop: what a run sets up once."""

import os
import signal
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dyn import device
from megatron_dyn.training.config import ParallelConfig


def world_size_from_environment() -> int:
    """Ranks of the job as the launcher (torchrun, srun) says; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def initialize(parallel: ParallelConfig, *, backend: str, seed: int) -> dist.ProcessGroup | None:
    """Make the process groups and seed every generator.

    Args:
        parallel: Sizes and time-out.
        backend: "nccl" or "gloo".
        seed: Seed of the run. Megatron-Core derives each tensor-parallel rank's dropout generator from it.

    Returns:
        A group of all ranks that moves CPU tensors (None: the default group does).
    """
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
    )
    # Pipeline stages part by 100 (as in Megatron-LM) so that their dropout differs; data-parallel ranks share seeds.
    device.seed_everything(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    return None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)


class StopRequest:
    """Remembers that the process was asked to end (SIGTERM), so that the loop can save first.

    A scheduler sends SIGTERM and kills some time later; the loop looks once a step, and all ranks stop after the same one.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        self.requested = True

    def close(self) -> None:
        """Give the signal back."""
        signal.signal(signal.SIGTERM, self._previous)
