# SPDX-License-Identifier: Apache-2.0
"""Pieces -> bins: how many microbatches a step needs, and a first division under the hard caps.

Shapes: p pieces, M bins. `weight` (int64 [p]) is the room a piece takes in tokens, `cost` (int64 [p]) an exact integer
measure of its time; both fall together, pieces come longest first. All decisions are integer arithmetic with the index as
the tie-breaker, so that every platform finds the same packing.
"""

import heapq
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from megatron_dyn.planning.dense import dense

MANY_PIECES = 1 << 17
"""Above this, no way of packing is tried that is likely to fail, or slow."""
LEVEL_SLACK = 200
"""One token in so many must be free for filling very many pieces evenly."""


@dataclass(frozen=True, kw_only=True)
class Caps:
    """What a bin may hold."""

    weight: int
    pieces: int
    squares: int | None = None
    """Most of the sum of squared lengths, if any."""


def lower_bound(weight: np.ndarray, caps: Caps) -> int:
    """No packing has fewer bins: by total weight, by number of pieces, and by pieces above half a bin.

    Room beside a piece that not even the shortest one fits in counts as weight.
    """
    lost = caps.weight - weight[weight > caps.weight - weight.min(initial=caps.weight)]
    by_weight = -(-int(weight.sum() + lost.sum()) // caps.weight)
    by_count = -(-len(weight) // caps.pieces)
    by_halves = int(np.count_nonzero(2 * weight > caps.weight))
    return max(by_weight, by_count, by_halves)


def cost_floor(weight: np.ndarray, cost: np.ndarray, num_bins: int, cap: int) -> int:
    """No division of the pieces over `num_bins` bins of at most `cap` has a cheaper costliest bin.

    The mean is such a floor, and the costliest piece. Between the two: for any g, the g pieces with most cost beyond their
    weight lie in at most g bins, which must also hold what the other bins have no room for. Their mean is a floor.

    Args:
        weight: int64 [p], falling.
        cost: int64 [p], not rising.
    """
    mean = -(-int(cost.sum()) // num_bins)
    if not len(weight):
        return mean
    bins = np.arange(1, min(num_bins, len(weight)) + 1)  # g
    forced = np.maximum(int(weight.sum()) - (num_bins - bins) * cap, np.cumsum(weight[: len(bins)]))
    rate = cost_rate(weight, cost)
    excess = np.cumsum((cost - rate * weight)[: len(bins)])
    return max(mean, int(cost[0]), int(np.max((rate * forced + excess) // bins)))


def best_fit_decreasing(weight: np.ndarray, caps: Caps) -> np.ndarray:
    """Bin of each piece, int64 [p]: each piece, longest first, goes to the fullest bin that still has room.

    Needs at most 11/9 of the fewest bins possible (Johnson et al. 1974), in practice the lower bound when many pieces are
    short. O(p log p).
    """
    bin_of, room, bins, count = [], [], [], []  # room: sorted; bins: the bin which has that room
    for w in weight.tolist():
        at = bisect_left(room, w)
        if at == len(room):
            chosen, left = len(count), caps.weight - w
            count.append(0)
        else:
            chosen, left = bins.pop(at), room.pop(at) - w
        bin_of.append(chosen)
        count[chosen] += 1
        if left > 0 and count[chosen] < caps.pieces:
            at = bisect_left(room, left)
            room.insert(at, left)
            bins.insert(at, chosen)
    return np.asarray(bin_of, dtype=np.int64)


def longest_first(weight: np.ndarray, cost: np.ndarray, num_bins: int, caps: Caps) -> np.ndarray | None:
    """Bin of each piece, int64 [p], or None when a piece finds no room: each piece goes to the cheapest bin with room.

    Bins without room for the piece at hand are set aside, by room, until pieces are short enough for them. O(p log M).
    """
    bin_of = list(range(min(num_bins, len(weight))))  # the first pieces each open a bin
    room, count = [caps.weight] * num_bins, [0] * num_bins
    open_bins = list(range(len(bin_of), num_bins))  # heap of cost * M + bin
    for b, (w, c) in enumerate(zip(weight[:num_bins].tolist(), cost[:num_bins].tolist())):
        room[b] -= w
        count[b] = 1
        if caps.pieces > 1 and room[b] > 0:
            open_bins.append(c * num_bins + b)
    heapq.heapify(open_bins)
    total = [0] * num_bins  # of a bin that is aside: its key
    aside = []  # heap of (-room, bin)
    for w, c in zip(weight[num_bins:].tolist(), cost[num_bins:].tolist()):
        while aside and -aside[0][0] >= w:
            heapq.heappush(open_bins, total[heapq.heappop(aside)[1]])
        while open_bins and room[open_bins[0] % num_bins] < w:
            key = heapq.heappop(open_bins)
            chosen = key % num_bins
            total[chosen] = key
            heapq.heappush(aside, (-room[chosen], chosen))
        if not open_bins:
            return None
        key = open_bins[0]
        chosen = key % num_bins
        bin_of.append(chosen)
        room[chosen] -= w
        count[chosen] += 1
        if count[chosen] < caps.pieces and room[chosen] > 0:
            heapq.heapreplace(open_bins, key + c * num_bins)
        else:
            heapq.heappop(open_bins)
    return np.asarray(bin_of, dtype=np.int64)


def fill_empty_bins(bin_of: np.ndarray, cost: np.ndarray, num_bins: int) -> np.ndarray:
    """Take pieces from the costliest bins that hold several until no bin is empty, or each piece is alone."""
    bin_of = bin_of.copy()
    count = np.bincount(bin_of, minlength=num_bins)
    empty = np.flatnonzero(count == 0).tolist()
    if not empty:
        return bin_of
    members = [[] for _ in range(num_bins)]
    for piece, b in enumerate(bin_of.tolist()):
        members[b].append(piece)
    costs = cost.tolist()
    heap = [(-sum(costs[p] for p in pieces), b) for b, pieces in enumerate(members) if len(pieces) > 1]
    heapq.heapify(heap)
    for target in empty:
        if not heap:
            break
        total, source = heapq.heappop(heap)
        piece = members[source].pop(0)  # the longest
        bin_of[piece] = target
        if len(members[source]) > 1:
            heapq.heappush(heap, (total + costs[piece], source))
    return bin_of


def pack(weight: np.ndarray, cost: np.ndarray, *, caps: Caps, multiple: int) -> tuple[np.ndarray, int]:
    """Divide pieces over the fewest bins that are a multiple of `multiple`.

    Fewest as far as three ways of packing find: the true minimum is NP-hard.

    Args:
        weight: int64 [p], falling, each in 1..caps.weight.
        cost: int64 [p], not rising.

    Returns:
        The bin of each piece, int64 [p], and the number of bins. No bin is empty unless there are fewer pieces than bins.
    """
    fewest = fewest_bins(weight, caps, multiple)
    free = fewest * caps.weight - int(weight.sum())
    if len(weight) <= MANY_PIECES or LEVEL_SLACK * free > fewest * caps.weight:
        balanced = longest_first(weight, cost, fewest, caps)
        if balanced is not None:
            return balanced, fewest
    tight = dense(weight, cap=caps.weight, pieces=caps.pieces)
    if -(-(int(tight.max()) + 1) // multiple) * multiple > fewest and len(weight) <= MANY_PIECES:
        other = best_fit_decreasing(weight, caps)
        tight = min(tight, other, key=np.max)
    num_bins = -(-(int(tight.max()) + 1) // multiple) * multiple
    if num_bins > fewest:
        balanced = longest_first(weight, cost, num_bins, caps)
        if balanced is not None:
            return balanced, num_bins
    return fill_empty_bins(tight, cost, num_bins), num_bins


def cost_rate(weight: np.ndarray, cost: np.ndarray) -> int:
    """Cost of a token that every piece has at least: what a piece costs beyond that is its excess."""
    return int(np.min(cost // weight))


def fewest_bins(weight: np.ndarray, caps: Caps, multiple: int) -> int:
    """The lower bound, rounded up to a multiple."""
    return -(-max(lower_bound(weight, caps), 1) // multiple) * multiple
