# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's UserBuffers and the native extension as far as `te_backend` knows them, over no memory: they count and write down.

bulk, pipeline, external   buffer [T, hidden]                        ring exchange   chunks of [T / tp, hidden]: tp, or 2 * tp - 1 to reduce
address                    1000 bytes apart for each communicator, never the same twice
"""

import itertools
import sys
import weakref
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_dyn import device
from megatron_dyn.userbuffers import native
from megatron_dyn.userbuffers.configuration import DEFAULT_METHODS, DGRADS_OF_COLUMNS, REDUCE_SCATTERS

ELEMENT_SIZE = 2


class UserBufferQuantizationMode(Enum):
    NONE = "none"
    FP8 = "fp8"


class Buffer:
    def __init__(self, address, shape):
        self.address, self.shape = address, list(shape)

    def data_ptr(self):
        return self.address

    def element_size(self):
        return ELEMENT_SIZE


class _Native:
    """What both kinds share. `rows` is that of the active shape."""

    addresses = itertools.count(1_000_000, 1_000_000)
    extra_rows = 0  # of a version whose buffers are laid out in another way

    def __init__(self, shape, dtype, helper, tp_size, comm_type=None, *, cublasmp=False, tp_id=0, **options):
        self.rows, self.hidden = shape
        self.dtype, self.tp_size, self.tp_id = dtype, tp_size, tp_id
        self.helper = weakref.ref(helper)  # whose callbacks it keeps, and not the object
        self.cublasmp, self.address, self.is_reduce_scatter = cublasmp, next(self.addresses), comm_type == "RS"

    def with_cublasmp(self):
        return self.cublasmp

    def get_buffer(self, local_chunk=False, shape=None):
        rows = self.rows // self.tp_size
        held = [rows if local_chunk else rows * self.chunks + self.extra_rows, self.hidden]
        if shape is not None and list(shape) != held:
            raise RuntimeError(f"Invalid shape for a Userbuffers buffer\n{shape} is not {held}")
        return Buffer(self.address + (self.tp_id * rows * self.hidden * ELEMENT_SIZE if local_chunk else 0), held)


class CommOverlap(_Native):
    @property
    def chunks(self):
        return self.tp_size


class CommOverlapP2P(_Native):
    @property
    def chunks(self):
        return 2 * self.tp_size - 1 if self.is_reduce_scatter else self.tp_size


class CommOverlapHelper:
    def __init__(self, world, domain):
        self.world, self.domain = world, domain


class ActiveShapes:
    """As csrc/active_shape.cpp documents it."""

    def __init__(self, events):
        self.communicators, self.capacities, self.events = [], [], events

    def add_bulk(self, comm):
        assert type(comm) is CommOverlap, "pybind11 takes no ring exchange here"
        return self._add(comm)

    def add_ring(self, comm):
        assert type(comm) is CommOverlapP2P, "pybind11 takes ring exchanges only"
        return self._add(comm)

    def _add(self, comm):
        if comm.cublasmp:
            raise RuntimeError("this communicator was made with cuBLASMp")
        self.communicators.append(comm)
        self.capacities.append(comm.rows)
        return len(self.communicators) - 1

    def set_rows(self, rows):
        self.events.append(("set_rows", rows))
        for comm in self.communicators:
            comm.rows = rows

    def set_rows_of(self, index, rows):
        self.events.append(("set_rows_of", index, rows))
        self.communicators[index].rows = rows

    def shape(self, index):
        return self.communicators[index].rows, self.communicators[index].hidden

    def layout(self, index):
        comm, is_ring = self.communicators[index], isinstance(self.communicators[index], CommOverlapP2P)
        rows, row_bytes = comm.rows // comm.tp_size, comm.hidden * ELEMENT_SIZE
        return dict(
            dptr=comm.address, element_size=ELEMENT_SIZE, tp_size=comm.tp_size, tp_id=comm.tp_id, chunks=comm.chunks if is_ring else 1,
            rows=comm.rows, buffer_rows=rows * comm.chunks, hidden=comm.hidden, capacity_rows=self.capacities[index],
            capacity_bytes=self.capacities[index] // comm.tp_size * comm.chunks * row_bytes,
            chunk_layout=[(chunk * rows * row_bytes, rows, comm.hidden) for chunk in range(comm.chunks)] if is_ring else [],
        )  # fmt: skip


class Engine:
    """The modules put into ``sys.modules``, and what was asked of them.

    Attributes:
        events: in order: ("fence made" | "initialize_ub" | "destroy_ub" | "set_rows" | "set_rows_of" | "fence" | "all_reduce", ...).
        base: stands for `transformer_engine.pytorch.module.base`.
        groups: what `torch.distributed` made, as (ranks of a group, backend).
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, world: int = 2, knows_cublasmp: bool = True):
        self.events, self.groups, self.initialized_with, self.shapes = [], [], None, []
        self.tp_ranks = None
        self.base = base = ModuleType("transformer_engine.pytorch.module.base")
        base._ub_communicators, base.UserBufferQuantizationMode, base.destroy_ub = None, UserBufferQuantizationMode, self._destroy_ub
        base.initialize_ub = self._initialize_ub if knows_cublasmp else self._initialize_ub_of_2_11
        tex = ModuleType("transformer_engine_torch")
        tex.CommOverlap, tex.CommOverlapP2P, tex.CommOverlapHelper = self._make_fence, CommOverlapP2P, CommOverlapHelper
        tex.ubuf_built_with_mpi = lambda: False
        packages = [ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module")]
        for package in packages:
            patch.setitem(sys.modules, package.__name__, package)
        packages[0].pytorch, packages[1].module, packages[2].base = packages[1], packages[2], base
        patch.setitem(sys.modules, base.__name__, base)
        patch.setitem(sys.modules, tex.__name__, tex)
        patch.setattr(native, "load", lambda: SimpleNamespace(ActiveShapes=self._active_shapes, fence=self._fence))
        patch.setattr(device, "compute_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
        patch.setattr(dist, "get_world_size", lambda group=None: world if group is None else 2)
        patch.setattr(dist, "get_process_group_ranks", lambda group: self.tp_ranks or [0, 1])
        patch.setattr(dist, "all_reduce", lambda tensor, group: self.events.append(("all_reduce", tensor.numel(), group)))
        patch.setattr(dist, "new_group", lambda backend: self.groups.append((world, backend)) or "world")
        patch.setattr(dist, "new_subgroups", lambda size, backend: self.groups.append((size, backend)) or ("domain", []))

    def _active_shapes(self):
        self.shapes.append(ActiveShapes(self.events))
        return self.shapes[-1]

    def _fence(self, communicator, stream):
        self.events.append(("fence", communicator, stream))

    def _make_fence(self, *arguments, **options):
        made = CommOverlap(*arguments, **options)
        self.events.append(("fence made", made))
        return made

    def _initialize_ub(self, shape, tp_size, *, with_cublasmp=False, **arguments):
        self._initialize_ub_of_2_11(shape, tp_size, **arguments)
        self.initialized_with["with_cublasmp"] = with_cublasmp
        if with_cublasmp:
            for (name, mode), comm in list(self.base._ub_communicators.items()):
                if DEFAULT_METHODS[name] in ("bulk", "external"):
                    del self.base._ub_communicators[name, mode]
                comm.cublasmp = True

    def _initialize_ub_of_2_11(self, shape, tp_size, *, quantization_modes, dtype, ub_cfgs, bootstrap_backend):
        if self.base._ub_communicators is not None:
            raise RuntimeError("UB communicators are already initialized.")
        assert all(type(mode) is UserBufferQuantizationMode for mode in quantization_modes)
        self.events.append(("initialize_ub", list(shape)))
        self.initialized_with = dict(
            shape=shape, tp_size=tp_size, quantization_modes=quantization_modes, dtype=dtype, ub_cfgs=ub_cfgs,
            bootstrap_backend=bootstrap_backend,
        )  # fmt: skip
        self.base._ub_communicators = {}
        helper = CommOverlapHelper("theirs", "theirs")
        for mode, table in zip(quantization_modes, ub_cfgs):
            for name, default in DEFAULT_METHODS.items():
                method, reduces = table.get(name, {}).get("method", default), name in REDUCE_SCATTERS
                if name in DGRADS_OF_COLUMNS:
                    reduces = method != "bulk"
                elif table.get(name.replace("wgrad", "dgrad"), {}).get("method", "bulk") != "bulk" and default == "bulk":
                    continue
                if table.get(name, {}).get("atomic_gemm"):
                    raise ValueError("Atomic GEMM overlap supported only for FP8 GEMM")
                kind = CommOverlapP2P if method == "ring_exchange" else CommOverlap
                self.base._ub_communicators[name, mode] = kind(shape, dtype, helper, tp_size, "RS" if reduces else "AG")

    def _destroy_ub(self):
        self.events.append(("destroy_ub",))
        self.base._ub_communicators = None
