# SPDX-License-Identifier: Apache-2.0
"""The tensors of one microbatch: pieces of documents packed end to end into T rows.

Shapes (T is the plan's padded length, P the number of pieces; a filler has P = 1 segment of padding only):

    tokens, labels, position_ids      [1, T]    int64
    loss_mask                         [1, T]    float32, 1 where ``labels`` is a real next token
    cu_seqlens_q / cu_seqlens_kv      [P + 1]   int32, real lengths, ends at the number of real tokens
    cu_seqlens_*_padded               [P + 1]   int32, rows including padding, ends at T
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_dyn.planning import MicrobatchPlan

_PACKED_TENSORS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_ALIGNMENT = 256  # bytes, as of tensors with memory of their own


@dataclass(kw_only=True)
class PackedMicrobatch:
    """One THD forward: what the model, the loss and the log need of a microbatch.

    Attributes:
        tokens: [1, T] int64, the padding rows hold the padding token's id.
        labels: [1, T] int64, the next token of the same document; 0 where there is none.
        position_ids: [1, T] int64, restart at 0 in each piece; 0 in padding.
        loss_mask: [1, T] float32, 1.0 where ``labels`` counts; its sum is ``plan.num_loss_tokens``.
        packed_seq_params: megatron-core's description of the segments (``qkv_format="thd"``).
        plan: the MicrobatchPlan this was built from; T comes from it and from nowhere else.
        step: the optimizer step it belongs to.
        index: its place among the microbatches of its data-parallel rank in that step.
        buffer: [n] uint8, the one buffer in which all tensors lie (see `in_one_buffer`), else None.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    loss_mask: torch.Tensor
    packed_seq_params: PackedSeqParams
    plan: MicrobatchPlan
    step: int
    index: int
    buffer: torch.Tensor | None = None

    @property
    def T(self) -> int:
        """Rows of this microbatch, padding included."""
        return self.plan.T

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedMicrobatch:
        """Returns a copy in which ``function`` was applied to every tensor; tensors that were one object stay one."""
        done: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = function(tensor)
            return done[id(tensor)]

        packed = dataclasses.replace(
            self.packed_seq_params,
            **{name: once(getattr(self.packed_seq_params, name)) for name in _PACKED_TENSORS},
        )
        return dataclasses.replace(
            self,
            buffer=None,
            tokens=once(self.tokens),
            labels=once(self.labels),
            position_ids=once(self.position_ids),
            loss_mask=once(self.loss_mask),
            packed_seq_params=packed,
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PackedMicrobatch:
        """Returns this microbatch with every tensor on ``device``.

        Args:
            device: where to copy to; tensors that are there already are shared, not copied.
            non_blocking: asynchronous on the current stream where the source is pinned.
        """
        if self.buffer is None:
            return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        buffer = self.buffer.to(device, non_blocking=non_blocking)

        def of_buffer(tensor: torch.Tensor) -> torch.Tensor:
            first = tensor.storage_offset() * tensor.element_size()
            return buffer[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return self if buffer is self.buffer else dataclasses.replace(self.map(of_buffer), buffer=buffer)

    def in_one_buffer(self, prepare: Callable[[torch.Tensor], torch.Tensor] = lambda buffer: buffer) -> PackedMicrobatch:
        """Returns a copy whose tensors are views of one buffer, so that `to` copies once: six small copies take the host six times as long.

        Args:
            prepare: applied to the buffer first (`device.pin`).
        """
        size = 0

        def room(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal size
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            return tensor

        self.map(room)
        buffer, size = prepare(torch.empty(size, dtype=torch.uint8)), 0

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            first = size
            room(tensor)
            view = buffer[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            return view.copy_(tensor)

        return dataclasses.replace(self.map(placed), buffer=buffer)


def content_checksum(microbatch: PackedMicrobatch) -> int:
    """62 bits that stand for the tokens a rank read for a microbatch (on the CPU).

    The labels count too: they hold the last id read of a piece whose document goes on.
    """
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (microbatch.tokens, microbatch.labels):
        digest.update(tensor.contiguous().numpy())
    return int.from_bytes(digest.digest(), "little") >> 2
