# SPDX-License-Identifier: Apache-2.0
"""The process's communicators: made once at capacity, found by the layers, destroyed on purpose."""

import operator
from typing import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_dyn.userbuffers.communicator import Communicator
from megatron_dyn.userbuffers.configuration import OverlapConfigError, communicator_specs
from megatron_dyn.userbuffers.manager import LAYOUT_FENCES, LayoutFence, UserBuffers
from megatron_dyn.userbuffers.quantization import quantization_modes as known_modes
from megatron_dyn.userbuffers.shape import FP8_LOCAL_ROWS, check_active_shape

_manager: UserBuffers | None = None


class NotInitializedError(RuntimeError):
    """There are no communicators yet, or there are some already."""


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    quantization_modes: Sequence[object] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Mapping[str, Mapping] | Sequence[Mapping[str, Mapping] | None] | None = None,
    bootstrap_backend: str | None = None,
    backend: str = "auto",
    *,
    layout_fence: LayoutFence = "auto",
    fp8_local_rows: int = FP8_LOCAL_ROWS,
    with_cublasmp: bool = False,
    tp_group: dist.ProcessGroup | None = None,
) -> UserBuffers:
    """Allocate and register all communicators at their capacity. A collective of all ranks of the job.

    Args:
        shape: [max_tokens, hidden], in rows and elements: the largest microbatch there will be.
        tp_size: ranks of a tensor-parallel group; groups are consecutive global ranks.
        quantization_modes: a set of communicators for each, see `UserBufferQuantizationMode` (Transformer Engine's enum works too).
        dtype: of what is not FP8.
        ub_cfgs: what differs from the default overlap, by communicator name; or one such table for each quantization mode.
        bootstrap_backend: "gloo", "nccl" or "mpi", for the exchange of handles while registering ("te" only).
        backend: "te" (Transformer Engine's UserBuffers), "reference" (torch.distributed) or "auto": te where it works.
        layout_fence: see `manager.UserBuffers`.
        fp8_local_rows: T / tp must be a multiple of it where buffers carry FP8 (MXFP8 would need 128).
        with_cublasmp: let Transformer Engine make its communicators with cuBLASMp, which takes sizes from its operands.
        tp_group: this rank's tensor-parallel group, for the reference backend and for fences ("te" makes its own for the
            registration); by default Megatron's, or all ranks when there are ``tp_size`` of them.
    Returns:
        the manager; also found with `current()`.
    Raises:
        NotInitializedError: they are initialised already.
        ActiveShapeError: the capacity is not a shape that buffers can have.
        OverlapConfigError: a table that cannot work.
        ValueError: an unknown backend or mode, or one that does not work here, with the reason.
    """
    global _manager
    if _manager is not None:
        raise NotInitializedError(
            f"UserBuffers are initialised already, for {get_ub_capacity_shape()}: a second registration would leave the layers with buffers "
            "of another size. Call destroy_ub() first."
        )
    if layout_fence not in LAYOUT_FENCES:
        raise ValueError(f"layout fence {layout_fence!r} is not known: use one of {', '.join(LAYOUT_FENCES)}.")
    modes = known_modes(quantization_modes)
    for what, count in (("tp_size", tp_size), ("fp8_local_rows", fp8_local_rows)):
        if type(count) is not int or count < 1:
            raise ValueError(f"{what} is {count!r}: it must be a whole number of at least 1.")
    local_rows = fp8_local_rows if any(mode.value == "fp8" for mode in modes) else 1
    shape = _checked_capacity(shape, tp_size, local_rows)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}: buffers hold activations and gradients; give a floating-point torch.dtype, such as torch.bfloat16.")
    if ub_cfgs is not None and not isinstance(ub_cfgs, (Mapping, list, tuple)):
        raise OverlapConfigError(f"ub_cfgs is {ub_cfgs!r}: give a table of communicators, or one table for each quantization mode.")
    tables = [ub_cfgs] * len(modes) if ub_cfgs is None or isinstance(ub_cfgs, Mapping) else list(ub_cfgs)
    for table in tables:
        communicator_specs(table, tp_size, hidden=shape[1])
    if len(tables) != len(modes):
        raise ValueError(f"{len(tables)} tables in ub_cfgs for {len(modes)} quantization modes: give one for each, or one for all.")
    from megatron_dyn.userbuffers.choice import choose_backend

    chosen, reason = choose_backend(backend)
    group = _group(tp_group, tp_size)
    _agree(
        group,
        {
            "shape": list(shape), "tp_size": tp_size, "dtype": str(dtype), "quantization_modes": [mode.value for mode in modes],
            "ub_cfgs": [{name: dict(options) for name, options in (table or {}).items()} for table in tables], "backend": chosen,
            "layout_fence": layout_fence, "fp8_local_rows": fp8_local_rows, "with_cublasmp": with_cublasmp,
        },
    )  # fmt: skip
    arguments = dict(tp_size=tp_size, modes=modes, dtype=dtype, tables=tables, local_rows=fp8_local_rows, tp_group=group)
    if chosen == "te":
        from megatron_dyn.userbuffers.te_backend import TransformerEngineBackend

        made = TransformerEngineBackend(shape, **arguments, bootstrap_backend=bootstrap_backend, with_cublasmp=with_cublasmp)
    else:
        if with_cublasmp:
            raise ValueError(f"with_cublasmp needs backend 'te', and 'reference' was chosen ({reason}): leave it out.")
        from megatron_dyn.userbuffers.reference import ReferenceBackend

        made = ReferenceBackend(shape, **arguments)
    try:
        _manager = UserBuffers(made, layout_fence=layout_fence, reason=reason)
    except BaseException:
        made.close()
        raise
    return _manager


def is_ub_initialized() -> bool:
    """Whether there are communicators."""
    return _manager is not None


def current() -> UserBuffers:
    """The manager of this process.

    Raises:
        NotInitializedError: there is none.
    """
    if _manager is None:
        raise NotInitializedError(
            "UserBuffers are not initialised: layers with communication overlap have no buffer to exchange through. Call "
            "initialize_ub([max_tokens, hidden], tp_size) on every rank before the first forward."
        )
    return _manager


def set_ub_active_shape(shape: Sequence[int]) -> None:
    """Use the first [T, hidden] of every buffer from now on. See `UserBuffers.set_active_shape`."""
    manager = _manager or current()
    manager._unseen_uses = True
    if type(shape) is not list and hasattr(shape, "tolist"):  # a NumPy array or a tensor would be compared element by element
        shape = shape.tolist()
    if shape != manager._active:
        manager.set_active_shape(shape)


def get_ub_active_shape() -> list[int]:
    """[T, hidden] set last for all communicators."""
    return current().active_shape


def get_ub_capacity_shape() -> list[int]:
    """[max_tokens, hidden] for which the buffers were registered."""
    return list(current().capacity)


def get_ub(name: str, use_fp8: bool = False) -> Communicator:
    """A communicator by name, such as "qkv_fprop".

    Raises:
        KeyError: there is none of that name.
        NotInitializedError: there are none at all.
    """
    return current().get(name, use_fp8)


def destroy_ub() -> None:
    """Free all buffers (nothing when there are none). A collective of all ranks: peers must not be exchanging any more."""
    global _manager
    if _manager is not None:
        manager, _manager = _manager, None
        manager.close()


def _checked_capacity(shape: Sequence[int], tp_size: int, local_rows: int) -> tuple[int, int]:
    """A capacity is an active shape like any other: T = capacity has to work."""
    try:
        rows, hidden = (operator.index(size) for size in shape)
    except (TypeError, ValueError):
        rows = hidden = 0
    asked = shape if hidden < 1 else [rows, hidden]
    rows = check_active_shape(asked, capacity=(rows, max(hidden, 1)), tp_size=tp_size, local_rows=local_rows, name="the capacity")
    return rows, hidden


def _group(tp_group: dist.ProcessGroup | None, tp_size: int) -> dist.ProcessGroup:
    if tp_group is None:
        if not dist.is_initialized():
            raise NotInitializedError("torch.distributed is not initialised: buffers are registered with peers. Initialise it first.")
        from megatron.core import parallel_state

        if parallel_state.model_parallel_is_initialized():
            tp_group = parallel_state.get_tensor_model_parallel_group()
        else:
            tp_group = dist.group.WORLD
    if dist.get_world_size(tp_group) != tp_size:
        raise ValueError(
            f"tp_size is {tp_size}, but the tensor-parallel group has {dist.get_world_size(tp_group)} ranks: exchanges would wait for ranks "
            "that take no part. Pass the size of the group, or the group itself as tp_group."
        )
    return tp_group


def _agree(group: dist.ProcessGroup, arguments: dict) -> None:
    """Before a buffer exists: all ranks of the group want the same ones. Afterwards they would hang, or exchange rows of another place."""
    told: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, arguments, group=group)
    different = [name for name in arguments if any(other[name] != told[0][name] for other in told)]
    if different:
        ranks = dist.get_process_group_ranks(group)
        values = "; ".join(f"{name}: " + ", ".join(f"rank {rank} {other[name]!r}" for rank, other in zip(ranks, told)) for name in different)
        raise ValueError(
            f"the tensor-parallel ranks ask for different UserBuffers ({values}): exchanges would hang, or mix rows of different places. "
            "Pass the same arguments on every rank."
        )
