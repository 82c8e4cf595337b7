# SPDX-License-Identifier: Apache-2.0
"""What the plans of some steps fill, waste and cost, beside other ways to divide the same documents. No model, no device."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dyn.corpus.length_counts import LengthCounts
from megatron_dyn.planning.baselines import DIVISIONS, Concatenation, differencing_work
from megatron_dyn.planning.division import Division, Measures, division_of, measure, pieces_in_order
from megatron_dyn.planning.plan import StepPlan
from megatron_dyn.planning.planner import Planner
from megatron_dyn.planning.simulate import step_time

PLANNED, FIXED, DIFFERENCING = "planned", "fixed_length", "karmarkar_karp"
MOST_DIFFERENCING = 3_000_000
"""Parts joined in all steps together: about ten seconds, and at most half a gigabyte in a step."""
TITLES = {
    PLANNED: ("planned", "as a run would"),
    "in_order": ("in order", "each microbatch filled until the next document does not fit (Megatron-LM's DpBalancedScheduler)"),
    "karmarkar_karp": ("KK", "Karmarkar-Karp differencing by token budget, which may be exceeded (as verl)"),
    "fixed_length": ("cut at B", "documents concatenated from step to step and cut every B tokens, attention across them; what is left after the "
                     "last step counts in proportion"),
    "padded": ("padded", "each document padded to the longest of the corpus (at most B)"),
}
"""Name -> (heading, explanation)."""
MOST_SCANNED = 10_000_000
"""Documents of an epoch that are scanned to count its steps, where steps are sized in tokens: ten seconds; above it the count is estimated."""
LENGTH_QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and 99th percentile over the steps."""

    mean: float
    p99: float

    @classmethod
    def over(cls, values: Sequence[float]) -> "Spread":
        return cls(mean=float(np.mean(values)), p99=float(np.percentile(values, 99)))


@dataclass(frozen=True, kw_only=True)
class WaySummary:
    """One way to divide, over all steps. Imbalance is largest over mean: 1 at best."""

    short: str
    """Heading of a column."""
    title: str
    microbatches: float
    """Over all ranks and steps."""
    microbatches_per_rank: float
    """Mean over the steps (K)."""
    fill: float
    """Real tokens / (microbatches x B)."""
    slot_fill: float
    """Real tokens / tokens computed."""
    microbatch_cost: Spread
    """Imbalance over the microbatches that hold documents."""
    microbatch_tokens: Spread
    rank_cost: Spread
    """Imbalance over the sums of the data-parallel ranks."""
    rank_tokens: Spread
    over_budget: int
    """Microbatches with more than B real tokens: they may not fit into memory."""
    cut_documents: int
    """Documents that do not lie whole in one microbatch."""
    cost: float
    """Computed in all steps, padding included, as a multiple of the planned way's."""
    time: float
    """Simulated time of all steps, as a multiple of the planned way's."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Everything `python -m megatron_dyn plan` shows."""

    corpus: dict
    """Of one epoch: documents, tokens, what the oversize policy does, quantiles of the lengths, steps."""
    settings: dict
    """The planner's configuration."""
    pipeline: dict
    """pipeline_parallel, virtual_stages."""
    first_step: int
    steps: int
    documents: int
    """Trained on, in all steps."""
    tokens: int
    loss_tokens: int
    distinct_T: int
    T_min: int
    T_mean: float
    T_max: int
    capacity: int
    padding: int
    """Tokens computed that are not real."""
    fillers: int
    """Microbatches without documents."""
    split_documents: int
    truncated_documents: int
    truncated_tokens: int
    dropped_documents: int
    dropped_tokens: int
    open_seconds: float
    """To make the planner."""
    first_plan_ms: float
    """Orders the epoch (and compiles, if anything must be)."""
    plan_ms: Spread
    """Of the plans after the first."""
    idle_ranks: float
    """Data-parallel ranks without a document in a step, mean over the steps."""
    ways: dict[str, WaySummary]
    skipped_ways: list[str]
    """Ways left out because dividing would have taken too long."""
    per_step: dict[str, list[float]]
    """fill, slot_fill, microbatch_cost and rank_cost of each plan."""

    def as_dict(self) -> dict:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A report, and what its pictures need besides."""

    report: PlanReport
    lengths: LengthCounts  # of the documents that are not empty
    T: np.ndarray  # [microbatches that hold documents], of all steps
    plan: StepPlan  # of the first step
    in_order_per_step: dict[str, list[float]] | None


class _Way:
    """Sums of one way to divide."""

    def __init__(self, name: str):
        self.name = name
        self.measures: list[Measures] = []
        self.per_rank: list[int] = []
        self.time = 0.0

    def add(self, division: Division, budget: int, pipeline: dict) -> None:
        self.measures.append(measure(division, budget))
        self.per_rank.append(division.num_microbatches)
        self.time += step_time(division.cost, **pipeline)

    def total(self, name: str) -> float:
        return sum(getattr(found, name) for found in self.measures)

    def series(self, name: str) -> list[float]:
        return [getattr(found, name) for found in self.measures]

    def summary(self, planned: "_Way") -> WaySummary:
        """What was added stands for all tokens of the steps: where some wait for more (`Concatenation`), in proportion."""
        spreads = {name: Spread.over(self.series(name)) for name in ("microbatch_cost", "microbatch_tokens", "rank_cost", "rank_tokens")}
        share = _ratio(planned.total("tokens"), self.total("tokens"))
        return WaySummary(
            short=TITLES[self.name][0],
            title=TITLES[self.name][1],
            microbatches=self.total("microbatches") * share,
            microbatches_per_rank=sum(self.per_rank) * share / len(planned.per_rank),
            fill=self.total("tokens") / self.total("room"),
            slot_fill=self.total("tokens") / self.total("rows"),
            over_budget=self.total("over_budget"),
            cut_documents=self.total("cut_documents"),
            cost=_ratio(self.total("total_cost") * share, planned.total("total_cost")),
            time=_ratio(self.time * share, planned.time),
            **spreads,
        )


def _ratio(value: float, reference: float) -> float:
    return value / reference if reference > 0 else 1.0


def report_on(
    planner: Planner,
    *,
    first_step: int = 0,
    steps: int = 32,
    pipeline_parallel: int = 1,
    virtual_stages: int = 1,
    compare: bool = True,
    open_seconds: float = 0.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Planned:
    """Plans some steps and measures them.

    Args:
        planner: with the settings to look at.
        first_step: the first step planned.
        steps: how many.
        pipeline_parallel: PP of the simulated time.
        virtual_stages: VPP of the simulated time; 1 is 1F1B.
        compare: also divide the same documents in the other ways.
        open_seconds: what making the planner took, for the report.
        progress: called with the number of steps that are done.

    Raises:
        ValueError: no step is asked for.
    """  # fmt: skip
    if steps < 1 or first_step < 0:
        raise ValueError(f"steps={steps}, first_step={first_step}: at least one step, from step 0 on, is needed to say anything")
    config, pipeline = planner.config, dict(pipeline_parallel=pipeline_parallel, virtual_stages=virtual_stages)
    longest = planner.longest_document
    ways = {name: _Way(name) for name in (TITLES if compare else (PLANNED,))}
    concatenation, skipped, joined, idle = Concatenation(config), [], 0, []
    stats, T, times, first_plan = [], [], [], None
    for step in range(first_step, first_step + steps):
        began = time.perf_counter()
        plan = planner.plan(step)
        times.append(1e3 * (time.perf_counter() - began))
        first_plan = first_plan or plan
        stats.append(plan.stats)
        T += [microbatch.T for rank in plan.microbatches for microbatch in rank if not microbatch.is_filler]
        division = division_of(plan, config.cost)
        idle.append(int(np.count_nonzero(division.tokens.sum(axis=1) == 0)))
        ways[PLANNED].add(division, config.max_tokens_per_microbatch, pipeline)
        if compare:
            pieces = pieces_in_order(plan)
            work = differencing_work(pieces, config)
            if DIFFERENCING in ways and joined + work * (first_step + steps - step) > MOST_DIFFERENCING:
                del ways[DIFFERENCING]
                skipped.append(DIFFERENCING)
            joined += work
            divisions = {name: divide(pieces, config, longest) for name, divide in DIVISIONS.items() if name in ways}
            for name, found in (divisions | {FIXED: concatenation.divide(pieces)}).items():
                if found is not None:
                    ways[name].add(found, config.max_tokens_per_microbatch, pipeline)
        progress(len(stats))
    if compare and not ways[FIXED].measures:
        ways[FIXED].add(concatenation.rounds(1), config.max_tokens_per_microbatch, pipeline)
    summed = ("documents", "tokens", "loss_tokens", "padding", "fillers", "split_documents", "truncated_documents", "truncated_tokens",
              "dropped_documents", "dropped_tokens")  # fmt: skip
    series = {"microbatch_cost", "rank_cost"}
    counts = LengthCounts(planner.lengths, empty=False)
    report = PlanReport(
        corpus=_corpus(planner, counts, float(np.mean([found.tokens + found.truncated_tokens + found.dropped_tokens for found in stats]))),
        settings=config.to_dict(),
        pipeline=pipeline,
        first_step=first_step,
        steps=steps,
        distinct_T=len(set(T)),
        T_min=min(T, default=0),
        T_mean=float(np.mean(T)) if T else 0.0,
        T_max=max(T, default=0),
        capacity=config.capacity,
        open_seconds=open_seconds,
        first_plan_ms=times[0],
        plan_ms=Spread.over(times[1:] or times),
        idle_ranks=float(np.mean(idle)),
        ways={
            name: dataclasses.replace(way.summary(ways[PLANNED]), **({"cut_documents": concatenation.cut_documents} if name == FIXED else {}))
            for name, way in ways.items()
        },
        skipped_ways=skipped,
        per_step={
            "fill": [found.fill for found in stats],
            "slot_fill": [found.slot_fill for found in stats],
            **{name: ways[PLANNED].series(name) for name in sorted(series)},
        },
        **{name: sum(getattr(found, name) for found in stats) for name in summed},
    )
    in_order = {name: ways["in_order"].series(name) for name in sorted(series)} if compare else None
    return Planned(report=report, lengths=counts, T=np.array(T, dtype=np.int64), plan=first_plan, in_order_per_step=in_order)


def _corpus(planner: Planner, lengths: LengthCounts, step_tokens: float) -> dict:
    """Of one epoch.

    Args:
        step_tokens: of the planned steps' documents as the corpus has them, mean.
    """
    quantiles = lengths.quantiles(LENGTH_QUANTILES, method="lower")
    counted = planner.config.global_batch_tokens is None or planner.num_documents <= MOST_SCANNED
    return {
        **dataclasses.asdict(planner.counts),
        "mean_length": planner.counts.tokens / max(planner.num_documents, 1),
        "length_quantiles": {f"{share:g}": int(length) for share, length in zip(LENGTH_QUANTILES, quantiles)},
        "steps": planner.steps_per_epoch() if counted else max(1, round(planner.counts.tokens / step_tokens)),
        "steps_estimated": not counted,
    }
