# SPDX-License-Identifier: Apache-2.0
"""Even out a packing: first the costliest microbatch, then the costliest rank, then the order within a rank.

Shapes: p pieces, M bins, R ranks, K = M / R bins a rank. All numbers are exact int64; every choice takes the best exchange
of two pieces (or of a piece against nothing, or of two whole bins), the first one among equals, so the result is the same
on every platform. Work is bounded by counting table cells, never by a clock.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_dyn.planning.packing import Caps

TABLE_CELLS = 1 << 16
"""Most pairs looked at for one exchange."""
TOTAL_CELLS = 1 << 20
"""Most pairs looked at in each of the two phases of a step: a few milliseconds."""
CELLS_PER_LOOK = 2048
"""What a look costs beside its table, in cells (and one cell for each piece of the step)."""
PAIRED = 16
"""Pieces of a rank, the longest, that are exchanged against pairs."""
BIN_TOLERANCE = 1000
"""The costliest bin is good enough within 1/1000 of what is possible."""
RANK_TOLERANCE = 4000
IMPOSSIBLE = np.iinfo(np.int64).max


@dataclass
class Bins:
    """A packing that is being improved.

    Each bin also holds one *nothing*, an element of weight 0 and cost 0 at position p + bin: exchanging a piece against it
    is moving the piece.
    """

    weight: np.ndarray  # [p + M]
    cost: np.ndarray  # [p + M]
    bin_of: np.ndarray  # [p + M]
    num_bins: int
    caps: Caps
    bin_weight: np.ndarray = field(init=False)  # [M]
    bin_cost: np.ndarray = field(init=False)  # [M]
    count: np.ndarray = field(init=False)  # [M] pieces

    def __post_init__(self):
        self.num_pieces = len(self.weight)
        nothing = np.zeros(self.num_bins, dtype=np.int64)
        self.count = np.bincount(self.bin_of, minlength=self.num_bins)
        self.weight = np.concatenate([self.weight, nothing])
        self.cost = np.concatenate([self.cost, nothing])
        self.bin_of = np.concatenate([self.bin_of, np.arange(self.num_bins)])
        self.bin_weight, self.bin_cost = nothing.copy(), nothing.copy()
        np.add.at(self.bin_weight, self.bin_of, self.weight)
        np.add.at(self.bin_cost, self.bin_of, self.cost)

    def singles(self, elements: np.ndarray, most: int) -> "Taken":
        """Pieces and nothings, int64 [t], each by itself; `most` is for `pairs`."""
        into = self.bin_of[elements]
        nothing = elements >= self.num_pieces
        room = self.caps.weight - self.bin_weight[into] + self.weight[elements]
        room[nothing & (self.count[into] >= self.caps.pieces)] = -1
        return Taken(
            members=elements[:, None], bin=into, weight=self.weight[elements], cost=self.cost[elements], room=room,
            pieces=np.where(nothing, 0, 1),
        )

    def pairs(self, elements: np.ndarray, most: int) -> "Taken":
        """Pairs of pieces that share a bin, of the cheapest bins first, about `most`; nothings, int64 [t] too, make no pair."""
        pieces = elements[elements < self.num_pieces]
        into = self.bin_of[pieces]
        pieces = pieces[np.lexsort((pieces, into, self.bin_cost[into]))]
        first, second, offset = [pieces[:0]], [pieces[:0]], 0
        for n in _runs(self.bin_of[pieces]):
            i, j = np.triu_indices(n, 1)
            first.append(pieces[offset + i[:most]])
            second.append(pieces[offset + j[:most]])
            offset, most = offset + n, most - len(i)
            if most <= 0:
                break
        first, second = np.concatenate(first), np.concatenate(second)
        into = self.bin_of[first]
        weight = self.weight[first] + self.weight[second]
        return Taken(
            members=np.stack([first, second], axis=1), bin=into, weight=weight, cost=self.cost[first] + self.cost[second],
            room=self.caps.weight - self.bin_weight[into] + weight, pieces=np.full(len(first), 2),
        )

    def look(self, give: np.ndarray, take: "Taken", load_give, load_take, ceiling) -> tuple[tuple[int, np.ndarray, int] | None, int]:
        """The best exchange, and what looking for it cost in cells."""
        found = self.best_exchange(give, take, load_give, self.bin_cost[take.bin] if load_take is None else load_take, ceiling)
        return found, len(give) * len(take.bin) + len(self.bin_of) + CELLS_PER_LOOK

    def best_exchange(self, give: np.ndarray, take: "Taken", load_give, load_take, ceiling) -> tuple[int, np.ndarray, int] | None:
        """The exchange of a piece of `give` against one of `take` after which the larger load is smallest.

        Args:
            give: pieces, int64 [g], in bins other than those of `take`.
            load_give: cost to be lowered, a number.
            load_take: cost to be raised, a number, or int64 [t].
            ceiling: no bin of `take` may come to cost more.

        Returns:
            (piece, what is taken for it, larger load afterwards), or None when nothing lowers the larger load.
        """
        if not len(take.bin):
            return None
        out_of, weight = self.bin_of[give], self.weight[give]
        shift = self.cost[give][:, None] - take.cost[None, :]
        after = np.maximum(load_give - shift, load_take + shift)
        room = self.caps.weight - self.bin_weight[out_of] + weight
        allowed = (weight[:, None] <= take.room[None, :]) & (take.weight[None, :] <= room[:, None])
        allowed &= (shift > 0) & (shift <= (ceiling - self.bin_cost[take.bin])[None, :])
        pieces_left = self.caps.pieces - self.count[out_of] + 1
        allowed &= take.pieces[None, :] <= pieces_left[:, None]
        allowed &= (self.count[out_of] > 1)[:, None] | (take.pieces > 0)[None, :]  # moving the only piece gains nothing
        after[~allowed] = IMPOSSIBLE
        at = int(np.argmin(after))
        best = int(after.flat[at])
        if best >= load_give:
            return None
        return int(give[at // len(take.bin)]), take.members[at % len(take.bin)], best

    def exchange(self, piece: int, taken: np.ndarray) -> None:
        """Swap the bins of a piece and of what is taken for it (a nothing stays where it is: then the piece moves)."""
        source, target = int(self.bin_of[piece]), int(self.bin_of[taken[0]])
        moved_weight, moved_cost = self.weight[piece] - self.weight[taken].sum(), self.cost[piece] - self.cost[taken].sum()
        self.bin_weight[source] -= moved_weight
        self.bin_weight[target] += moved_weight
        self.bin_cost[source] -= moved_cost
        self.bin_cost[target] += moved_cost
        taken = taken[taken < self.num_pieces]
        self.bin_of[piece] = target
        self.bin_of[taken] = source
        self.count[source] += len(taken) - 1
        self.count[target] += 1 - len(taken)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What may come for a piece: t sets of elements, each within one bin."""

    members: np.ndarray  # [t, 1 or 2] elements
    bin: np.ndarray  # [t]
    weight: np.ndarray  # [t]
    cost: np.ndarray  # [t]
    room: np.ndarray  # [t] the weight that the bin can take for it
    pieces: np.ndarray  # [t] how many they are


def _runs(values: np.ndarray) -> list[int]:
    """Lengths of the runs of equal values."""
    ends = np.flatnonzero(np.diff(values, append=-1))
    return np.diff(ends, prepend=-1).tolist()


def cost_floor(weight: np.ndarray, cost: np.ndarray, num_bins: int, cap: int) -> int:
    """No division of the pieces over `num_bins` bins of at most `cap` has a cheaper costliest bin (but for rounding).

    The mean is such a floor, and the costliest piece. Between the two: for any g, the g pieces with most cost beyond their
    weight lie in at most g bins, which must also hold what the other bins have no room for. Their mean is a floor.

    Args:
        weight: int64 [p], falling.
        cost: int64 [p], not rising.
    """
    mean = -(-int(cost.sum()) // num_bins)
    if not len(weight):
        return mean
    g = np.arange(1, min(num_bins, len(weight)) + 1)
    forced = np.maximum(int(weight.sum()) - (num_bins - g) * cap, np.cumsum(weight[: len(g)]))
    lightest, cheapest = int(weight[-1]), int(cost[-1])  # no piece costs less for its weight than the shortest
    excess = 0
    for bins, (total, w, c) in enumerate(zip(forced.tolist(), weight.tolist(), cost.tolist()), 1):
        excess += c - w * cheapest // lightest
        mean = max(mean, (total * cheapest // lightest + excess) // bins)
    return max(mean, int(cost[0]))


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
        others = _elements_of_cheapest_bins(bins, TABLE_CELLS // len(give) + 1, leave_out=costliest)
        for take in (bins.singles, bins.pairs):
            found, looked_at = bins.look(give, take(others, TABLE_CELLS // len(give)), load, None, load)
            cells += looked_at
            if found is not None:
                bins.exchange(found[0], found[1])
                break
        else:
            return


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
        for take_of in (bins.singles, bins.pairs):
            for cheap in ranks[load[ranks] < possible].tolist():
                others = np.flatnonzero(rank_of_element == cheap)
                take = take_of(others, TABLE_CELLS // PAIRED)
                found, looked_at = bins.look(
                    give[: TABLE_CELLS // max(len(take.bin), 1) + 1],  # the longest pieces
                    take, int(load[costliest]), int(load[cheap]), ceiling,
                )
                cells += looked_at
                swap = _best_bin_swap(bins.bin_cost, rank_of, costliest, cheap, load)
                if found is not None and (swap is None or found[2] <= swap[2]):
                    bins.exchange(found[0], found[1])
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
    All ranks use one pattern, so microbatch i costs about the same on each.
    """
    by_cost = np.lexsort((bin_cost, rank_of)).reshape(num_ranks, -1)
    return np.concatenate([by_cost[:, 0::2], by_cost[:, 1::2][:, ::-1]], axis=1)
