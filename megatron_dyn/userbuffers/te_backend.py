# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's UserBuffers, unmodified: made or adopted here, and given the active shape by the native extension.

Every overlap of TE takes its views, offsets and counts from the shape of its communicator's buffer. Allocation, registration and the
handles that peers opened belong to the address, which never changes. So resetting the shape in place is all it takes
(`csrc/active_shape.cpp`).
"""

import inspect
from typing import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_dyn import device
from megatron_dyn.userbuffers import native
from megatron_dyn.userbuffers.communicator import Communicator, CommunicatorSpec
from megatron_dyn.userbuffers.configuration import (
    DEFAULT_METHODS,
    DGRADS_OF_COLUMNS,
    REDUCE_SCATTERS,
    OverlapConfigError,
    communicator_specs,
)
from megatron_dyn.userbuffers.quantization import UserBufferQuantizationMode
from megatron_dyn.userbuffers.shape import ActiveShapeError

# 8 bytes for each rank. Below 16, TE's send is a bare signal of one thread block. From 16 on it is a kernel of many blocks when the exchange
# before it did not use copy engines, each of which signals, while the receiver waits for one signal only: no fence at all.
FENCE_COLUMNS = 4


class TransformerEngineCommunicator(Communicator):
    """A communicator of Transformer Engine.

    Attributes:
        native: TE's own object (`CommOverlap` or `CommOverlapP2P`).
        index: its number in the native extension; None where TE made it with cuBLASMp, which takes sizes from its operands, so that
            a shape is only recorded here.
    """

    native: object
    index: int | None


class TransformerEngineBackend:
    """Makes TE's communicators at capacity, or adopts those that somebody made with `te.initialize_ub`.

    Args:
        See `lifecycle.initialize_ub`.
    Raises:
        ActiveShapeError: adopted communicators are smaller than asked for, or for another hidden size.
        LayoutMismatchError: the extension reads something else than TE reports.
    """

    name = "te"
    one_sided = True

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        tp_size: int,
        modes: Sequence[UserBufferQuantizationMode],
        dtype: torch.dtype,
        tables: Sequence[Mapping[str, Mapping] | None],
        local_rows: int,
        tp_group: dist.ProcessGroup,
        bootstrap_backend: str | None = None,
        with_cublasmp: bool = False,
    ) -> None:
        specs = [communicator_specs(table, tp_size, hidden=shape[1]) for table in tables]
        extension = native.load()
        from transformer_engine.pytorch.module import base

        self._te = base
        self._extension = extension
        self._group = tp_group
        self._shapes = extension.ActiveShapes()
        self.set_rows = self._shapes.set_rows  # the native call itself
        self._helper = self._fence_communicator = None
        self.communicators: list[Communicator] = []
        self.adopted = base._ub_communicators is not None
        try:
            if not self.adopted:
                _check_consecutive(tp_group, tp_size)
                _check_tables(specs, modes)
                if with_cublasmp and "with_cublasmp" not in inspect.signature(base.initialize_ub).parameters:
                    raise ValueError("with_cublasmp: this Transformer Engine has no cuBLASMp communicators; leave it out, or install a newer one.")
                if not with_cublasmp:
                    self._make_fence(tp_size, bootstrap_backend)
                base.initialize_ub(
                    list(shape),
                    tp_size,
                    quantization_modes=[base.UserBufferQuantizationMode(mode.value) for mode in modes],
                    dtype=dtype,
                    ub_cfgs=[{name: dict(options) for name, options in (table or {}).items()} for table in tables],
                    bootstrap_backend=bootstrap_backend,
                    **({"with_cublasmp": True} if with_cublasmp else {}),
                )
            by_mode = {mode.value: spec for mode, spec in zip(modes, specs)}
            for (name, mode), te_communicator in base._ub_communicators.items():
                self.communicators.append(self._wrap(te_communicator, name, mode.value, by_mode, shape, tp_size, local_rows))
            if self.adopted:
                _check_adopted(self.communicators, modes)
            self._fence_token = None
            if self._fence_communicator is None:
                self._fence_token = torch.zeros(1, device=device.compute_device())
            self._check_layouts()
        except BaseException:
            self._release()  # else the next call would adopt what this one had half made
            raise

    def set_rows_of(self, communicator: Communicator, rows: int) -> None:
        if communicator.index is not None:
            self._shapes.set_rows_of(communicator.index, rows)

    def fence(self) -> None:
        """An exchange of one line a rank through a buffer of its own, on the current stream. With adopted communicators, whose
        bootstrap is gone, a one-element all-reduce of the tensor-parallel group instead."""
        if self._fence_communicator is not None:
            self._extension.fence(self._fence_communicator, torch.cuda.current_stream().cuda_stream)
        else:
            dist.all_reduce(self._fence_token, group=self._group)

    def close(self) -> None:
        """Adopted communicators go back to their owner, at capacity; own ones are destroyed."""
        if self.adopted:
            self.fence()  # the owner's next exchange has another layout: no peer may still be in the last one
        device.synchronize()
        if self.adopted:
            for communicator in self.communicators:
                self.set_rows_of(communicator, communicator.capacity[0])
        self._release()

    def _release(self) -> None:
        for communicator in self.communicators:
            communicator.native = None
        self.communicators = []
        self._shapes = self.set_rows = None
        if not self.adopted:
            self._te.destroy_ub()
            self._fence_communicator = self._helper = None

    # ---- making ----

    def _make_fence(self, tp_size: int, bootstrap_backend: str | None) -> None:
        """Made before all others: TE keeps the bootstrap callbacks of the first communicator, and those of `te.initialize_ub` point
        into an object that dies with that call. Its own lives as long as this backend."""
        import transformer_engine_torch as tex

        chosen = bootstrap_backend or ("gloo" if dist.is_gloo_available() else "nccl")
        world = dist.new_group(backend=chosen)
        domain = world
        if dist.get_world_size() > tp_size:
            domain, _ = dist.new_subgroups(tp_size, backend=chosen)
        self._helper = tex.CommOverlapHelper() if tex.ubuf_built_with_mpi() else tex.CommOverlapHelper(world, domain)
        self._fence_communicator = tex.CommOverlap(
            [tp_size, FENCE_COLUMNS], torch.bfloat16, self._helper, tp_size, num_splits=1, num_max_streams=1, comm_cga_size=1, num_comm_sm=1
        )

    def _wrap(self, te_communicator, name, mode, by_mode, shape, tp_size, local_rows) -> TransformerEngineCommunicator:
        quantized = mode == "fp8"
        cublasmp = getattr(te_communicator, "with_cublasmp", bool)()
        is_ring = type(te_communicator).__name__ == "CommOverlapP2P"
        index, capacity, chunks, nbytes = None, shape, 1, 0
        if not cublasmp:
            index = (self._shapes.add_ring if is_ring else self._shapes.add_bulk)(te_communicator)
            layout = self._shapes.layout(index)
            if layout["tp_size"] != tp_size:
                raise ValueError(
                    f"{name} was registered by somebody else for {layout['tp_size']} tensor-parallel ranks, but tp_size is {tp_size}: chunks would "
                    "start at the wrong rows. Pass the size it was registered for."
                )
            capacity, chunks, nbytes = (layout["capacity_rows"], layout["hidden"]), layout["chunks"], layout["capacity_bytes"]
        spec = by_mode.get(mode, {}).get(name) if not self.adopted else None
        if spec is None:
            spec = _seen_spec(name, is_ring, chunks > tp_size, self._te._ub_communicators, tp_size)
        if capacity[1] != shape[1] or capacity[0] < shape[0]:
            raise ActiveShapeError(
                f"{name} was registered by somebody else for {list(capacity)}, but {list(shape)} is asked for: microbatches beyond it would "
                "write into a peer's memory. Register it for the largest microbatch, or let this package register."
            )
        wrapped = TransformerEngineCommunicator(
            spec, quantized=quantized, capacity=capacity, tp_size=tp_size, local_rows=local_rows if quantized else 1
        )
        wrapped.native, wrapped.index, wrapped.nbytes = te_communicator, index, nbytes
        return wrapped

    def _check_layouts(self) -> None:
        for communicator in self.communicators:
            if communicator.index is not None:
                native.check_layout(self._shapes, communicator.index, communicator.native)


def _seen_spec(name: str, is_ring: bool, extra_chunks: bool, all_of_them: Mapping, tp_size: int) -> CommunicatorSpec:
    """What an adopted communicator does, from what can be seen of it."""
    if is_ring:
        return CommunicatorSpec(name=name, method="ring_exchange", is_reduce_scatter=extra_chunks, num_splits=tp_size)
    method = DEFAULT_METHODS.get(name, "bulk")
    wgrad = name.replace("_dgrad", "_wgrad")
    if name in DGRADS_OF_COLUMNS and not any(other == wgrad for other, _ in all_of_them):
        return CommunicatorSpec(name=name, method="pipeline", is_reduce_scatter=True)
    return CommunicatorSpec(name=name, method="pipeline" if method == "ring_exchange" else method, is_reduce_scatter=name in REDUCE_SCATTERS)


def _check_consecutive(tp_group: dist.ProcessGroup, tp_size: int) -> None:
    ranks = dist.get_process_group_ranks(tp_group)
    first = ranks[0] // tp_size * tp_size
    if ranks != list(range(first, first + tp_size)):
        raise ValueError(
            f"the tensor-parallel group has global ranks {ranks}, but Transformer Engine's UserBuffers pair consecutive ranks: rank "
            f"{ranks[1]} would exchange with a stranger. Put TP first in the order of the parallel dimensions (Megatron's default)."
        )


def _check_adopted(communicators: Sequence[Communicator], modes: Sequence[UserBufferQuantizationMode]) -> None:
    """That somebody else's communicators can serve the layers."""
    missing = {mode.value for mode in modes} - {"fp8" if c.quantized else "none" for c in communicators}
    if missing:
        raise ValueError(
            f"Transformer Engine's UserBuffers were initialised by somebody else without quantization mode {', '.join(sorted(missing))}: layers "
            "would find no buffer. Pass the modes they were made with, or destroy them and let this package register."
        )
    for communicator in communicators:
        if communicator.index is not None:  # cuBLASMp has a product of its own
            _check_pipelined_dgrad(communicator.spec, communicator.quantized)


def _check_tables(specs: Sequence[Mapping[str, CommunicatorSpec]], modes: Sequence[UserBufferQuantizationMode]) -> None:
    if len(specs) > 1 and any("qkv_wgrad" not in spec or "fc1_wgrad" not in spec for spec in specs):
        raise OverlapConfigError(
            "a reduce-scatter beside the input gradient's own GEMM (qkv_dgrad or fc1_dgrad not 'bulk') together with two quantization modes: "
            "Transformer Engine registers the first and stops at the second. Use one mode, or 'bulk'."
        )
    for spec, mode in zip(specs, modes):
        for name in DGRADS_OF_COLUMNS:
            _check_pipelined_dgrad(spec[name], mode is not UserBufferQuantizationMode.NONE)


def _check_pipelined_dgrad(spec: CommunicatorSpec, quantized: bool) -> None:
    # split_overlap_rs takes contiguous pieces of the weight, which are its columns only where it is stored transposed, as in FP8.
    if spec.name in DGRADS_OF_COLUMNS and spec.method == "pipeline" and not quantized:
        raise OverlapConfigError(
            f"{spec.name} with method 'pipeline' and unquantized operands: Transformer Engine splits the weight at the wrong places there "
            "and the input gradient is wrong, at any T. Use 'ring_exchange' (or FP8)."
        )
