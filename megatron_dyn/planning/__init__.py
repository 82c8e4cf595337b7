# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents -> the plan of every optimizer step, known to every rank before the first kernel runs."""

from megatron_dyn.planning.alignment import alignment_for, document_alignment_for
from megatron_dyn.planning.config import PlanConfig, PlanError
from megatron_dyn.planning.cost import CostModel
from megatron_dyn.planning.pieces import Piece
from megatron_dyn.planning.plan import MicrobatchPlan, StepPlan, StepStats
from megatron_dyn.planning.planner import Planner
from megatron_dyn.planning.sampler import TokenBudgetBatchSampler
from megatron_dyn.planning.survey import EpochCounts

__all__ = [
    "CostModel",
    "EpochCounts",
    "MicrobatchPlan",
    "Piece",
    "PlanConfig",
    "PlanError",
    "Planner",
    "StepPlan",
    "StepStats",
    "TokenBudgetBatchSampler",
    "alignment_for",
    "document_alignment_for",
]
