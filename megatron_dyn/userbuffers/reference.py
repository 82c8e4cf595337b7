# SPDX-License-Identifier: Apache-2.0
"""Communicators on torch.distributed alone: gloo on a CPU, NCCL on GPUs. The oracle of the tests, and a choice where there is no TE.

buffer     [chunks * max_tokens / tp * hidden]   one allocation for each communicator, at initialisation; never moved
in use     [chunks * T / tp, hidden]             the contiguous prefix for the active T
chunks     tp, and a few more to receive in, see `reference_exchanges`

Every message lands in a receive that its receiver posted in this very exchange, so layouts of two microbatches cannot race.
"""

from typing import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_dyn import device
from megatron_dyn.userbuffers.communicator import Communicator, CommunicatorSpec
from megatron_dyn.userbuffers.configuration import communicator_specs
from megatron_dyn.userbuffers.quantization import UserBufferQuantizationMode
from megatron_dyn.userbuffers.reference_exchanges import (
    AllGather,
    PipelineReduceScatter,
    ReduceScatter,
    ReferenceCommunicator,
    RingAllGather,
    RingReduceScatter,
)

# (method, whether it is a reduce-scatter) -> what does it. "external" gathers beside somebody else's GEMM, as "bulk" does.
COMMUNICATORS: dict[tuple[str, bool], type[ReferenceCommunicator]] = {
    ("ring_exchange", False): RingAllGather,
    ("ring_exchange", True): RingReduceScatter,
    ("pipeline", True): PipelineReduceScatter,
    ("bulk", False): AllGather,
    ("bulk", True): ReduceScatter,
    ("external", False): AllGather,
}


class ReferenceBackend:
    """Makes all communicators of the reference backend. See `manager.Backend`.

    Args:
        See `lifecycle.initialize_ub`.
    Attributes:
        allocations, allocated_bytes: buffers made so far. They do not change after initialisation.
    Raises:
        OverlapConfigError: a table that cannot work.
        ValueError: gloo with a GPU.
    """

    name = "reference"
    one_sided = False

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
    ) -> None:
        specs = [communicator_specs(table, tp_size, hidden=shape[1]) for table in tables]
        self._device = device.compute_device()
        if self._device.type == "cuda" and "cuda:gloo" in dist.get_backend_config(tp_group):
            raise ValueError(
                "the tensor-parallel group uses gloo, which sends no tensors of a GPU from rank to rank, so the reference backend cannot "
                "exchange there. Use NCCL (one rank a card), Transformer Engine (backend='te'), or leave --tp-comm-overlap out."
            )
        self.allocations = 0
        self.allocated_bytes = 0
        self._group = tp_group
        self._fence_token = self._allocate(1, torch.float32).zero_()
        self.communicators: list[Communicator] = [
            self._make(spec, mode is UserBufferQuantizationMode.FP8, tuple(shape), tp_size, dtype, local_rows)
            for mode, by_name in zip(modes, specs)
            for spec in by_name.values()
        ]

    def set_rows(self, rows: int) -> None:
        """Nothing to tell anybody: an exchange cuts its views when it starts."""

    def set_rows_of(self, communicator: Communicator, rows: int) -> None:
        """As `set_rows`."""

    def fence(self) -> None:
        """An all-reduce of one element, ordered on the current stream like every collective."""
        dist.all_reduce(self._fence_token, group=self._group)

    def close(self) -> None:
        device.synchronize()
        for communicator in self.communicators:
            communicator.release()
        self.communicators = []

    def _make(
        self, spec: CommunicatorSpec, quantized: bool, capacity: tuple[int, int], tp_size: int, dtype: torch.dtype, local_rows: int
    ) -> ReferenceCommunicator:
        kind = COMMUNICATORS[spec.method, spec.is_reduce_scatter]
        # As in Transformer Engine: what is gathered is FP8, what is reduced is wide unless the table says otherwise.
        is_fp8 = quantized and bool(spec.options.get("fp8_buf", not spec.is_reduce_scatter))
        numel = kind.chunks(tp_size) * (capacity[0] // tp_size) * capacity[1]
        return kind(
            spec,
            quantized=quantized,
            capacity=capacity,
            tp_size=tp_size,
            local_rows=local_rows if quantized else 1,
            buffer=self._allocate(numel, torch.uint8 if is_fp8 else dtype),
            group=self._group,
        )

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Every buffer comes from here."""
        self.allocations += 1
        self.allocated_bytes += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device=self._device)
