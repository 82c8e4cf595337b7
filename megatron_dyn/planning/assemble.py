# SPDX-License-Identifier: Apache-2.0
"""Pieces of a step -> StepPlan: packing, ranks, padding, digest and statistics.

Shapes: p pieces, M = ranks * K microbatches, in rank-major order.

| array                              | shape | dtype |
|------------------------------------|-------|-------|
| weight, cost, microbatch of a piece| [p]   | int64 |
| tokens, T, count per microbatch    | [M]   | int64 |
"""

import hashlib
import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.balance import deal_to_ranks, level_ranks, lower_costliest_bin, order_within_ranks
from megatron_dyn.planning.bins import Bins
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.packing import MANY_PIECES, Caps, fewest_bins, fill_empty_bins, pack
from megatron_dyn.planning.ranks import ranks_first
from megatron_dyn.planning.pieces import Piece, StepPieces
from megatron_dyn.planning.plan import MicrobatchPlan, StepPlan, StepStats
from megatron_dyn.planning.squares import pack_under_squares, squares_of_fullest_bin

COST_UNITS = 2**36
"""Integer units in the cost of a piece of B tokens: exact sums for up to 2**26 pieces a step."""


def integer_cost(length: np.ndarray, config: PlanConfig) -> np.ndarray:
    """Cost of each piece in exact integer units, int64 [p], at least 1: sums do not depend on the order of addition."""
    unit = config.cost.of(config.max_tokens_per_microbatch) / COST_UNITS
    return np.maximum(np.rint(config.cost.of(length.astype(np.float64)) / unit).astype(np.int64), 1)


def divide(length: np.ndarray, config: PlanConfig) -> tuple[np.ndarray, int]:
    """Microbatch of each piece in rank-major numbering, int64 [p], and K, the microbatches per rank."""
    ranks, multiple = config.data_parallel_size, config.microbatch_multiple
    if len(length) == 0:
        return np.zeros(0, dtype=np.int64), multiple
    caps = Caps(
        weight=config.max_tokens_per_microbatch,
        pieces=config.max_documents_per_microbatch or len(length),
        squares=config.max_sum_squares_per_microbatch,
    )
    order = np.argsort(-length, kind="stable")
    # A piece whose padding would pass B fills a microbatch alone: its own padded length is within the capacity.
    weight = np.minimum(round_up(length[order], config.document_alignment), caps.weight)
    cost = integer_cost(length[order], config)
    num_bins = fewest_bins(weight, caps, ranks * multiple)
    bin_of = ranks_first(weight, cost, ranks, num_bins // ranks, caps) if len(weight) <= MANY_PIECES else None
    by_rank = bin_of is not None
    if by_rank:
        bin_of = fill_empty_bins(bin_of, cost, num_bins)
    else:
        bin_of, num_bins = pack(weight, cost, caps=caps, multiple=ranks * multiple)
    squares = length[order] ** 2
    if squares_of_fullest_bin(bin_of, squares) > (caps.squares or math.inf):
        bin_of, num_bins = pack_under_squares(weight, squares, caps=caps, multiple=ranks * multiple, at_least=num_bins)
        by_rank = False
    bins = Bins(weight=weight, cost=cost, squares=squares, bin_of=bin_of, num_bins=num_bins, caps=caps)
    lower_costliest_bin(bins)
    rank_of = np.arange(num_bins) // (num_bins // ranks) if by_rank else deal_to_ranks(bins.bin_cost, ranks)
    level_ranks(bins, rank_of, ranks)
    number = np.empty(num_bins, dtype=np.int64)
    number[order_within_ranks(bins.bin_cost, rank_of, ranks).reshape(-1)] = np.arange(num_bins)
    microbatch_of = np.empty(len(length), dtype=np.int64)
    microbatch_of[order] = number[bins.bin_of[: len(length)]]
    return microbatch_of, num_bins // ranks


def assemble(
    *, step: int, epoch: int, documents: np.ndarray, pieces: StepPieces, config: PlanConfig, digest_seed: bytes,
    empty_documents: int, drop_last_documents: int,
) -> StepPlan:
    """Divide the pieces of a step and write the plan down.

    Args:
        documents: ids of the step, int64 [n].
        digest_seed: bytes that stand for corpus and configuration.
        empty_documents: for the statistics, see StepStats.
        drop_last_documents: for the statistics, see StepStats.
    """
    microbatch_of, per_rank = divide(pieces.length, config)
    table = MicrobatchTable.of(pieces, microbatch_of, per_rank * config.data_parallel_size, config)
    microbatches = table.microbatches(config.alignment)
    by_rank = tuple(tuple(microbatches[r * per_rank : (r + 1) * per_rank]) for r in range(config.data_parallel_size))
    digest = hashlib.sha256(digest_seed)
    digest.update(b"step %d epoch %d;" % (step, epoch))
    for array in (table.count, table.T, table.rows):
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return StepPlan(
        step=step,
        epoch=epoch,
        documents=_read_only(documents),
        microbatches=by_rank,
        digest=digest.hexdigest(),
        stats=_stats(table, documents, pieces, config, empty_documents, drop_last_documents),
    )


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

    @classmethod
    def of(cls, pieces: StepPieces, microbatch_of: np.ndarray, total: int, config: PlanConfig) -> "MicrobatchTable":
        """Write down `total` microbatches.

        Args:
            microbatch_of: microbatch of each piece, int64 [p].
        """
        order = np.argsort(microbatch_of, kind="stable")  # within a microbatch: the order of the step
        count = np.bincount(microbatch_of, minlength=total)
        first = np.concatenate([[0], np.cumsum(count)])
        length = pieces.length[order]
        padded = round_up(length, config.document_alignment)
        ends_padded = _ends(padded)
        T = round_up(ends_padded[first[1:]] - ends_padded[first[:-1]], config.alignment)
        last = first[1:][count > 0] - 1
        padded[last] += T[count > 0] - np.diff(ends_padded[first])[count > 0]  # padding for the alignment lies behind the last piece
        T[count == 0] = config.alignment
        tokens, attended = np.diff(_ends(length)[first]), np.diff(_ends(config.cost.attended(length))[first])
        longest = np.full(total, config.alignment, dtype=np.int64)
        if len(length):
            longest[count > 0] = np.maximum.reduceat(padded, first[:-1][count > 0])
        return cls(
            rows=np.stack([pieces.document[order], pieces.start[order], length], axis=1).astype("<i8"),
            count=count,
            first=first,
            cu_seqlens=_boundaries(length, first),
            cu_seqlens_padded=_boundaries(padded, first),
            T=T,
            tokens=tokens,
            loss_tokens=np.diff(_ends(length - pieces.ends_document[order])[first]),
            max_seqlen=longest,
            cost=config.cost.of_sums(tokens, attended),
        )

    def microbatches(self, alignment: int) -> list[MicrobatchPlan]:
        """One object for each microbatch; its arrays are read-only views."""
        pieces = list(map(partial(tuple.__new__, Piece), self.rows.tolist()))  # Piece._make, without a Python call for each
        filler = np.array([0, alignment], dtype=np.int32)
        filler.flags.writeable = False
        columns = (self.tokens, self.loss_tokens, self.T, self.max_seqlen, self.cost)
        made = []
        for i, (a, b, *numbers) in enumerate(zip(self.first.tolist(), self.first[1:].tolist(), *(c.tolist() for c in columns))):
            tokens, loss_tokens, T, max_seqlen, cost = numbers
            real, padded = (self.cu_seqlens[a + i : b + i + 1], self.cu_seqlens_padded[a + i : b + i + 1]) if a < b else (filler, filler)
            made.append(
                MicrobatchPlan(
                    pieces=tuple(pieces[a:b]), num_tokens=tokens, num_loss_tokens=loss_tokens, T=T, cu_seqlens=real,
                    cu_seqlens_padded=padded, max_seqlen=max_seqlen, cost=cost,
                )
            )
        return made


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
    boundaries.flags.writeable = False
    return boundaries


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _stats(table: MicrobatchTable, documents, pieces: StepPieces, config: PlanConfig, empty: int, drop_last: int) -> StepStats:
    real = table.count > 0
    T_real = table.T[real] if real.any() else np.array([config.alignment])
    tokens, slots = int(table.tokens.sum()), int(table.T.sum())
    rank_costs = [math.fsum(costs) for costs in table.cost.reshape(config.data_parallel_size, -1).tolist()]
    return StepStats(
        tokens=tokens,
        loss_tokens=int(table.loss_tokens.sum()),
        documents=len(documents) - pieces.dropped_documents,
        pieces=len(pieces),
        microbatches=len(real),
        fillers=int(np.count_nonzero(~real)),
        T_min=int(T_real.min()),
        T_mean=int(T_real.sum()) / len(T_real),
        T_max=int(T_real.max()),
        capacity=config.capacity,
        slots=slots,
        padding=slots - tokens,
        fill=tokens / (len(real) * config.max_tokens_per_microbatch),
        slot_fill=tokens / slots,
        imbalance=_largest_over_mean(table.cost[real].tolist()),
        rank_imbalance=_largest_over_mean(rank_costs),
        split_documents=pieces.split_documents,
        truncated_documents=pieces.truncated_documents,
        truncated_tokens=pieces.truncated_tokens,
        dropped_documents=pieces.dropped_documents,
        dropped_tokens=pieces.dropped_tokens,
        empty_documents=empty,
        drop_last_documents=drop_last,
    )


def _largest_over_mean(costs: list[float]) -> float:
    total = math.fsum(costs)
    return max(costs) * len(costs) / total if total > 0 else 1.0
