# SPDX-License-Identifier: Apache-2.0
"""A packing that is being improved: which exchange of pieces between bins is best, and what it changes.

Shapes: p pieces, M bins; elements are the pieces and a *nothing* for each bin, p + M. All numbers are exact int64; the first
of the best exchanges is taken.
"""

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from megatron_dyn.planning.packing import Caps

MOST_OF_A_BIN = 48
"""Pieces of a bin, the longest, of which sets are made."""
NEAREST = 16
"""Sets looked at for each set, those of the nearest weight that fits."""
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
    squares: np.ndarray | None = None  # [p + M] squared lengths, where the caps have something to say of them
    bin_squares: np.ndarray = field(init=False)  # [M]
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
        self.squares = np.zeros_like(self.weight) if self.squares is None else np.concatenate([self.squares, nothing])
        self.bin_weight, self.bin_cost, self.bin_squares = nothing.copy(), nothing.copy(), nothing.copy()
        np.add.at(self.bin_weight, self.bin_of, self.weight)
        np.add.at(self.bin_cost, self.bin_of, self.cost)
        np.add.at(self.bin_squares, self.bin_of, self.squares)

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
        if self.caps.squares is not None:
            allowed &= self.squares[give][:, None] <= (self.caps.squares - self.bin_squares[into] + self.squares[take])[None, :]
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
        if self.caps.squares is not None:
            change = self.squares[taken].sum(axis=1)[at] - self.squares[given].sum(axis=1)[:, None]
            allowed &= self.bin_squares[out_of][:, None] + change <= self.caps.squares
            allowed &= self.bin_squares[into][at] - change <= self.caps.squares
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
            weight, cost, squares = (sign * of[pieces].sum() for of in (self.weight, self.cost, self.squares))
            self.bin_of[pieces] = there
            for b, way in ((source, -1), (target, 1)):
                self.bin_weight[b] += way * weight
                self.bin_cost[b] += way * cost
                self.bin_squares[b] += way * squares
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
