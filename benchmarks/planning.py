# SPDX-License-Identifier: Apache-2.0
"""Fill, balance and time of plans for the documents of an index, over data-parallel sizes.

    python benchmarks/planning.py --idx PREFIX.idx [--budget 8192] [--batch 256] [--steps 16]

Milliseconds are processor time, median over the steps.
"""

import argparse
import statistics
import time

from megatron_dyn.corpus import IndexedReader
from megatron_dyn.planning import PlanConfig, Planner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--idx", required=True)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    lengths = IndexedReader(arguments.idx.removesuffix(".idx")).lengths
    print("| DP | microbatches | fill | slot fill | imbalance | rank imbalance | ms a step |\n|---|---|---|---|---|---|---|")
    for ranks in (1, 2, 4, 8):
        config = PlanConfig(
            max_tokens_per_microbatch=arguments.budget, global_batch_size=arguments.batch, data_parallel_size=ranks, alignment=2
        )
        planner = Planner(lengths, config)
        planner.plan(0)
        plans, times = [], []
        for step in range(arguments.steps):
            began = time.process_time()
            plans.append(planner.plan(step).stats)
            times.append(time.process_time() - began)
        microbatches, tokens = sum(plan.microbatches for plan in plans), sum(plan.tokens for plan in plans)
        print(
            f"| {ranks} | {microbatches} | {tokens / microbatches / arguments.budget:.3f} | {tokens / sum(plan.slots for plan in plans):.4f} "
            f"| {statistics.mean(plan.imbalance for plan in plans):.3f} | {statistics.mean(plan.rank_imbalance for plan in plans):.4f} "
            f"| {1e3 * statistics.median(times):.1f} |"
        )


if __name__ == "__main__":
    main()
