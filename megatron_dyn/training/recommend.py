# SPDX-License-Identifier: Apache-2.0
"""A proposal for B, the global batch and the token bucket, from a device's memory, a model and the lengths of a corpus."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_dyn.corpus.computed_lengths import ComputedLengths
from megatron_dyn.corpus.length_counts import LengthCounts
from megatron_dyn.planning import PlanConfig, Planner, PlanError
from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.config import INT32_MAX
from megatron_dyn.planning.division import division_of
from megatron_dyn.planning.simulate import step_time
from megatron_dyn.training.config import ConfigError, ParallelConfig, require
from megatron_dyn.training.memory import CONTEXT_BYTES, GIB, MemorySettings, RankMemory, rounded_down, tightest_rank, usable_bytes

IDLE_SHARE = 0.10
"""Of a pipeline: what the proposed number of microbatches leaves at most to filling and draining."""
LEAST_MICROBATCHES = 4
"""Per rank: with fewer, a rank has nothing to make up for a long document with."""
LAUNCH_BOUND = 4096
"""Tokens below which a microbatch takes about as long as launching its kernels (measured at 618M parameters, TP 1)."""
STEP_FILL = 0.96
"""Of microbatches x B that a proposed step asks for: whole documents overshoot, and one microbatch too many costs a round on every rank."""
GOOD_FILL = 0.90
"""Below it the global batch is worth a remark."""
NEAR_BEST = 0.02
"""Budgets whose busy share is this close to the best are equally good."""
MOST_CUT = 0.01
"""Share of documents that a budget may cut."""
LEAST_SLOT_FILL = 0.995
"""A bucket's padding may cost half a percent."""
STEPS = 4
"""Planned to judge a budget or a bucket."""


@dataclass(frozen=True, kw_only=True)
class BudgetChoice:
    """One budget, judged on plans of this corpus."""

    max_tokens_per_microbatch: int
    memory_gib: float
    global_batch_tokens: float
    """Real tokens of a step, mean."""
    global_batch_documents: float
    microbatches_per_rank: float
    fill: float
    cut_documents: float
    """Share of the documents longer than B."""
    busy: float
    """Cost of the real tokens / (ranks x simulated step time): what padding, imbalance and bubbles leave of the machine."""


@dataclass(frozen=True, kw_only=True)
class BucketChoice:
    """One token bucket at the proposed budget."""

    token_bucket: int
    distinct_T: int
    slot_fill: float


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The proposal, and what led to it."""

    max_tokens_per_microbatch: int
    global_batch_tokens: int | None
    """None: the global batch was given."""
    token_bucket: int | None
    """None: it was given."""
    device_memory_gib: float
    memory: RankMemory
    largest_budget: int
    """That the estimate lets fit."""
    least_microbatches: int
    """Per rank, from the pipeline."""
    budgets: list[BudgetChoice]
    impossible: dict[int, str]
    """Budgets with which these documents cannot be planned, and why."""
    buckets: list[BucketChoice]
    reasons: list[str]

    def as_dict(self) -> dict:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def least_microbatches(parallel: ParallelConfig) -> int:
    """Microbatches per rank that keep a pipeline's idle share, (p - 1) / v over m + (p - 1) / v, at or below `IDLE_SHARE`."""
    pp, vp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    needed = max(LEAST_MICROBATCHES, math.ceil((pp - 1) / vp * (1 - IDLE_SHARE) / IDLE_SHARE - 1e-9))
    return round_up(needed, pp) if vp > 1 else needed


def step_tokens(budget: int, *, microbatches: int, data_parallel_size: int) -> int:
    """Tokens of a step that fills so many microbatches a rank, see `STEP_FILL`."""
    return int(STEP_FILL * microbatches * data_parallel_size * budget)


def recommend(
    lengths: np.ndarray | ComputedLengths,
    *,
    plan_config: Callable[..., PlanConfig],
    settings: MemorySettings,
    device_memory_gib: float,
    budget: int | None = None,
    token_bucket: int | None = None,
    global_batch_given: bool = False,
) -> Recommendation:
    """Proposes what fits and keeps the machine busy.

    Args:
        lengths: tokens per document, [D].
        plan_config: (max_tokens_per_microbatch=..., token_bucket=..., global_batch_tokens=...) -> the planner's settings; the last only
            where the global batch is open.
        settings: what decides what a rank holds.
        device_memory_gib: of one device.
        budget: B, when it is given and only the rest is to be proposed.
        token_bucket: the same of the bucket.
        global_batch_given: keep the global batch of `plan_config`.

    Raises:
        ConfigError: the model does not fit, whatever B.
        PlanError: no budget that fits makes a plan possible.
    """
    parallel, data_parallel_size = settings.parallel, settings.data_parallel_size
    room = usable_bytes(device_memory_gib * GIB)
    memory = tightest_rank(settings, room)
    unit = plan_config(max_tokens_per_microbatch=1024, token_bucket=1, global_batch_tokens=1).alignment
    largest = rounded_down(min(memory.largest(room), INT32_MAX - unit), unit)
    require(
        largest >= max(unit, 256),
        f"weights, gradients, optimizer and workspaces take an estimated {memory.fixed_bytes / GIB:.1f} GiB of the {room / GIB:.1f} GiB that are "
        f"usable on a device of {device_memory_gib:g} GiB, and a token takes {memory.token_bytes / 1024:,.0f} KiB: no budget of use "
        "would fit; raise "
        "--tensor-model-parallel-size or --pipeline-model-parallel-size, or use --use-distributed-optimizer or --recompute-granularity",
    )
    wanted = least_microbatches(parallel)

    def batch_for(tokens: int) -> int:
        return step_tokens(tokens, microbatches=wanted, data_parallel_size=data_parallel_size)

    def config_for(tokens: int, bucket: int) -> PlanConfig:
        return plan_config(max_tokens_per_microbatch=tokens, token_bucket=bucket, global_batch_tokens=batch_for(tokens))

    counts = LengthCounts(lengths, empty=False)
    budgets, impossible = [], {}
    for tokens in [budget] if budget is not None else _budgets(largest):
        try:
            budgets.append(_judge(lengths, counts, config_for(tokens, token_bucket or 1), memory, parallel))
        except (PlanError, ConfigError) as error:
            impossible[tokens] = str(error)
    if not budgets:
        reasons = "; ".join(f"B {tokens:,}: {reason}" for tokens, reason in impossible.items())
        raise PlanError(f"no budget makes a plan of these documents possible: {reasons}")
    chosen = _choose(budgets)
    tried = (1, 16, 32, 64, 128, 256, 512) if token_bucket is None else (token_bucket,)
    buckets = _buckets(lengths, lambda bucket: config_for(chosen.max_tokens_per_microbatch, bucket), tried)
    bucket = max((choice for choice in buckets if choice.slot_fill >= LEAST_SLOT_FILL), default=buckets[0], key=lambda found: found.token_bucket)
    reasons = _reasons(chosen, largest, wanted, parallel, budget_given=budget is not None, global_batch_given=global_batch_given)
    if global_batch_given and chosen.global_batch_documents < data_parallel_size:
        reasons.append(
            f"the global batch should grow: {chosen.global_batch_documents:,.0f} documents do not feed {data_parallel_size:,} ranks; {wanted} "
            f"microbatches a rank hold about {batch_for(chosen.max_tokens_per_microbatch):,} tokens at this B"
        )
    return Recommendation(
        max_tokens_per_microbatch=chosen.max_tokens_per_microbatch,
        global_batch_tokens=None if global_batch_given else batch_for(chosen.max_tokens_per_microbatch),
        token_bucket=bucket.token_bucket if token_bucket is None else None,
        device_memory_gib=device_memory_gib,
        memory=memory,
        largest_budget=largest,
        least_microbatches=wanted,
        budgets=budgets,
        impossible=impossible,
        buckets=buckets,
        reasons=reasons + [_bucket_reason(bucket, given=token_bucket is not None)],
    )


def _budgets(largest: int) -> list[int]:
    """Powers of two up to the largest budget, and that one."""
    powers = [2**exponent for exponent in range(11, 20) if 2**exponent <= largest]
    return (powers[-5:] + [largest] if powers and largest >= 1.2 * powers[-1] else powers[-6:]) or [largest]


def _plans(lengths: np.ndarray | ComputedLengths, config: PlanConfig) -> list:
    planner = Planner(lengths, config, fingerprint="of a proposal")  # no digest of all lengths for plans that nobody keeps
    return [planner.plan(step) for step in range(planner.steps_per_epoch(at_most=STEPS))]


def _judge(
    lengths: np.ndarray | ComputedLengths, counts: LengthCounts, config: PlanConfig, memory: RankMemory, parallel: ParallelConfig
) -> BudgetChoice:
    plans = _plans(lengths, config)
    pipeline = dict(
        pipeline_parallel=parallel.pipeline_model_parallel_size, virtual_stages=parallel.virtual_pipeline_model_parallel_size or 1
    )
    divisions = [division_of(plan, config.cost) for plan in plans]
    cost = sum(microbatch.cost for plan in plans for rank in plan.microbatches for microbatch in rank)
    machine = (
        config.data_parallel_size * parallel.pipeline_model_parallel_size * sum(step_time(found.cost, **pipeline) for found in divisions)
    )
    budget = config.max_tokens_per_microbatch
    return BudgetChoice(
        max_tokens_per_microbatch=budget,
        memory_gib=(memory.total(config.capacity) + CONTEXT_BYTES) / GIB,
        global_batch_tokens=float(np.mean([plan.stats.tokens for plan in plans])),
        global_batch_documents=float(np.mean([plan.stats.documents for plan in plans])),
        microbatches_per_rank=float(np.mean([plan.num_microbatches for plan in plans])),
        fill=sum(plan.stats.tokens for plan in plans) / (budget * sum(plan.stats.microbatches for plan in plans)),
        cut_documents=int(counts.counts[counts.lengths > budget].sum()) / max(counts.documents, 1),
        busy=cost / machine if machine else 1.0,
    )


def _choose(budgets: list[BudgetChoice]) -> BudgetChoice:
    """The smallest budget that is as good as the best: it leaves memory, and its global batch is smallest."""
    fair = [choice for choice in budgets if choice.max_tokens_per_microbatch >= LAUNCH_BOUND] or budgets[-1:]
    whole = [choice for choice in fair if choice.cut_documents <= MOST_CUT] or fair[-1:]
    best = max(choice.busy for choice in whole)
    return next(choice for choice in whole if choice.busy >= best - NEAR_BEST)


def _buckets(lengths: np.ndarray | ComputedLengths, config_for: Callable[[int], PlanConfig], tried: tuple[int, ...]) -> list[BucketChoice]:
    found: list[BucketChoice] = []
    for bucket in tried:
        config = config_for(bucket)
        if found and config.alignment == found[-1].token_bucket:
            continue
        plans = _plans(lengths, config)
        T = {microbatch.T for plan in plans for rank in plan.microbatches for microbatch in rank}
        slot_fill = sum(plan.stats.tokens for plan in plans) / sum(plan.stats.slots for plan in plans)
        found.append(BucketChoice(token_bucket=config.alignment, distinct_T=len(T), slot_fill=slot_fill))
        if slot_fill < LEAST_SLOT_FILL:
            break
    return found


def _reasons(
    chosen: BudgetChoice, largest: int, wanted: int, parallel: ParallelConfig, *, budget_given: bool, global_batch_given: bool
) -> list[str]:
    pp, vp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    B, reasons = chosen.max_tokens_per_microbatch, []
    if budget_given:
        reasons.append(f"B {B:,} was given; it {'fits' if B <= largest else 'does NOT fit'}: the estimate lets up to {largest:,} fit")
    else:
        reasons.append(
            f"B {B:,}: the smallest of at least {LAUNCH_BOUND:,} (below, launching dominates) that cuts at most {MOST_CUT:.0%} of the "
            f"documents and keeps the machine within {NEAR_BEST:.0%} of the busiest; up to {largest:,} fit"
        )
        if chosen.cut_documents > MOST_CUT:
            reasons.append(f"it cuts {chosen.cut_documents:.1%} of the documents: no budget that fits cuts fewer")
    if not global_batch_given:
        why = (
            f"idle at most {IDLE_SHARE:.0%} of a PP {pp} x VPP {vp} pipeline"
            if pp > 1
            else "a long document needs others to make up for it"
        )
        reasons.append(
            f"global batch: {STEP_FILL:.0%} of {wanted} microbatches a rank ({why}); a lower limit for speed, which says "
            "nothing about convergence"
        )
    elif chosen.fill < GOOD_FILL and chosen.microbatches_per_rank > 1:
        reasons.append(
            f"the global batch fills {chosen.fill:.0%} of {chosen.microbatches_per_rank:.1f} microbatches a rank: every rank runs the same "
            "number"
            + (f", a multiple of {pp}" if vp > 1 else "")
            + ". Nothing is padded for it, but a batch just below a whole number has fewer and longer microbatches"
        )
    return reasons


def _bucket_reason(bucket: BucketChoice, *, given: bool) -> str:
    if given:
        return f"token bucket {bucket.token_bucket} was given: {bucket.distinct_T:,} different T, slot fill {bucket.slot_fill:.1%}"
    if bucket.slot_fill < LEAST_SLOT_FILL:
        return (
            f"token bucket {bucket.token_bucket}, the smallest: the slot fill is {bucket.slot_fill:.1%} with it already; every other one pads more"
        )
    return (
        f"token bucket {bucket.token_bucket}: the largest that keeps the slot fill at {LEAST_SLOT_FILL:.1%} or more; optional, of use only "
        "where something is cached by shape"
    )
