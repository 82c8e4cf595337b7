# SPDX-License-Identifier: Apache-2.0
"""The watch over a job, with ranks that are threads of one process and a store in memory. Whole runs: tests/functional_tests/test_job_faults.py."""

import json
import re
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dyn.microbatch import StepStream
from megatron_dyn.microbatch.stream import StreamError
from megatron_dyn.pipeline.agreement import AgreementError, LostRankError, PlanDisagreement
from megatron_dyn.planning import PlanConfig, Planner, TokenBudgetBatchSampler
from megatron_dyn.training import job_watch
from megatron_dyn.training.checkpoint_files import CheckpointError
from megatron_dyn.training.failure_board import Failure, FailureBoard
from megatron_dyn.training.job_failure import is_lost_peer, is_out_of_memory, report, tell
from megatron_dyn.training.job_watch import JobWatch
from megatron_dyn.training.progress import PATIENCE, JobEnded, Progress
from megatron_dyn.training.stop_request import StopRequest


class Job:
    """Watches that share a store; `ended` has the exit status of each rank whose process would have been ended."""

    def __init__(self, world: int, *, heartbeat_secs: float = 0.0, stall_secs: float = 0.0, **named):
        self.store, self.ended = dist.HashStore(), {}
        self.progress = [Progress() for _ in range(world)]
        self.watches = []
        for rank in range(world):
            end = lambda status, rank=rank: self.ended.setdefault(rank, status)  # noqa: E731
            board = FailureBoard(self.store, rank=rank, world=world)
            watch = JobWatch(
                board, hosts_store=rank == 0, heartbeat_secs=heartbeat_secs, stall_secs=stall_secs, progress=self.progress[rank], end=end, **named
            )
            self.watches.append(watch)

    def __enter__(self) -> "Job":
        for watch in self.watches:
            watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self.watches:
            watch.close()

    def wait_for_the_end(self, ranks: set[int], secs: float = 10.0) -> None:
        deadline = time.monotonic() + secs
        while set(self.ended) != ranks and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(self.ended) == ranks and set(self.ended.values()) <= {1}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, secs in dict(TICK_SECS=0.02, GRACE_SECS=0.1, SUSPICION_SECS=0.3, _TABLE_SECS=0.5).items():
        monkeypatch.setattr(job_watch, name, secs)


def raised(rank: int, reason: str = "ValueError: no") -> Failure:
    return Failure(kind="raised", rank=rank, by=rank, reason=reason, where="step 3")


def test_a_failure_ends_every_rank_and_the_first_one_is_the_cause(capsys):
    with Job(3) as job:
        assert job.watches[1].report(raised(1)) == raised(1)
        assert job.watches[2].report(raised(2, "a later one")) == raised(1)
        job.wait_for_the_end({0, 1, 2})  # 1 and 2 too, had their main threads not left by themselves
        assert job.watches[0].root == raised(1)
    assert capsys.readouterr().err == "[rank 0] leaving because rank 1 failed (step 3): ValueError: no\n"


def test_a_main_thread_that_leaves_by_itself_is_not_ended(monkeypatch):
    monkeypatch.setattr(job_watch, "GRACE_SECS", 5.0)
    with Job(2) as job:
        job.watches[0].report(raised(0))
        for watch in job.watches:
            watch.close()
    assert job.ended == {}


def test_of_ranks_that_lost_a_peer_none_is_the_cause(capsys):
    job = Job(4, heartbeat_secs=60)
    del job.watches[2]  # killed before its first sign of life
    with job:
        found = [None] * 3
        threads = [
            threading.Thread(target=lambda i=i, w=w: found.__setitem__(i, w.report(raised(w.rank, "connection closed"), wait_secs=5, lost=True)))
            for i, w in enumerate(job.watches)
        ]
        began = time.monotonic()
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert time.monotonic() - began < 4
    assert {(f.kind, f.rank, f.by) for f in found} == {("silent", 2, 1)}, "the rank before it in the ring finds it"
    table = capsys.readouterr().err
    assert "rank 2 has given no sign of life" in table and "rank 2: no answer" in table and "rank 0, 1, 3: starting for 0 s" in table


def test_a_rank_that_falls_silent_is_found_without_any_error(capsys):
    with Job(3, heartbeat_secs=0.5) as job:
        time.sleep(0.3)
        job.watches[1].close()
        job.wait_for_the_end({0, 2})
        assert job.watches[2].root.rank == 1
    assert "rank 1 has given no sign of life" in capsys.readouterr().err


def test_no_rank_is_lost_while_all_are_there_or_the_run_ends():
    with Job(3, heartbeat_secs=0.4) as job:
        time.sleep(0.6)
        for watch in job.watches:
            watch.finishing()
        job.watches[1].close()
        time.sleep(0.5)
        assert job.ended == {} and all(watch.root is None for watch in job.watches)


def test_a_stall_is_told_with_every_ranks_place(capsys):
    with Job(2, stall_secs=0.4) as job:
        for rank, progress in enumerate(job.progress):
            progress.end_step()  # the first step is done
            progress.begin_step(7, 4)
            progress.forward(rank, 96)
        job.wait_for_the_end({0, 1})
        assert job.watches[1].root.kind == "stalled"
    said = capsys.readouterr().err
    assert "no rank has got on for" in said and "rank 1: step 7, microbatch 2 of 4 (T 96), forward and backward for" in said
    assert said.count("stands at step 7") == 2 and "test_job_watch.py" in said, "each shows its main thread's stack"


def test_a_stall_shows_the_background_thread_that_is_stuck(capsys):
    """The main thread only waits for it: what it reads is what must be known."""
    stuck, free = threading.Event(), threading.Event()

    class Corpus:
        lengths, fingerprint = np.full(8, 4), "x"

        def tokens(self, document, start, length):
            stuck.set()
            free.wait(30)
            return np.zeros(length, dtype=np.int64)

    config = PlanConfig(max_tokens_per_microbatch=8, global_batch_size=2, data_parallel_size=1)
    stream = StepStream(TokenBudgetBatchSampler(Planner(Corpus.lengths, config, fingerprint="x")), Corpus(), data_parallel_rank=0)
    reader = threading.Thread(target=lambda: pytest.raises(StreamError, stream.next), daemon=True)
    reader.start()
    assert stuck.wait(10)
    with Job(1, stall_secs=0.4) as job:
        job.progress[0].end_step()
        job.progress[0].begin_step(7, 4)
        job.wait_for_the_end({0})
    said = capsys.readouterr().err
    assert f"thread {stream.worker_name}:" in said and "in _build_one_step" in said
    assert re.search(rf"rank 0: step 7.*{re.escape(stream.worker_name)} at builder.py", said)
    free.set()
    stream.close()


@pytest.mark.parametrize("who", ["rank 1 gets on", "rank 1 saves", "the first step compiles"])
def test_what_is_no_stall(who):
    with Job(2, stall_secs=0.2) as job:
        if who != "the first step compiles":
            for progress in job.progress:
                progress.end_step()
        if who == "rank 1 saves":
            job.progress[1].mark("saving", patient=True)
        for _ in range(12):
            time.sleep(0.05)
            if who == "rank 1 gets on":
                job.progress[1].mark("evaluating")
        assert job.ended == {} and job.watches[0].root is None
        assert 0.2 < 12 * 0.05 < PATIENCE * 0.2


def test_a_store_that_is_gone_ends_the_rank_unless_it_was_asked_to_stop(capsys):
    class Gone(FailureBoard):
        def beat(self, text):
            raise dist.DistNetworkError("connection reset")

    stop = StopRequest()
    try:
        for asked in (True, False):
            stop.requested, ended = asked, []
            board = Gone(dist.HashStore(), rank=1, world=2)  # with a progress of its own: that of the process would stay ended
            watch = JobWatch(board, hosts_store=False, progress=Progress(), heartbeat_secs=9, stall_secs=0, stop=stop, end=ended.append)
            watch.start()
            time.sleep(0.3)
            watch.close()
            assert ended == ([] if asked else [1])
    finally:
        stop.close()
    assert capsys.readouterr().err.count("rank 0's process, which holds the job's store") == 1


def test_the_board_keeps_the_first_failure():
    store = dist.HashStore()
    boards = [FailureBoard(store, rank=rank, world=2) for rank in range(2)]
    assert boards[0].alarm() == (None, False)
    boards[0].suspect()
    assert boards[1].alarm() == (None, True)
    assert boards[1].post(raised(1)) == boards[0].post(raised(0)) == raised(1) and boards[0].alarm() == (raised(1), True)
    boards[1].tell()
    assert boards[0].untold({0, 1}) == {0}


def cpu_out_of_memory() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    return caught.value


def test_memory_that_ran_out_is_known_however_it_is_raised():
    wrapped = RuntimeError("elsewhere")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    for error in (cpu_out_of_memory(), MemoryError(), wrapped):
        assert is_out_of_memory(error) and not is_lost_peer(error)
    assert not is_out_of_memory(ValueError("memory"))
    progress = Progress()
    progress.begin_step(12, 8)
    progress.forward(2, 4096)
    text = tell(cpu_out_of_memory(), progress.standing, budget=8192, explained=()).text
    assert text.startswith("out of memory at step 12, microbatch 3 of 8 (T 4096)") and "its T is 4096, the budget 8192" in text
    in_the_background = tell(MemoryError(), Progress().standing, budget=8192, explained=()).text
    assert in_the_background.startswith("out of memory at starting for 0 s, where the budget is 8192 (MemoryError: ")
    assert "Lower --max-tokens-per-microbatch" in text and "can't allocate" in text and "Traceback" not in text


def test_echoes_are_told_from_causes():
    assert is_lost_peer(LostRankError("x")) and is_lost_peer(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
    assert is_lost_peer(CheckpointError("could not write: rank 0: RuntimeError: Connection reset by peer"))
    assert not is_lost_peer(AgreementError("rank 1: OSError: timed out")) and not is_lost_peer(ValueError("wrong"))


def test_the_rank_that_knows_why_speaks_for_an_error_that_all_share():
    with Job(3) as job:
        errors = [AgreementError("step 5 cannot start, because rank 2: OSError: gone") for _ in range(3)]
        errors[2].__cause__ = OSError("gone")
        texts = [""] * 3

        def leave(rank):
            told = tell(errors[rank], job.progress[rank].standing, budget=1, explained=(AgreementError,))
            texts[rank] = report(errors[rank], told, job.watches[rank], job.progress[rank].standing)

        threads = [threading.Thread(target=leave, args=(rank,)) for rank in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert texts[2] == "AgreementError: step 5 cannot start, because rank 2: OSError: gone"
    assert all(text.startswith("leaving because rank 2 failed (starting") and "OSError: gone" in text for text in texts[:2])


def test_a_stall_that_was_declared_ends_the_run_whatever_the_main_thread_does_then():
    """Declared, the main thread gets no further than its next mark; and a run whose last step ended meanwhile is told at its end."""
    with Job(2, stall_secs=0.2) as job:
        for progress in job.progress:
            progress.end_step()  # the first step is done
        job.wait_for_the_end({0, 1})
        for watch, progress in zip(job.watches, job.progress):
            with pytest.raises(JobEnded, match="no rank has got on"):
                progress.begin_step(8)
            assert watch.finishing().kind == "stalled"


def test_no_stall_is_declared_once_a_run_was_told_that_there_is_none():
    with Job(1, stall_secs=0.2) as job:
        job.progress[0].end_step()
        assert job.watches[0].finishing() is None
        time.sleep(0.5)
        assert job.watches[0].root is None and job.ended == {}


def test_no_rank_says_that_it_leaves_because_of_itself(capsys):
    silent = Failure(kind="silent", rank=1, by=0, reason="rank 1 has given no sign of life")
    assert silent.leaving(1) == "leaving because rank 0 gave this rank up: rank 1 has given no sign of life"
    assert silent.leaving(2) == "leaving because rank 1 has given no sign of life"
    with Job(2, heartbeat_secs=60) as job:  # rank 1 was frozen, and wakes
        job.watches[0]._board.post(silent)
        job.wait_for_the_end({0, 1})
    assert "[rank 1] leaving because rank 0 gave this rank up" in capsys.readouterr().err


def test_all_ranks_end_with_the_status_of_the_root_cause():
    job = Job(3)
    with job:
        refusal = Failure(kind="shared", rank=0, by=0, reason="they differ", status=2)
        job.watches[0].report(refusal)
        deadline = time.monotonic() + 10
        while len(job.ended) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert job.ended == {0: 2, 1: 2, 2: 2}


def test_a_failure_told_by_another_version_can_be_read():
    store = dist.HashStore()
    board = FailureBoard(store, rank=0, world=2)
    store.set("failure", json.dumps({"kind": "raised", "rank": 1, "by": 1, "reason": "no", "of a later version": 3}))
    store.set("alarm", "1")
    assert board.alarm()[0] == Failure(kind="raised", rank=1, by=1, reason="no")


def test_of_an_error_that_all_share_one_rank_tells_and_none_is_blamed():
    with Job(3) as job:
        error, texts = PlanDisagreement("the ranks disagree on step 3: T"), [""] * 3

        def leave(rank):
            told = tell(error, job.progress[rank].standing, budget=1, explained=(AgreementError,))
            texts[rank] = report(error, told, job.watches[rank], job.progress[rank].standing)

        threads = [threading.Thread(target=leave, args=(rank,)) for rank in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert texts[0] == "PlanDisagreement: the ranks disagree on step 3: T"
    assert texts[1] == texts[2] == f"leaving with all ranks, as rank 0 tells: {texts[0]}"
