# SPDX-License-Identifier: Apache-2.0
"""The microbatches of a step as columns: what each holds, how it is padded, where its segments lie.

Shapes: p pieces, M = ranks * K microbatches, in rank-major order.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.grouping import slots
from megatron_dyn.planning.pieces import Piece, StepPieces
from megatron_dyn.planning.plan import MicrobatchPlan


@dataclass(frozen=True, kw_only=True)
class MicrobatchTable:
    """The pieces of a step in running order, and what each microbatch holds: a plan written as columns.

    Thousands of small numpy calls are what making a plan costs; here each number is made for all microbatches at once.
    """

    rows: np.ndarray  # [p, 3] document, start, length
    count: np.ndarray  # [M] pieces
    first: np.ndarray  # [M + 1] first piece
    cu_seqlens: np.ndarray  # [p + M] int32, microbatch i at first[i] + i, count[i] + 1 entries
    cu_seqlens_padded: np.ndarray  # [p + M] int32
    T: np.ndarray  # [M]
    tokens: np.ndarray  # [M]
    loss_tokens: np.ndarray  # [M]
    max_seqlen: np.ndarray  # [M]
    cost: np.ndarray  # [M] float64
    filler_rows: int
    following: list[Piece | None] | None = None  # joined: one segment a microbatch, boundaries [M, 2], and what the stream goes on with

    @classmethod
    def of(cls, pieces: StepPieces, microbatch_of: np.ndarray, total: int, config: PlanConfig, longest: int) -> "MicrobatchTable":
        """Write down `total` microbatches.

        Args:
            microbatch_of: microbatch of each piece, int64 [p].
            longest: tokens of the longest piece there can be.
        """
        order = np.argsort(microbatch_of, kind="stable")  # within a microbatch: the order of the step
        count = np.bincount(microbatch_of, minlength=total)
        first = np.concatenate([[0], np.cumsum(count)])
        length = pieces.length[order]
        padded = slots(length, count, config, longest)
        ends_padded = _ends(padded)
        T = round_up(ends_padded[first[1:]] - ends_padded[first[:-1]], config.alignment)
        filler_rows = config.alignment
        if config.microbatching == "packed-fixed":
            T[:] = filler_rows = config.capacity
        last = first[1:][count > 0] - 1
        padded[last] += T[count > 0] - np.diff(ends_padded[first])[count > 0]  # padding for the alignment lies behind the last piece
        T[count == 0] = filler_rows
        tokens, attended = np.diff(_ends(length)[first]), np.diff(_ends(config.cost.attended(length))[first])
        max_seqlen = np.full(total, filler_rows, dtype=np.int64)
        if len(length):
            max_seqlen[count > 0] = np.maximum.reduceat(padded, first[:-1][count > 0])
        return cls(
            rows=np.stack([pieces.document[order], pieces.start[order], length], axis=1).astype("<i8"),
            count=count,
            first=first,
            cu_seqlens=_boundaries(length, first),
            cu_seqlens_padded=_boundaries(padded, first),
            T=T,
            tokens=tokens,
            loss_tokens=np.diff(_ends(length - pieces.ends_document[order])[first]),
            max_seqlen=max_seqlen,
            cost=config.cost.of_sums(tokens, attended),
            filler_rows=filler_rows,
        )

    def microbatches(self) -> list[MicrobatchPlan]:
        """One object for each microbatch; its arrays are read-only views."""
        pieces = list(map(partial(tuple.__new__, Piece), self.rows.tolist()))  # Piece._make, without a Python call for each
        filler = _read_only(np.array([0, self.filler_rows], dtype=np.int32))
        columns = (self.tokens, self.loss_tokens, self.T, self.max_seqlen, self.cost)
        made = []
        for i, (a, b, *numbers) in enumerate(zip(self.first.tolist(), self.first[1:].tolist(), *(c.tolist() for c in columns))):
            tokens, loss_tokens, T, max_seqlen, cost = numbers
            real, padded = (self.cu_seqlens[a + i : b + i + 1], self.cu_seqlens_padded[a + i : b + i + 1]) if a < b else (filler, filler)
            joined = {}
            if self.following is not None and a < b:
                real, padded = self.cu_seqlens[i], self.cu_seqlens_padded[i]
                joined = dict(joined=True, following=self.following[i])
            made.append(
                MicrobatchPlan(
                    pieces=tuple(pieces[a:b]), num_tokens=tokens, num_loss_tokens=loss_tokens, T=T, cu_seqlens=real,
                    cu_seqlens_padded=padded, max_seqlen=max_seqlen, cost=cost, **joined,
                )
            )
        return made


def joined_table(pieces: StepPieces, config: PlanConfig) -> tuple[MicrobatchTable, int]:
    """The documents of a step one after the other, cut every B tokens: one segment a microbatch, dealt to the ranks one after the other.

    Every token but the step's last has a label, the next one of the stream. Attention does not stop between documents: as with
    Megatron-LM's GPT data set and no attention mask reset.

    Args:
        pieces: whole documents, or pieces that follow each other.

    Returns:
        The microbatches in rank-major order, and K.
    """
    budget, ranks = config.max_tokens_per_microbatch, config.data_parallel_size
    ends = _ends(pieces.length)
    total = int(ends[-1])
    chunks = -(-total // budget)
    per_rank = max(round_up(-(-chunks // ranks), config.microbatch_multiple), config.microbatch_multiple)
    cuts = np.unique(np.concatenate([ends, np.arange(0, total, budget)]))  # where a piece or a chunk begins, and the end
    source = np.searchsorted(ends, cuts[:-1], side="right") - 1
    length, chunk = np.diff(cuts), cuts[:-1] // budget
    rows = np.stack([pieces.document[source], pieces.start[source] + cuts[:-1] - ends[source], length], axis=1).astype("<i8")
    chunk_of = np.arange(per_rank * ranks).reshape(per_rank, ranks).T.reshape(-1)  # of each microbatch, rank-major
    count = np.bincount(chunk, minlength=len(chunk_of))
    tokens = np.bincount(chunk, length, minlength=len(chunk_of)).astype(np.int64)
    loss_tokens = tokens.copy()
    loss_tokens[max(chunks - 1, 0)] -= total > 0
    next_row = np.cumsum(count)
    tokens, loss_tokens, count, next_row = (column[chunk_of] for column in (tokens, loss_tokens, count, next_row))
    T = np.maximum(round_up(tokens, config.alignment), config.alignment)
    table = MicrobatchTable(
        rows=rows[np.argsort(np.argsort(chunk_of)[chunk], kind="stable")],
        count=count,
        first=_ends(count),
        cu_seqlens=_read_only(np.stack([np.zeros_like(tokens), tokens], axis=1).astype(np.int32)),
        cu_seqlens_padded=_read_only(np.stack([np.zeros_like(T), T], axis=1).astype(np.int32)),
        T=T,
        tokens=tokens,
        loss_tokens=loss_tokens,
        max_seqlen=T,
        cost=config.cost.of_sums(tokens, config.cost.attended(tokens)),
        filler_rows=config.alignment,
        following=[Piece(*rows[at].tolist()) if at < len(rows) else None for at in next_row.tolist()],
    )
    return table, per_rank


def _ends(values: np.ndarray) -> np.ndarray:
    """0 and the running sums, int64 [p + 1]."""
    ends = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=ends[1:])
    return ends


def _boundaries(length: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Cumulative lengths within each microbatch, each with its leading 0, one after the other; read-only int32 [p + M]."""
    ends = _ends(length)
    microbatches = np.arange(len(first) - 1)
    of_entry = np.repeat(microbatches, np.diff(first) + 1)
    boundaries = (ends[np.arange(len(of_entry)) - of_entry] - ends[first[of_entry]]).astype(np.int32)
    return _read_only(boundaries)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
