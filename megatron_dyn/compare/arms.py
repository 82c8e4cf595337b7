# SPDX-License-Identifier: Apache-2.0
"""Runs -> arms: runs that differ in nothing but their seed are one arm; an arm is called by what it does differently."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dyn.compare.runs import CompareError, Run

WHERE_AND_WHEN = {
    "training.seed", "logging", "checkpoint", "parallel.distributed_timeout_minutes", "parallel.data_timeout_secs", "parallel.stall_timeout",
    "parallel.heartbeat_timeout", "data.prefetch_steps", "training.exit_interval",
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
        reference: name of the reference arm, or folder or name of a run of it, or NAME=FOLDER of one; the first run by default.

    Raises:
        CompareError: fewer than two arms, one folder twice, two runs of one arm with one seed, runs of one name with other settings,
            two arms that would have one name, or no such reference.
    """
    groups: list[list[Run]] = []
    for run in runs:
        same = next((group for group in groups if _identity(group[0]) == _identity(run)), None)
        groups.append([run]) if same is None else same.append(run)
    first = runs[0]
    for number, run in enumerate(runs):
        _refuse_the_same_folder(run, runs[:number])
        other = [name for name, value in run.about["settings"]["model"].items() if value != first.about["settings"]["model"].get(name)]
        if other:
            raise CompareError(
                f"{run.folder} and {first.folder} are other models ({', '.join(other)}): losses and speeds of two models say nothing of each other; "
                "compare runs of one model"
            )
    for group in groups:
        _refuse_what_is_no_arm(group)
    if len(groups) < 2:
        raise CompareError(
            "runs of one arm alone, which differ in their seed at most: there is nothing to compare; give two runs or more that do something "
            "differently, or name them to see them side by side: NAME=FOLDER"
        )
    names = _names(groups)
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise CompareError(f"two arms would be called {twice!r}, and their results taken for each other's; name them: NAME=FOLDER")
    arms = [Arm(name=name, runs={run.seed: run for run in group}) for name, group in zip(names, groups)]
    if reference is not None:
        word = str(reference)
        wanted = next((arm for arm in arms if arm.name == word), None) or next((arm for arm in arms if _holds_run(arm, word)), None)
        if wanted is None:
            raise CompareError(
                f"--reference {reference} is none of the arms ({', '.join(names)}) and none of the runs ({', '.join(run.name for run in runs)})"
            )
        arms.sort(key=lambda arm: arm is not wanted)  # the others keep their order
    return arms


def split_word(word: str) -> tuple[str | None, Path]:
    """NAME=FOLDER or FOLDER -> the arm's name, if one is given, and the folder. A folder that exists may have a "=" in its own name.

    Raises:
        CompareError: an empty name or folder.
    """
    name, equals, folder = word.partition("=")
    if not equals or Path(word).exists():
        return None, Path(word)
    if not name.strip() or not folder:
        raise CompareError(f"{word!r}: give NAME=FOLDER, both not empty, or a folder alone")
    return name, Path(folder)


def _holds_run(arm: Arm, word: str) -> bool:
    name, folder = split_word(word)
    return any(
        (name is None and word == run.name) or ((name is None or name == arm.name) and folder.resolve() == run.folder.resolve())
        for run in arm.runs.values()
    )


def _refuse_the_same_folder(run: Run, before: Sequence[Run]) -> None:
    if any(other.folder.resolve() == run.folder.resolve() for other in before):
        raise CompareError(f"{run.folder} is given twice: a run always agrees with itself, which says nothing; leave it out once")


def _refuse_what_is_no_arm(group: list[Run]) -> None:
    """Runs of one arm differ in their seed, and in nothing else."""
    first = group[0]
    for number, run in enumerate(group):
        mine, theirs = deciding_settings(run), deciding_settings(first)
        other = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if other:
            raise CompareError(
                f"{run.folder} and {first.folder} are both called {run.arm!r}, and differ in {', '.join(other)}: they would be taken for "
                "seeds of one arm; give them two names"
            )
        twin = next((earlier for earlier in group[:number] if earlier.seed == run.seed), None)
        if twin is not None and run.arm:
            raise CompareError(
                f"{run.folder} and {twin.folder} are both called {run.arm!r}, and both have the seed {run.seed}: of an arm a seed counts once; "
                "give them two names, or leave one out"
            )
        if twin is not None:
            raise CompareError(
                f"{run.folder} and {twin.folder} have the same settings and the same seed {run.seed}: they are one run made twice, "
                "and would count as two; give another seed, leave one out, or name the arms: NAME=FOLDER"
            )


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
