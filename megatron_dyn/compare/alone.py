# SPDX-License-Identifier: Apache-2.0
"""Of each run alone: no step is missing, it is finished, and where it was resumed the loss goes on."""

import math

import numpy as np

from megatron_dyn.compare.arms import Arm
from megatron_dyn.compare.runs import Run
from megatron_dyn.compare.verdicts import Verdict

MOST_JUMP = 6.0
"""Largest change of the loss at a resume, in standard deviations of the changes around it."""
AROUND = 25
"""Steps looked at on each side of a resume."""


def check_alone(arm: Arm, run: Run) -> list[Verdict]:
    """What is wrong with one run."""

    def verdict(name: str, holds: bool | None, value, threshold, text: str) -> Verdict:
        seed = run.seed if len(arm.runs) > 1 else None
        return Verdict(name=name, arm=arm.name, seed=seed, holds=holds, value=value, threshold=threshold, text=text)

    missing = int(run.iteration[-1]) - len(run.iteration)
    found = []
    wanted = run.setting("training.train_iters")
    if wanted and run.iteration[-1] < wanted:
        text = f"{run.iteration[-1]} of {wanted} steps are recorded: the run is going on, was ended, or its record is cut"
        found.append(verdict("unfinished", None, int(run.iteration[-1]), None, text))
    if missing or run.about.get("resumed"):
        found.append(verdict("steps", missing == 0, missing, 0, "steps missing in the record"))
    for at in run.about.get("resumed", []):
        jump = _jump(run, at)
        text = f"change of the loss at the resume after iteration {at}, in standard deviations of the changes around it"
        found.append(verdict("resume", None if jump is None else jump <= MOST_JUMP, jump, MOST_JUMP, text))
    return found


def _jump(run: Run, at: int) -> float | None:
    where = np.flatnonzero(run.iteration == at)
    if not len(where) or where[0] + 1 >= len(run.loss):
        return None
    first = max(0, int(where[0]) - AROUND)
    changes = np.diff(run.loss[first : int(where[0]) + 2 + AROUND])
    here = changes[int(where[0]) - first]
    others = np.delete(changes, int(where[0]) - first)
    others = others[np.isfinite(others)]
    spread = float(np.std(others)) if len(others) >= 4 else 0.0
    return abs(float(here) - float(np.mean(others))) / spread if spread and math.isfinite(here) else None
