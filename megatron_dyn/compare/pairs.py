# SPDX-License-Identifier: Apache-2.0
"""The runs of two arms, seed by seed, on the steps that both have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dyn.compare.arms import Arm
from megatron_dyn.compare.runs import CompareError, Run

LAST_PART = 0.1
"""Share of the steps whose mean loss is the final loss; the steps are looked at in windows of this share."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Two runs with one seed."""

    reference: Run
    other: Run

    @property
    def seed(self) -> int:
        return self.other.seed

    @property
    def steps(self) -> int:
        """That both have."""
        return min(len(self.reference.iteration), len(self.other.iteration))

    def relative(self, name: str) -> np.ndarray:
        """other / reference - 1 of each common step; infinite where one of the two is not finite, left out where both are not."""
        mine, theirs = getattr(self.reference, name)[: self.steps], getattr(self.other, name)[: self.steps]
        finite = np.isfinite(mine).astype(int) + np.isfinite(theirs)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where(finite == 1, np.inf, theirs / mine - 1)
        return found[finite > 0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """An arm and the reference, paired by seed."""

    reference: Arm
    arm: Arm
    all: list[Pair]

    @property
    def steps(self) -> int:
        """Steps that are compared: those of the pairs that are not cut short."""
        return most_common_steps([pair.steps for pair in self.all])

    @property
    def whole(self) -> list[Pair]:
        """The pairs that have these steps: what is averaged over seeds is of them."""
        return [pair for pair in self.all if pair.steps >= self.steps]

    @property
    def short(self) -> list[Pair]:
        """The others: a run that was ended early, beside seeds that were not."""
        return [pair for pair in self.all if pair.steps < self.steps]

    @property
    def unpaired(self) -> list[int]:
        """Seeds of the arm that the reference does not have."""
        return [seed for seed in self.arm.runs if seed not in self.reference.runs]

    @property
    def wanted(self) -> int:
        """Steps that the settings ask for, or that one of the runs has."""
        runs = [run for pair in self.all for run in (pair.reference, pair.other)]
        return max(max(run.setting("training.train_iters") or 0, len(run.iteration)) for run in runs)

    @property
    def reference_runs(self) -> list[Run]:
        """Of all seeds of the reference, those with the compared steps: seeds differ among them."""
        return [run for run in self.reference.runs.values() if len(run.loss) >= self.steps]


def pairs_of(reference: Arm, arm: Arm) -> Pairs:
    """Pair the runs.

    Raises:
        CompareError: no common seed.
    """
    pairs = [Pair(reference=reference.runs[seed], other=run) for seed, run in arm.runs.items() if seed in reference.runs]
    if not pairs:
        raise CompareError(
            f"{arm.name} has the seeds {sorted(arm.runs)} and {reference.name} {sorted(reference.runs)}: without a common seed they start from "
            "other weights and see other documents; give them one"
        )
    return Pairs(reference=reference, arm=arm, all=pairs)


def most_common_steps(lengths: Sequence[int]) -> int:
    """The number of steps for which (steps x runs that have them) is largest: one run cut at step 2 does not cut the others.

    Args:
        lengths: steps of each run.
    """
    ordered = sorted(lengths, reverse=True)
    return max(ordered, key=lambda steps: steps * sum(length >= steps for length in ordered))


def finite_mean(values: np.ndarray) -> float:
    """Mean of what is finite; NaN where nothing is."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def final_loss(run: Run, steps: int | None = None) -> float:
    """Mean loss of the last part of the steps."""
    loss = run.loss[: steps or len(run.loss)]
    return finite_mean(loss[-window_of(len(loss)) :])


def window_of(steps: int) -> int:
    """Steps of a window."""
    return max(1, round(LAST_PART * steps))


def window_ends(steps: int) -> list[int]:
    """Each window is the steps before one of these. [w]"""
    window = window_of(steps)
    return list(range(window, steps + 1, window))


def window_means(run: Run, steps: int) -> list[float]:
    """Mean loss of each window. [w]"""
    window = window_of(steps)
    return [finite_mean(run.loss[end - window : end]) for end in window_ends(steps)]


def window_differences(pairs: Pairs) -> np.ndarray:
    """Of the whole pairs, other minus reference of each window, averaged over the seeds. [w]"""
    steps = pairs.steps
    apart = [np.subtract(window_means(pair.other, steps), window_means(pair.reference, steps)) for pair in pairs.whole]
    return np.mean(apart, axis=0)
