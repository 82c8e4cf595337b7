# SPDX-License-Identifier: Apache-2.0
"""Reading ahead: order, bounds, errors, death and state (rows 25, 28 and 34 of the fault cases)."""

import multiprocessing
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from microbatch_checks import ListCorpus, check_microbatch, hand_plan

from megatron_dyn.microbatch import StepStream, StreamError

DOCUMENTS = [[10 * d + i for i in range(n)] for d, n in enumerate([5, 5, 3, 8, 2, 1, 4], start=1)]
LENGTHS = [len(document) for document in DOCUMENTS]


class OneDocumentASampler:
    """A step a document, one microbatch on each of two ranks; counts the steps it yielded, as the real sampler does."""

    def __init__(self, steps=len(DOCUMENTS), microbatches=1, on_step=None):
        self.step, self.steps, self.microbatches, self.on_step = 0, steps, microbatches, on_step

    def __iter__(self):
        while self.step < self.steps:
            if self.on_step:
                self.on_step(self.step)
            document = self.step % len(DOCUMENTS)
            part = [hand_plan(LENGTHS, [(document, 0, LENGTHS[document])], alignment=2)] * self.microbatches
            self.step += 1
            yield SimpleNamespace(step=self.step - 1, microbatches=[part, list(part)])

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def stream_of(sampler=None, corpus=None, **options):
    return StepStream(sampler or OneDocumentASampler(), corpus or ListCorpus(DOCUMENTS), **{"data_parallel_rank": 0, "device": "cpu", **options})


def wait_until(condition, secs=10.0):
    deadline = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_steps_come_in_order_and_then_end(depth):
    with stream_of(prefetch_steps=depth) as stream:
        seen = list(stream)
        assert [plan.step for plan, _ in seen] == list(range(len(DOCUMENTS)))
        for plan, microbatches in seen:
            assert [(mb.step, mb.index) for mb in microbatches] == [(plan.step, 0)]
            check_microbatch(microbatches[0], DOCUMENTS)
        for _ in range(2):
            with pytest.raises(StopIteration):
                stream.next()


def documents_of_an_interrupted_run(depth, saved_after, resumed_depth):
    """Runs ``saved_after`` steps, lets the thread read ahead, saves, and goes on from the state in a new stream."""
    sampler = OneDocumentASampler()
    with stream_of(sampler, prefetch_steps=depth) as stream:
        seen = [stream.next()[0].step for _ in range(saved_after)]
        if depth and saved_after:
            wait_until(lambda: sampler.step == min(saved_after + depth, len(DOCUMENTS)))
        state = stream.state_dict()
    resumed = OneDocumentASampler()
    resumed.load_state_dict(state)
    with stream_of(resumed, prefetch_steps=resumed_depth) as stream:
        return seen + [plan.step for plan, _ in stream]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("saved_after", [0, 1, 4, 7])
@pytest.mark.parametrize("resumed_depth", [0, 2])
def test_the_state_knows_nothing_of_what_was_read_ahead(depth, saved_after, resumed_depth):
    """Row 25: each document comes once, in the order of the unbroken run, whatever was read ahead when the state was taken."""
    assert documents_of_an_interrupted_run(depth, saved_after, resumed_depth) == list(range(len(DOCUMENTS)))


def test_a_state_that_leaks_the_read_ahead_would_lose_documents(monkeypatch):
    monkeypatch.setattr(StepStream, "state_dict", lambda self: self._sampler.state_dict())
    assert documents_of_an_interrupted_run(2, 1, 0) == [0, 3, 4, 5, 6]


def test_the_state_handed_out_is_the_callers_own():
    with stream_of() as stream:
        stream.next()
        stream.state_dict()["step"] = 99
        assert stream.state_dict() == {"step": 1}
        stream.close()
        assert stream.state_dict() == {"step": 1}


def test_reading_ahead_stops_at_the_number_of_steps():
    sampler = OneDocumentASampler(steps=1000)
    with stream_of(sampler, prefetch_steps=3) as stream:
        stream.next()
        wait_until(lambda: sampler.step == 4)
        time.sleep(0.1)
        assert sampler.step == 4


@pytest.mark.parametrize("bound, expected", [(1, 6), (8, 8), (9, 9), (20, 18)])
def test_reading_ahead_stops_at_the_number_of_microbatches(bound, expected):
    """Steps of 6 microbatches: the next step is built to its end, beyond it the bound counts, in the middle of a step too."""
    corpus = ListCorpus(DOCUMENTS)
    with stream_of(OneDocumentASampler(steps=1000, microbatches=6), corpus, prefetch_steps=3, prefetch_microbatches=bound) as stream:
        for step in range(5):
            plan, microbatches = stream.next()
            assert (plan.step, len(microbatches)) == (step, 6)
            built = (step + 1) * 6 + expected
            wait_until(lambda: len(corpus.reads) == built)
            time.sleep(0.02)
            assert len(corpus.reads) == built


def test_an_error_arrives_with_its_step_and_after_the_steps_before_it():
    class Broken(ListCorpus):
        def tokens(self, document, start, length):
            if document == 2:
                raise OSError("the file is gone")
            return super().tokens(document, start, length)

    for depth in (0, 2):
        with stream_of(corpus=Broken(DOCUMENTS), data_parallel_rank=1, prefetch_steps=depth) as stream:
            assert [stream.next()[0].step for _ in range(2)] == [0, 1]
            for _ in range(2):  # and it stays: a step is never skipped
                with pytest.raises(StreamError, match="microbatch-builder-dp1.*building step 2, microbatch 1 of 1.*OSError: the file is gone") as caught:
                    stream.next()
                assert isinstance(caught.value.__cause__, OSError)
            assert stream.state_dict() == {"step": 2}


def test_an_error_of_the_planner_arrives_too():
    def fail(step):
        if step == 1:
            raise ValueError("cannot plan")

    with stream_of(OneDocumentASampler(on_step=fail)) as stream:
        stream.next()
        with pytest.raises(StreamError, match="planning the step after step 0: ValueError: cannot plan"):
            stream.next()


@pytest.mark.parametrize("ending", [SystemExit(3), MemoryError("no room"), KeyboardInterrupt()])
def test_whatever_ends_the_thread_reaches_the_caller(ending):
    """Row 34."""

    def end(step):
        if step == 1:
            raise ending

    with stream_of(OneDocumentASampler(on_step=end)) as stream:
        stream.next()
        with pytest.raises(StreamError, match=type(ending).__name__):
            stream.next()


def test_a_thread_that_dies_without_a_word_is_noticed_within_seconds(monkeypatch):
    """Row 34: the error names the worker; nobody waits for a step that will never come."""
    work = StepStream._build_one_step
    monkeypatch.setattr(StepStream, "_build_one_step", lambda self: work(self) and self._sampler.step < 2)
    with stream_of(prefetch_steps=1) as stream:
        stream.next()
        stream.next()
        began = time.monotonic()
        with pytest.raises(StreamError, match="microbatch-builder-dp0.*died without a word while planning the step after step 1"):
            stream.next()
        assert time.monotonic() - began < 5


def test_a_fork_has_no_thread_and_says_so():
    """Threads do not survive a fork: in the child the builder is dead, and next() must not wait for it."""
    stream = stream_of(OneDocumentASampler(steps=100), prefetch_steps=1)
    stream.next()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    wait_until(lambda: stream._ready and stream._ready[0].complete)

    def child():
        try:
            for _ in range(3):
                stream.next()
        except StreamError as error:
            sender.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receiver.poll(20), "the child waits for a thread that it does not have"
    assert "died without a word" in receiver.recv()
    process.join()
    assert stream.next()[0].step == 1  # the parent goes on
    stream.close()


def test_a_thread_that_stands_still_is_named_with_the_place_where_it_stands():
    release = threading.Event()

    def stand_still_here(step):
        if step == 1:
            release.wait(30)

    stream = stream_of(OneDocumentASampler(on_step=stand_still_here), timeout_secs=0.5)
    stream.next()
    with pytest.raises(StreamError, match=r"made nothing for 0.5 s while planning the step after step 0; it stands at .*threading.py"):
        stream.next()
    release.set()
    stream.close()


def test_closing_is_prompt_also_in_the_middle_of_reading_ahead():
    stream = stream_of(OneDocumentASampler(steps=10**6), prefetch_steps=2)
    stream.next()
    began = time.monotonic()
    stream.close()
    stream.close()
    assert time.monotonic() - began < 2
    assert stream.worker_name not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="closed"):
        stream.next()


def test_no_process_and_no_thread_before_it_is_needed():
    stream = stream_of()
    assert stream.worker_name not in [thread.name for thread in threading.enumerate()]
    stream.next()
    assert stream.worker_name in [thread.name for thread in threading.enumerate()]
    assert multiprocessing.active_children() == []
    stream.close()


def test_a_stream_that_nobody_closed_does_not_hold_up_or_change_the_exit():
    program = """
import sys
from test_step_stream import OneDocumentASampler, stream_of
stream = stream_of(OneDocumentASampler(steps=10**6, microbatches=100))
stream.next()
sys.exit(7)
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=Path(__file__).parent, text=True, capture_output=True, timeout=150)
    assert (result.returncode, result.stderr) == (7, "")


@pytest.mark.parametrize("depth", [0, 2])
def test_the_global_generators_are_left_alone(depth):
    """Row 28: a generator that only some ranks' loaders draw from lets their dropout part."""
    before = (torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate())
    with stream_of(prefetch_steps=depth) as stream:
        assert len(list(stream)) == len(DOCUMENTS)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_the_wait_is_measured():
    def slow(step):
        time.sleep(0.2 if step == 1 else 0)

    with stream_of(OneDocumentASampler(on_step=slow), prefetch_steps=1) as stream:
        stream.next()
        stream.next()
        slow_step = stream.last_wait_secs
        wait_until(lambda: stream._ready and stream._ready[0].complete)
        stream.next()
        assert 0.1 < slow_step and stream.last_wait_secs < slow_step


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prefetch_steps": -1}, "prefetch_steps"),
        ({"prefetch_microbatches": 0}, "prefetch_microbatches"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"data_parallel_rank": -1}, "data_parallel_rank"),
        ({"timeout_secs": 0}, "timeout_secs"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        stream_of(**options)


def test_a_rank_outside_the_plan_is_an_error_and_not_another_ranks_part():
    with stream_of(data_parallel_rank=2) as stream, pytest.raises(StreamError, match="planned for 2 data-parallel ranks, this is rank 2"):
        stream.next()


@pytest.mark.gpu
def test_tensors_arrive_on_the_gpu():
    with StepStream(OneDocumentASampler(), ListCorpus(DOCUMENTS), data_parallel_rank=0) as stream:
        for _, microbatches in stream:
            assert microbatches[0].tokens.is_cuda and microbatches[0].packed_seq_params.cu_seqlens_q_padded.is_cuda
            check_microbatch(microbatches[0].to("cpu"), DOCUMENTS)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_step_can_be_looked_at_before_it_is_handed_out(depth):
    with stream_of(prefetch_steps=depth) as stream:
        for step in range(3):
            plan, microbatches = stream.peek()
            assert stream.peek()[0] is plan and plan.step == step
            assert stream.state_dict() == {"step": step}, "what was only looked at is not done"
            handed, own = stream.next()
            assert handed is plan and [mb.index for mb in own] == [mb.index for mb in microbatches]


def test_a_failure_carries_the_plan_of_the_step_that_failed():
    corpus = ListCorpus(DOCUMENTS)
    corpus.documents[1] = corpus.documents[1][:2]
    with stream_of(corpus=corpus) as stream:
        stream.next()
        with pytest.raises(StreamError) as raised:
            stream.peek()
        assert raised.value.plan.step == 1


def test_plans_come_alone_where_another_rank_reads():
    corpus = ListCorpus(DOCUMENTS)
    with stream_of(corpus=corpus, plans_only=True) as stream:
        assert [(plan.step, microbatches) for plan, microbatches in stream] == [(step, []) for step in range(len(DOCUMENTS))]
    assert not corpus.reads
