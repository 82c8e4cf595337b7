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

    def best_exchange(self, give: np.ndarray, take: np.ndarray, load_give, load_take, ceiling) -> tuple[int, int, int] | None:
        """The exchange of a piece of `give` against an element of `take` after which the larger load is smallest.

        Args:
            give: pieces, int64 [g], in bins other than those of `take`.
            take: elements, int64 [t].
            load_give: cost to be lowered, a number.
            load_take: cost to be raised, a number, or int64 [t].
            ceiling: no bin of `take` may come to cost more.

        Returns:
            (piece, element, larger load afterwards), or None when nothing lowers the larger load.
        """
        into, out_of = self.bin_of[take], self.bin_of[give]
        shift = self.cost[give][:, None] - self.cost[take][None, :]
        after = np.maximum(load_give - shift, load_take + shift)
        # Cost and weight fall together, so what leaves `give` is no lighter than what comes: only `take` can overflow.
        allowed = self.weight[give][:, None] <= (self.caps.weight - self.bin_weight[into] + self.weight[take])[None, :]
        allowed &= (shift > 0) & (shift <= (ceiling - self.bin_cost[into])[None, :])
        nothing = take >= self.num_pieces
        full = nothing & (self.count[into] >= self.caps.pieces)
        allowed &= ~full[None, :]
        allowed &= ~((self.count[out_of] == 1)[:, None] & nothing[None, :])  # moving the only piece gains nothing
        after = np.where(allowed, after, IMPOSSIBLE)
        at = int(np.argmin(after))
        best = int(after.flat[at])
        if best >= load_give:
            return None
        return int(give[at // len(take)]), int(take[at % len(take)]), best

    def exchange(self, piece: int, element: int) -> None:
        """Swap the bins of a piece and an element (a nothing stays where it is: then the piece moves)."""
        source, target = int(self.bin_of[piece]), int(self.bin_of[element])
        moved_weight, moved_cost = self.weight[piece] - self.weight[element], self.cost[piece] - self.cost[element]
        self.bin_weight[source] -= moved_weight
        self.bin_weight[target] += moved_weight
        self.bin_cost[source] -= moved_cost
        self.bin_cost[target] += moved_cost
        self.bin_of[piece] = target
        if element < self.num_pieces:
            self.bin_of[element] = source
        else:
            self.count[source] -= 1
            self.count[target] += 1


def lower_costliest_bin(bins: Bins) -> None:
    """Exchange pieces of the costliest bin until it costs no more than the costliest piece or the mean, or no exchange helps."""
    possible = max(int(bins.cost.max()), -(-int(bins.bin_cost.sum()) // bins.num_bins))
    cells = 0
    while cells < TOTAL_CELLS:
        costliest = int(np.argmax(bins.bin_cost))
        load = int(bins.bin_cost[costliest])
        if load <= possible + possible // BIN_TOLERANCE or bins.count[costliest] == 1:
            return
        give = np.flatnonzero(bins.bin_of[: bins.num_pieces] == costliest)
        take = _elements_of_cheapest_bins(bins, TABLE_CELLS // len(give) + 1, leave_out=costliest)
        cells += len(give) * len(take) + len(bins.bin_of) + CELLS_PER_LOOK
        found = bins.best_exchange(give, take, load, bins.bin_cost[bins.bin_of[take]][None, :], load)
        if found is None:
            return
        bins.exchange(found[0], found[1])


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
    mean, ceiling = int(load.sum()) // num_ranks, int(bins.bin_cost.max())
    cells = 0
    while cells < TOTAL_CELLS:
        costliest = int(np.argmax(load))
        if load[costliest] <= mean + mean // RANK_TOLERANCE:
            return
        ranks = np.argsort(load, kind="stable")
        rank_of_element = rank_of[bins.bin_of]
        give = np.flatnonzero(rank_of_element[: bins.num_pieces] == costliest)
        for cheap in ranks[load[ranks] < mean].tolist():
            take = np.flatnonzero(rank_of_element == cheap)
            candidates = give[: TABLE_CELLS // len(take) + 1]  # the longest pieces
            cells += len(candidates) * len(take) + len(bins.bin_of) + CELLS_PER_LOOK
            found = bins.best_exchange(candidates, take, int(load[costliest]), int(load[cheap]), ceiling)
            swap = _best_bin_swap(bins.bin_cost, rank_of, costliest, cheap, load)
            if found is not None and (swap is None or found[2] <= swap[2]):
                bins.exchange(found[0], found[1])
            elif swap is not None:
                rank_of[swap[0]], rank_of[swap[1]] = cheap, costliest
            else:
                continue
            load[:] = 0
            np.add.at(load, rank_of, bins.bin_cost)
            break
        else:
            return


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
