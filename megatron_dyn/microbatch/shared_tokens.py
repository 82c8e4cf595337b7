# SPDX-License-Identifier: Apache-2.0
"""One rank reads, its tensor-parallel peers receive: the tokens of a whole step in one message.

T, boundaries, positions and the loss mask follow from the plan, which every rank makes for itself; what is sent are the ids that
were read, segment by segment in the plan's order, with the id behind a segment that is its last label:

    ids     [n] int32, n = the sum of `segment_sizes` over the microbatches

Receivers build their tensors from them by the same builder, with the same checks, as a rank that reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_dyn.device import pin
from megatron_dyn.microbatch.builder import build_microbatch, segment_sizes
from megatron_dyn.microbatch.packed import PackedMicrobatch

if TYPE_CHECKING:
    from megatron_dyn.corpus import Corpus
    from megatron_dyn.planning import StepPlan


class TokenBroadcast:
    """Gives the tokens of a step from the rank that reads to the others of its group.

    Args:
        group: of CPU tensors; used by one thread at a time, in the order of steps.
        corpus: lengths of the documents (the rank that reads needs no more of it here).
        data_parallel_rank: which part of each plan the group computes.
        pad_token_id: token id of padding rows.
    """

    def __init__(self, group: dist.ProcessGroup, corpus: Corpus, *, data_parallel_rank: int, pad_token_id: int):
        self._group = group
        self._reader = dist.get_process_group_ranks(group)[0]
        self._corpus = corpus
        self._rank = data_parallel_rank
        self._pad_token_id = pad_token_id

    @property
    def reads(self) -> bool:
        """This rank is the one that reads."""
        return dist.get_rank() == self._reader

    def share(self, plan: StepPlan, microbatches: Sequence[PackedMicrobatch]) -> list[PackedMicrobatch] | None:
        """A collective of the group; its ranks must know that they hold the same plan.

        Args:
            plan: of the step.
            microbatches: what was built, on the CPU, on the rank that reads.

        Returns:
            The microbatches of the step, on the CPU, on a rank that received them; None on the one that has them.

        Raises:
            MicrobatchError: what was received does not fit the plan.
        """
        lengths = self._corpus.lengths
        mine = plan.microbatches[self._rank]
        if self.reads:
            ids = np.concatenate([*_ids_of(microbatches, lengths), np.zeros(0, np.int32)])
        else:
            ids = np.empty(sum(sum(segment_sizes(part, lengths)) for part in mine), np.int32)
        if len(ids):
            dist.broadcast(torch.from_numpy(ids), src=self._reader, group=self._group)
        return None if self.reads else list(self._built(plan, ids))

    def _built(self, plan: StepPlan, ids: np.ndarray) -> Iterator[PackedMicrobatch]:
        first = 0
        for index, part in enumerate(plan.microbatches[self._rank]):
            ends = first + np.cumsum(segment_sizes(part, self._corpus.lengths), dtype=np.int64)
            segments = np.split(ids[first : ends[-1]], ends[:-1] - first) if len(ends) else []
            first = int(ends[-1]) if len(ends) else first
            built = build_microbatch(part, self._corpus, pad_token_id=self._pad_token_id, step=plan.step, index=index, segments=segments)
            yield built.in_one_buffer(pin)


def _ids_of(microbatches: Sequence[PackedMicrobatch], lengths: np.ndarray) -> Iterator[np.ndarray]:
    """The ids of each segment, as they were read, from the tensors that were made of them."""
    for microbatch in microbatches:
        plan, tokens, labels = microbatch.plan, microbatch.tokens[0].numpy(), microbatch.labels[0].numpy()
        for size, row, length in zip(segment_sizes(plan, lengths), plan.cu_seqlens_padded.tolist(), np.diff(plan.cu_seqlens).tolist()):
            end = row + length
            yield tokens[row:end].astype(np.int32)
            if size > length:
                yield labels[end - 1 : end].astype(np.int32)
