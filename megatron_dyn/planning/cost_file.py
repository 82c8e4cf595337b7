# SPDX-License-Identifier: Apache-2.0
"""A cost model on disk: what `python -m megatron_dyn calibrate` measured, and `--cost-file` reads."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from megatron_dyn.planning.cost import CostModel

COEFFICIENTS = ("linear", "quadratic")
POOR_FIT = 0.15
"""Worst relative error above which a fit is told to be poor."""
REMARKS = ("constant", "unit", "device", "model", "parallel", "fit", "date")


def write_cost_file(path: str | Path, cost: CostModel, **remarks: object) -> None:
    """Write the coefficients and what is worth knowing about them.

    Args:
        cost: the coefficients.
        **remarks: any of `REMARKS`, for people; they decide nothing.
    """
    unknown = set(remarks) - set(REMARKS)
    if unknown:
        raise ValueError(f"remarks {sorted(unknown)} are not among {', '.join(REMARKS)}")
    values = {name: getattr(cost, name) for name in COEFFICIENTS} | remarks
    head = "# Time of a piece of L tokens: linear * L + quadratic * L^2. Written by `python -m megatron_dyn calibrate`.\n"
    Path(path).write_text(head + yaml.safe_dump(values, sort_keys=False))


def doubts(path: str | Path, model: Mapping[str, object]) -> list[str]:
    """What speaks against using a readable file for a model: it was measured on another one, or badly.

    Args:
        model: sizes by the names the file has them under; what the file does not know is not compared.
    """
    values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    measured, quality = values.get("model"), values.get("fit")
    found = []
    if isinstance(measured, dict):
        other = [f"{name} {measured[name]} (here {model[name]})" for name in measured if name in model and measured[name] != model[name]]
        if other:
            found.append(f"{path} was measured on another model: {', '.join(other)}; microbatches are balanced by what that one costs")
    worst = quality.get("worst_relative_error") if isinstance(quality, dict) else None
    if isinstance(worst, (int, float)) and worst > POOR_FIT:
        found.append(f"{path} explains its own measurements badly (worst error {worst:.0%}); measure again on an idle machine")
    return found


def read_cost_file(path: str | Path) -> CostModel:
    """The cost model of a file.

    Raises:
        ValueError: no such file, not YAML, or without usable coefficients; the message says which.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict) or set(values) - {*COEFFICIENTS, *REMARKS} or not set(COEFFICIENTS) <= set(values):
        have = ", ".join(map(str, values)) if isinstance(values, dict) else type(values).__name__
        raise ValueError(
            f"{path} must hold {' and '.join(COEFFICIENTS)} (and at most {', '.join(REMARKS)}), not: {have}. "
            "Write it with: python -m megatron_dyn calibrate"
        )
    try:
        return CostModel(**{name: float(values[name]) for name in COEFFICIENTS})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
