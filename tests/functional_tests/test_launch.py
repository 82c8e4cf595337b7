# SPDX-License-Identifier: Apache-2.0
"""The helper that every multi-rank test stands on: it must not hide a failing, dying or hung rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from launch import RanksFailed, launch, outcomes


def summed(rank, world, base):
    value = torch.tensor([base + rank])
    dist.all_reduce(value)
    return value


def test_results_come_back_in_rank_order():
    assert [int(v) for v in launch(2, summed, 10)] == [21, 21]
    assert launch(3, lambda rank, world: (rank, world), process_group=False) == [(0, 3), (1, 3), (2, 3)]


def test_a_raising_rank_is_named_with_its_traceback():
    def job(rank, world):
        if rank == 1:
            raise ValueError("wrong on one rank only")

    with pytest.raises(RanksFailed, match="(?s)1 of 2 ranks failed.*rank 1.*wrong on one rank only"):
        launch(2, job)


def test_a_hung_rank_is_killed_and_its_stack_shown():
    def sleeps_here(rank, world):
        if rank == 0:
            time.sleep(60)

    begin = time.monotonic()
    ended = outcomes(2, sleeps_here, timeout=1.5, process_group=False)
    assert time.monotonic() - begin < 10
    assert ended[0].hung and "sleeps_here" in ended[0].error and ended[1].ok


def test_a_killed_rank_is_reported_and_its_waiting_peer_does_not_block():
    def job(rank, world):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    ended = outcomes(2, job, timeout=50, grace=0.5)
    assert "exit code -9" in ended[1].error and ended[0].hung and ended[0].seconds < 10
