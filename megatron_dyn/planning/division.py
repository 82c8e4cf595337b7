# SPDX-License-Identifier: Apache-2.0
"""A step divided into microbatches, reduced to what can be measured on it: the same for our plans and for other ways to divide.

Shapes: R data-parallel ranks, K microbatches a rank, in running order.

| array           | shape  | dtype   | meaning                                                   |
|-----------------|--------|---------|-----------------------------------------------------------|
| tokens          | [R, K] | int64   | real tokens                                               |
| rows            | [R, K] | int64   | tokens computed, padding included (T, or documents x S)   |
| cost            | [R, K] | float64 | of what is computed, by the plan's cost model             |

Costs count padding, whoever makes it: the linear term goes over all rows (matrix products take them all, fillers too); attention over the
real tokens of packed microbatches, as THD kernels compute it, and over whole sequences in a layout [batch, length].
"""

import math
from dataclasses import dataclass

import numpy as np

from megatron_dyn.planning.cost import CostModel
from megatron_dyn.planning.plan import StepPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Division:
    """One step, divided in one way."""

    tokens: np.ndarray
    rows: np.ndarray
    cost: np.ndarray
    cut_documents: int = 0
    """Documents that do not lie whole in one microbatch."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches per rank (K)."""
        return self.tokens.shape[1]

    @property
    def used(self) -> np.ndarray:
        """Microbatches that hold documents, bool [R, K]."""
        return self.tokens > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class OrderedPieces:
    """The pieces of a step in the order of its documents, before any division: documents above the budget already cut."""

    length: np.ndarray
    """Tokens, int64 [p]."""
    document: np.ndarray
    """Place of the document in the step, int64 [p], not falling."""

    @property
    def cut_documents(self) -> int:
        """Documents in several pieces."""
        return int(np.count_nonzero(np.bincount(self.document) > 1)) if len(self.document) else 0


def pieces_in_order(plan: StepPlan) -> OrderedPieces:
    """What another way to divide the same step would start from."""
    place = {document: at for at, document in enumerate(plan.documents.tolist())}
    pieces = [piece for rank in plan.microbatches for microbatch in rank for piece in microbatch.pieces]
    table = sorted((place[piece.document], piece.start, piece.length) for piece in pieces)
    columns = np.array(table, dtype=np.int64).reshape(-1, 3)
    return OrderedPieces(length=columns[:, 2], document=columns[:, 0])


def division_of(plan: StepPlan, cost: CostModel) -> Division:
    """Our plan as a division; `cost` is that of the plan's configuration."""

    def table(value, dtype) -> np.ndarray:
        return np.array([[value(microbatch) for microbatch in rank] for rank in plan.microbatches], dtype=dtype)

    tokens, rows = table(lambda mb: mb.num_tokens, np.int64), table(lambda mb: mb.T, np.int64)
    return Division(
        tokens=tokens,
        rows=rows,
        cost=table(lambda mb: mb.cost, np.float64) + cost.linear * (rows - tokens),
        cut_documents=plan.stats.split_documents,
    )


def from_microbatches(microbatches: list[list[list[int]]], *, alignment: int, cost: CostModel, cut_documents: int = 0) -> Division:
    """A division from the lengths of the pieces in each microbatch, [R][K][pieces]; rows are rounded up to the alignment."""

    def table(value, dtype) -> np.ndarray:
        return np.array([[value(pieces) for pieces in rank] for rank in microbatches], dtype=dtype)

    tokens = table(sum, np.int64)
    attended = table(lambda pieces: sum(int(cost.attended(length)) for length in pieces), np.int64)
    rows = np.maximum(-(-tokens // alignment), 1) * alignment
    return Division(tokens=tokens, rows=rows, cost=cost.of_sums(rows, attended), cut_documents=cut_documents)


def largest_over_mean(values: np.ndarray) -> float:
    """1 when all are equal, or all are 0."""
    total = math.fsum(values.tolist())
    return float(values.max()) * len(values) / total if total > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What one division wastes. Imbalance is largest over mean, 1 at best."""

    tokens: int
    rows: int
    microbatches: int
    """Over all ranks."""
    room: int
    """microbatches * B."""
    microbatch_cost: float
    """Imbalance of the cost over microbatches that hold documents."""
    microbatch_tokens: float
    rank_cost: float
    """Imbalance of the sums of a rank's costs."""
    rank_tokens: float
    over_budget: int
    """Microbatches with more real tokens than B."""
    total_cost: float
    cut_documents: int


def measure(division: Division, budget: int) -> Measures:
    """The figures of one division under a budget of B tokens."""
    used = division.used
    return Measures(
        tokens=int(division.tokens.sum()),
        rows=int(division.rows.sum()),
        microbatches=division.tokens.size,
        room=division.tokens.size * budget,
        microbatch_cost=largest_over_mean(division.cost[used]) if used.any() else 1.0,
        microbatch_tokens=largest_over_mean(division.tokens[used]) if used.any() else 1.0,
        rank_cost=largest_over_mean(division.cost.sum(axis=1)),
        rank_tokens=largest_over_mean(division.tokens.sum(axis=1)),
        over_budget=int(np.count_nonzero(division.tokens > budget)),
        total_cost=math.fsum(division.cost.ravel().tolist()),
        cut_documents=division.cut_documents,
    )
