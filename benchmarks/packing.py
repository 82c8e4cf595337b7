# SPDX-License-Identifier: Apache-2.0
"""Packing and balance of plans beside the algorithms that others use: one run, one table for each kind of packing.

    python benchmarks/packing.py [--idx PREFIX] [--documents 1000000] [--steps 100] [--budgets 4096 8192 32768]

Lengths: lognormal (mu 6.0, sigma 1.2), and those of the documents of `--idx` where it is given. Cost of a document of L
tokens: 24 h^2 L + 4 h L^2 with h = 4096 (the default CostModel counts causal attention, half of that: `--causal`).
Baselines (`packing_baselines.py`) are labelled with who uses them; all see the same documents, cut where they exceed the
budget. Times are processor time on one core. Two tables:

- whole: all documents packed at once; documents above the budget are truncated (lognormal) or split (`--idx`).
- steps: 1,024 documents on 8 ranks, T a multiple of 2. Ours is `Planner.plan`, everything included; the others only divide.
  "over the bound" compares with what no division under the cap undercuts (`cost_floor`); "/ target" with max(cost of the
  longest piece, mean cost). Both mean (worst step).
"""

import argparse
import statistics
import time

import numpy as np
from packing_baselines import PACKINGS, karmarkar_karp

from megatron_dyn.corpus import IndexedReader
from megatron_dyn.planning import CostModel, PlanConfig, Planner
from megatron_dyn.planning.assemble import divide, integer_cost
from megatron_dyn.planning.packing import Caps, cost_floor, fewest_bins
from megatron_dyn.planning.pieces import cut_documents

RANKS, DOCUMENTS = 8, 1024


def timed(function, *arguments, **settings):
    began = time.process_time()
    result = function(*arguments, **settings)
    return result, time.process_time() - began


def whole_tables(name: str, lengths: np.ndarray, budgets: list[int], cost: CostModel, oversize: str) -> None:
    print(f"\nAll {len(lengths):,} documents of {name} at once; documents above the budget: {oversize}\n")
    print("| B | algorithm | packs | bound | fill | documents/s |\n|---|---|---|---|---|---|")
    for budget in budgets:
        length = cut_documents(np.arange(len(lengths)), lengths, budget=budget, oversize=oversize, even=False).length
        bound = -(-int(length.sum()) // budget)
        config = PlanConfig(max_tokens_per_microbatch=budget, global_batch_size=len(length), cost=cost)
        for label, pack in {"ours": lambda length, _: divide(length, config)[0], **PACKINGS}.items():
            bin_of, seconds = timed(pack, length, budget)
            packs = int(bin_of.max()) + 1
            assert np.bincount(bin_of, length).max() <= budget
            print(
                f"| {budget} | {label} | {packs} | {bound} | {length.sum() / packs / budget:.4f} | {len(length) / seconds:,.0f} |",
                flush=True,
            )


class Steps:
    """What one algorithm did with the steps, collected."""

    def __init__(self):
        self.rows, self.seconds, self.over, self.microbatches, self.tokens, self.slots, self.fewest = [], [], 0, 0, 0, 0, 0

    def add(self, length: np.ndarray, bin_of: np.ndarray, each: int, config: PlanConfig, seconds: float) -> None:
        total, budget = each * RANKS, config.max_tokens_per_microbatch
        weight = np.bincount(bin_of, length, minlength=total).astype(np.int64)
        piece = integer_cost(length, config)
        cost = np.zeros(total, dtype=np.int64)
        np.add.at(cost, bin_of, piece)
        order = np.argsort(-length, kind="stable")
        fewest = fewest_bins(length, Caps(weight=budget, pieces=len(length)), RANKS) // RANKS
        floors = [cost_floor(length[order], piece[order], n, budget * k) for n, k in ((fewest * RANKS, 1), (RANKS, fewest))]
        rank = cost.reshape(RANKS, -1).sum(axis=1)
        mean = piece.sum() / total
        self.rows.append((
            cost.max() / max(piece.max(), mean), cost.max() / floors[0], rank.max() / rank.mean(), floors[1] / rank.mean(),
            rank.max() / floors[1],
        ))
        self.seconds.append(seconds)
        self.over += int(np.count_nonzero(weight > budget))
        self.microbatches, self.fewest = self.microbatches + total, self.fewest + fewest * RANKS
        self.tokens += int(length.sum())
        self.slots += int(np.maximum(-(-weight // config.alignment), 1).sum()) * config.alignment

    def line(self, budget: int, label: str) -> str:
        target, bound, rank, rank_floor, rank_bound = np.array(self.rows).T
        shown = [f"{x.mean():.4f} ({x.max():.4f})" for x in (target, bound, rank, rank_floor, rank_bound)]
        ms = 1e3 * statistics.median(self.seconds)
        return (
            f"| {budget} | {label} | {self.microbatches} | {self.fewest} | {self.tokens / self.microbatches / budget:.4f} "
            f"| {self.tokens / self.slots:.5f} | {' | '.join(shown[:2])} | {np.mean(target > 1.02):.1%} | {' | '.join(shown[2:])} "
            f"| {np.mean(rank > 1.005):.1%} | {self.over / self.microbatches:.1%} | {ms:.2f} | {DOCUMENTS * 1e3 / ms:,.0f} |"
        )


def dealt(bin_of: np.ndarray, ranks: int) -> tuple[np.ndarray, int]:
    """Bins dealt to the ranks in turn; where the last round is short, ranks run an empty one."""
    each = -(-(int(bin_of.max()) + 1) // ranks)
    return bin_of % ranks * each + bin_of // ranks, each


def steps(name: str, lengths: np.ndarray, budgets: list[int], count: int, cost: CostModel) -> None:
    print(f"\n{count} steps of {DOCUMENTS:,} documents of {name}, {RANKS} ranks\n")
    print(
        "| B | algorithm | microbatches | bound | fill | slot fill | costliest microbatch / target | over the bound | steps above 1.02 "
        "| costliest rank / mean | its bound / mean | over the bound | steps above 1.005 | packs over budget | ms a step | documents/s |\n"
        + "|---" * 16 + "|"
    )
    for budget in budgets:
        config = PlanConfig(max_tokens_per_microbatch=budget, global_batch_size=DOCUMENTS, data_parallel_size=RANKS, alignment=2, cost=cost)
        planner = Planner(lengths, config)
        planner.plan(0)
        every = {label: Steps() for label in ("ours", "Karmarkar-Karp, equal counts (verl)", "Karmarkar-Karp (verl)", *PACKINGS)}
        step = taken = 0
        while taken < count:
            plan, seconds = timed(planner.plan, step)
            step += 1
            if len(plan.documents) < DOCUMENTS:
                continue  # the short last step of an epoch
            taken += 1
            microbatches = [mb for rank in plan.microbatches for mb in rank]
            length = np.array([piece.length for mb in microbatches for piece in mb.pieces])
            bin_of = np.repeat(np.arange(len(microbatches)), [len(mb.pieces) for mb in microbatches])
            every["ours"].add(length, bin_of, plan.num_microbatches, config, seconds)
            pieces = cut_documents(plan.documents, lengths[plan.documents], budget=budget, oversize="split")
            costs = cost.of(pieces.length.astype(np.float64))
            for label, equal in (("Karmarkar-Karp, equal counts (verl)", True), ("Karmarkar-Karp (verl)", False)):
                (bin_of, each), seconds = timed(karmarkar_karp, pieces.length, costs, budget, RANKS, equal_counts=equal)
                every[label].add(pieces.length, bin_of, each, config, seconds)
            for label, pack in PACKINGS.items():
                (bin_of, each), seconds = timed(lambda: dealt(pack(pieces.length, budget), RANKS))
                every[label].add(pieces.length, bin_of, each, config, seconds)
        for label, found in every.items():
            print(found.line(budget, label), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idx", help="prefix of an .idx file whose documents are measured too")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4096, 8192, 32768])
    parser.add_argument("--causal", action="store_true", help="the default CostModel: causal attention counts half")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cost = CostModel() if arguments.causal else CostModel(linear=1.0, quadratic=1.0 / (6 * 4096))
    drawn = np.clip(np.random.default_rng(arguments.seed).lognormal(6.0, 1.2, arguments.documents), 1, None).astype(np.int64)
    tables, oversize = {"lognormal(6.0, 1.2)": drawn}, ("truncate", "split")
    if arguments.idx:
        tables[arguments.idx.rsplit("/", 1)[-1]] = np.asarray(IndexedReader(arguments.idx.removesuffix(".idx")).lengths).astype(np.int64)
    for name, lengths in tables.items():
        steps(name, lengths, arguments.budgets, arguments.steps, cost)
    for (name, lengths), policy in zip(tables.items(), oversize):
        whole_tables(name, lengths, arguments.budgets, cost, policy)


if __name__ == "__main__":
    main()
