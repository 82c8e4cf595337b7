# SPDX-License-Identifier: Apache-2.0
"""Runs beside each other: do they train alike, and how much faster is one than the other."""

from megatron_dyn.compare.arms import Arm, arms_of
from megatron_dyn.compare.comparison import Comparison, compare_arms, compare_runs
from megatron_dyn.compare.runs import CompareError, Run, read_run
from megatron_dyn.compare.verdicts import Verdict

__all__ = ["Arm", "CompareError", "Comparison", "Run", "Verdict", "arms_of", "compare_arms", "compare_runs", "read_run"]
