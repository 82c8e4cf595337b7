# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of the run that wrote it: versions, topology, and every rank's random number generators."""

import hashlib
import random
from importlib import metadata as packages
from typing import Optional

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_dyn import device

RNG_KEY = "rng_state"


def versions() -> dict:
    return {
        "megatron_dyn": _installed("megatron-dyn"),
        "megatron-core": megatron.core.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _installed(distribution: str) -> str:
    try:
        return packages.version(distribution)
    except packages.PackageNotFoundError:
        return "not installed (run from a source folder)"


def topology() -> dict:
    """Sizes of everything that decides which generators a rank has."""
    return {
        "world": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "device": device.compute_device().type,
    }


def describe(topology: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in topology.items())


def rng_state() -> dict:
    return {"python": random.getstate(), "numpy": np.random.get_state(), **device.rng_state()}


def rng_object(state: Optional[dict]) -> ShardedObject:
    """One object a rank: with dropout, ranks draw different numbers."""
    return ShardedObject(RNG_KEY, state, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def set_rng_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    device.set_rng_state(state)


def seed_anew(iteration: int) -> None:
    """Seeds from this run's seed and the iteration, so that the draws of the run's beginning do not come again."""
    text = f"{torch.initial_seed()}:{iteration}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1
    device.seed_everything(seed)
