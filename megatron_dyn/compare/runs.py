# SPDX-License-Identifier: Apache-2.0
"""A finished (or going) run, read back from its folder: settings from `run.json`, one row a step from `metrics.jsonl`.

Shapes: n steps, v evaluations. Values that are `null` in the file (no loss token, not finite) are NaN here.

| array                                               | shape | dtype   |
|-----------------------------------------------------|-------|---------|
| iteration, tokens, slots, squares                   | [n]   | int64   |
| loss, grad_norm, seconds                            | [n]   | float64 |
| lost                                                | [n]   | bool    |
| held_out_iteration / held_out_loss                  | [v]   | int64 / float64 |
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dyn.training.metrics import POLICY_COUNTS
from megatron_dyn.training.metrics_file import MetricsError, read_metrics
from megatron_dyn.training.run_log import RUN_FILE


class CompareError(ValueError):
    """Runs that cannot be compared; the message names the run and the way out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One run."""

    name: str
    """Its folder, as far as it differs from the others'."""
    folder: Path
    arm: str | None
    """What its arm is called, where the user says so: for runs whose settings do not tell them apart, such as two versions of the code."""
    about: dict[str, Any]
    """`run.json`."""
    iteration: np.ndarray
    loss: np.ndarray
    lost: np.ndarray
    """Steps whose loss is not finite though they had loss tokens."""
    grad_norm: np.ndarray
    seconds: np.ndarray
    """Wall time of each step."""
    tokens: np.ndarray
    """Real tokens of each step."""
    slots: np.ndarray
    """Rows computed: real tokens and padding."""
    squares: np.ndarray
    """Sum of the squared lengths that attention spans."""
    digests: list[str]
    """Stands for the documents of each step."""
    lengths: list[list[int]]
    """T of every microbatch of each step."""
    held_out_iteration: np.ndarray
    held_out_loss: np.ndarray
    held_out_seconds: np.ndarray
    policy_counts: dict[str, int] = field(default_factory=dict)
    """What the oversize policy and the filters left out or cut, over all steps."""

    def setting(self, name: str) -> Any:
        """A setting by its dotted name, such as "data.microbatching"; None where the run does not know it."""
        section, _, key = name.partition(".")
        values = self.about["settings"].get(section)
        return values.get(key) if isinstance(values, dict) else None

    @property
    def precision(self) -> str:
        """"fp32", "bf16" or "fp8"."""
        if self.setting("fp8.fp8"):
            return "fp8"
        return "bf16" if self.setting("training.bf16") else "fp32"

    @property
    def seed(self) -> int:
        return self.setting("training.seed")

    @property
    def operations(self) -> np.ndarray:
        """Floating-point operations of each step, forward and backward, attention by the squared lengths, no recomputation. [n]"""
        counted = self.about["operations"]
        return counted["linear"] * self.tokens + counted["quadratic"] * self.squares

    @property
    def ranks(self) -> int:
        sizes = self.about["parallel"]
        return sizes["TP"] * sizes["PP"] * sizes["DP"]

    def rate(self, values: np.ndarray, steps: int | None = None) -> float:
        """Something a second, steady: the median over steps of value / time, the first tenth left out.

        Args:
            values: of each step. [n]
            steps: of these first steps alone, to compare with a run that has no more.
        """
        count = min(steps or len(values), len(values))
        steady = slice(count // 10 if count >= 10 else min(1, count - 1), count)
        return float(np.median(values[steady] / self.seconds[steady]))


def read_run(folder: str | Path, name: str | None = None, arm: str | None = None) -> Run:
    """Read a run's folder.

    Args:
        folder: as named by `--run-dir`.
        name: how to call it; the folder's own name by default.
        arm: what its arm is called, see `Run`.

    Raises:
        CompareError: the folder is no run's, or was written by a version that told too little.
        MetricsError: a broken metrics file.
    """
    folder = Path(folder)
    metrics = read_metrics(folder)
    try:
        about = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CompareError(
            f"{folder}: no readable {RUN_FILE} ({error}): settings and documents are not known, so nothing can be compared; "
            "make the run again with this version"
        ) from error
    _check_about(folder / RUN_FILE, about)
    if not metrics.steps:
        raise CompareError(f"{folder}: no step was recorded, so there is nothing to compare; let the run go on first")
    try:
        return _from_records(folder, name or folder.name, arm, about, metrics.steps, metrics.validations)
    except KeyError as error:
        raise MetricsError(f"{folder}: its steps lack {error}; make the run again with this version") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise MetricsError(f"{folder}: a step holds a value of another kind than a run writes ({error}); make the run again") from error


NEEDED = {
    "settings.model": dict, "settings.data": dict, "settings.training": dict, "settings.training.seed": int, "documents.train": str,
    "operations.linear": (int, float), "operations.quadratic": (int, float), "parallel.TP": int, "parallel.PP": int, "parallel.DP": int,
}  # fmt: skip
"""What is read from `run.json`, and its kind."""


def _check_about(path: Path, about: Any) -> None:
    """Refuse a settings file of another form by name, before anything is looked up in it.

    Raises:
        CompareError: it lacks something, or holds something else there.
    """
    for dotted, kind in NEEDED.items():
        found = about
        for key in dotted.split("."):
            if not isinstance(found, dict) or key not in found:
                raise CompareError(f"{path} lacks {dotted}; it is damaged, or of another version: make the run again with this version")
            found = found[key]
        if not isinstance(found, kind):
            raise CompareError(f"{path}: {dotted} is {found!r}; it is damaged, or of another version: make the run again with this version")
    resumed = about.get("resumed", [])
    if not isinstance(resumed, list) or not all(isinstance(at, int) for at in resumed):
        raise CompareError(f"{path}: resumed is {resumed!r}, not a list of iterations; it is damaged: make the run again")


def _from_records(folder: Path, name: str, arm: str | None, about: dict, steps: list[dict], validations: list[dict]) -> Run:
    def column(key: str, dtype=np.float64) -> np.ndarray:
        return np.array([np.nan if step[key] is None else step[key] for step in steps], dtype=dtype)

    held_out = [record for record in validations if record["validation lm loss"] is not None or record.get("validation-tokens", 1)]
    held_out_loss = [np.nan if record["validation lm loss"] is None else record["validation lm loss"] for record in held_out]
    loss, loss_tokens = column("lm loss"), np.array([step.get("num-loss-tokens", 1) for step in steps])
    return Run(
        name=name,
        folder=folder,
        arm=arm,
        about=about,
        iteration=column("iteration", np.int64),
        loss=loss,
        lost=~np.isfinite(loss) & (loss_tokens > 0),
        grad_norm=column("grad-norm"),
        seconds=column("step-time"),
        tokens=column("num-tokens", np.int64),
        slots=np.array([sum(step["T"]) for step in steps], dtype=np.int64),
        squares=column("squared-tokens", np.int64),
        digests=[step["documents-digest"] for step in steps],
        lengths=[step["T"] for step in steps],
        held_out_iteration=np.array([record["iteration"] for record in held_out], dtype=np.int64),
        held_out_loss=np.array(held_out_loss, dtype=np.float64),
        held_out_seconds=np.array([record["validation-time"] for record in held_out], dtype=np.float64),
        policy_counts={key: sum(step.get(key, 0) for step in steps) for key in POLICY_COUNTS},
    )
