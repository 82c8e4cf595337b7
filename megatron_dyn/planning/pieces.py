# SPDX-License-Identifier: Apache-2.0
"""Documents of a step -> pieces: the oversize policy.

Shapes: n documents of the step, p pieces.

| array                                   | shape | dtype |
|-----------------------------------------|-------|-------|
| documents, their lengths                | [n]   | int64 |
| document, start, length of each piece   | [p]   | int64 |
| ends_document (no label for last token) | [p]   | bool  |

A document above B is split into the fewest pieces possible, in one of two ways:

- even: of near-equal length (they differ by at most one token). Attention is quadratic, so equal pieces cost least in total, the
  costliest microbatch (which every other rank waits for) is cheapest, and no orphan of a few tokens is left without context.
- full: B, B, ..., rest. Full pieces waste no room, while a step of many even pieces of, say, 0.6 B wastes four tenths.

The planner takes even pieces unless full ones need fewer microbatches.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_dyn.planning.config import PlanError

MOST_PIECES = 1 << 26
"""In a step; costs are exact integers up to so many."""


class Piece(NamedTuple):
    """A document, or a part of one that was too long."""

    document: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class StepPieces:
    """The pieces of a step in step order, and what the oversize policy did."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    ends_document: np.ndarray
    split_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0

    def __len__(self) -> int:
        return len(self.length)


def cut_documents(documents: np.ndarray, lengths: np.ndarray, *, budget: int, oversize: str, even: bool = True) -> StepPieces:
    """Apply the oversize policy. Every piece has 1 to `budget` tokens; pieces keep the order of the step.

    Args:
        documents: ids, int64 [n].
        lengths: their lengths in tokens, int64 [n], all positive.
        budget: most tokens in a piece (B).
        oversize: "split", "truncate" or "drop" ("error" has been settled when the planner was made).
        even: split into pieces of near-equal length, or into full ones and a rest.
    """
    too_long = lengths > budget
    oversize_count = int(np.count_nonzero(too_long))
    if oversize_count == 0:
        return _whole(documents, lengths)
    if oversize == "drop":
        kept = ~too_long
        return _whole(
            documents[kept],
            lengths[kept],
            dropped_documents=oversize_count,
            dropped_tokens=int(lengths[too_long].sum()),
        )
    if oversize == "truncate":
        return StepPieces(
            document=documents,
            start=np.zeros_like(lengths),
            length=np.minimum(lengths, budget),
            ends_document=~too_long,
            truncated_documents=oversize_count,
            truncated_tokens=int(lengths[too_long].sum()) - oversize_count * budget,
        )
    counts = -(-lengths // budget)
    if int(counts.sum()) > MOST_PIECES:
        longest = int(np.argmax(lengths))
        raise PlanError(
            f"a step would be cut into {int(counts.sum())} pieces of at most {budget} tokens (document {documents[longest]} has {lengths[longest]}): "
            f"more than the {MOST_PIECES} that fit in memory; raise the token budget, or choose the oversize policy truncate or drop"
        )
    index = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    if even:
        short, longer = np.repeat(lengths // counts, counts), np.repeat(lengths % counts, counts)
        start = index * short + np.minimum(index, longer)
        length = short + (index < longer)
    else:
        start = index * budget
        length = np.minimum(np.repeat(lengths, counts) - start, budget)
    return StepPieces(
        document=np.repeat(documents, counts),
        start=start,
        length=length,
        ends_document=start + length == np.repeat(lengths, counts),
        split_documents=oversize_count,
    )


def _whole(documents: np.ndarray, lengths: np.ndarray, **counts: int) -> StepPieces:
    return StepPieces(
        document=documents,
        start=np.zeros_like(lengths),
        length=lengths,
        ends_document=np.ones(len(lengths), dtype=bool),
        **counts,
    )
