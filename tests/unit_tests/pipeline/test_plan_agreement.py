# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold different plans of a step hear of it on every rank, with the first field that differs, over TP, PP and DP at once."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_dyn.pipeline import plan_agreement
from megatron_dyn.pipeline.agreement import AgreementError, LostRankError, PlanDisagreement
from megatron_dyn.pipeline.plan_agreement import Held, PlanAgreement, plan_constants
from megatron_dyn.planning import PlanConfig, Planner

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "functional_tests"))
from launch import launch, outcomes  # noqa: E402

LENGTHS = np.array([9, 6, 5, 3, 1, 3, 8, 7, 2, 12, 4, 6])
SETTINGS = dict(max_tokens_per_microbatch=16, global_batch_size=6, data_parallel_size=2, alignment=2, seed=1)
LIMIT_SECS = 5.0
WORLD = 4  # two data-parallel ranks of two ranks each


def planner(lengths=LENGTHS, **changes) -> Planner:
    return Planner(lengths, PlanConfig(**SETTINGS | changes))


def agreement_of(own: Planner, rank: int, *, group=None, code_version="1 (abc)", schedule=None, **options) -> PlanAgreement:
    constants = plan_constants(own, code_version=code_version, schedule=schedule or {"pipeline_model_parallel_size": 1})
    return PlanAgreement(constants, data_parallel_rank=rank // 2, data_parallel_size=2, group=group, **options)


def with_T(plan, data_parallel_rank: int, index: int, T: int):
    """The plan with another T in one microbatch, and its digest as it was: as a fault in the planner or in memory would leave it."""
    parts = [list(part) for part in plan.microbatches]
    parts[data_parallel_rank][index] = dataclasses.replace(parts[data_parallel_rank][index], T=T)
    return dataclasses.replace(plan, microbatches=tuple(map(tuple, parts)))


def with_one_microbatch_less(plan):
    return dataclasses.replace(plan, microbatches=tuple(part[:-1] for part in plan.microbatches))


def with_other_documents(plan):
    parts = [list(part) for part in plan.microbatches]
    first, second = parts[1][0], parts[1][1]
    parts[1][0] = dataclasses.replace(first, pieces=second.pieces)
    return dataclasses.replace(plan, microbatches=tuple(map(tuple, parts)), digest="another")


def own_case(name: str):
    """What the rank that differs holds: (agreement's planner and options, plan)."""
    if name == "seed":
        other = planner(seed=2)
    elif name == "budget":
        other = planner(max_tokens_per_microbatch=14)
    elif name == "length":
        changed = LENGTHS.copy()
        changed[3] += 1
        other = planner(changed)
    else:
        other = planner()
    options = {"code": {"code_version": "1 (def)"}, "schedule": {"schedule": {"pipeline_model_parallel_size": 2}}}.get(name, {})
    plan = other.plan(1 if name == "step" else 0)
    plan = {"T": lambda: with_T(plan, 1, 1, 64), "K": lambda: with_one_microbatch_less(plan), "documents": lambda: with_other_documents(plan)}.get(
        name, lambda: plan
    )()
    return other, options, plan


TOLD = {
    "seed": "seed: 1 on ranks 0-2, 2 on rank 3",
    "budget": "max_tokens_per_microbatch: 16 on ranks 0-2, 14 on rank 3",
    "length": "corpus fingerprint: ",
    "code": "code version: 1 (abc) on ranks 0-2, 1 (def) on rank 3",
    "schedule": "pipeline_model_parallel_size: 1 on ranks 0-2, 2 on rank 3",
    "step": "step of the plan: 0 (epoch 0) on ranks 0-2, 1 (epoch 0) on rank 3",
    "K": "K (microbatches of each data-parallel rank): ",
    "T": "T of microbatch 1 of data-parallel rank 1: ",
    "documents": "documents of microbatch 0 of data-parallel rank 1: ",
}


def disagree_one_at_a_time(rank: int, world: int, group_of=lambda rank: None) -> dict:
    """Every case in one job; for each: (type, message, seconds), None where this rank noticed nothing."""
    group = group_of(rank)
    told = {}
    for name in TOLD:
        own, options, plan = own_case(name if rank == 3 else "nothing")
        agreement = agreement_of(own, rank, group=group, **options)
        began = time.monotonic()
        try:
            agreement.check("step 7", Held(plan=plan))
            told[name] = None
        except AgreementError as error:
            told[name] = type(error).__name__, str(error), time.monotonic() - began
        dist.barrier()
    return told


def test_each_disagreement_raises_on_every_rank_and_names_the_first_field_that_differs():
    assert len(planner().plan(0).microbatches[1]) >= 2
    for told in launch(WORLD, disagree_one_at_a_time):
        for name, text in TOLD.items():
            kind, message, seconds = told[name]
            assert kind == "PlanDisagreement"
            assert message.startswith(f"the ranks disagree on step 7: {text}"), message
            assert " on ranks 0-2, " in message and " on rank 3. " in message
            assert seconds < LIMIT_SECS


def test_mutant_a_comparison_inside_the_tensor_parallel_groups_only_is_noticed():
    """Ranks 0 and 1 are one TP group, 2 and 3 the other: K and T must be compared over data-parallel ranks as well."""

    def in_my_group(rank):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        return groups[rank // 2]

    def job(rank, world):
        return disagree_one_at_a_time(rank, world, in_my_group)

    first, _, third, _ = launch(WORLD, job)
    assert all(first[name] is None and third[name] is not None for name in TOLD)


def test_mutant_a_digest_that_leaves_T_out_is_noticed(monkeypatch):
    lengths = plan_agreement._lengths
    monkeypatch.setattr(plan_agreement, "_lengths", lambda plan: np.zeros_like(lengths(plan)))
    for told in launch(WORLD, disagree_one_at_a_time):
        assert told["T"] is None and told["documents"] is not None


def test_equal_plans_pass_and_a_stop_request_reaches_everybody():
    def job(rank, world):
        own = planner()
        agreement = agreement_of(own, rank, check_contents=True)
        contents = [rank // 2 + 10, 3]  # equal within a data-parallel rank
        return [
            agreement.check(f"step {step}", Held(plan=own.plan(step), contents=contents), stop_requested=rank == 2 and step == 3).stop_requested
            for step in range(4)
        ]

    assert launch(WORLD, job) == [[False, False, False, True]] * WORLD


def test_a_failure_is_told_by_all_and_a_disagreement_beside_it_is_not_hidden():
    def job(rank, world):
        told = []
        for name in ("nothing", "T"):
            own, _, plan = own_case(name if rank == 1 else "nothing")
            error = OSError("the disk went away") if rank == 1 else None
            try:
                agreement_of(own, rank).check("step 3", Held(plan=plan), error=error)
            except AgreementError as raised:
                told.append((type(raised).__name__, str(raised)))
        return told

    for same_plan, other_T in launch(WORLD, job):
        assert same_plan == ("AgreementError", "step 3 cannot start, because rank 1: OSError: the disk went away. No rank has begun it")
        assert other_T[0] == "PlanDisagreement" and "T of microbatch 1" in other_T[1] and "rank 1 also failed: OSError" in other_T[1]


def test_a_rank_that_could_not_even_plan_is_told_by_all():
    def job(rank, world):
        own = planner()
        held = None if rank == 0 else Held(plan=own.plan(0))
        agreement_of(own, rank).check("step 3", held, error=ValueError("no plan") if rank == 0 else None)

    for outcome in outcomes(WORLD, job, timeout=30):
        assert outcome.exception.startswith("AgreementError: step 3 cannot start, because rank 0: ValueError: no plan")


@pytest.mark.parametrize("checks", [True, False])
def test_other_tokens_are_told_with_ranks_and_microbatch_where_asked_for(checks):
    def job(rank, world):
        own = planner()
        contents = [100 * (rank // 2) + index for index in range(own.plan(0).num_microbatches)]
        contents[1] += rank == 3
        reads = None if rank == 0 else contents  # rank 0 receives what another rank reads: it has no say
        try:
            agreement_of(own, rank, check_contents=checks).check("step 2", Held(plan=own.plan(0), contents=reads))
        except PlanDisagreement as error:
            return str(error)

    told = launch(WORLD, job)
    if not checks:
        assert told == [None] * WORLD
    else:
        assert all("step 2: tokens of microbatch 1 of data-parallel rank 1: checksum" in text for text in told)
        assert all("on rank 2, " in text and "on rank 3. " in text for text in told), told


def test_constants_are_told_in_the_order_fingerprint_configuration_code_schedule():
    names = list(plan_constants(planner(), code_version="1", schedule={"a": 1}))
    assert names[0] == "corpus fingerprint" and names[-2:] == ["code version", "a"]
    assert set(names[1:-2]) == set(planner().config.to_dict()) - {"cost"} | {"cost_linear", "cost_quadratic", "cost_window"}
    json.dumps(plan_constants(planner(), code_version="1", schedule={"a": 1}))


def test_a_lost_rank_is_no_disagreement():
    def job(rank, world):
        own = planner()
        if rank == 1:
            return
        agreement_of(own, rank).check("step 1", Held(plan=own.plan(0)))

    ended = outcomes(2, job, timeout=30, grace=20)
    assert ended[0].exception.startswith(LostRankError.__name__)
