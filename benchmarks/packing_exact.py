# SPDX-License-Identifier: Apache-2.0
"""How far plans of small steps are from the best there is, by an exact solver (OR-tools CP-SAT, `pip install ortools`).

    python benchmarks/packing_exact.py [--instances 300] [--seconds 20]

Each instance is a step of 6 to 24 random documents (uniform, lognormal or bimodal lengths) on 1 to 4 ranks. Solved for, one
after the other: the fewest microbatches that hold the documents, the cheapest costliest microbatch with so many, and, apart
from that, the cheapest costliest rank. An instance whose optimum is not proved within the time counts as unproved.
"""

import argparse

import numpy as np

from megatron_dyn.planning import PlanConfig, Planner


def instance(rng: np.random.Generator) -> tuple[np.ndarray, PlanConfig]:
    """A small step; budgets make for 2 to 4 documents a microbatch and more, where packing is hardest."""
    n, ranks = int(rng.integers(6, 25)), int(rng.choice([1, 1, 2, 3, 4]))
    kind = rng.integers(3)
    if kind == 0:
        lengths = rng.integers(50, 4000, size=n)
    elif kind == 1:
        lengths = np.clip(rng.lognormal(6.0, 1.2, n), 1, None).astype(np.int64)
    else:
        lengths = np.where(rng.random(n) < 0.3, rng.integers(2500, 6000, size=n), rng.integers(20, 800, size=n))
    microbatches = ranks * int(rng.integers(1, max(2, 1 + n // (3 * ranks))))
    budget = max(int(lengths.max()), int(lengths.sum() / microbatches * rng.uniform(1.0, 1.25)) + 1)
    return lengths, PlanConfig(max_tokens_per_microbatch=budget, global_batch_size=n, data_parallel_size=ranks)


def best(lengths, cost, budget: int, bins: int, groups: int, seconds: float) -> int | None:
    """The least sum of `cost` that the costliest group of bins can have, or None when the bins do not hold the documents.

    Args:
        groups: the bins' ranks, each of `bins / groups` bins; as many as bins to measure single microbatches.

    Raises:
        TimeoutError: not proved in time.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    at = [[model.new_bool_var(f"{i},{b}") for b in range(bins)] for i in range(len(lengths))]
    for row in at:
        model.add_exactly_one(row)
    for b in range(bins):
        model.add(sum(int(w) * row[b] for w, row in zip(lengths, at)) <= budget)
    for i in range(min(bins, len(lengths)) if groups == bins else 0):  # bins are alike: document i lies in one of the first i + 1
        for b in range(i + 1, bins):
            model.add(at[i][b] == 0)
    largest = model.new_int_var(int(max(cost)), int(sum(cost)), "largest")
    each = bins // groups
    for g in range(groups):
        model.add(sum(int(c) * row[b] for c, row in zip(cost, at) for b in range(g * each, (g + 1) * each)) <= largest)
    model.minimize(largest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise TimeoutError
    return round(solver.objective_value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    above, gaps, rank_gaps, unproved, ranks_unproved = [], [], [], 0, 0
    for _ in range(arguments.instances):
        lengths, config = instance(rng)
        plan = Planner(lengths, config).plan(0)
        ranks, ours = config.data_parallel_size, plan.stats.microbatches
        lengths = -np.sort(-lengths)
        cost = np.rint(1000 * config.cost.of(lengths.astype(np.float64))).astype(np.int64)
        costs = [[sum(round(1000 * config.cost.of(float(p.length))) for p in mb.pieces) for mb in rank] for rank in plan.microbatches]
        bins = -(-int(lengths.sum()) // (config.max_tokens_per_microbatch * ranks)) * ranks
        budget = config.max_tokens_per_microbatch
        try:
            while (least := best(lengths, cost, budget, bins, bins, arguments.seconds)) is None:
                bins += ranks
        except TimeoutError:
            unproved += 1
            continue
        above.append((ours - bins) // ranks)
        if ours > bins:
            continue
        gaps.append(max(map(max, costs)) / least)
        try:
            rank_gaps.append(max(map(sum, costs)) / best(lengths, cost, budget, bins, ranks, arguments.seconds))
        except TimeoutError:
            ranks_unproved += 1
    print("| | instances | optimal | mean above | p99 | largest |\n|---|---|---|---|---|---|")
    print(f"| microbatches a rank | {len(above)} | {np.mean(np.equal(above, 0)):.1%} | {np.mean(above):.4f} | | {max(above)} |")
    for name, ratios in (("costliest microbatch", gaps), ("costliest rank", rank_gaps)):
        ratios = np.asarray(ratios) - 1
        print(
            f"| {name} | {len(ratios)} | {np.mean(ratios < 1e-6):.1%} | {ratios.mean():.2%} | {np.percentile(ratios, 99):.2%} "
            f"| {ratios.max():.2%} |"
        )
    print(f"\nNot proved within {arguments.seconds:g} s: {unproved} instances, and the costliest rank of {ranks_unproved} others")


if __name__ == "__main__":
    main()
