# SPDX-License-Identifier: Apache-2.0
"""Other ways to pack and to balance, written anew from what is published, for `benchmarks/packing.py` to measure beside ours.

| baseline                    | published in                                       | what it does                                          |
|-----------------------------|----------------------------------------------------|-------------------------------------------------------|
| in order                    | Megatron-LM `DpBalancedScheduler`, sequential      | a bin is closed when the next document does not fit   |
|                             | samplers                                           |                                                       |
| first fit                   | axolotl `MultipackBatchSampler`                    | the first bin with room, documents as they come       |
| first-fit decreasing        | Johnson 1973                                       | the same, longest document first                      |
| best-fit decreasing         | TRL `pack_dataset(strategy="bfd")`                 | the fullest bin with room, longest document first     |
| Karmarkar-Karp, equal counts| verl `seqlen_balancing`, as its trainers call it   | largest differencing of the costs into ranks of       |
|                             |                                                    | equally many documents, then into microbatches        |
| Karmarkar-Karp              | the same function with `equal_size=False`          | ranks of any number of documents                      |

Shapes: n documents; every function returns the bin of each, int64 [n]. Bins of the packing rules are dealt to the ranks in turn.
"""

import heapq
import itertools

import numpy as np


def in_order(length: np.ndarray, budget: int) -> np.ndarray:
    """A bin is closed when the next document does not fit."""
    bin_of, number, room = [], -1, 0
    for n in length.tolist():
        if n > room:
            number, room = number + 1, budget
        room -= n
        bin_of.append(number)
    return np.asarray(bin_of, dtype=np.int64)


def first_fit(length: np.ndarray, budget: int) -> np.ndarray:
    """The first bin with room, by a tree of the largest room under each node: O(n log n)."""
    leaves = 1
    while leaves < max(len(length), 1):
        leaves *= 2
    tree, bin_of = [budget] * (2 * leaves), []
    for n in length.tolist():
        node = 1
        while node < leaves:
            node *= 2
            node += tree[node] < n
        bin_of.append(node - leaves)
        tree[node] -= n
        while node > 1:
            node //= 2
            largest = max(tree[2 * node], tree[2 * node + 1])
            if tree[node] == largest:
                break
            tree[node] = largest
    return np.asarray(bin_of, dtype=np.int64)


def best_fit(length: np.ndarray, budget: int) -> np.ndarray:
    """The fullest bin with room: bins by their room, and a bit for each room that some bin has."""
    bins, some, number, bin_of = [[] for _ in range(budget + 1)], 0, 0, []
    for n in length.tolist():
        fitting = some >> n
        if fitting:
            room = n + (fitting & -fitting).bit_length() - 1
            chosen = bins[room].pop()
            if not bins[room]:
                some ^= 1 << room
        else:
            chosen, room, number = number, budget, number + 1
        bin_of.append(chosen)
        if room > n:
            bins[room - n].append(chosen)
            some |= 1 << (room - n)
    return np.asarray(bin_of, dtype=np.int64)


def decreasing(rule):
    """`rule` with the longest document first."""

    def packed(length: np.ndarray, budget: int) -> np.ndarray:
        order = np.argsort(-length, kind="stable")
        bin_of = np.empty(len(length), dtype=np.int64)
        bin_of[order] = rule(length[order], budget)
        return bin_of

    return packed


def largest_differencing(cost: list[float], parts: int, equal_counts: bool) -> list[list[int]]:
    """Karmarkar and Karp 1982, for several parts: the two partial divisions whose parts differ most are joined, large on small."""
    order = sorted(range(len(cost)), key=cost.__getitem__)
    heap, age = [], itertools.count()

    def push(division):
        division.sort(key=lambda part: part[0])
        heapq.heappush(heap, (division[0][0] - division[-1][0], next(age), division))

    size = parts if equal_counts else 1
    for first in range(0, len(order), size):
        group = order[first : first + size]
        push([(0.0, []) for _ in range(parts - len(group))] + [(cost[i], [i]) for i in group])
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        push([(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other))])
    return [indices for _, indices in heap[0][-1]]


def karmarkar_karp(length: np.ndarray, cost: np.ndarray, budget: int, ranks: int, *, equal_counts: bool) -> tuple[np.ndarray, int]:
    """Microbatch of each document in rank-major numbering, and microbatches a rank: what the fullest rank needs by its tokens.

    The budget is only a mean: some microbatches hold more.
    """
    missing = -len(length) % ranks if equal_counts else 0
    costs = cost.tolist() + [0.0] * missing
    of_rank = [[i for i in part if i < len(length)] for part in largest_differencing(costs, ranks, equal_counts)]
    each = max(-(-int(length[part].sum()) // budget) for part in of_rank)
    bin_of = np.empty(len(length), dtype=np.int64)
    for rank, part in enumerate(of_rank):
        for number, inside in enumerate(largest_differencing([costs[i] for i in part], each, False)):
            bin_of[[part[i] for i in inside]] = rank * each + number
    return bin_of, each


PACKINGS = {
    "in order (Megatron)": in_order,
    "first fit (axolotl multipack)": first_fit,
    "first-fit decreasing": decreasing(first_fit),
    "best-fit decreasing (TRL)": decreasing(best_fit),
}
