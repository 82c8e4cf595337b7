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

import numpy as np

from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.balance import Bins, deal_to_ranks, level_ranks, lower_costliest_bin, order_within_ranks
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.packing import Caps, pack
from megatron_dyn.planning.pieces import Piece, StepPieces
from megatron_dyn.planning.plan import MicrobatchPlan, StepPlan, StepStats

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
        weight=config.max_tokens_per_microbatch, pieces=config.max_documents_per_microbatch or len(length)
    )
    order = np.argsort(-length, kind="stable")
    # A piece whose padding would pass B fills a microbatch alone: its own padded length is within the capacity.
    weight = np.minimum(round_up(length[order], config.document_alignment), caps.weight)
    cost = integer_cost(length[order], config)
    bin_of, num_bins = pack(weight, cost, caps=caps, multiple=ranks * multiple)
    bins = Bins(weight=weight, cost=cost, bin_of=bin_of, num_bins=num_bins, caps=caps)
    lower_costliest_bin(bins)
    rank_of = deal_to_ranks(bins.bin_cost, ranks)
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
    total = per_rank * config.data_parallel_size
    order = np.argsort(microbatch_of, kind="stable")  # within a microbatch: the order of the step
    count = np.bincount(microbatch_of, minlength=total)
    length = pieces.length[order]
    padded = round_up(length, config.document_alignment)
    first = np.concatenate([[0], np.cumsum(count)])
    microbatches = []
    table = np.stack([pieces.document[order], pieces.start[order], length], axis=1).astype("<i8")
    rows = [Piece(*row) for row in table.tolist()]
    has_label = length - pieces.ends_document[order]
    ends_real = np.concatenate([[0], np.cumsum(length)])
    ends_padded = np.concatenate([[0], np.cumsum(padded)])
    ends_label = np.concatenate([[0], np.cumsum(has_label)])
    ends_square = np.concatenate([[0], np.cumsum(length * length)])
    for a, b in zip(first[:-1].tolist(), first[1:].tolist()):
        if a == b:
            microbatches.append(_filler(config.alignment))
            continue
        cu_real = (ends_real[a : b + 1] - ends_real[a]).astype(np.int32)
        cu_padded = (ends_padded[a : b + 1] - ends_padded[a]).astype(np.int32)
        T = round_up(int(cu_padded[-1]), config.alignment)
        cu_padded[-1] = T  # all padding for the alignment lies behind the last piece
        num_tokens = int(cu_real[-1])
        microbatches.append(
            MicrobatchPlan(
                pieces=tuple(rows[a:b]),
                num_tokens=num_tokens,
                num_loss_tokens=int(ends_label[b] - ends_label[a]),
                T=T,
                cu_seqlens=_read_only(cu_real),
                cu_seqlens_padded=_read_only(cu_padded),
                max_seqlen=int(np.diff(cu_padded).max()),
                cost=config.cost.of_sums(num_tokens, int(ends_square[b] - ends_square[a])),
            )
        )
    by_rank = tuple(tuple(microbatches[r * per_rank : (r + 1) * per_rank]) for r in range(config.data_parallel_size))
    digest = hashlib.sha256(digest_seed)
    digest.update(b"step %d epoch %d;" % (step, epoch))
    for array in (count, [mb.T for mb in microbatches], table):
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return StepPlan(
        step=step,
        epoch=epoch,
        documents=_read_only(documents),
        microbatches=by_rank,
        digest=digest.hexdigest(),
        stats=_stats(by_rank, documents, pieces, config, empty_documents, drop_last_documents),
    )


def _filler(alignment: int) -> MicrobatchPlan:
    cu_seqlens = _read_only(np.array([0, alignment], dtype=np.int32))
    return MicrobatchPlan(
        pieces=(), num_tokens=0, num_loss_tokens=0, T=alignment, cu_seqlens=cu_seqlens, cu_seqlens_padded=cu_seqlens,
        max_seqlen=alignment, cost=0.0,
    )


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _stats(by_rank, documents, pieces: StepPieces, config: PlanConfig, empty: int, drop_last: int) -> StepStats:
    every = [mb for rank in by_rank for mb in rank]
    real = [mb for mb in every if not mb.is_filler]
    T_real = [mb.T for mb in real] or [config.alignment]
    tokens, slots = sum(mb.num_tokens for mb in every), sum(mb.T for mb in every)
    rank_costs = [math.fsum(mb.cost for mb in rank) for rank in by_rank]
    return StepStats(
        tokens=tokens,
        loss_tokens=sum(mb.num_loss_tokens for mb in every),
        documents=len(documents) - pieces.dropped_documents,
        pieces=len(pieces),
        microbatches=len(every),
        fillers=len(every) - len(real),
        T_min=min(T_real),
        T_mean=sum(T_real) / len(T_real),
        T_max=max(T_real),
        capacity=config.capacity,
        slots=slots,
        padding=slots - tokens,
        fill=tokens / (len(every) * config.max_tokens_per_microbatch),
        slot_fill=tokens / slots,
        imbalance=_largest_over_mean([mb.cost for mb in real]),
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
