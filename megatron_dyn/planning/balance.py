# SPDX-License-Identifier: Apache-2.0
"""Even out a packing: first the costliest microbatch, then the costliest rank, then the order within a rank.

Shapes: p pieces, M bins, R ranks, K = M / R bins a rank. All numbers are exact int64; every choice takes the best exchange
of two pieces (or of a piece against nothing, or of two whole bins), the first one among equals, so the result is the same
on every platform. Work is bounded by counting table cells, never by a clock.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from megatron_dyn.planning.packing import Caps, cost_rate

TABLE_CELLS = 1 << 16
"""Most pairs looked at for one exchange."""
TOTAL_CELLS = 1 << 20
"""Most pairs looked at in each of the two phases of a step: a few milliseconds."""
CELLS_PER_LOOK = 2048
"""What a look costs beside its table, in cells (and one cell for each piece of the step)."""
MOST_OF_A_BIN = 48
"""Pieces of a bin, the longest, of which sets are made."""
NEAREST = 16
"""Sets looked at for each set, those of the nearest weight that fits."""
SET_CELLS = 64
"""What a piece costs in a look at sets, in cells."""
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

    def best_exchange(self, give: np.ndarray, take: np.ndarray, load_give, load_take, ceiling) -> "Exchange | None":
        """The exchange of a piece of `give` against an element of `take` after which the larger load is smallest.

        Args:
            give: pieces, int64 [g], in bins other than those of `take`.
            take: elements, int64 [t].
            load_give: cost to be lowered, a number.
            load_take: cost to be raised, int64 [M], by the bin of what is taken.
            ceiling: no bin of `take` may come to cost more.

        Returns:
            None when nothing lowers the larger load.
        """
        into, out_of = self.bin_of[take], self.bin_of[give]
        shift = self.cost[give][:, None] - self.cost[take][None, :]
        after = np.maximum(load_give - shift, load_take[into] + shift)
        # Of single pieces, what leaves `give` is no lighter than what comes, as it costs more: only `take` can overflow.
        allowed = self.weight[give][:, None] <= (self.caps.weight - self.bin_weight[into] + self.weight[take])[None, :]
        allowed &= (shift > 0) & (shift <= (ceiling - self.bin_cost[into])[None, :])
        nothing = take >= self.num_pieces
        full = nothing & (self.count[into] >= self.caps.pieces)
        allowed &= ~full[None, :]
        allowed &= ~((self.count[out_of] == 1)[:, None] & nothing[None, :])  # moving the only piece gains nothing
        after[~allowed] = IMPOSSIBLE
        at = int(np.argmin(after))
        return self._if_better(give[at // len(take)], take[at % len(take)], int(after.flat[at]), load_give)

    def best_exchange_of_sets(self, give: np.ndarray, take: np.ndarray, load_give, load_take, ceiling) -> "Exchange | None":
        """As `best_exchange`, of one or two pieces against up to two: in bins without room, of the same total weight.

        Two short pieces cost less than a long one of their weight. Only a few sets of the nearest weight are looked at for each.

        Args:
            give: pieces, int64 [g], those of one bin next to each other, longest first.
            take: the same, of other bins.
        """
        given, taken = self._sets(give), self._sets(take)
        if not len(given) or not len(taken):
            return None
        (out_of, weight, cost, pieces), (into, its_weight, its_cost, its_pieces) = self._sums(given), self._sums(taken)
        reach = its_weight + self.caps.weight - self.bin_weight[into]  # what its bin has room for instead of it
        order = np.argsort(reach, kind="stable")
        at = np.searchsorted(reach[order], weight)[:, None] + np.arange(NEAREST)
        inside = at < len(order)
        at = order[np.minimum(at, len(order) - 1)]
        shift = cost[:, None] - its_cost[at]
        allowed = inside & (shift > 0) & (shift <= (ceiling - self.bin_cost[into])[at])
        allowed &= its_weight[at] <= (weight + self.caps.weight - self.bin_weight[out_of])[:, None]
        grows = its_pieces[at] - pieces[:, None]
        grown, shrunk = self.count[out_of][:, None] + grows, self.count[into][at] - grows
        allowed &= (np.maximum(grown, shrunk) <= self.caps.pieces) & (np.minimum(grown, shrunk) >= 1)
        after = np.where(allowed, np.maximum(load_give - shift, load_take[into][at] + shift), IMPOSSIBLE)
        best = int(np.argmin(after))
        return self._if_better(given[best // NEAREST], taken[at.flat[best]], int(after.flat[best]), load_give)

    def _sets(self, pieces: np.ndarray) -> np.ndarray:
        """All sets of one or two of each bin's longest pieces, int64 [s, 2]; for one, the second is the bin's nothing."""
        into = self.bin_of[pieces]
        first = np.flatnonzero(np.diff(into, prepend=-1)).tolist()
        sets = [np.empty((0, 2), dtype=np.int64)]
        for a, b in zip(first, [*first[1:], len(pieces)]):
            elements = np.append(pieces[a : min(b, a + MOST_OF_A_BIN)], self.num_pieces + into[a])
            sets.append(elements[_two_of(len(elements))])
        return np.concatenate(sets)

    def _sums(self, sets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Bin, weight, cost and number of pieces of each set, int64 [s]."""
        real = np.count_nonzero(sets < self.num_pieces, axis=1)
        return self.bin_of[sets[:, 0]], self.weight[sets].sum(axis=1), self.cost[sets].sum(axis=1), real

    @staticmethod
    def _if_better(given, taken, load: int, before: int) -> "Exchange | None":
        return Exchange(given=np.atleast_1d(given), taken=np.atleast_1d(taken), load=load) if load < before else None

    def exchange(self, found: "Exchange") -> None:
        """Swap the bins of what is given and what is taken (a nothing stays where it is: then pieces move)."""
        source, target = int(self.bin_of[found.given[0]]), int(self.bin_of[found.taken[0]])
        for elements, there, sign in ((found.given, target, 1), (found.taken, source, -1)):
            pieces = elements[elements < self.num_pieces]
            weight, cost = sign * self.weight[pieces].sum(), sign * self.cost[pieces].sum()
            self.bin_of[pieces] = there
            for b, way in ((source, -1), (target, 1)):
                self.bin_weight[b] += way * weight
                self.bin_cost[b] += way * cost
                self.count[b] += way * sign * len(pieces)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Elements of one bin for those of another."""

    given: np.ndarray
    taken: np.ndarray
    load: int
    """The larger of the two loads afterwards."""


@lru_cache
def _two_of(n: int) -> np.ndarray:
    """Positions of all pairs of n elements, int64 [n (n - 1) / 2, 2]."""
    return np.stack(np.triu_indices(n, 1), axis=1)


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
    All ranks use one pattern, so microbatch i costs about the same on each.
    """
    by_cost = np.lexsort((bin_cost, rank_of)).reshape(num_ranks, -1)
    return np.concatenate([by_cost[:, 0::2], by_cost[:, 1::2][:, ::-1]], axis=1)
