# SPDX-License-Identifier: Apache-2.0
"""Golden values: the metrics that a test case is known to give, in the JSON form of Megatron-LM's functional tests.

    {"lm loss": {"start_step": 1, "end_step": 6, "step_interval": 1, "values": {"1": 4.12345, "2": 4.01234, ...}}, ...}

They are read from a run's TensorBoard events, as Megatron-LM's scripts do, and rounded as theirs are: to 5 decimals (learning rates, which are
small, to six digits).

Two comparisons. *Approximate* is relative, 5 percent unless a case says otherwise; it is for other processors and other builds. *Exact* asks
for what a run repeats on the same machine, up to what differs between machines (docs/functional_tests.md). Both want every metric at every
step: one missing or not finite, on either side, is a failure.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DECIMALS = 5
UNIT = 10.0**-DECIMALS
SMALL = 0.01  # what is below keeps six digits: 5 decimals would leave fewer than four
APPROXIMATE = 0.05  # relative
MEDIAN_METRICS = ("iteration-time",)  # the median over the steps is compared, and approximately only


class GoldenError(Exception):
    """A golden file that is absent or cannot be used; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric of a run: iteration -> value. None or NaN stands for a step without a number."""

    values: Mapping[int, float | None]
    step_interval: int = 1

    def as_json(self) -> dict:
        """The metric in Megatron-LM's form."""
        steps = sorted(self.values)
        return {
            "start_step": steps[0],
            "end_step": steps[-1],
            "step_interval": self.step_interval,
            "values": {str(step): self.values[step] for step in steps},
        }


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a value may be from the golden one, relative to that (and a unit of the last digit kept, unless 0)."""

    exact: float
    approximate: float = APPROXIMATE


TOLERANCES = {
    # fp32 on other processors differs by 1e-8 (loss) and 3e-7 (norm): docs/functional_tests.md.
    "lm loss": Tolerance(exact=1e-6),
    "lm loss validation": Tolerance(exact=1e-6),
    "grad-norm": Tolerance(exact=1e-6),
    "learning-rate": Tolerance(exact=1e-5, approximate=1e-5),
    "iteration-time": Tolerance(exact=APPROXIMATE),
    # What is planned is the same everywhere.
    "num-tokens": Tolerance(exact=0.0, approximate=0.0),
    "microbatches": Tolerance(exact=0.0, approximate=0.0),
    "T/max": Tolerance(exact=0.0, approximate=0.0),
}
"""The metrics that golden files may hold; a case may loosen them."""


def rounded(value: float | None) -> float | None:
    """To 5 decimals, or to six digits where that keeps more; what is not finite becomes None (JSON has no NaN)."""
    if value is None or not math.isfinite(value):
        return None
    if abs(value) < SMALL:
        return float(f"{value:.6g}")
    return round(value, DECIMALS)


def read_tensorboard(folder: Path, *, run: int | None = None) -> dict[str, dict[int, float]]:
    """Tag -> iteration -> value of a TensorBoard folder.

    Args:
        folder: holds one file of events a process that wrote there.
        run: which file, from 0 in the order they were written (1 is what a resumed run wrote); None joins all, later ones winning.
    """
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    files = sorted(folder.glob("events*tfevents*"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    found: dict[str, dict[int, float]] = {}
    for file in files if run is None else files[run : run + 1]:
        events = EventAccumulator(str(file), size_guidance={SCALARS: 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return found


def as_series(scalars: Mapping[str, Mapping[int, float]], metrics: Iterable[str]) -> dict[str, Series]:
    """The metrics named, rounded; those without any value are left out."""
    found = {}
    for metric in metrics:
        values = {step: rounded(value) for step, value in sorted(scalars.get(metric, {}).items())}
        if values:
            gaps = {after - before for before, after in zip(list(values), list(values)[1:])}
            found[metric] = Series(values=values, step_interval=min(gaps, default=1))
    return found


def read_golden(path: Path) -> dict[str, Series]:
    """Reads a golden file.

    Raises:
        GoldenError: it is absent, is not of the form, or contradicts itself.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = {}
        for metric, entry in content.items():
            values = {int(step): value for step, value in entry["values"].items()}
            found[metric] = Series(values=values, step_interval=int(entry["step_interval"]))
            if (entry["start_step"], entry["end_step"]) != (min(values), max(values)):
                raise ValueError(f"{metric}: start_step and end_step are not those of its values")
    except FileNotFoundError:
        raise GoldenError(f"there are no golden values at {path}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"{path} is not a file of golden values: {type(error).__name__}: {error}") from error
    return found


def write_golden(path: Path, series: Mapping[str, Series]) -> None:
    """Writes a golden file.

    Raises:
        GoldenError: a value is not a finite number: such a file would fail every run.
    """
    for metric, one in series.items():
        broken = [step for step, value in one.values.items() if not _is_number(value)]
        if broken or not one.values:
            raise GoldenError(f"{metric} has no finite value at steps {broken or '(any)'}: not written to {path}")
    path.write_text(json.dumps({metric: one.as_json() for metric, one in series.items()}, indent=2) + "\n", encoding="utf-8")


def compare(golden: Mapping[str, Series], actual: Mapping[str, Series], tolerances: Mapping[str, Tolerance], *, exact: bool) -> list[str]:
    """What is wrong with a run, a line a metric; nothing when it agrees.

    Args:
        golden: what is expected.
        actual: what the run gave.
        tolerances: of each metric that is compared; every one of them must be on both sides.
        exact: compare exactly and approximately, not only approximately.
    """
    problems = []
    for metric, tolerance in tolerances.items():
        sides = [name for name, side in (("golden values", golden), ("run", actual)) if metric not in side]
        if sides:
            problems.append(f"{metric}: missing in the {' and in the '.join(sides)}")
        else:
            problems += [f"{metric}: {problem}" for problem in _problems(metric, golden[metric], actual[metric], tolerance, exact)]
    return problems


def _problems(metric: str, golden: Series, actual: Series, tolerance: Tolerance, exact: bool) -> list[str]:
    problems = []
    for name, side in (("golden values", golden), ("run", actual)):
        if broken := [step for step, value in side.values.items() if not _is_number(value)]:
            problems.append(f"no finite number in the {name} at steps {broken}")
    if lacking := sorted(golden.values.keys() - actual.values.keys()):
        problems.append(f"the run lacks steps {lacking}")
    if surplus := sorted(actual.values.keys() - golden.values.keys()):
        problems.append(f"the golden values lack steps {surplus}")
    if not problems and golden.step_interval != actual.step_interval:
        problems.append(f"step_interval {actual.step_interval}, golden {golden.step_interval}")
    if problems:
        return problems
    if metric in MEDIAN_METRICS:
        expected, found = (statistics.median(side.values.values()) for side in (golden, actual))
        return [] if _near(found, expected, tolerance.approximate) else [f"median {found}, golden {expected} ({_relative(found, expected)})"]
    wanted = min(tolerance.exact, tolerance.approximate) if exact else tolerance.approximate
    off = [step for step, expected in golden.values.items() if not _near(actual.values[step], expected, wanted)]
    if not off:
        return []
    step = max(off, key=lambda step: abs(actual.values[step] - golden.values[step]))
    found, expected = actual.values[step], golden.values[step]
    return [
        f"{len(off)} of {len(golden.values)} steps differ by more than {wanted:g} (relative), first at step {min(off)}, "
        f"most at step {step}: {found}, golden {expected} ({_relative(found, expected)})"
    ]


def changes(old: Mapping[str, Series], new: Mapping[str, Series]) -> list[tuple[str, int, float | None, float | None]]:
    """(metric, step, old value, new value) wherever two files differ; None where one has no value."""
    found = []
    for metric in [*old, *(name for name in new if name not in old)]:
        before, after = (side[metric].values if metric in side else {} for side in (old, new))
        for step in sorted({*before, *after}):
            if before.get(step) != after.get(step) or step not in before or step not in after:
                found.append((metric, step, before.get(step), after.get(step)))
    return found


def describe_changes(old: Mapping[str, Series], new: Mapping[str, Series]) -> str:
    """A table of `changes`, to be read before it is accepted, and what stays."""
    found = changes(old, new)
    lines = [f"  {'metric':<20} {'step':>5} {'old':>14} {'new':>14}  change"] if found else []
    for metric, step, before, after in found:
        change = "" if before is None or after is None else _relative(after, before)
        lines.append(f"  {metric:<20} {step:>5} {_text(before):>14} {_text(after):>14}  {change}")
    total = len({(metric, step) for side in (old, new) for metric, one in side.items() for step in one.values})
    return "\n".join([*lines, f"  {len(found)} of {total} values change"])


def _near(found: float, expected: float, relative: float) -> bool:
    # Both are rounded, so values which are closer than anything can tell may still be a unit of the last digit apart.
    rounding = 0.0 if relative == 0 or abs(expected) < SMALL else UNIT * 1.001
    return abs(found - expected) <= relative * abs(expected) + rounding


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _relative(found: float, expected: float) -> str:
    return f"{(found - expected) / abs(expected):+.2e}" if expected else "from 0"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.10g}"
