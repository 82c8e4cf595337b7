# SPDX-License-Identifier: Apache-2.0
"""Planned steps and their records, as a run of a small planner would leave them."""

import numpy as np

from megatron_dyn.planning import PlanConfig, Planner
from megatron_dyn.training.metrics import StepRecord

BUDGET = 100


def planner(*, data_parallel_size=2, documents=6, alignment=8, **config) -> Planner:
    """Heavy-tailed lengths (some longer than the budget, one empty) under a budget that is no multiple of the alignment."""
    lengths = np.random.default_rng(5).lognormal(3.2, 1.0, size=120).astype(np.int64)
    lengths[7] = 0
    return Planner(
        lengths,
        PlanConfig(
            max_tokens_per_microbatch=BUDGET, global_batch_size=documents, data_parallel_size=data_parallel_size, alignment=alignment, **config
        ),
    )


def records(count, *, plans=None, first=1, **changes) -> list[StepRecord]:
    """Records of `count` steps from iteration `first` on; `changes` are fields of `from_plan` that differ from the usual ones."""
    plans = plans or planner()
    made, tokens, documents = [], 0, 0
    for iteration in range(1, first + count):
        plan = plans.plan(iteration - 1)
        tokens, documents = tokens + plan.stats.tokens, documents + plan.num_documents
        values = {
            "lm_loss": 8.0 / iteration,
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
            "step_time": 0.5,
            "data_time": 0.01,
            "max_tokens_per_microbatch": BUDGET,
            "capacity": plans.config.capacity,
            "consumed_tokens": tokens,
            "consumed_documents": documents,
            **changes,
        }
        made.append(StepRecord.from_plan(plan, iteration=iteration, **values))
    return made[first - 1 :]
