# SPDX-License-Identifier: Apache-2.0
"""The one owner of all communicators: sets their shape together, and keeps a change of layout from racing with a slow rank.

A *layer call* is one forward or one backward of a tensor-parallel layer. It uses some communicators, and it is an exchange in which every
tensor-parallel rank waits for every other. A communicator whose layout changes between two uses is safe when another layer
call lies between them: no rank gets past that one before all ranks have left the first use. Where none does, the change
is fenced. docs/userbuffers.md has the argument at length.
"""

from typing import Iterable, Literal, Protocol, Sequence

from megatron_dyn.userbuffers.communicator import Communicator
from megatron_dyn.userbuffers.shape import ActiveShapeError, check_active_shape

LayoutFence = Literal["auto", "always", "never"]
LAYOUT_FENCES = ("auto", "always", "never")
_SEVERAL = object()


class Backend(Protocol):
    """What makes the communicators and moves the data.

    Attributes:
        name: "te" or "reference".
        one_sided: a rank writes into a peer's buffer, or reads from it, without the peer taking part; only then can layouts race.
        communicators: all of them.
    """

    name: str
    one_sided: bool
    communicators: list[Communicator]

    def set_rows(self, rows: int) -> None:
        """Give all buffers T rows: one native call, no allocation, no synchronization."""

    def set_rows_of(self, communicator: Communicator, rows: int) -> None:
        """Give one buffer T rows."""

    def fence(self) -> None:
        """On the current stream: nothing after it starts before all tensor-parallel ranks have finished what came before it."""

    def close(self) -> None:
        """Free the buffers."""


class UserBuffers:
    """All communicators of this process.

    Args:
        backend: its communicators are owned from here on.
        layout_fence: "auto" fences a change of layout that no other exchange separates from the last use; "always" fences every
            layer call; "never" none.
        reason: why this backend, for the log.

    Attributes:
        rows: T now.
        capacity: [max_tokens, hidden].
        fences: how many there were.
    """

    def __init__(self, backend: Backend, *, layout_fence: LayoutFence = "auto", reason: str = "") -> None:
        if layout_fence not in LAYOUT_FENCES:
            raise ValueError(f"layout fence {layout_fence!r} is not known: use one of {', '.join(LAYOUT_FENCES)}.")
        self.backend = backend
        self.reason = reason
        self.layout_fence = layout_fence
        self.communicators = {(c.name, c.quantized): c for c in backend.communicators}
        if not self.communicators:
            raise ValueError("no communicator is configured: there is nothing to overlap. Leave --tp-comm-overlap out.")
        first = backend.communicators[0]
        self.tp_size = first.tp_size
        self.capacity = first.capacity
        self.local_rows = max(c.local_rows for c in backend.communicators)
        self._multiple = self.tp_size * self.local_rows
        self.fences = 0
        self._set_rows = backend.set_rows
        self._fence_all = layout_fence == "always"
        self._fence_changes = layout_fence == "auto" and backend.one_sided
        self._exchange = 0
        # Somebody else may have used the communicators since the last layer call: their owner before, or whoever sets shapes by hand.
        self._unseen_uses = getattr(backend, "adopted", False)
        self.rows = self.capacity[0]
        self._with_own_rows: list[Communicator] = []
        # What set_active_shape compares with: equal to no shape while single communicators have shapes of their own.
        self._active: object = list(self.capacity)
        for communicator in backend.communicators:
            communicator._manager = self

    # ---- shapes ----

    def set_active_shape(self, shape: Sequence[int]) -> None:
        """Give all communicators the shape of the microbatch that runs next.

        For calls from outside the layers, whose uses of the communicators the manager cannot see: so with "auto" every change is
        fenced. All tensor-parallel ranks have to set the same shape; one that differs hangs its peers.

        Args:
            shape: [T, hidden].
        Raises:
            ActiveShapeError: a shape that some communicator cannot take; all keep the old one.
        """
        self._unseen_uses = True
        if shape == self._active:
            return
        rows = self._checked(shape)
        if rows != self.rows or self._active is _SEVERAL:
            self._change(rows)
            if self._fence_changes:
                self.fence()

    def set_shape_of(self, communicator: Communicator, shape: Sequence[int]) -> None:
        """Give one communicator a shape of its own, until the next `set_active_shape` or layer call."""
        rows = check_active_shape(
            shape, capacity=communicator.capacity, tp_size=self.tp_size, local_rows=communicator.local_rows, name=communicator.name
        )
        self._unseen_uses = True
        if rows == communicator.rows:
            return
        self.backend.set_rows_of(communicator, rows)
        communicator.own_rows = rows
        self._with_own_rows.append(communicator)
        self._active = _SEVERAL
        if self._fence_changes:
            self.fence()

    @property
    def active_shape(self) -> list[int]:
        """[T, hidden] set last for all communicators."""
        return [self.rows, self.capacity[1]]

    # ---- layer calls ----

    def begin(self, used: Iterable[Communicator], rows: int) -> None:
        """Before a forward or backward of a layer: all communicators take T rows, with a fence where a rank could still be reading
        the old layout.

        Args:
            used: the communicators of this call; empty when the layer exchanges by other means.
            rows: T of the input that the call has at hand.
        Raises:
            ActiveShapeError: see `set_active_shape`.
        """
        wants_fence = self._fence_all
        if rows != self.rows or self._active is _SEVERAL:
            checked = self._checked([rows, self.capacity[1]])
            if self._unseen_uses and self._fence_changes:
                wants_fence |= any(communicator.rows != rows for communicator in used)
            self._change(checked)
        self._unseen_uses = False
        last = self._exchange
        for communicator in used:
            if communicator.used_rows != rows:
                wants_fence |= self._fence_changes and communicator.used_in == last
                communicator.used_rows = rows
            communicator.used_in = last + 1
        self._exchange = last + 1
        if wants_fence:
            self.fence()
            for communicator in used:
                communicator.used_in = self._exchange

    def fence(self) -> None:
        """Order all earlier exchanges of all ranks before all later ones, on the current stream."""
        self.backend.fence()
        self.fences += 1
        self._exchange += 1

    # ---- life ----

    def get(self, name: str, quantized: bool = False) -> Communicator:
        """A communicator by name.

        Raises:
            KeyError: there is none; the message lists those there are.
        """
        try:
            return self.communicators[name, quantized]
        except KeyError:
            have = ", ".join(sorted(n + (" (fp8)" if q else "") for n, q in self.communicators))
            raise KeyError(f"no communicator {name!r}{' for FP8' if quantized else ''}; there are: {have}") from None

    def description(self) -> str:
        """One line for a log: what is registered, how large, and through what."""
        kinds = sorted({"fp8" if c.quantized else "unquantized" for c in self.communicators.values()})
        size = sum(c.nbytes for c in self.communicators.values()) / 2**20
        return (
            f"{len(self.communicators)} communicators ({', '.join(kinds)}) registered once for {list(self.capacity)}, {size:.1f} MiB a rank; "
            f"backend {self.backend.name} ({self.reason}), layout fence {self.layout_fence}"
        )

    def close(self) -> None:
        """Free the buffers. The communicators are of no use afterwards."""
        self._set_rows = None  # it holds the native communicators, which have to go before others are made
        self.backend.close()
        for communicator in self.communicators.values():
            communicator._manager = _CLOSED
        self.communicators = {}
        self._active = _SEVERAL  # so that every shape is a change
        self._set_rows = _CLOSED.set_rows  # the backend's would keep the buffers alive as long as this manager

    def _checked(self, shape: Sequence[int]) -> int:
        try:  # what a training step passes, without a call; `check_active_shape` decides about everything else
            rows, hidden = shape
            if type(rows) is int and 0 < rows <= self.capacity[0] and hidden == self.capacity[1] and not rows % self._multiple:
                return rows
        except (TypeError, ValueError):
            pass
        return check_active_shape(shape, capacity=self.capacity, tp_size=self.tp_size, local_rows=self.local_rows)

    def _change(self, rows: int) -> None:
        self._set_rows(rows)
        if self._active is _SEVERAL:
            for communicator in self._with_own_rows:
                communicator.own_rows = None
            self._with_own_rows.clear()
        self.rows = rows
        self._active = [rows, self.capacity[1]]


class _Closed:
    rows = 0

    def set_rows(self, rows: int) -> None:
        raise ActiveShapeError("the buffers were destroyed with destroy_ub(): there is none to give a shape to. Initialise again.")

    def set_shape_of(self, communicator: Communicator, shape: Sequence[int]) -> None:
        raise ActiveShapeError(
            f"{communicator.name} was destroyed with destroy_ub(): its buffer is gone. Initialise again and ask for it anew."
        )


_CLOSED = _Closed()
