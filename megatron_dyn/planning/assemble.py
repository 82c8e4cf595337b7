# SPDX-License-Identifier: Apache-2.0
"""Pieces of a step -> StepPlan: packing, ranks, padding, digest and statistics.

Shapes: p pieces, M = ranks * K microbatches, in rank-major order.

| array                              | shape | dtype |
|------------------------------------|-------|-------|
| weight, cost, microbatch of a piece| [p]   | int64 |
| tokens, T, count per microbatch    | [M]   | int64 |
"""

import dataclasses
import hashlib
import math

import numpy as np

from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.balance import deal_to_ranks, level_ranks, lower_costliest_bin, order_within_ranks
from megatron_dyn.planning.bins import Bins
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.grouping import IN_ORDER, group_in_order
from megatron_dyn.planning.packing import MANY_PIECES, Caps, fewest_bins, fill_empty_bins, pack
from megatron_dyn.planning.pieces import StepPieces
from megatron_dyn.planning.plan import StepPlan, StepStats
from megatron_dyn.planning.ranks import ranks_first
from megatron_dyn.planning.squares import pack_under_squares, squares_of_fullest_bin
from megatron_dyn.planning.table import MicrobatchTable, joined_table

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
    *, step: int, epoch: int, documents: np.ndarray, pieces: StepPieces, config: PlanConfig, longest: int, digest_seed: bytes,
    empty_documents: int, drop_last_documents: int,
) -> StepPlan:
    """Divide the pieces of a step and write the plan down.

    Args:
        documents: ids of the step, int64 [n].
        longest: tokens of the longest piece there can be in any step.
        digest_seed: bytes that stand for corpus and configuration.
        empty_documents: for the statistics, see StepStats.
        drop_last_documents: for the statistics, see StepStats.
    """
    if config.microbatching == "concat-chunk":
        table, per_rank = joined_table(pieces, config)
        cut = np.unique(table.rows[:, 0], return_counts=True)[1] > 1
        pieces = dataclasses.replace(pieces, split_documents=int(np.count_nonzero(cut)))
    else:
        in_order = config.microbatching in IN_ORDER
        microbatch_of, per_rank = group_in_order(pieces.length, config, longest) if in_order else divide(pieces.length, config)
        table = MicrobatchTable.of(pieces, microbatch_of, per_rank * config.data_parallel_size, config, longest)
    microbatches = table.microbatches()
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
        squared_tokens=int((table.tokens**2).sum() if table.following is not None else (table.rows[:, 2] ** 2).sum()),
        documents=len(documents) - pieces.dropped_documents,
        pieces=len(table.rows),
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
