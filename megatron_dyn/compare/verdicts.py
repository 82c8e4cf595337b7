# SPDX-License-Identifier: Apache-2.0
"""Do two arms train alike? Verdicts, each with its number and its threshold.

Two kinds of comparison:

- *exact*: both in fp32 with the same pieces. Sums are taken in another order, nothing else: 1e-5 at every step.
- *noise*: anything else. Rounding differs from the first step on and grows as training does; what counts is that the means over the seeds
  of the arms do not part by more than seeds explain (`noise.py`). With fewer than three seeds of the reference arm, what needs it is
  reported and not judged.

A run that trains on other data ("concat-chunk") is judged by its held-out loss alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from megatron_dyn.compare.arms import Arm
from megatron_dyn.compare.noise import FEWEST_SEEDS, deviation, noise_limit
from megatron_dyn.compare.runs import CompareError, Run

EXACT_LOSS = 1e-5
"""Largest relative difference of a step's loss between exact arms."""
EXACT_NORM = 1e-4
"""The same of the gradient's norm, which squares what the loss averages."""
ROUNDED_LOSS = {"bf16": 2e-3, "fp8": 1e-2}
"""Largest relative difference of the first step's loss: same weights, same documents, rounding alone."""
ROUNDED_NORM = {"bf16": 3e-2, "fp8": 1e-1}
LEAST_CORRELATION = 0.99
MOST_NORM_RATIO = 1.05
LAST_PART = 0.1
"""Share of the steps whose mean loss is the final loss."""
MOST_JUMP = 6.0
"""Largest change of the loss at a resume, in standard deviations of the changes around it."""
AROUND = 25
"""Steps looked at on each side of a resume."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One question about one arm."""

    name: str
    arm: str
    holds: bool | None
    """None: reported, not judged."""
    value: float | int | str | None
    threshold: float | int | str | None
    text: str

    def as_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """The runs of two arms with one seed, on the steps that both have."""

    reference: Run
    other: Run

    @property
    def steps(self) -> int:
        return min(len(self.reference.iteration), len(self.other.iteration))

    def relative(self, name: str) -> np.ndarray:
        """other / reference - 1 of each common step; infinite where one of the two is not finite, left out where both are not."""
        mine, theirs = getattr(self.reference, name)[: self.steps], getattr(self.other, name)[: self.steps]
        finite = np.isfinite(mine).astype(int) + np.isfinite(theirs)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where(finite == 1, np.inf, theirs / mine - 1)
        return found[finite > 0]


def compare_runs(arms: Sequence[Arm], *, peak_tflops: float | None = None) -> list[Verdict]:
    """All verdicts on all arms but the first, which is the reference.

    Args:
        peak_tflops: 1e12 operations a second that a rank's device can do: model FLOPs utilisation is told beside the rates.

    Raises:
        CompareError: an arm shares no seed with the reference.
    """
    reference, found = arms[0], []
    for arm in arms[1:]:
        pairs = [Pair(reference=reference.runs[seed], other=run) for seed, run in arm.runs.items() if seed in reference.runs]
        if not pairs:
            raise CompareError(
                f"{arm.name} has the seeds {sorted(arm.runs)} and {reference.name} {sorted(reference.runs)}: without a common seed they start from "
                "other weights and see other documents; give them one"
            )
        found += _verdicts(arm, pairs, reference) + _speed(arm, pairs, peak_tflops)
    found += [verdict for arm in arms for run in arm.runs.values() for verdict in _whole(arm, run)]
    return found


def _verdicts(arm: Arm, pairs: list[Pair], reference: Arm) -> list[Verdict]:
    other_data = any("concat-chunk" in (run.setting("data.microbatching") for run in (pair.reference, pair.other)) for pair in pairs)
    precisions = {run.precision for pair in pairs for run in (pair.reference, pair.other)}
    exact = precisions == {"fp32"} and not other_data
    found = [_same_documents(arm, pairs)]
    if not other_data:
        worst = "fp8" if "fp8" in precisions else "bf16" if "bf16" in precisions else None
        found += [_first_step(arm, pairs, worst), _first_gradient(arm, pairs, worst)]
        found += [_pointwise(arm, pairs) if exact else _parted(arm, pairs, reference), _correlation(arm, pairs), _norms(arm, pairs)]
    return [
        *found, _final(arm, pairs, reference, exact, judged=not other_data), _held_out(arm, pairs, reference, exact), _drops(arm, pairs, other_data),
    ]  # fmt: skip


def _over(pairs: list[Pair], value: Callable[[Pair], float]) -> float:
    """The worst pair's value."""
    return max((value(pair) for pair in pairs), default=math.nan)


def _verdict(name: str, arm: Arm, value: float, threshold: float | None, text: str) -> Verdict:
    """Holds where the value is finite and at most the threshold."""
    holds = None if threshold is None else bool(math.isfinite(value) and value <= threshold)
    return Verdict(name=name, arm=arm.name, holds=holds, value=value, threshold=threshold, text=text)


def _same_documents(arm: Arm, pairs: list[Pair]) -> Verdict:
    other, corpus = 0, 0
    for pair in pairs:
        other += sum(a != b for a, b in zip(pair.reference.digests, pair.other.digests))
        corpus += pair.reference.about["documents"]["train"] != pair.other.about["documents"]["train"]
    steps = sum(pair.steps for pair in pairs)
    if corpus:
        return Verdict(name="documents", arm=arm.name, holds=False, value=corpus, threshold=0, text="trained on other documents (another corpus)")
    return _verdict("documents", arm, other, 0, f"{other} of {steps} steps hold other documents, or in another order")


def _first_step(arm: Arm, pairs: list[Pair], rounded: str | None) -> Verdict:
    value = _over(pairs, lambda pair: abs(pair.relative("loss")[0]) if len(pair.relative("loss")) else math.nan)
    limit = ROUNDED_LOSS[rounded] if rounded else EXACT_LOSS
    return _verdict("first loss", arm, value, limit, "relative difference of the first step's loss: the same weights and documents")


def _first_gradient(arm: Arm, pairs: list[Pair], rounded: str | None) -> Verdict:
    value = _over(pairs, lambda pair: abs(pair.relative("grad_norm")[0]) if len(pair.relative("grad_norm")) else math.nan)
    limit = ROUNDED_NORM[rounded] if rounded else EXACT_NORM
    return _verdict("first gradient", arm, value, limit, "relative difference of the norm of the first step's gradient")


def _pointwise(arm: Arm, pairs: list[Pair]) -> Verdict:
    value = _over(pairs, lambda pair: float(np.abs(pair.relative("loss")).max()))
    return _verdict("every loss", arm, value, EXACT_LOSS, f"largest relative difference of a loss over {max(pair.steps for pair in pairs)} steps")


def final_loss(run: Run, steps: int | None = None) -> float:
    """Mean loss of the last part of the steps."""
    loss = run.loss[: steps or len(run.loss)]
    last = loss[-max(1, round(LAST_PART * len(loss))) :]
    return float(last[np.isfinite(last)].mean()) if np.isfinite(last).any() else math.nan


def _judged_by_noise(name: str, arm: Arm, difference: float, reference: Sequence, seeds: int, text: str) -> Verdict:
    """Against what the values of the reference's seeds (one or several each) allow."""
    limit = noise_limit(reference, seeds)
    if limit is None:
        return _verdict(name, arm, difference, None, f"{text}; not judged: the noise floor needs {FEWEST_SEEDS} seeds of the reference")
    in_deviations = f"; {difference / deviation(reference):.1f} standard deviations" if deviation(reference) else ""
    return _verdict(name, arm, difference, limit, f"{text}, against what the reference's seeds explain{in_deviations}")


def _windows(run: Run, steps: int) -> list[float]:
    """Mean loss of each tenth of the steps."""
    window = max(1, round(LAST_PART * steps))
    return [float(np.nanmean(run.loss[end - window : end])) for end in range(window, steps + 1, window)]


def _parted(arm: Arm, pairs: list[Pair], reference: Arm) -> Verdict:
    """The mean difference over windows of steps, the worst window: noise of single steps averages out, parting does not."""
    steps = min(pair.steps for pair in pairs)
    apart = np.array([_windows(pair.other, steps) for pair in pairs]) - np.array([_windows(pair.reference, steps) for pair in pairs])
    seeds = [_windows(run, steps) for run in reference.runs.values() if len(run.loss) >= steps]
    text = "largest mean difference of the loss over a tenth of the steps (nats)"
    return _judged_by_noise("every loss", arm, float(np.abs(apart.mean(axis=0)).max()), seeds, len(pairs), text)


def _final(arm: Arm, pairs: list[Pair], reference: Arm, exact: bool, *, judged: bool) -> Verdict:
    differences = [final_loss(pair.other, pair.steps) - final_loss(pair.reference, pair.steps) for pair in pairs]
    value = abs(float(np.mean(differences)))
    text = f"difference of the mean loss over the last {LAST_PART:.0%} of the steps (nats)"
    if not judged:
        return _verdict("final loss", arm, value, None, text + "; not judged: other data")
    if exact:
        level = abs(float(np.mean([final_loss(pair.reference, pair.steps) for pair in pairs])))
        return _verdict("final loss", arm, value, EXACT_LOSS * level, text)
    steps = min(pair.steps for pair in pairs)
    seeds = [final_loss(run, steps) for run in reference.runs.values() if len(run.loss) >= steps]
    return _judged_by_noise("final loss", arm, value, seeds, len(pairs), text)


def _held_out(arm: Arm, pairs: list[Pair], reference: Arm, exact: bool) -> Verdict:
    """At equal real tokens: the same documents a step make that the same iteration."""

    def at(run: Run, iteration: int) -> float:
        return float(run.held_out_loss[run.held_out_iteration == iteration][0])

    common = [(pair, np.intersect1d(pair.reference.held_out_iteration, pair.other.held_out_iteration)) for pair in pairs]
    if not all(len(iterations) for _, iterations in common):
        return Verdict(name="held-out loss", arm=arm.name, holds=None, value=None, threshold=None, text="not both were evaluated at one iteration")
    differences = [at(pair.other, iterations[-1]) - at(pair.reference, iterations[-1]) for pair, iterations in common]
    value, text = abs(float(np.mean(differences))), f"difference of the held-out loss at equal real tokens, iteration {common[0][1][-1]} (nats)"
    if exact:
        return _verdict("held-out loss", arm, value, EXACT_LOSS * abs(at(common[0][0].reference, common[0][1][-1])), text)
    evaluated = [run for run in reference.runs.values() if common[0][1][-1] in run.held_out_iteration]
    return _judged_by_noise("held-out loss", arm, value, [at(run, common[0][1][-1]) for run in evaluated], len(pairs), text)


def _correlation(arm: Arm, pairs: list[Pair]) -> Verdict:
    def shortfall(pair: Pair) -> float:
        mine, theirs = pair.reference.loss[: pair.steps], pair.other.loss[: pair.steps]
        both = np.isfinite(mine) & np.isfinite(theirs)
        if both.sum() < 3 or not np.std(mine[both]) or not np.std(theirs[both]):
            return math.nan
        return 1 - float(np.corrcoef(mine[both], theirs[both])[0, 1])

    value = _over(pairs, shortfall)
    if math.isnan(value):
        return Verdict(name="correlation", arm=arm.name, holds=None, value=None, threshold=None, text="too few different losses")
    return Verdict(
        name="correlation", arm=arm.name, holds=bool(1 - value >= LEAST_CORRELATION), value=1 - value, threshold=LEAST_CORRELATION,
        text="smallest correlation of the losses",
    )  # fmt: skip


def _norms(arm: Arm, pairs: list[Pair]) -> Verdict:
    def ratio(pair: Pair) -> float:
        relative = pair.relative("grad_norm")
        return float(np.exp(abs(np.median(np.log1p(relative))))) if len(relative) else math.nan

    return _verdict("gradient norm", arm, _over(pairs, ratio), MOST_NORM_RATIO, "median ratio of the gradient norms, the larger over the smaller")


def _drops(arm: Arm, pairs: list[Pair], other_data: bool) -> Verdict:
    names = [name for name in pairs[0].reference.policy_counts if not (other_data and name == "split-documents")]
    differing = sorted(
        {name for pair in pairs if len(pair.reference.iteration) == len(pair.other.iteration) for name in names
         if pair.reference.policy_counts[name] != pair.other.policy_counts[name]}
    )  # fmt: skip
    text = f"differ in {', '.join(differing)}" if differing else "split, truncated, dropped and empty documents are the same"
    return Verdict(name="left out", arm=arm.name, holds=not differing, value=len(differing), threshold=0, text=text)


def _speed(arm: Arm, pairs: list[Pair], peak_tflops: float | None) -> list[Verdict]:
    """Reported: how fast the arms were, as ratios of medians over steady steps, the median over seeds."""

    def ratio(name: str) -> float:
        return float(np.median([pair.other.rate(getattr(pair.other, name)) / pair.reference.rate(getattr(pair.reference, name)) for pair in pairs]))

    speed, used = ratio("tokens"), ""
    if peak_tflops:
        shares = (np.median([run.rate(run.operations) / run.ranks for run in of]) / peak_tflops / 1e12 for of in zip(*((p.other, p.reference) for p in pairs)))
        used = "MFU " + " to ".join(f"{share:.1%}" for share in shares) + ", "
    found = [
        Verdict(name="real tokens a second", arm=arm.name, holds=None, value=speed, threshold=None, text=f"times the reference's ({_rates(pairs, 'tokens')})"),
        Verdict(name="rows a second", arm=arm.name, holds=None, value=ratio("slots"), threshold=None, text=f"times the reference's ({_rates(pairs, 'slots')})"),
        Verdict(name="operations a second", arm=arm.name, holds=None, threshold=None,
                value=ratio("operations") * pairs[0].reference.ranks / pairs[0].other.ranks,
                text=f"a rank, times the reference's ({used}{_rates(pairs, 'operations', 1e12)} TFLOP/s a rank; attention by squared lengths)"),
    ]  # fmt: skip
    later = _held_out_at_equal_time(arm, pairs)
    return [*found, later] if later else found


def _rates(pairs: list[Pair], name: str, unit: float = 1.0) -> str:
    mine, theirs = (
        float(np.median([run.rate(getattr(run, name)) / (run.ranks if unit != 1.0 else 1) for run in runs])) / unit
        for runs in ([pair.other for pair in pairs], [pair.reference for pair in pairs])
    )
    return f"{mine:,.3g} to {theirs:,.3g}" if unit != 1.0 else f"{mine:,.0f} to {theirs:,.0f}"


def _held_out_at_equal_time(arm: Arm, pairs: list[Pair]) -> Verdict | None:
    """Held-out loss when the faster of the two runs had ended, interpolated in time."""
    differences = []
    for pair in pairs:
        curves = []
        for run in (pair.reference, pair.other):
            clock = np.cumsum(run.seconds)
            known = np.isin(run.iteration, run.held_out_iteration)
            if known.sum() < 2:
                return None
            curves.append((clock[known], run.held_out_loss[np.isin(run.held_out_iteration, run.iteration)]))
        end = min(clock[-1] for clock, _ in curves)
        if any(clock[0] > end for clock, _ in curves):
            return None
        mine, theirs = (float(np.interp(end, clock, loss)) for clock, loss in curves)
        differences.append(theirs - mine)
    text = "held-out loss at equal wall time, minus the reference's (nats; negative is better)"
    return Verdict(name="held-out loss, equal time", arm=arm.name, holds=None, value=float(np.mean(differences)), threshold=None, text=text)


def _whole(arm: Arm, run: Run) -> list[Verdict]:
    """Of each run alone: no step is missing, and where it was resumed the loss goes on."""
    label = f"{arm.name}, seed {run.seed}" if len(arm.runs) > 1 else arm.name
    missing = int(run.iteration[-1]) - len(run.iteration)
    found = []
    wanted = run.setting("training.train_iters")
    if wanted and run.iteration[-1] < wanted:
        text = f"{run.iteration[-1]} of {wanted} steps are recorded: the run is going on, was ended, or its record is cut"
        found.append(Verdict(name="unfinished", arm=label, holds=None, value=int(run.iteration[-1]), threshold=None, text=text))
    if missing or run.about.get("resumed"):
        found.append(Verdict(name="steps", arm=label, holds=missing == 0, value=missing, threshold=0, text="steps missing in the record"))
    for at in run.about.get("resumed", []):
        jump = _jump(run, at)
        text = f"change of the loss at the resume after iteration {at}, in standard deviations of the changes around it"
        found.append(Verdict(name="resume", arm=label, holds=None if jump is None else jump <= MOST_JUMP, value=jump, threshold=MOST_JUMP, text=text))
    return found


def _jump(run: Run, at: int) -> float | None:
    where = np.flatnonzero(run.iteration == at)
    if not len(where) or where[0] + 1 >= len(run.loss):
        return None
    first = max(0, int(where[0]) - AROUND)
    changes = np.diff(run.loss[first : int(where[0]) + 2 + AROUND])
    here = changes[int(where[0]) - first]
    others = np.delete(changes, int(where[0]) - first)
    spread = float(np.nanstd(others)) if len(others) >= 4 else 0.0
    return abs(float(here) - float(np.nanmean(others))) / spread if spread and math.isfinite(here) else None
