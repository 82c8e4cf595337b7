# SPDX-License-Identifier: Apache-2.0
"""Ranks that differ, fail or vanish are found before work starts, on every rank, within seconds."""

import json
import os
import sys
from pathlib import Path

import pytest

from megatron_dyn.pipeline.agreement import Agreement, AgreementError, losing_a_rank_during, raise_failures, ranges

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "functional_tests"))
from launch import launch, outcomes  # noqa: E402


def test_equal_values_pass_and_a_stop_request_reaches_everybody():
    def job(rank, world):
        agreement = Agreement()
        first = agreement.check("step 1", "digest", stop_requested=False)
        second = agreement.check("step 2", "digest", stop_requested=rank == 1)
        return first.stop_requested, second.stop_requested

    assert launch(3, job) == [(False, True)] * 3


def test_a_different_plan_raises_on_every_rank_and_names_the_ranks():
    def job(rank, world):
        Agreement().check("the plan of step 7", "bbbb" if rank == 2 else "aaaa")

    ended = outcomes(4, job, timeout=30)
    assert all(outcome.exception.startswith("AgreementError") for outcome in ended)
    assert len({outcome.exception for outcome in ended}) == 1, "every rank tells the same"
    assert "aaaa on ranks 0-1, 3; bbbb on rank 2" in ended[0].exception
    assert "the plan of step 7" in ended[0].exception
    assert max(outcome.seconds for outcome in ended) < 15


def test_values_that_differ_in_one_bit_of_their_hash_are_told_apart():
    """Mutant guard: comparing only a part of the digest would let some of these pass."""

    def job(rank, world):
        agreement, passed = Agreement(), 0
        for value in range(50):
            try:
                agreement.check("x", str(value + rank))
                passed += 1
            except RuntimeError:
                pass
        return passed

    assert launch(2, job) == [0, 0]


def test_a_failure_on_one_rank_is_told_by_all():
    def job(rank, world):
        error = ValueError("document 17 cannot be read") if rank == 1 else None
        Agreement().check("step 3", "digest", error=error)

    ended = outcomes(3, job, timeout=30)
    for outcome in ended:
        assert "step 3 cannot start, because rank 1: ValueError: document 17 cannot be read" in outcome.exception


def test_a_lost_rank_does_not_leave_the_others_waiting():
    def job(rank, world):
        agreement = Agreement()
        agreement.check("step 1", "digest")
        if rank == 1:
            os._exit(9)
        agreement.check("step 2", "digest")

    ended = outcomes(2, job, timeout=60, grace=20)
    assert "a rank was lost while the ranks agreed on step 2" in ended[0].exception
    assert ended[0].seconds < 20


@pytest.mark.parametrize("ranks, text", [([0], "0"), ([0, 1, 2, 5], "0-2, 5"), ([3, 4, 7, 8], "3-4, 7-8")])
def test_ranks_are_named_asranges(ranks, text):
    assert ranges(ranks) == text


def test_of_settings_the_entries_that_differ_are_named():
    def job(rank, world):
        settings = {"lr": 0.1 if rank < 2 else 0.2, "seed": 1, "save": None}
        Agreement().check("the settings", json.dumps(settings))

    ended = outcomes(3, job, timeout=30)
    assert "lr: 0.1 on ranks 0-1, 0.2 on rank 2" in ended[0].exception
    assert "seed" not in ended[0].exception


@pytest.mark.parametrize("text, told", [("[gloo] Connection closed by peer [::1]:1", True), ("index out of range", False)])
def test_only_the_loss_of_a_rank_is_told_as_one(text, told):
    with pytest.raises(RuntimeError) as raised, losing_a_rank_during("step 3"):
        raise RuntimeError(text)
    assert isinstance(raised.value, AgreementError) == told
    assert ("a rank was lost during step 3" in str(raised.value)) == told


def test_ranks_that_fail_alike_are_told_once():
    with pytest.raises(AgreementError) as raised:
        raise_failures("step 4", ["OSError: cut", None, "OSError: cut", "ValueError: other", "OSError: cut"], None)
    assert str(raised.value) == "step 4 cannot start, because ranks 0, 2, 4: OSError: cut; rank 3: ValueError: other. No rank has begun it"
