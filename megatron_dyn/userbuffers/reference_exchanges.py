# SPDX-License-Identifier: Apache-2.0
"""How each method of the reference backend exchanges, and which GEMM runs meanwhile.

local      [T / tp, hidden]        what this rank holds under sequence parallelism
gathered   [T, hidden]             a view of the buffer, valid until its next exchange
left       [T, k]                  right   [k, hidden] or, after an all-gather, [hidden, n]
partial    [T, hidden]             this rank's part of a sum over the ranks

Chunks are [T / tp, hidden], one after the other from the start of the buffer; the last column says which:

RingAllGather          chunk r travels round the ring while the GEMM of the chunk at hand runs          tp: by rank
RingReduceScatter      the chunk of each peer is sent while the next one's GEMM runs                    tp to send, tp - 1 received
PipelineReduceScatter  columns in num_splits; a split is reduced while the next one's GEMM runs         tp, by split; 1 received
AllGather              beside a GEMM that does not need the result                                      tp: by rank
ReduceScatter          beside a GEMM that does not need the result                                      tp: by rank

NCCL runs an exchange on a stream of its own, after what the current stream was given before, and ``wait`` makes the current
stream wait for it. All exchanges are waited for before a call (or `Pending.wait`) returns, so no buffer is reused too early.
"""

from typing import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dyn.userbuffers.communicator import Communicator, CommunicatorSpec
from megatron_dyn.userbuffers.shape import ActiveShapeError

# Since torch 2.13 the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """An exchange on its way; keeps its tensors alive."""

    def __init__(self, work: dist.Work, result: Tensor, *used: Tensor) -> None:
        self._work = work
        self._result = result
        self._used = used

    def wait(self) -> Tensor:
        """The result, which kernels launched from now on may read."""
        if self._work is not None:
            self._work.wait()
            self._work, self._used = None, ()
        return self._result


def start_all_gather(local: Tensor, gathered: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to gather ``local`` of all ranks, in rank order, into ``gathered``."""
    return Pending(all_gather_single(gathered, local, group=group, async_op=True), gathered, local)


def start_reduce_scatter(partial: Tensor, local: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to sum ``partial`` over all ranks; this rank's rows of the sum go into ``local``."""
    return Pending(reduce_scatter_single(local, partial, group=group, async_op=True), local, partial)


class ReferenceCommunicator(Communicator):
    """What all methods share: views of the active rows, and checks of the operands.

    Args:
        buffer: 1-D, for all chunks at capacity.
        group: the tensor-parallel group.
    """

    def __init__(
        self,
        spec: CommunicatorSpec,
        *,
        quantized: bool,
        capacity: tuple[int, int],
        tp_size: int,
        local_rows: int,
        buffer: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(spec, quantized=quantized, capacity=capacity, tp_size=tp_size, local_rows=local_rows)
        self.buffer: Tensor | None = buffer
        self.dtype = buffer.dtype
        self.nbytes = buffer.nbytes
        self.group = group
        self.rank = dist.get_rank(group)
        self._peers = [dist.get_global_rank(group, rank) for rank in range(tp_size)]

    @staticmethod
    def chunks(tp_size: int) -> int:
        """Chunks of the buffer."""
        return tp_size

    @property
    def matrix(self) -> Tensor:
        """[T, hidden] view of the active rows: what was gathered, or what is to be reduce-scattered."""
        return self._view(0, self.rows)

    def release(self) -> None:
        """Let the buffer go."""
        self.buffer = None

    # What a method cannot do, it refuses by name.

    def all_gather_gemm(self, local: Tensor, right: Tensor, product: Tensor) -> Tensor:
        """``product`` [T, n] = (``local`` of all ranks) @ ``right``; returns the gathered [T, hidden]."""
        raise self._unable("gather beside its own GEMM", "an all-gather by ring_exchange")

    def gemm_reduce_scatter(self, left: Tensor, right: Tensor, local: Tensor) -> None:
        """``local`` [T / tp, hidden] = this rank's rows of the sum over ranks of ``left`` @ ``right``."""
        raise self._unable("reduce-scatter beside its own GEMM", "a reduce-scatter by ring_exchange or pipeline")

    def start_all_gather(self, local: Tensor) -> Pending:
        """Begin to gather; the result is [T, hidden], a view of the buffer."""
        raise self._unable("gather beside another GEMM", "a bulk or external all-gather")

    def start_reduce_scatter(self, local: Tensor) -> Pending:
        """Begin to sum what is in `matrix` over the ranks; the result is ``local`` [T / tp, hidden]."""
        raise self._unable("reduce-scatter beside another GEMM", "a bulk reduce-scatter")

    # ---- for the methods ----

    def _view(self, first_row: int, rows: int) -> Tensor:
        """[rows, hidden] of the buffer."""
        hidden = self.capacity[1]
        return self.buffer[first_row * hidden : (first_row + rows) * hidden].view(rows, hidden)

    def _chunk(self, index: int) -> Tensor:
        """[T / tp, hidden]."""
        rows = self.rows // self.tp_size
        return self._view(index * rows, rows)

    def _exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> list[dist.Work]:
        """Begin to send to one rank of the group while receiving from another."""
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self._peers[to % self.tp_size], self.group),
                dist.P2POp(dist.irecv, received, self._peers[source % self.tp_size], self.group),
            ]
        )

    def _check(self, what: str, tensor: Tensor, rows: int, columns: int) -> None:
        if self.buffer is None:
            raise RuntimeError(
                f"{self.name} was destroyed with destroy_ub(): there is no buffer to exchange through. Initialise again and get it anew."
            )
        if list(tensor.shape) != [rows, columns]:
            raise ActiveShapeError(
                f"{self.name} is active for {self.get_buffer_active_shape()} over {self.tp_size} ranks, so {what} must be "
                f"{[rows, columns]}, but it is {list(tensor.shape)}: peers would wait for other rows than are sent. Set the active shape "
                "from the input of this very call, before its forward and again before its backward."
            )
        if tensor.dtype != self.dtype:
            raise ValueError(
                f"{self.name} was initialised for {self.dtype}, but {what} is {tensor.dtype}: bytes would be read as other numbers. "
                f"Initialise with dtype={tensor.dtype}."
            )

    def _check_local(self, local: Tensor) -> None:
        self._check("what a rank holds", local, self.rows // self.tp_size, self.capacity[1])

    def _check_can_multiply(self) -> None:
        if self.quantized:
            raise ValueError(
                f"{self.name} carries FP8, and the reference backend has no FP8 GEMM. Use the unquantized communicator (leave --fp8 out), "
                "or Transformer Engine (backend='te') on a GPU that has FP8."
            )

    def _unable(self, what: str, needed: str) -> ValueError:
        kind = "a reduce-scatter" if self.spec.is_reduce_scatter else "an all-gather"
        return ValueError(
            f"{self.name} is {kind} by {self.spec.method}, which cannot {what}: that takes {needed}. The table of communicators "
            "(--tp-comm-overlap-cfg) and the flags of the layers must agree."
        )


class RingAllGather(ReferenceCommunicator):
    """tp - 1 messages of one chunk, each from the previous rank to the next."""

    def all_gather_gemm(self, local: Tensor, right: Tensor, product: Tensor) -> Tensor:
        self._check_can_multiply()
        self._check("the product", product, self.rows, right.size(1))
        products = product.chunk(self.tp_size)
        for source, chunk in self._arriving(local):
            torch.mm(chunk, right, out=products[source])
        return self.matrix

    def gather(self, local: Tensor) -> Tensor:
        """Without a GEMM, of anything that fits, such as FP8 bytes."""
        for _ in self._arriving(local):
            pass
        return self.matrix

    def _arriving(self, local: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The rank it is from, and the chunk; the next one travels meanwhile."""
        self._check_local(local)
        self._chunk(self.rank).copy_(local)
        for step in range(self.tp_size):
            source, following = (self.rank - step) % self.tp_size, (self.rank - step - 1) % self.tp_size
            works = []
            if step < self.tp_size - 1:
                works = self._exchange(self._chunk(source), self.rank + 1, self._chunk(following), self.rank - 1)
            yield source, self._chunk(source)
            for work in works:
                work.wait()


class RingReduceScatter(ReferenceCommunicator):
    """tp - 1 messages of one chunk, each straight to the rank that needs it."""

    @staticmethod
    def chunks(tp_size: int) -> int:
        return 2 * tp_size - 1

    def gemm_reduce_scatter(self, left: Tensor, right: Tensor, local: Tensor) -> None:
        self._check_can_multiply()
        self._check_local(local)
        self._check("the left operand", left, self.rows, right.size(0))
        lefts = left.chunk(self.tp_size)
        works = []
        for step in range(self.tp_size):
            peer = (self.rank + 1 + step) % self.tp_size  # this rank itself comes last
            torch.mm(lefts[peer], right, out=self._chunk(step))
            if peer != self.rank:
                works += self._exchange(self._chunk(step), peer, self._chunk(self.tp_size + step), self.rank - 1 - step)
        for work in works:
            work.wait()
        # The own chunk and the received ones lie side by side. PyTorch adds bf16 up in fp32 and rounds once.
        rows = self.rows // self.tp_size
        terms = self._view((self.tp_size - 1) * rows, self.rows).view(self.tp_size, rows, -1)
        torch.sum(terms, 0, out=local)


class PipelineReduceScatter(ReferenceCommunicator):
    """num_splits collectives over all rows of some columns."""

    @staticmethod
    def chunks(tp_size: int) -> int:
        return tp_size + 1

    def gemm_reduce_scatter(self, left: Tensor, right: Tensor, local: Tensor) -> None:
        self._check_can_multiply()
        self._check_local(local)
        self._check("the left operand", left, self.rows, right.size(0))
        splits = self.spec.num_splits
        partials = self.matrix.view(splits, self.rows, -1)
        sums = self._chunk(self.tp_size).view(splits, self.rows // self.tp_size, -1)
        started = []
        for partial, columns, total in zip(partials, right.chunk(splits, 1), sums):
            torch.mm(left, columns, out=partial)
            started.append(start_reduce_scatter(partial, total, self.group))
        for pending in started:
            pending.wait()
        local.view(-1, splits, sums.size(2)).copy_(sums.transpose(0, 1))


class AllGather(ReferenceCommunicator):
    """One collective, beside whatever runs until it is waited for."""

    def start_all_gather(self, local: Tensor) -> Pending:
        self._check_local(local)
        return start_all_gather(local, self.matrix, self.group)

    def gather(self, local: Tensor) -> Tensor:
        """At once, of anything that fits, such as FP8 bytes."""
        return self.start_all_gather(local).wait()


class ReduceScatter(ReferenceCommunicator):
    """One collective, beside whatever runs until it is waited for."""

    def start_reduce_scatter(self, local: Tensor) -> Pending:
        self._check_local(local)
        return start_reduce_scatter(self.matrix, local, self.group)
