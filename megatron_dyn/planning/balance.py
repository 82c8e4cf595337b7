# SPDX-License-Identifier: Apache-2.0
"""Even out a packing: first the costliest microbatch, then the costliest rank, then the order within a rank.

Shapes: p pieces, M bins, R ranks, K = M / R bins a rank. All numbers are exact int64; every choice takes the best exchange (bins.py,
or of two whole bins), the first one among equals, so the result is the same on every platform. Work is bounded by counting table
cells, never by a clock.
"""

import numpy as np

from megatron_dyn.planning.bins import Bins
from megatron_dyn.planning.packing import cost_floor

TABLE_CELLS = 1 << 16
"""Most pairs looked at for one exchange."""
TOTAL_CELLS = 1 << 20
"""Most pairs looked at in each of the two phases of a step: tens of milliseconds, which only nearly full bins need."""
CELLS_PER_LOOK = 2048
"""What a look costs beside its table, in cells (and one cell for each piece of the step)."""
SET_CELLS = 64
"""What a piece costs in a look at sets, in cells."""
BIN_TOLERANCE = 1000
"""The costliest bin is good enough within 1/1000 of what is possible."""
RANK_TOLERANCE = 4000


def lower_costliest_bin(bins: Bins) -> None:
    """Exchange pieces of the costliest bin until it costs no more than it must, or no exchange helps.

    A piece is exchanged against another one, or nothing; in bins without room also against two of the same total weight,
    which cost less than one.
    """
    pieces = slice(bins.num_pieces)
    possible = cost_floor(bins.weight[pieces], bins.cost[pieces], bins.num_bins, bins.caps.weight)
    cells = 0
    while cells < TOTAL_CELLS:
        costliest = int(np.argmax(bins.bin_cost))
        load = int(bins.bin_cost[costliest])
        if load <= possible + possible // BIN_TOLERANCE or bins.count[costliest] == 1:
            return
        give = np.flatnonzero(bins.bin_of[pieces] == costliest)
        take = _elements_of_cheapest_bins(bins, TABLE_CELLS // len(give) + 1, leave_out=costliest)
        cells += len(give) * len(take) + len(bins.bin_of) + CELLS_PER_LOOK
        found = bins.best_exchange(give, take, load, bins.bin_cost, load)
        if found is None:
            take = _by_bin(bins, take)
            cells += SET_CELLS * (len(give) + len(take)) + CELLS_PER_LOOK
            found = bins.best_exchange_of_sets(give, take, load, bins.bin_cost, load)
        if found is None:
            return
        bins.exchange(found)


def _by_bin(bins: Bins, elements: np.ndarray) -> np.ndarray:
    """The pieces among the elements, those of one bin next to each other, longest first."""
    pieces = elements[elements < bins.num_pieces]
    return pieces[np.argsort(bins.bin_of[pieces], kind="stable")]


def _elements_of_cheapest_bins(bins: Bins, most: int, *, leave_out: int) -> np.ndarray:
    """Elements of as many bins, cheapest first, as give about `most` elements."""
    chosen = np.ones(bins.num_bins, dtype=bool)
    if len(bins.bin_of) > most:
        order = np.argsort(bins.bin_cost, kind="stable")
        chosen[order[np.cumsum(bins.count[order] + 1) > most]] = False
        chosen[order[0]] = True
    chosen[leave_out] = False
    return np.flatnonzero(chosen[bins.bin_of])


def deal_to_ranks(bin_cost: np.ndarray, num_ranks: int) -> np.ndarray:
    """Rank of each bin, int64 [M]: K bins a rank, nearly equal sums, and each rank has bins of all sizes.

    Bins sorted by cost are cut into K groups of one bin a rank. Groups are dealt in order of falling spread, the costliest
    bin of a group to the rank which has least so far.
    """
    if num_ranks == 1:
        return np.zeros(len(bin_cost), dtype=np.int64)
    order = np.argsort(bin_cost, kind="stable")
    groups = order.reshape(-1, num_ranks)
    rank_of = np.empty(len(bin_cost), dtype=np.int64)
    load = np.zeros(num_ranks, dtype=np.int64)
    cost = bin_cost[groups]
    for g in np.argsort(cost[:, 0] - cost[:, -1], kind="stable"):
        ranks = np.argsort(-load, kind="stable")  # most loaded rank first: it gets the cheapest bin
        rank_of[groups[g]] = ranks
        load[ranks] += cost[g]
    return rank_of


def level_ranks(bins: Bins, rank_of: np.ndarray, num_ranks: int) -> None:
    """Exchange pieces, or whole bins, between the costliest rank and cheap ones until their sums are even (in place).

    No bin comes to cost more than the costliest one does, so the balance of microbatches is kept. A rank with a giant document
    thereby gets less of everything else.
    """
    load = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(load, rank_of, bins.bin_cost)
    pieces = slice(bins.num_pieces)
    room = bins.caps.weight * (bins.num_bins // num_ranks)
    possible = cost_floor(bins.weight[pieces], bins.cost[pieces], num_ranks, room)
    ceiling = int(bins.bin_cost.max())
    cells = 0
    while cells < TOTAL_CELLS:
        costliest = int(np.argmax(load))
        if load[costliest] <= possible + possible // RANK_TOLERANCE:
            return
        ranks = np.argsort(load, kind="stable")
        rank_of_element = rank_of[bins.bin_of]
        give = np.flatnonzero(rank_of_element[pieces] == costliest)
        for sets in (False, True):
            for cheap in ranks[load[ranks] < possible].tolist():
                take = np.flatnonzero(rank_of_element == cheap)
                if sets:
                    take = _by_bin(bins, take)
                    cells += SET_CELLS * (len(give) + len(take)) + CELLS_PER_LOOK
                    found = bins.best_exchange_of_sets(_by_bin(bins, give), take, int(load[costliest]), load[rank_of], ceiling)
                    swap = None
                else:
                    candidates = give[: TABLE_CELLS // len(take) + 1]  # the longest pieces
                    cells += len(candidates) * len(take) + len(bins.bin_of) + CELLS_PER_LOOK
                    found = bins.best_exchange(candidates, take, int(load[costliest]), load[rank_of], ceiling)
                    swap = _best_bin_swap(bins.bin_cost, rank_of, costliest, cheap, load)
                if found is not None and (swap is None or found.load <= swap[2]):
                    bins.exchange(found)
                elif swap is not None:
                    rank_of[swap[0]], rank_of[swap[1]] = cheap, costliest
                else:
                    continue
                break
            else:
                continue
            break
        else:
            return
        load[:] = 0
        np.add.at(load, rank_of, bins.bin_cost)


def _best_bin_swap(bin_cost: np.ndarray, rank_of: np.ndarray, costliest: int, cheap: int, load: np.ndarray):
    """(bin of the costliest rank, bin of the cheap one, larger load after swapping them), or None when no swap helps."""
    ours, theirs = np.flatnonzero(rank_of == costliest), np.flatnonzero(rank_of == cheap)
    shift = bin_cost[ours][:, None] - bin_cost[theirs][None, :]
    after = np.maximum(load[costliest] - shift, load[cheap] + shift)
    at = int(np.argmin(after))
    if after.flat[at] >= load[costliest]:
        return None
    return int(ours[at // len(theirs)]), int(theirs[at % len(theirs)]), int(after.flat[at])


def order_within_ranks(bin_cost: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    """Bins of each rank in running order, int64 [R, K]: the cheap ones at both ends, the costliest in the middle.

    A pipeline is partly idle while it fills and drains: the cheapest microbatches make that shortest (verl does the same).
    All ranks use one pattern, so microbatch i costs about the same on each. Of an even number the costliest is the last of the first
    half: where an interleaved schedule runs two groups of microbatches, its cost then delays the end of one, not the start of the next.
    """
    by_cost = np.lexsort((bin_cost, rank_of)).reshape(num_ranks, -1)
    return np.concatenate([by_cost[:, 1::2], by_cost[:, 0::2][:, ::-1]], axis=1)
