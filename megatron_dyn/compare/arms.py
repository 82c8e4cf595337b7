# SPDX-License-Identifier: Apache-2.0
"""Runs -> arms: runs that differ in nothing but their seed are one arm; an arm is called by what it does differently."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dyn.compare.runs import CompareError, Run

WHERE_AND_WHEN = {
    "training.seed", "logging", "checkpoint", "parallel.distributed_timeout_minutes", "parallel.data_timeout_secs", "data.prefetch_steps",
    "training.exit_interval",
}  # fmt: skip
"""Settings that make no other arm: where things are written, how long is waited."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Arm:
    """One way to train, with several seeds."""

    name: str
    runs: dict[int, Run]
    """By seed."""

    @property
    def settings(self) -> dict[str, object]:
        """Of any of its runs; what makes no other arm is left out."""
        return deciding_settings(next(iter(self.runs.values())))


def deciding_settings(run: Run) -> dict[str, object]:
    """Settings by dotted name, without where and when."""
    return {
        f"{section}.{name}": value
        for section, values in run.about["settings"].items()
        if isinstance(values, dict) and section not in WHERE_AND_WHEN
        for name, value in values.items()
        if f"{section}.{name}" not in WHERE_AND_WHEN
    }


def arms_of(runs: Sequence[Run], reference: str | Path | None = None) -> list[Arm]:
    """Group runs; the first arm is the one that the others are compared with.

    Args:
        reference: folder or name of a run of the reference arm; the first run by default.

    Raises:
        CompareError: fewer than two arms, two runs of one arm with one seed, or no such reference.
    """
    groups: list[list[Run]] = []
    for run in runs:
        same = next((group for group in groups if _identity(group[0]) == _identity(run)), None)
        groups.append([run]) if same is None else same.append(run)
    first = runs[0]
    for run in runs:
        other = [name for name, value in run.about["settings"]["model"].items() if value != first.about["settings"]["model"].get(name)]
        if other:
            raise CompareError(
                f"{run.folder} and {first.folder} are other models ({', '.join(other)}): losses and speeds of two models say nothing of each other; "
                "compare runs of one model"
            )
    for group in groups:
        for run in group:
            twin = next((other for other in group if other is not run and other.seed == run.seed), None)
            if twin is not None:
                raise CompareError(
                    f"{run.folder} and {twin.folder} have the same settings and the same seed {run.seed}: they are one run made twice, "
                    "and would count as two; give another seed, leave one out, or name the arms: NAME=FOLDER"
                )
    if len(groups) < 2:
        raise CompareError(
            "runs of one arm alone, which differ in their seed at most: there is nothing to compare; give two runs or more that do something "
            "differently, or name them to see them side by side: NAME=FOLDER"
        )
    if reference is not None:
        wanted = [group for group in groups if any(str(reference) in (run.name, str(run.folder)) or Path(reference) == run.folder for run in group)]
        if not wanted:
            raise CompareError(f"--reference {reference} is none of the runs: {', '.join(run.name for run in runs)}")
        groups.remove(wanted[0])
        groups.insert(0, wanted[0])
    names = _names(groups)
    return [Arm(name=name, runs={run.seed: run for run in group}) for name, group in zip(names, groups)]


HARMLESS = {
    "data.microbatching", "data.documents_per_microbatch", "data.max_tokens_per_microbatch", "data.token_bucket", "data.cost_file",
    "data.max_documents_per_microbatch", "data.check_batch_content", "data.data_broadcast", "training.bf16", "training.log_interval",
}  # fmt: skip
"""Settings of data and training that say how a step is computed and not what is learnt from it."""


def differing_settings(arms: Sequence[Arm]) -> list[tuple[str, ...]]:
    """Setting and its value in each arm, where they differ."""
    settings = [arm.settings for arm in arms]
    names = sorted({name for of in settings for name in of if any(of.get(name) != other.get(name) for other in settings)})
    return [(name, *(str(of.get(name)) for of in settings)) for name in names]


def other_training(reference: Arm, arm: Arm) -> list[str]:
    """Settings by which the arm learns something else than the reference, whatever its grouping: optimizer, schedule, data."""
    names = [name for name, *_ in differing_settings([reference, arm])]
    return [name for name in names if name.split(".")[0] in ("optimizer", "training", "data") and name not in HARMLESS]


def _identity(run: Run) -> tuple:
    return (run.arm, None if run.arm else deciding_settings(run))


def _names(groups: list[list[Run]]) -> list[str]:
    """What differs between arms, in words of flags; folder names where that would be long or not unique. Given names go first."""
    names = [group[0].arm or told for group, told in zip(groups, _told(groups))]
    return names if len(set(names)) == len(names) else [group[0].arm or group[0].name for group in groups]


def _told(groups: list[list[Run]]) -> list[str]:
    settings = [deciding_settings(group[0]) for group in groups]
    keys = sorted({key for of in settings for key in of if any(of.get(key) != other.get(key) for other in settings)})
    if len(keys) == 1:
        return [str(of.get(keys[0])) for of in settings]
    if "data.microbatching" in keys and len({of.get("data.microbatching") for of in settings}) == len(groups):
        return [str(of["data.microbatching"]) for of in settings]
    return [group[0].name for group in groups]
