# SPDX-License-Identifier: Apache-2.0
"""Other ways to divide the documents of a step, to compare with: each is the published rule, written anew.

All get the same pieces (documents above the budget already cut) in the same order, the same ranks and the same multiple of
microbatches. Rules that know no padding to an alignment get ours.

| name            | rule                                                                                                             |
|-----------------|------------------------------------------------------------------------------------------------------------------|
| in_order        | documents in order until the budget is full (`DpBalancedScheduler`, Megatron-LM `core/datasets/data_schedule.py`) |
| karmarkar_karp  | equal counts over ranks, then microbatches, by largest differencing of the cost (verl `utils/seqlen_balancing.py`) |
| Concatenation   | documents concatenated, from step to step, and cut every B tokens                                                |
| padded          | every document padded to the longest the corpus has (at most B), as many in a microbatch as B holds              |
"""

import heapq
import itertools
import operator
from collections.abc import Callable, Sequence

import numpy as np

from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.division import Division, OrderedPieces, from_microbatches


def in_order(pieces: OrderedPieces, config: PlanConfig, longest: int) -> Division:
    """Fill a microbatch until the next piece does not fit. What is missing to a multiple of the ranks (times the schedule's multiple) is
    made by taking the last piece of the last microbatches that have several; microbatches are dealt to the ranks in turn."""
    groups: list[list[int]] = []
    left = 0
    for length in pieces.length.tolist():
        if not groups or length > left:
            groups.append([])
            left = config.max_tokens_per_microbatch
        groups[-1].append(length)
        left -= length
    ranks = config.data_parallel_size
    missing = -len(groups) % (ranks * config.microbatch_multiple) if groups else ranks * config.microbatch_multiple
    from_group = len(groups) - 1
    while missing and from_group >= 0:
        if len(groups[from_group]) > 1:
            groups.append([groups[from_group].pop()])
            missing -= 1
        else:
            from_group -= 1
    groups += [[]] * missing  # Megatron-LM stops there; a filler lets the comparison go on
    dealt = [groups[rank::ranks] for rank in range(ranks)]
    return from_microbatches(dealt, alignment=config.alignment, cost=config.cost, cut_documents=pieces.cut_documents)


def largest_differencing(values: Sequence[float], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Indices of each of `parts` parts whose sums are nearly equal: Karmarkar and Karp's differencing, for several parts.

    Partial divisions of few values each are kept in a heap; the two whose largest and smallest sums lie furthest apart are joined,
    the largest part of one with the smallest of the other, until one is left (Karmarkar and Karp 1982).

    Args:
        equal_size: every part gets the same number of values; `parts` must divide their number.
    """
    order = sorted(range(len(values)), key=lambda index: (values[index], index))
    counter = itertools.count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []

    def keep(division: list[tuple[float, list[int]]]) -> None:
        division.sort(key=operator.itemgetter(0), reverse=True)  # equal ones stay in their order
        heapq.heappush(heap, (division[-1][0] - division[0][0], next(counter), division))

    step = parts if equal_size else 1
    for first in range(0, len(order), step):
        taken = order[first : first + step]
        keep([(values[index], [index]) for index in taken] + [(0.0, []) for _ in range(parts - len(taken))])
    if not heap:
        return [[] for _ in range(parts)]
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        keep([(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other))])
    return [indices for _, indices in heap[0][2]]


def karmarkar_karp(pieces: OrderedPieces, config: PlanConfig, longest: int) -> Division:
    """Ranks get equally many pieces of nearly equal cost; each rank divides its own into as many microbatches as the fullest rank needs by
    its sum of tokens, cheap ones at both ends. The budget is only a mean: a microbatch may hold more than B."""
    ranks, multiple = config.data_parallel_size, config.microbatch_multiple
    length = pieces.length.tolist() + [0] * (-len(pieces.length) % ranks)
    cost = config.cost.of(np.array(length, dtype=np.float64)).tolist()
    mine = largest_differencing(cost, ranks, equal_size=True)
    needed = max(-(-sum(length[index] for index in indices) // config.max_tokens_per_microbatch) for indices in mine)
    per_rank = round_up(max(needed, 1), multiple)
    microbatches = []
    for indices in mine:
        indices = [index for index in indices if length[index]]
        parts = largest_differencing([cost[index] for index in indices], per_rank)
        parts.sort(key=lambda part: -sum(cost[indices[index]] for index in part))
        parts = parts[::2][::-1] + parts[1::2]
        microbatches.append([[length[indices[index]] for index in part] for part in parts])
    return from_microbatches(microbatches, alignment=config.alignment, cost=config.cost, cut_documents=pieces.cut_documents)


def differencing_work(pieces: OrderedPieces, config: PlanConfig) -> int:
    """Parts that `karmarkar_karp` joins for a step: what its time grows with."""
    ranks, multiple = config.data_parallel_size, config.microbatch_multiple
    per_rank = round_up(max(-(-int(pieces.length.sum()) // (ranks * config.max_tokens_per_microbatch)), 1), multiple)
    return len(pieces.length) * (per_rank + 1)


class Concatenation:
    """Sequences of B tokens cut from the documents in a row; attention does not stop between documents, as with Megatron-LM's GPT data set
    and no attention mask reset. The row goes on from step to step: a step computes as many whole rounds (the same number of full sequences
    on every rank) as have come together, and the rest waits for the next one."""

    def __init__(self, config: PlanConfig):
        self._config = config
        self._waiting = 0
        self.tokens = 0
        """Of all steps so far."""
        self.cut_documents = 0
        """Of all steps so far: documents that do not lie whole in one sequence."""

    def divide(self, pieces: OrderedPieces) -> Division | None:
        """The next step; None where no round has come together yet."""
        budget = self._config.max_tokens_per_microbatch
        lengths = np.bincount(pieces.document, weights=pieces.length).astype(np.int64) if len(pieces.length) else np.zeros(0, np.int64)
        ends = self.tokens + np.cumsum(lengths)
        self.cut_documents += int(np.count_nonzero(((ends - lengths) // budget != (ends - 1) // budget) & (lengths > 0)))
        self.tokens += int(lengths.sum())
        self._waiting += int(lengths.sum())
        count, self._waiting = divmod(self._waiting, int(self.rounds(1).tokens.sum()))
        return self.rounds(count) if count else None

    def rounds(self, count: int) -> Division:
        """Rounds of full sequences."""
        config = self._config
        shape = (config.data_parallel_size, count * config.microbatch_multiple)
        return Division(
            tokens=np.full(shape, config.max_tokens_per_microbatch, dtype=np.int64),
            rows=np.full(shape, config.capacity, dtype=np.int64),
            cost=np.full(shape, config.cost.of(float(config.capacity))),
        )


def padded(pieces: OrderedPieces, config: PlanConfig, longest: int) -> Division:
    """Every piece padded to S, the longest document of the corpus (at most B), as many in a microbatch as B holds."""
    length = round_up(min(longest, config.max_tokens_per_microbatch), config.alignment)
    each = max(config.max_tokens_per_microbatch // length, 1)
    first = np.arange(0, len(pieces.length), each)
    tokens = np.add.reduceat(pieces.length, first) if len(first) else np.zeros(0, dtype=np.int64)
    sequences = np.diff(np.append(first, len(pieces.length)))
    return _dealt(
        config, tokens=tokens, rows=sequences * length, cost=sequences * config.cost.of(float(length)), cut_documents=pieces.cut_documents
    )


def _dealt(config: PlanConfig, *, tokens: np.ndarray, rows: np.ndarray, cost: np.ndarray, cut_documents: int) -> Division:
    """Microbatches [M] dealt to the ranks in turn; empty ones of one aligned row fill up the last round."""
    ranks = config.data_parallel_size
    missing = round_up(max(len(tokens), 1), ranks * config.microbatch_multiple) - len(tokens)

    def table(values: np.ndarray, filler: float) -> np.ndarray:
        return np.concatenate([values, np.full(missing, filler, dtype=values.dtype)]).reshape(-1, ranks).T

    filler_cost = float(config.cost.of_sums(config.alignment, 0))
    return Division(
        tokens=table(tokens, 0),
        rows=table(rows, config.alignment),
        cost=table(cost.astype(np.float64), filler_cost),
        cut_documents=cut_documents,
    )


DIVISIONS: dict[str, Callable[[OrderedPieces, PlanConfig, int], Division]] = {
    "in_order": in_order,
    "karmarkar_karp": karmarkar_karp,
    "padded": padded,
}
"""Name -> (pieces of a step, settings, longest document of the corpus) -> division. `Concatenation` goes over steps and is none of them."""
