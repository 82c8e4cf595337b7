# SPDX-License-Identifier: Apache-2.0
"""For every schedule: the plan names the microbatch the schedule means, every send meets its receive, and no rank waits for ever.

The real schedule code of megatron-core runs for each rank in turn (`schedule_on_paper.py`), then the ranks' messages are played against
each other under the rules of gloo and of NCCL.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
from planned_mutants import (
    backward_posted_first,
    chunk_ignored,
    ends_of_the_model_ignored,
    forward_position_for_backward,
    last_microbatch,
    sends_posted_first,
)
from schedule_on_paper import Case, Group, Stuck, play, programs_of

from megatron_dyn import device
from megatron_dyn.pipeline.messages import planned_messages
from megatron_dyn.pipeline.planned_p2p import PlannedMessageError, PlannedP2PCommunicator


def cases(sizes, chunks, counts):
    for pp in sizes:
        for k in counts:
            for batched in (True, False):
                yield Case(pp, 1, k, batched=batched)
                yield Case(pp, 1, k, batched=batched, forward_only=True)
        for vpp in chunks:
            for k in {pp * ((count + pp - 1) // pp) for count in counts}:
                for how in (dict(), dict(batched=False), dict(overlap=True, batched=False), dict(overlap=True, flush=True, batched=False)):
                    yield Case(pp, vpp, k, **how)
                    yield Case(pp, vpp, k, **how, forward_only=True)


def check(case: Case, monkeypatch) -> None:
    links = case.pp * case.vpp - 1
    for rules in ("gloo", "nccl"):
        try:
            moved = play(programs_of(case, monkeypatch, rules=rules), case, rules=rules)
        except AssertionError as error:
            raise type(error)(f"{case} under the rules of {rules}: {error}") from error
        assert moved == case.k * links * (1 if case.forward_only else 2), case


@pytest.fixture(autouse=True)
def on_a_cpu():
    device.install_cpu_replacements()
    yield
    device.uninstall_cpu_replacements()


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_schedule_moves_the_planned_messages(pp, monkeypatch):
    for case in cases([pp], [2, 3], [1, 3, 9]):
        check(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("vpp", [2, 3, 4])
@pytest.mark.parametrize("pp", range(2, 9))
def test_every_schedule_of_the_whole_range(pp, vpp, monkeypatch):
    for case in cases([pp], [vpp], range(1, 10)):
        check(case, monkeypatch)


# Mutants: each break of the plan is noticed by the check above ------------------------------------------------------------


INTERLEAVED = Case(4, 2, 8, overlap=True, batched=False)
MUTANTS = [
    (last_microbatch, Case(2, 1, 3)),
    (last_microbatch, INTERLEAVED),
    (forward_position_for_backward, Case(2, 1, 3)),
    (forward_position_for_backward, INTERLEAVED),
    (chunk_ignored, INTERLEAVED),
    (ends_of_the_model_ignored, INTERLEAVED),
    (backward_posted_first, Case(2, 2, 4)),
    (sends_posted_first, Case(3, 2, 3, batched=False)),
]


@pytest.mark.parametrize("mutant, case", MUTANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_mutant_is_caught(mutant, case, monkeypatch):
    check(case, monkeypatch)
    planned_messages.cache_clear()
    mutant(monkeypatch)
    try:
        with pytest.raises((AssertionError, RuntimeError)):
            check(case, monkeypatch)
    finally:
        planned_messages.cache_clear()


def test_what_is_sent_outlives_the_schedules_own_tensor(monkeypatch):
    """The schedule frees an output right after its send was posted; gloo and NCCL may read it later."""
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    config = ModelParallelConfig(pipeline_dtype=torch.float32, pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=2)
    config.hidden_size = 2
    communicator = PlannedP2PCommunicator(Group(0, 2), config)
    monkeypatch.setattr(communicator, "_post", lambda tensors, messages: {"send_next": tensors["send_next"]})
    output = torch.arange(6.0).reshape(3, 1, 2).requires_grad_() * 1
    with pytest.raises(PlannedMessageError, match="ended before all planned messages .*1 x forward activation to the next stage"):
        with communicator.step([3, 4], forward_only=True):
            _, held = communicator.send_forward_recv_forward(output, recv_prev=False, tensor_shape=None, overlap_p2p_comm=True)
            deallocate_output_tensor(output, True)
            assert output.numel() == 1
            assert torch.equal(held["send_next"], torch.arange(6.0).reshape(3, 1, 2))
            with pytest.raises(PlannedMessageError, match="shape .3, 1, 2. .*planned are .4, 1, 2."):
                communicator.send_forward(torch.zeros(3, 1, 2), is_last_stage=False)
            communicator._reached["send_next"] = 1
    with pytest.raises(PlannedMessageError, match="outside of a step"):
        communicator.send_forward(torch.zeros(3, 1, 2), is_last_stage=False)


def test_settings_without_a_schedule_are_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    with pytest.raises(ValueError, match="cannot be batched"):
        PlannedP2PCommunicator(Group(0, 2), ModelParallelConfig(overlap_p2p_comm=True, batch_p2p_comm=True))
    divided = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    with pytest.raises(ValueError, match="microbatch 1 has T = 5, which cannot be divided over the 2 ranks"):
        with PlannedP2PCommunicator(Group(0, 2), divided).step([4, 5], forward_only=True):
            pass


def test_two_phases_would_deadlock(monkeypatch):
    """The player itself: shapes first, then tensors, as the stock communicator does it, hangs where it does on gloo (PP 4, VPP 2, K 4)."""
    fine, stuck = Case(4, 2, 8), Case(4, 2, 4)
    play(in_two_phases(programs_of(fine, monkeypatch, rules="nccl")), fine, rules="gloo")
    with pytest.raises(Stuck, match="rank 1"):
        play(in_two_phases(programs_of(stuck, monkeypatch, rules="nccl")), stuck, rules="gloo")


def in_two_phases(programs):
    """Each call twice, and each time waited for; calls are numbered anew."""
    return [
        [
            event
            for kind, what in program
            if kind == "post"
            for call in (2 * what[0].call, 2 * what[0].call + 1)
            for event in (("post", [replace(op, call=call) for op in what]), ("wait", call))
        ]
        for program in programs
    ]
