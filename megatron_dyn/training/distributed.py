# SPDX-License-Identifier: Apache-2.0
"""Process groups and seeds: what a run sets up once."""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dyn import device
from megatron_dyn.pipeline.handshake import shake_hands
from megatron_dyn.training.config import ConfigError, ParallelConfig
from megatron_dyn.training.rendezvous import Meeting, meet


def world_size_from_environment() -> int:
    """Ranks of the job as torchrun says; 1 without a launcher.

    Raises:
        ConfigError: Slurm started several tasks without torchrun: each would train alone, and all write into one folder.
    """
    if "WORLD_SIZE" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        raise ConfigError(
            f"srun started {os.environ['SLURM_NTASKS']} tasks and no torchrun: each of them would be a run of its own. "
            "Start one torchrun on each node (examples/slurm/train_slurm.sh)"
        )
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_environment() -> int:
    """This process's number among them; 0 without a launcher."""
    return int(os.environ["RANK"]) if "WORLD_SIZE" in os.environ else 0


def meet_ranks(parallel: ParallelConfig, meeting: Meeting, *, backend: str, facts: Mapping[str, object]) -> dict[str, str]:
    """Compare what all ranks are about to run (`shake_hands`), then make the group of all of them.

    Args:
        parallel: The time-out.
        meeting: Where the ranks have met.
        backend: "nccl" or "gloo".
        facts: Name -> value, equal on all ranks.

    Returns:
        The facts of rank 0.

    Raises:
        AgreementError: On every rank: they differ.
    """
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    of_rank_0 = shake_hands(meeting.client("handshake", timeout), meeting.rank, meeting.world, facts, timeout=timeout)
    _make_group_of_all(meeting, backend, timeout)
    return of_rank_0


def initialize(parallel: ParallelConfig, *, backend: str, seed: int) -> dist.ProcessGroup | None:
    """Make the process groups and seed every generator; the group of all ranks too, unless `meet_ranks` has made it.

    Args:
        parallel: Sizes and time-out.
        backend: "nccl" or "gloo".
        seed: Seed of the run. Megatron-Core derives each tensor-parallel rank's dropout generator from it.

    Returns:
        A group of all ranks that moves CPU tensors (None: the default group does).
    """
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if not dist.is_initialized():
        _make_group_of_all(meet(timeout=timeout), backend, timeout)
    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
    )
    # Pipeline stages part by 100 (as in Megatron-LM) so that their dropout differs; data-parallel ranks share seeds.
    device.seed_everything(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    return None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)


def _make_group_of_all(meeting: Meeting, backend: str, timeout: timedelta) -> None:
    store = meeting.client("groups", timeout)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.world, timeout=timeout)


def tensor_parallel_cpu_group(timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of the ranks of this rank's tensor-parallel group, for a thread of its own. A collective of all ranks.

    The groups are enumerated from the rank numbers, as Megatron-Core makes them: tensor parallelism counts first.
    """
    size = parallel_state.get_tensor_model_parallel_world_size()
    mine = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, backend="gloo", timeout=timeout)
        mine = group if dist.get_rank() in ranks else mine
    return mine
