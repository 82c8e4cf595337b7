# SPDX-License-Identifier: Apache-2.0
"""One communicator: a buffer that is registered once at its capacity, and the shape in which it is used now.

capacity       [max_tokens, hidden]
active shape   [T, hidden], a contiguous prefix of the allocation
chunks         [T / tp, hidden]; tp of them, or 2 * tp - 1 for ring-exchange reduce-scatter, one after the other
"""

from dataclasses import dataclass, field
from typing import Literal, Sequence

Method = Literal["ring_exchange", "pipeline", "bulk", "external"]


@dataclass(frozen=True, kw_only=True)
class CommunicatorSpec:
    """What a communicator does, as Transformer Engine configures it.

    Attributes:
        name: the GEMM it goes with, such as "qkv_fprop".
        method: how exchange and GEMM overlap.
        is_reduce_scatter: the GEMM's output is reduce-scattered; otherwise its input is all-gathered.
        num_splits: pieces of the hidden dimension in which a pipelined reduce-scatter follows its GEMM.
        options: what else was configured (num_sm, cga_size, ...), for Transformer Engine alone.
    """

    name: str
    method: Method
    is_reduce_scatter: bool
    num_splits: int = 1
    options: dict = field(default_factory=dict, compare=False)


class Communicator:
    """A named buffer of the manager. Made by a backend; used by layers through the manager.

    Attributes:
        spec: name and method.
        quantized: it carries FP8 GEMM operands (its buffer may still be wider, as for reduce-scatter).
        local_rows: T / tp is a multiple of it.
        nbytes: of its allocation.
        own_rows: T of this one alone; None while it has that of all.
        used_rows, used_in: T at its last use, and the number of the exchange in which that was (see `manager.UserBuffers.begin`).
    """

    def __init__(self, spec: CommunicatorSpec, *, quantized: bool, capacity: tuple[int, int], tp_size: int, local_rows: int = 1) -> None:
        self.spec = spec
        self.quantized = quantized
        self.capacity = capacity
        self.tp_size = tp_size
        self.local_rows = local_rows
        self.nbytes = 0
        self.own_rows: int | None = None
        self.used_rows = capacity[0]
        self.used_in = -1
        self._manager = None  # set by the manager, which alone changes T

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def rows(self) -> int:
        """T now. Backends read it when an exchange starts."""
        if self.own_rows is not None:
            return self.own_rows
        return self.capacity[0] if self._manager is None else self._manager.rows

    def set_buffer_active_shape(self, shape: Sequence[int]) -> None:
        """Use the first [T, hidden] of the buffer from now on: no allocation, free, registration or synchronization.

        Args:
            shape: [T, hidden].
        Raises:
            ActiveShapeError: a shape it cannot take; the old one stays.
        """
        self._manager.set_shape_of(self, shape)

    def get_buffer_active_shape(self) -> list[int]:
        """[T, hidden] in which it is used now."""
        return [self.rows, self.capacity[1]]

    def get_buffer_capacity_shape(self) -> list[int]:
        """[max_tokens, hidden] for which it was registered."""
        return list(self.capacity)

    def __repr__(self) -> str:
        kind = ("reduce-scatter" if self.spec.is_reduce_scatter else "all-gather") + (", fp8" if self.quantized else "")
        return f"<{self.name}: {self.spec.method} {kind}, active {self.get_buffer_active_shape()} of {self.get_buffer_capacity_shape()}>"
