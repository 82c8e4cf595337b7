# SPDX-License-Identifier: Apache-2.0
"""A first division that looks at ranks before microbatches: all ranks end a step together, whatever giants it holds.

Shapes: p pieces, R ranks of K bins each, in rank-major numbering. As in packing.py, `weight` and `cost` are int64 [p], both fall,
and every choice is integer arithmetic.
"""

import heapq

import numpy as np

from megatron_dyn.planning.dense import dense
from megatron_dyn.planning.packing import Caps, cost_floor, cost_rate, longest_first

FILLING_EIGHTHS = (1, 2, 4, 6)
"""How much of the tokens is kept for filling nearly full bins: the first that is enough."""
PATIENCE = 4
"""Looks for room, per piece, before ranks are given up."""
EVEN_RANKS = 500
"""The costliest rank is even enough to start from within 1/500 of what is possible."""


def ranks_first(weight: np.ndarray, cost: np.ndarray, num_ranks: int, per_rank: int, caps: Caps) -> np.ndarray | None:
    """Bin of each piece, int64 [p], or None when the bins are too full for it.

    By cost; where bins have so little room that this leaves the ranks uneven, by what pieces cost beyond their weight.
    """
    by_cost = longest_first_by_rank(weight, cost, num_ranks, per_rank, caps)
    if by_cost is None:
        return level_then_fill(weight, cost, num_ranks, per_rank, caps)
    floor = cost_floor(weight, cost, num_ranks, per_rank * caps.weight)

    def costliest(bin_of: np.ndarray) -> int:
        load = np.zeros(num_ranks, dtype=np.int64)
        np.add.at(load, bin_of // per_rank, cost)
        return int(load.max())

    if costliest(by_cost) > floor + floor // EVEN_RANKS:
        by_excess = level_then_fill(weight, cost, num_ranks, per_rank, caps)
        if by_excess is not None and costliest(by_excess) < costliest(by_cost):
            return by_excess
    return by_cost


def longest_first_by_rank(weight: np.ndarray, cost: np.ndarray, num_ranks: int, per_rank: int, caps: Caps) -> np.ndarray | None:
    """As `longest_first`, but each piece goes to the cheapest rank first, there to the cheapest bin: [p] in rank-major numbering.

    A rank with a giant document thereby gets little else, whichever microbatch that would be in. None when a piece finds no
    room, or when looking for room takes long.
    """
    if num_ranks == 1:
        return longest_first(weight, cost, per_rank, caps)
    ranks = list(range(num_ranks))  # heap of cost * R + rank
    bins = [list(range(per_rank)) for _ in ranks]  # a heap of cost * K + bin for each rank
    room, count = [caps.weight] * (num_ranks * per_rank), [0] * (num_ranks * per_rank)
    patience, bin_of = PATIENCE * len(weight), []
    for w, c in zip(weight.tolist(), cost.tolist()):
        full = full_ranks = ()
        rank = ranks[0] % num_ranks if ranks else 0
        heap = bins[rank]
        if not heap or room[rank * per_rank + heap[0] % per_rank] < w:
            full, full_ranks = _find_room(w, ranks, bins, room, num_ranks, per_rank)
            patience -= len(full) + len(full_ranks)
            if not ranks or patience < 0:
                return None
            rank = ranks[0] % num_ranks
            heap = bins[rank]
        key = heap[0]
        chosen = rank * per_rank + key % per_rank
        bin_of.append(chosen)
        room[chosen] -= w
        count[chosen] += 1
        if count[chosen] < caps.pieces and room[chosen] > 0:
            heapq.heapreplace(heap, key + c * per_rank)
        else:
            heapq.heappop(heap)
        for key in full:
            heapq.heappush(heap, key)
        heapq.heapreplace(ranks, ranks[0] + c * num_ranks)
        for key in full_ranks:
            heapq.heappush(ranks, key)
    return np.asarray(bin_of, dtype=np.int64)


def _find_room(
    w: int, ranks: list[int], bins: list[list[int]], room: list[int], num_ranks: int, per_rank: int
) -> tuple[list[int], list[int]]:
    """Take ranks off their heap, and bins off that of the rank, until the cheapest of each has room for w; return what was taken off."""
    full_ranks = []
    while ranks:
        rank = ranks[0] % num_ranks
        heap, full = bins[rank], []
        while heap and room[rank * per_rank + heap[0] % per_rank] < w:
            full.append(heapq.heappop(heap))
        if heap:
            return full, full_ranks
        bins[rank] = full  # rising, which is a heap
        full_ranks.append(heapq.heappop(ranks))
    return [], full_ranks


def level_then_fill(weight: np.ndarray, cost: np.ndarray, num_ranks: int, per_rank: int, caps: Caps) -> np.ndarray | None:
    """For nearly full bins, int64 [p] in rank-major numbering, or None: all weigh the same, so what differs is the excess cost.

    The longest pieces level the excess over ranks and bins, the others then fill bin after bin to the last token. As few
    pieces as possible are left for filling.
    """
    num_bins = num_ranks * per_rank
    excess = cost - cost_rate(weight, cost) * weight
    beyond = np.cumsum(weight[::-1])[::-1]  # weight from each piece on
    level = -(-int(beyond[0]) // num_bins)
    for eighths in FILLING_EIGHTHS:
        longest = int(np.count_nonzero(8 * beyond > eighths * int(beyond[0])))
        first = longest_first_by_rank(weight[:longest], excess[:longest] + 1, num_ranks, per_rank, caps)
        if first is None:
            continue
        used, count = np.bincount(first, weight[:longest], minlength=num_bins), np.bincount(first, minlength=num_bins)
        by_room = np.argsort(used, kind="stable")  # the emptiest bins, which have the longest pieces, are left the shortest ones
        for cap in sorted({min(level + (caps.weight - level) // 4, caps.weight), caps.weight}):
            rooms = [(max(cap - int(used[b]), 0), caps.pieces - int(count[b])) for b in by_room.tolist()]
            rest = dense(weight[longest:], cap=caps.weight, pieces=caps.pieces, rooms=rooms)
            if rest is not None:
                return np.concatenate([first, by_room[rest]])
    return None
