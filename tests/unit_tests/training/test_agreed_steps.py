# SPDX-License-Identifier: Apache-2.0
"""Ranks meet for a step while they compute the one before, never further ahead, and leave no meeting behind."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dyn.microbatch import StepStream
from megatron_dyn.pipeline.agreement import Agreed, AgreementError, new_cpu_group
from megatron_dyn.pipeline.plan_agreement import PlanAgreement, plan_constants
from megatron_dyn.planning import PlanConfig, Planner, TokenBudgetBatchSampler
from megatron_dyn.training.agreed_steps import AgreedSteps

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "functional_tests"), str(Path(__file__).resolve().parents[1] / "microbatch")]
from launch import launch  # noqa: E402
from microbatch_checks import ListCorpus  # noqa: E402

DOCUMENTS = [[10 * d + i for i in range(n)] for d, n in enumerate([5, 3, 4, 6, 2, 7, 3, 5], start=1)]


class FailsAtDocument(ListCorpus):
    """The document cannot be read."""

    document = -1

    def tokens(self, document, start, length):
        if document == self.document:
            raise OSError("unreadable")
        return super().tokens(document, start, length)


def stream_of(rank=0, *, ranks=1, corpus=None, **options):
    corpus = corpus or ListCorpus(DOCUMENTS)
    config = PlanConfig(max_tokens_per_microbatch=8, global_batch_size=2, data_parallel_size=ranks, document_order="sequential")
    planner = Planner(np.array(corpus.lengths), config)
    sampler = TokenBudgetBatchSampler(planner, data_parallel_rank=rank)
    return planner, StepStream(sampler, corpus, data_parallel_rank=rank, device="cpu", **options)


def name(number: int) -> str:
    return f"step {number}"


class Meetings:
    """Stands in for the ranks: writes down who met for what, and can hold a meeting up."""

    check_contents = False

    def __init__(self):
        self.met, self.threads, self.opened, self.stop_at, self.fail_at = [], [], threading.Event(), None, None
        self.opened.set()

    def check(self, what, held, *, error=None, stop_requested=False):
        self.threads.append(threading.current_thread())
        self.met.append((what, held.plan.step))
        assert self.opened.wait(20)
        if what == self.fail_at:
            raise AgreementError("differs")
        return Agreed(stop_requested=stop_requested or what == self.stop_at)


def wait_until(condition, secs=10.0):
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.002)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_meeting_for_the_next_step_is_over_before_it_is_asked_for_and_no_further_one_begins(depth):
    meetings = Meetings()
    _, stream = stream_of(prefetch_steps=depth)
    with stream, AgreedSteps(stream, meetings, name=name) as steps:
        for number in range(1, 4):
            plan, microbatches = steps.next(more=number < 3)
            assert plan.step == number - 1 and [mb.step for mb in microbatches] == [number - 1] * len(microbatches)
            wait_until(lambda: len(meetings.met) == min(number + 1, 3))
            time.sleep(0.02)
            assert meetings.met[-1] == (name(min(number + 1, 3)), min(number, 2)), "one ahead, and none after the last"
    assert threading.main_thread() not in meetings.threads


def test_without_reading_ahead_ranks_meet_when_the_step_is_asked_for():
    meetings = Meetings()
    _, stream = stream_of(prefetch_steps=0)
    with stream, AgreedSteps(stream, meetings, name=name) as steps:
        for number in range(1, 4):
            assert steps.next(more=True)[0].step == number - 1
            assert meetings.met == [(name(n), n - 1) for n in range(1, number + 1)]
    assert set(meetings.threads) == {threading.main_thread()}


def test_a_step_is_not_handed_out_before_the_meeting_is_over():
    meetings = Meetings()
    _, stream = stream_of()
    with stream, AgreedSteps(stream, meetings, name=name) as steps:
        steps.next(more=True)
        wait_until(lambda: len(meetings.met) == 2)
        meetings.opened.clear()
        steps.next(more=True)  # its meeting was over
        wait_until(lambda: len(meetings.met) == 3)
        got = threading.Thread(target=lambda: steps.next(more=False))
        got.start()
        got.join(0.2)
        assert got.is_alive()
        meetings.opened.set()
        got.join(10)
        assert not got.is_alive()


def test_a_stop_gives_the_step_up_and_the_saved_position_does_not_hold_it():
    meetings, stop = Meetings(), SimpleNamespace(requested=False)
    _, stream = stream_of()
    with stream, AgreedSteps(stream, meetings, name=name, stop=stop) as steps:
        assert steps.next(more=True)[0].step == 0
        wait_until(lambda: len(meetings.met) == 2)
        stop.requested = True  # after the meeting for step 2 began: that step is still computed by all
        assert steps.next(more=True)[0].step == 1
        assert steps.next(more=True) is None
        assert stream.state_dict()["step"] == 2
    assert len(meetings.met) == 3, "no meeting after the one that agreed to stop"


def test_closing_ends_a_meeting_that_all_ranks_have_begun_and_an_error_does_not_wait_for_it():
    meetings = Meetings()
    _, stream = stream_of()
    with stream:
        steps = AgreedSteps(stream, meetings, name=name)
        steps.next(more=True)
        wait_until(lambda: len(meetings.met) == 2)
        steps.close()
        assert steps._met.empty() and not steps._begun
    _, stream = stream_of()
    began = time.monotonic()
    meetings = Meetings()
    with pytest.raises(KeyError), stream, AgreedSteps(stream, meetings, name=name) as steps:
        steps.next(more=False)
        meetings.opened.clear()
        steps._begin(2)
        raise KeyError("something else")
    assert time.monotonic() - began < 10
    meetings.opened.set()


def test_a_disagreement_is_raised_where_the_step_is_asked_for():
    meetings = Meetings()
    meetings.fail_at = name(2)
    _, stream = stream_of()
    with pytest.raises(AgreementError, match="differs"), stream, AgreedSteps(stream, meetings, name=name) as steps:
        assert steps.next(more=True)[0].step == 0
        wait_until(lambda: len(meetings.met) == 2)
        steps.next(more=True)


def real_steps(rank, world, *, corpus=None, **options):
    planner, stream = stream_of(rank, ranks=world, corpus=corpus, **options)
    agreement = PlanAgreement(
        plan_constants(planner, code_version="1", schedule={}), data_parallel_rank=rank, data_parallel_size=world, group=new_cpu_group()
    )
    return stream, agreement


def test_a_builder_that_fails_on_one_rank_is_told_by_all_at_its_own_step():
    """The builder works steps ahead: the failure must not end the steps before."""

    def job(rank, world):
        corpus = FailsAtDocument(DOCUMENTS)
        corpus.document = 4 if rank == 1 else -1  # in step 3
        stream, agreement = real_steps(rank, world, corpus=corpus, prefetch_steps=3)
        done = []
        try:
            with stream, AgreedSteps(stream, agreement, name=name) as steps:
                for number in range(1, 5):
                    done.append(steps.next(more=number < 4)[0].step)
        except AgreementError as error:
            return done, str(error)

    corpus = ListCorpus(DOCUMENTS)
    assert 4 in {piece.document for part in stream_of(ranks=2, corpus=corpus)[0].plan(2).microbatches[1] for piece in part.pieces}
    for done, text in launch(2, job):
        assert done == [0, 1] and text.startswith("step 3 cannot start, because rank 1: StreamError") and "unreadable" in text


def test_two_streams_agree_in_turn_while_one_works_ahead():
    """An evaluation between two training steps: each has a group of its own, so that neither disturbs the other's order."""

    def job(rank, world):
        stream, agreement = real_steps(rank, world)
        other_agreement = real_steps(rank, world)[1]
        seen = []
        with stream, AgreedSteps(stream, agreement, name=name) as steps:
            for number in range(1, 4):
                seen.append(steps.next(more=number < 3)[0].step)
                time.sleep(0.01 * rank)
                _, inner = stream_of(rank, ranks=world)
                with inner, AgreedSteps(inner, other_agreement, name=lambda n: f"evaluation {n}") as evaluation:
                    seen += [100 + evaluation.next(more=n < 2)[0].step for n in (1, 2)]
        return seen

    assert launch(2, job) == [[0, 100, 101, 1, 100, 101, 2, 100, 101]] * 2
