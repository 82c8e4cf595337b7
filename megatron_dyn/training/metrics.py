# SPDX-License-Identifier: Apache-2.0
"""What a run writes down: one record a step, and the summary of all of them.

`metrics.jsonl` is the one source: the summary and the plots are computed from it alone, so they are right after a crash and a resume,
and can be made again at any time. The file holds two kinds of JSON objects, one a line:

| object     | recognised by the key | one for each                             |
|------------|-----------------------|------------------------------------------|
| step       | `lm loss`             | optimizer step (`iteration` counts from 1) |
| validation | `validation lm loss`  | evaluation, after the step `iteration`   |

JSON has no NaN and no infinity: a value which is not finite is written as `null`.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dyn.planning import StepPlan
POLICY_COUNTS = (
    "split-documents",
    "truncated-documents",
    "truncated-tokens",
    "dropped-documents",
    "dropped-tokens",
    "empty-documents",
    "drop-last-documents",
)
"""Fields of `StepStats` (with hyphens) that tell what was not trained on as it stood."""


@dataclass(kw_only=True)
class StepRecord:
    """What is known of one optimizer step. Build it with `from_plan`; counts are over all data-parallel ranks.

    Tensors and numpy scalars are accepted wherever a number is expected.
    """

    iteration: int
    """Optimizer steps done, this one included: the first step is 1."""
    lm_loss: float | None
    """Sum of token losses / loss tokens of the step, nats a token; None when the step has no loss token."""
    grad_norm: float | None
    """Norm of the gradient before clipping; None when no update was made."""
    learning_rate: float
    """Learning rate used by this step."""
    num_tokens: int
    """Real tokens: padding is not counted."""
    num_loss_tokens: int
    """Tokens that have a label."""
    documents: int
    """Documents of the step."""
    documents_digest: str
    """Stands for the documents of the step and their order, whatever they are grouped into."""
    squared_tokens: int
    """Sum of the squared lengths that attention spans."""
    max_tokens_per_microbatch: int
    """The token budget B."""
    capacity: int
    """B rounded up to the alignment: no T exceeds it."""
    T: list[int]
    """Packed length of every microbatch, data-parallel rank by rank, fillers included."""
    fillers: int
    """Microbatches without documents, which keep the number of microbatches equal on all ranks."""
    T_min: int
    """T_min, T_mean, T_max are over the microbatches that hold documents."""
    T_mean: float
    T_max: int
    imbalance: float
    """Largest / mean cost over the microbatches that hold documents; 1 is perfect."""
    epoch: int
    """Epoch the documents belong to, from 0."""
    step_time: float
    """Seconds of wall time for the whole step, waiting for data included."""
    data_time: float
    """Seconds of `step_time` spent waiting for the step's microbatches."""
    consumed_tokens: int
    """Real tokens of all steps so far, this one included."""
    consumed_documents: int
    """Documents of all steps so far, this one included."""
    skipped: bool = False
    """True when the weights were left alone (no loss token, or a loss or gradient that is not finite)."""
    policy_counts: dict[str, int] = field(default_factory=dict)
    """What the oversize policy and the filters did in this step, by the keys of `POLICY_COUNTS`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More keys for the JSON object."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.type is int:
                setattr(self, spec.name, int(value))
            elif spec.type is float or (spec.type == float | None and value is not None):
                setattr(self, spec.name, float(value))
        self.T = [int(length) for length in self.T]
        self.skipped = bool(self.skipped)
        if not self.T:
            raise ValueError(f"iteration {self.iteration}: a step has at least one microbatch, but T is empty")
        if clash := set(self.extra) & set(self.own_keys()):
            raise ValueError(f"iteration {self.iteration}: extra metrics would overwrite {sorted(clash)}; choose other names")

    @classmethod
    def from_plan(
        cls,
        plan: "StepPlan",
        *,
        iteration: int,
        lm_loss: float | None,
        grad_norm: float | None,
        learning_rate: float,
        step_time: float,
        data_time: float,
        max_tokens_per_microbatch: int,
        capacity: int,
        consumed_tokens: int,
        consumed_documents: int,
        skipped: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> "StepRecord":
        """The record of a step whose plan is known: every count is taken from the plan, so it is global on every rank."""
        stats = plan.stats
        return cls(
            iteration=iteration,
            lm_loss=lm_loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            num_tokens=stats.tokens,
            num_loss_tokens=stats.loss_tokens,
            documents=stats.documents,
            documents_digest=plan.documents_digest,
            squared_tokens=stats.squared_tokens,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            capacity=capacity,
            T=[microbatch.T for rank in plan.microbatches for microbatch in rank],
            fillers=stats.fillers,
            T_min=stats.T_min,
            T_mean=stats.T_mean,
            T_max=stats.T_max,
            imbalance=stats.imbalance,
            epoch=plan.epoch,
            step_time=step_time,
            data_time=data_time,
            consumed_tokens=consumed_tokens,
            consumed_documents=consumed_documents,
            skipped=skipped,
            policy_counts={key: getattr(stats, key.replace("-", "_")) for key in POLICY_COUNTS},
            extra=dict(extra or {}),
        )

    @property
    def microbatches(self) -> int:
        """Microbatches over all data-parallel ranks, fillers included."""
        return len(self.T)

    @property
    def fill(self) -> float:
        """Real tokens / (microbatches x B)."""
        return self.num_tokens / (self.microbatches * self.max_tokens_per_microbatch)

    @property
    def slot_fill(self) -> float:
        """Real tokens / sum of T."""
        return self.num_tokens / sum(self.T)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens / step time; 0 when no time was measured."""
        return self.num_tokens / self.step_time if self.step_time > 0 else 0.0

    def own_keys(self) -> dict[str, Any]:
        """The keys that every step has, without `extra`."""
        return {
            "iteration": self.iteration,
            "lm loss": self.lm_loss,
            "grad-norm": self.grad_norm,
            "learning-rate": self.learning_rate,
            "num-tokens": self.num_tokens,
            "num-loss-tokens": self.num_loss_tokens,
            "documents": self.documents,
            "documents-digest": self.documents_digest,
            "squared-tokens": self.squared_tokens,
            "microbatches": self.microbatches,
            "fillers": self.fillers,
            "fill": self.fill,
            "slot-fill": self.slot_fill,
            "imbalance": self.imbalance,
            "T": self.T,
            "T-min": self.T_min,
            "T-mean": self.T_mean,
            "T-max": self.T_max,
            "max-tokens-per-microbatch": self.max_tokens_per_microbatch,
            "capacity": self.capacity,
            "step-time": self.step_time,
            "data-time": self.data_time,
            "tokens-per-second": self.tokens_per_second,
            "consumed-tokens": self.consumed_tokens,
            "consumed-documents": self.consumed_documents,
            "epoch": self.epoch,
            "skipped": self.skipped,
            **self.policy_counts,
        }

    def as_json(self) -> dict[str, Any]:
        """The object written to `metrics.jsonl`."""
        return {**self.own_keys(), **self.extra}


@dataclass(kw_only=True)
class ValidationRecord:
    """One evaluation on held-out documents, made after the step `iteration`."""

    iteration: int
    loss: float | None
    """Sum of token losses / loss tokens, nats a token; None without a loss token."""
    tokens: int
    """Loss tokens evaluated."""
    documents: int
    seconds: float

    def __post_init__(self) -> None:
        self.iteration, self.tokens, self.documents = int(self.iteration), int(self.tokens), int(self.documents)
        self.loss = None if self.loss is None else float(self.loss)
        self.seconds = float(self.seconds)

    @property
    def perplexity(self) -> float | None:
        """exp(loss), the exponent limited to 20 as in Megatron-LM (`evaluate_and_print_results`), so that it stays printable."""
        return None if self.loss is None else math.exp(min(20.0, self.loss))

    def as_json(self) -> dict[str, Any]:
        """The object written to `metrics.jsonl`."""
        return {
            "iteration": self.iteration,
            "validation lm loss": self.loss,
            "validation ppl": self.perplexity,
            "validation-tokens": self.tokens,
            "validation-documents": self.documents,
            "validation-time": self.seconds,
        }


@dataclass(kw_only=True)
class Metrics:
    """All records of a run in the order of their iterations; a repeated iteration counts once, the last one written."""

    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]


def summarize(metrics: Metrics) -> dict[str, Any]:
    """The run in one flat dictionary. Ratios are of totals: fill is all real tokens / all slots, not a mean of the steps' fills.

    Returns:
        counts over all steps; `T_min`, `T_mean`, `T_max` over the microbatches that hold documents, `distinct_T`: how many
        different T were seen, fillers included; `loss_first`, `loss_last`: the first and last loss that is not null;
        `imbalance`, `pipeline_bubble`, `pipeline_bubble_measured`: mean over the steps that have it; `seconds`: sum of step times; `tokens_per_second`: median over steps.
        Values that do not exist (no step, no evaluation) are None.
    """
    steps = metrics.steps
    losses = [step["lm loss"] for step in steps if step["lm loss"] is not None]
    validation = next((record for record in reversed(metrics.validations) if record["validation lm loss"] is not None), None)
    lengths = [length for step in steps for length in step["T"]]
    tokens = _total(steps, "num-tokens")
    working = [step for step in steps if step["microbatches"] > step["fillers"]]
    holding = [step["microbatches"] - step["fillers"] for step in working]
    slots = sum(step["microbatches"] * step["max-tokens-per-microbatch"] for step in steps)
    last = steps[-1] if steps else {}
    return {
        "steps": len(steps),
        "skipped_steps": sum(step["skipped"] for step in steps),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "validation_loss": validation["validation lm loss"] if validation else None,
        "validation_ppl": validation["validation ppl"] if validation else None,
        "fill": tokens / slots if slots else None,
        "slot_fill": tokens / sum(lengths) if lengths else None,
        "imbalance": statistics.fmean(step["imbalance"] for step in steps) if steps else None,
        "pipeline_bubble": _mean(steps, "pipeline-bubble"),
        "pipeline_bubble_measured": _mean(steps, "pipeline-bubble-measured"),
        "tokens": tokens,
        "loss_tokens": _total(steps, "num-loss-tokens"),
        "documents": _total(steps, "documents"),
        "microbatches": len(lengths),
        "fillers": _total(steps, "fillers"),
        "T_min": min((step["T-min"] for step in working), default=None),
        "T_mean": sum(step["T-mean"] * held for step, held in zip(working, holding, strict=True)) / sum(holding) if working else None,
        "T_max": max((step["T-max"] for step in working), default=None),
        "distinct_T": len(set(lengths)),
        "max_tokens_per_microbatch": last.get("max-tokens-per-microbatch"),
        "capacity": last.get("capacity"),
        "epoch": last.get("epoch"),
        "seconds": _total(steps, "step-time"),
        "data_seconds": _total(steps, "data-time"),
        "tokens_per_second": statistics.median(step["tokens-per-second"] for step in steps) if steps else None,
        **{key.replace("-", "_"): sum(step.get(key, 0) for step in steps) for key in POLICY_COUNTS},
    }


def _mean(steps: Iterable[Mapping[str, Any]], key: str) -> float | None:
    found = [step[key] for step in steps if key in step]
    return statistics.fmean(found) if found else None


def _total(steps: Iterable[Mapping[str, Any]], key: str) -> Any:
    return sum(step[key] for step in steps)
