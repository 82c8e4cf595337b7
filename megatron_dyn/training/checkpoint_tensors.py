# SPDX-License-Identifier: Apache-2.0
"""Tensors to disk and back in Megatron's torch_dist format, through torch.distributed.checkpoint (DCP).

Megatron's own saving forks writer processes (from a process with threads and perhaps a CUDA context) and waits for ever for one
that dies. DCP's synchronous writer writes the same files, and its collectives carry a failing rank's exception to every
rank. So the state is prepared by Megatron, laid out by Megatron's planner, and written by DCP; Megatron's loader reads it.
"""

import io
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as dcp

from megatron_dyn.training.checkpoint_files import COMMON_NAME, CheckpointError, on_every_rank
from megatron_dyn.training.checkpoint_safety import first_foreign_part

_BACKEND = ("torch_dist", 1)


class SynchronousSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist layout, written without forked processes."""

    def __init__(self, thread_count: int = 2):
        super().__init__(*_BACKEND, thread_count=thread_count)

    def save(self, sharded_state_dict: dict, checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=self.thread_count, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def write_state(state: dict, folder: Path, replicas: dist.ProcessGroup) -> None:
    """Write a state (Megatron's sharded state dict) into an empty folder; collective.

    Args:
        state: tensors as ShardedTensor; everything else is common to all ranks and written by rank 0.
        folder: exists, and is the same folder on every rank.
        replicas: ranks that hold the same model shards (data parallel); they share the writing.

    Raises:
        CheckpointError: on every rank, when any rank could not write.
    """
    sharded, common = save_preprocess(state)

    def write_common():
        if dist.get_rank() == 0:
            content = io.BytesIO()  # torch.save into a file says "unexpected pos" where a full disk is meant
            torch.save(common, content)
            (folder / COMMON_NAME).write_bytes(content.getvalue())
            save_config(CheckpointingConfig(*_BACKEND), str(folder))

    on_every_rank(f"write {folder / COMMON_NAME}", write_common)
    try:
        FullyParallelSaveStrategyWrapper(SynchronousSave(), replicas).save(sharded, folder)
    except dcp.api.CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items()))
        raise CheckpointError(f"could not write the tensors into {folder}: {reasons}") from error


def read_state(requested: dict, folder: Path) -> dict:
    """Read the requested tensors (into place where they have data) and the common state; collective.

    Raises:
        CheckpointError: on every rank, when any rank could not read; a file that holds more than data is named.
    """
    try:
        with warnings.catch_warnings():  # of PyTorch about the names that Megatron's loader still uses
            warnings.filterwarnings("ignore", message=".*(load_state_dict.* is deprecated|deprecating ShardedTensor)", category=FutureWarning)
            return dist_checkpointing.load(requested, str(folder))
    except dcp.api.CheckpointException as error:
        if any(isinstance(failure, pickle.UnpicklingError) for failure, _ in error.failures.values()):  # does not say of which file
            foreign = on_every_rank(f"look through {folder}", lambda: first_foreign_part(folder) if dist.get_rank() == 0 else None)[0]
            if foreign:
                raise CheckpointError(foreign) from error
        reasons = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in sorted(error.failures.items()))
        raise CheckpointError(f"could not read the tensors of {folder}: {reasons}") from error


@dataclass(frozen=True)
class Described:
    """What matters of a tensor for the question whether it fits."""

    shape: tuple
    dtype: Optional[torch.dtype]
    vocabulary_rows: bool = False  # dimension 0 is the padded vocabulary, which may differ

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def requested_tensors(sharded: dict) -> "dict[str, Described]":
    """Global shapes by checkpoint key of the tensors which this rank asks for."""
    return {
        item.key: Described(tuple(item.global_shape), item.dtype, item.allow_shape_mismatch) for item in _sharded_tensors(sharded)
    }


def saved_tensors(folder: Path) -> "dict[str, Described]":
    """Global shapes by key of the tensors in a checkpoint."""
    metadata = dist_checkpointing.load_tensors_metadata(str(folder))
    return {key: Described(tuple(item.global_shape), item.dtype) for key, item in metadata.items()}


def misfits(wanted: "dict[str, Described]", saved: "dict[str, Described]", vocab_size: Optional[int]) -> "list[str]":
    """One line for each wanted tensor that the checkpoint lacks or holds with another shape or dtype."""
    lines = []
    for key, want in sorted(wanted.items()):
        have = saved.get(key)
        if have is None:
            lines.append(f"{key} {want} is not in the checkpoint")
        elif want.dtype != have.dtype or not _shapes_fit(want, have, vocab_size):
            lines.append(f"{key}: {have} in the checkpoint, {want} here")
    return lines


def _shapes_fit(want: Described, have: Described, vocab_size: Optional[int]) -> bool:
    if want.shape == have.shape:
        return True
    other_padding = want.vocabulary_rows and want.shape[1:] == have.shape[1:]
    return other_padding and vocab_size is not None and min(want.shape[0], have.shape[0]) >= vocab_size


def _sharded_tensors(sharded: dict) -> Iterator[ShardedTensor]:
    for item in nested_values(sharded):
        parts = nested_values([item.build()]) if isinstance(item, ShardedTensorFactory) else [item]
        yield from (part for part in parts if isinstance(part, ShardedTensor))

