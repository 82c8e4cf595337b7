# SPDX-License-Identifier: Apache-2.0
"""The one pass over all lengths at open, and the r-th document that is not empty.

Shapes: N documents, M blocks of `block` documents.

| array            | shape   | dtype | meaning                                             |
|------------------|---------|-------|-----------------------------------------------------|
| lengths          | [N]     | any integer | in place: may be a memory map, or computed    |
| before           | [M + 1] | int64 | documents that are not empty in the blocks before   |
| ranks, documents | [m]     | int64 |                                                     |

Empty documents are left out of an epoch, so its places count the others. Finding the r-th needs no list of either kind, however many
are empty: `before` says in which block it lies (at most 2**21 blocks: 16 MiB), and the block's lengths are looked at.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from megatron_dyn.corpus.computed_lengths import ComputedLengths
from megatron_dyn.planning.config import PlanConfig, PlanError

CHUNK = 1 << 20
"""Documents looked at together; a multiple of every block."""
MOST_BLOCKS = 1 << 21
SMALLEST_BLOCK = 512
LOOKED_AT = 1 << 17
"""Lengths read together when blocks with holes are searched."""


LONGEST_DOCUMENT = 2**40
"""Tokens; what is above is no length."""


@dataclass(kw_only=True)
class Survey:
    """What is known of a corpus after one pass over its lengths, in chunks; O(N) time, memory as the module says."""

    documents: int
    tokens: int = 0
    empty: int = 0
    longest: int = 0
    oversize: int = 0
    """Documents above the budget."""
    oversize_tokens: int = 0
    first_oversize: int | None = None
    before: np.ndarray | None = None
    """int64 [M + 1]; None when no document is empty."""
    block: int = SMALLEST_BLOCK
    fingerprint: str | None = field(default=None)
    """Of the lengths; made only when asked for."""


@dataclass(frozen=True, kw_only=True)
class EpochCounts:
    """What one epoch does with the corpus, before `drop_last`. Equal for all epochs."""

    documents: int
    """All documents of the corpus, empty ones included."""
    empty_documents: int
    tokens: int
    split_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0


def survey(lengths: np.ndarray | ComputedLengths, *, budget: int, fingerprint: bool) -> Survey:
    """Look at every length once.

    Args:
        lengths: integer [N].
        budget: B, for the counts of what is above it.
        fingerprint: digest the lengths too (for callers that have no fingerprint of the documents).

    Raises:
        PlanError: a negative length.
    """
    block = SMALLEST_BLOCK
    while block < CHUNK and block * MOST_BLOCKS < len(lengths):
        block *= 2
    found = Survey(documents=len(lengths), block=block)
    counts = np.zeros(-(-len(lengths) // block) + 1, dtype=np.int64)
    digest = hashlib.sha256(b"lengths:%d;" % len(lengths)) if fingerprint else None
    for begin in range(0, len(lengths), CHUNK):
        chunk = np.asarray(lengths[begin : begin + CHUNK])
        least, most = int(chunk.min()), int(chunk.max())
        if least < 0:
            document = begin + int(np.argmin(chunk))
            raise PlanError(f"document {document} has a negative length ({least}): the index is damaged; rebuild it")
        if most > LONGEST_DOCUMENT:
            document = begin + int(np.argmax(chunk))
            raise PlanError(f"document {document} has {most} tokens, more than any document can have: the index is damaged; rebuild it")
        found.tokens += int(chunk.sum(dtype=np.int64))
        first = begin // block + 1
        sizes = np.full(-(-len(chunk) // block), block, dtype=np.int64)
        sizes[-1] = len(chunk) - (len(sizes) - 1) * block
        if least == 0:
            sizes -= np.bincount(np.flatnonzero(chunk == 0) // block, minlength=len(sizes))
        counts[first : first + len(sizes)] = sizes
        found.longest = max(found.longest, most)
        if most > budget:
            above = np.flatnonzero(chunk > budget)
            found.oversize += len(above)
            found.oversize_tokens += int(chunk[above].sum(dtype=np.int64))
            if found.first_oversize is None:
                found.first_oversize = begin + int(above[0])
        if digest is not None:
            _digest_chunk(digest, chunk, most)
    before = np.cumsum(counts, out=counts)
    found.empty = found.documents - int(before[-1])
    found.before = before if found.empty else None
    found.fingerprint = digest.hexdigest() if digest is not None else None
    return found


def _digest_chunk(digest, chunk: np.ndarray, most: int) -> None:
    """Values in the narrowest type that holds the chunk's largest, little-endian: equal lengths of any dtype have equal digests."""
    width = next(width for width in (1, 2, 4, 8) if most < 1 << 8 * width)
    digest.update(b"%d;" % width)
    digest.update(np.ascontiguousarray(chunk, dtype=f"<u{width}"))


def count_epoch(found: Survey, lengths: np.ndarray | ComputedLengths, config: PlanConfig) -> EpochCounts:
    """What an epoch does with the corpus.

    Raises:
    PlanError: an oversize document under the "error" policy, no usable document, no step that could ever be filled.
    """
    budget, usable = config.longest_piece, found.documents - found.empty
    counts = {"documents": found.documents, "empty_documents": found.empty, "tokens": found.tokens}
    if config.oversize == "error" and found.oversize:
        first = found.first_oversize
        raise PlanError(
            f"document {first} has {int(lengths[first])} tokens, above {_longest(config)} "
            f"({found.oversize} such document{'s' if found.oversize != 1 else ''}): oversize='error' refuses them; raise {_cap_of_pieces(config)} or choose "
            "oversize='split', 'truncate' or 'drop'"
        )
    if config.oversize == "split":
        counts.update(split_documents=found.oversize)
    elif config.oversize == "truncate":
        counts.update(truncated_documents=found.oversize, truncated_tokens=found.oversize_tokens - found.oversize * budget)
    elif config.oversize == "drop":
        counts.update(dropped_documents=found.oversize, dropped_tokens=found.oversize_tokens)
    if usable == counts.get("dropped_documents", 0):
        raise PlanError(
            f"no usable documents: of {found.documents}, {found.empty} are empty and "
            f"{counts.get('dropped_documents', 0)} are dropped for having more than {budget} tokens; there is nothing to "
            "train on; check the corpus, or choose another oversize policy or budget"
        )
    short = (
        usable < config.global_batch_size
        if config.global_batch_size is not None
        else found.tokens < config.global_batch_tokens
    )
    if config.drop_last and short:
        raise PlanError(
            f"an epoch ({usable} documents, {found.tokens} tokens) is smaller than one global batch and drop_last "
            "drops it: no step would ever run; lower the global batch or keep the last step"
        )
    return EpochCounts(**counts)


def documents_of(ranks: np.ndarray, lengths: np.ndarray | ComputedLengths, found: Survey) -> np.ndarray:
    """Ids of the r-th documents that are not empty, int64 [m]; O(m log M), and `block` lengths are read for a block with holes.

    Args:
        ranks: int64 [m].
        lengths: integer [N].
        found: their survey.
    """
    if found.before is None:
        return ranks
    before, size = found.before, found.block
    blocks = np.searchsorted(before, ranks, side="right") - 1
    inside = ranks - before[blocks]
    documents = blocks * size + inside
    holed = np.flatnonzero(before[blocks + 1] - before[blocks] < np.minimum(size, found.documents - blocks * size))
    together = max(LOOKED_AT // size, 1)
    for begin in range(0, len(holed), together):
        part = holed[begin : begin + together]
        documents[part] = blocks[part] * size + _places_of_ranks(blocks[part], inside[part], lengths, size)
    return documents


def _places_of_ranks(blocks: np.ndarray, ranks: np.ndarray, lengths: np.ndarray | ComputedLengths, size: int) -> np.ndarray:
    """Where in its block the r-th document that is not empty lies, int64 [m]: first which eight of the block, then which of the eight."""
    rows, row_of = np.unique(blocks, return_inverse=True)
    full = _lengths_of_blocks(rows, lengths, size) != 0
    in_eight = full.view(np.uint64) * np.uint64(0x0101010101010101) >> np.uint64(56)  # the sum of eight bytes, each 0 or 1
    upto = np.cumsum(in_eight, axis=1, dtype=np.int32)[row_of]
    eight = np.count_nonzero(upto <= ranks[:, None], axis=1)
    ranks = ranks - np.where(eight > 0, upto[np.arange(len(ranks)), eight - 1], 0)
    members = np.cumsum(full.reshape(len(rows), -1, 8)[row_of, eight], axis=1)
    return eight * 8 + np.count_nonzero(members <= ranks[:, None], axis=1)


def _lengths_of_blocks(blocks: np.ndarray, lengths: np.ndarray | ComputedLengths, size: int) -> np.ndarray:
    """Integer [len(blocks), size]; the last block of the corpus is filled up with 0.

    Args:
        blocks: rising.
    """
    whole = len(lengths) // size
    if isinstance(lengths, np.ndarray) and blocks[-1] < whole:
        return lengths[: whole * size].reshape(whole, size)[blocks]
    found = np.zeros((len(blocks), size), dtype=np.int64)
    for row, begin in zip(found, (blocks * size).tolist()):
        block = lengths[begin : begin + size]
        row[: len(block)] = block
    return found


def _cap_of_pieces(config: PlanConfig) -> str:
    by_squares = config.longest_piece < config.max_tokens_per_microbatch
    return "max_sum_squares_per_microbatch" if by_squares else "max_tokens_per_microbatch"


def _longest(config: PlanConfig) -> str:
    if config.longest_piece < config.max_tokens_per_microbatch:
        return f"{config.longest_piece} tokens, the root of max_sum_squares_per_microbatch={config.max_sum_squares_per_microbatch}"
    return f"the budget of {config.longest_piece} tokens a microbatch"
