# SPDX-License-Identifier: Apache-2.0
"""No rank waits for one that has failed: every rank watches the job from threads of its own, and leaves with the reason.

    main thread   raises -> `report`: its failure goes on the board, or that of an earlier rank is the root cause
    pulse         every tick: a sign of life onto the board; is there a failure? is the next rank (in a ring) alive? does rank 0 get on?
                  On another rank's failure it says so in one line, gives the main thread a moment to leave, and ends the process.
    judge         ends the process when the store itself stops answering (its host is frozen or cut off)

Time is counted in ticks, not by the clock: a process that was frozen itself does not judge others by what it slept through. Each rank
watches one other, so that the store's load grows with the number of ranks only, and the ticks grow longer with it.
`os._exit` is the only end that works for a thread stuck in a collective or in CUDA.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from megatron_dyn.training.failure_board import Failure, FailureBoard
from megatron_dyn.training.progress import PROGRESS, Progress, Standing
from megatron_dyn.training.rendezvous import uses_launchers_store
from megatron_dyn.training.stop_request import StopRequest

TICK_SECS = 0.5
GRACE_SECS = 3.0
"""What the main thread gets to leave by itself after another rank's failure."""
SUSPICION_SECS = 3.0
"""Silence that counts as death once some rank's connection broke."""
LOST_WAIT_SECS = 8.0
"""How long a rank whose connection broke waits for the reason: longer than it takes to find the silent rank."""
_TELL_SECS = 3.0
_TABLE_SECS = 3.0


class JobWatch:
    """Watches the job from this rank. Started by `start`.

    Args:
        board: Used by this object's threads alone from now on.
        hosts_store: The board's server ends with this process, so it leaves last.
        heartbeat_secs: Silence after which a rank is taken for lost (0: never).
        stall_secs: Time without a mark on any rank after which the job is ended (0: never); see `Progress` for what may take longer.
        stop: While it asks to stop, a store that is gone (its launcher got the signal too) does not end the process.
        progress: Where this rank stands.
        end: Ends the process.
    """

    def __init__(
        self,
        board: FailureBoard,
        *,
        hosts_store: bool,
        heartbeat_secs: float,
        stall_secs: float,
        stop: StopRequest | None = None,
        progress: Progress = PROGRESS,
        end: Callable[[int], object] = os._exit,
    ):
        self.rank, self.world = board.rank, board.world
        self.root: Failure | None = None
        """Why the job ends, once it does."""
        self.told = False
        """The watch has printed it on this rank."""
        self._board = board
        self._hosts_store = hosts_store
        self._heartbeat_secs = heartbeat_secs
        self._stall_secs = stall_secs
        self._stop = stop
        self._progress = progress
        self._end = end
        self._tick_secs = max(TICK_SECS, self.world / 2000)
        self._main = threading.main_thread()
        self._deciding = threading.Lock()  # no failure is found once the main thread has been told that there is none
        self._finishing = self._suspects = False
        self._reported: tuple[Failure, float] | None = None
        self._ticks = self._quiet_ticks = 0
        self._next = (self.rank + 1) % self.world
        self._next_beat: str | None = None
        self._looked_for_stall = 0.0
        self._wake, self._resolved, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=work, name=f"job-{work.__name__}", daemon=True) for work in (self._pulse, self._judge)]

    # ---- the main thread's side ----------------------------------------------------------------------------------

    def start(self) -> "JobWatch":
        """Begin to look for failures of other ranks."""
        for thread in self._threads:
            thread.start()
        return self

    def report(self, failure: Failure, *, wait_secs: float = 0.0, lost: bool = False) -> Failure | None:
        """Put this rank's failure on the board.

        Args:
            failure: What happened here.
            wait_secs: How long another rank may still come first, because its failure is likelier the cause.
            lost: It looks as if another rank were gone: find out which.

        Returns:
            The root cause: this failure or an earlier one; None when the store does not answer.
        """
        if lost:
            self._suspects = True
        self._reported = (failure, time.monotonic() + wait_secs)
        self._wake.set()
        self._resolved.wait(wait_secs + 2 * _TELL_SECS + _TABLE_SECS)
        return self.root

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank got a signal; below a launcher, every rank that outlives another gets one."""
        return self._stop is not None and self._stop.requested

    def wait_for_root(self, secs: float) -> Failure | None:
        """Give another rank's failure some time to arrive; the watch says it."""
        self._resolved.wait(secs)
        return self.root

    def finishing(self) -> Failure | None:
        """The run is done: a peer or the store that goes away from now on is no fault.

        Returns:
            The failure that this rank has found or heard of before; None: it finds none any more.
        """
        with self._deciding:
            self._finishing = True
            return self.root

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout=2.0)

    # ---- the pulse -----------------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        try:
            while not self._closed.is_set() and self.root is None:
                with self._deciding:
                    found = self._exchange(self._board)
                    self.root = found if self.root is None else self.root
                if found is not None:
                    self._leave_for(self.root, self._board)
                self._wake.wait(self._tick_secs)
                self._wake.clear()
        except RuntimeError as error:  # what torch raises about a store it cannot reach
            self._without_store(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")

    def _exchange(self, board: FailureBoard) -> Failure | None:
        """One tick: a sign of life, and the failure that ends the job, if there is one."""
        self._ticks += 1
        board.beat(json.dumps({"ticks": self._ticks, **self._progress.standing.as_dict()}))
        failure, suspicion = board.alarm()
        if self._suspects and not suspicion:
            board.suspect()
        if failure is None and self._reported is not None and time.monotonic() >= self._reported[1]:
            failure = board.post(self._reported[0])
        if failure is None and not self._finishing and self.world > 1:
            failure = self._look_at_neighbour(board, SUSPICION_SECS if suspicion else self._heartbeat_secs, suspicion)
        if failure is None and self._stall_secs and self.rank == 0 and not self._finishing:
            failure = self._look_for_a_stall(board)
        return failure

    def _look_at_neighbour(self, board: FailureBoard, limit: float, suspicion: bool) -> Failure | None:
        beat = board.beat_of(self._next)
        if beat is None and not suspicion:
            return None  # still on its way: the rendezvous has a time-out of its own
        self._quiet_ticks = self._quiet_ticks + 1 if beat == self._next_beat else 0
        self._next_beat = beat
        silent = self._quiet_ticks * self._tick_secs
        if not limit or silent < limit:
            return None
        reason = f"rank {self._next} has given no sign of life for {silent:.0f} s: its process was killed or is frozen, or its node is gone"
        last = f" (last seen at {place(Standing(**_fields(beat)))})" if beat else ""
        return board.post(Failure(kind="silent", rank=self._next, by=self.rank, reason=reason + last))

    def _look_for_a_stall(self, board: FailureBoard) -> Failure | None:
        """Rank 0 asks the others only where it stands still itself."""
        now, standing = time.monotonic(), self._progress.standing
        if standing.age < self._stall_secs * standing.patience or now - self._looked_for_stall < self._stall_secs / 20:
            return None
        self._looked_for_stall = now
        beats = [json.loads(board.beat_of(rank) or "null") for rank in range(self.world)]
        if any(beat is None or beat["age"] < self._stall_secs * beat["patience"] for beat in beats):
            return None
        longest = min(beat["age"] for beat in beats)
        reason = f"no rank has got on for {longest:.0f} s (--stall-timeout {self._stall_secs:g}): the job is ended"
        return board.post(Failure(kind="stalled", rank=None, by=self.rank, reason=reason))

    def _helpers(self) -> list[threading.Thread]:
        """The run's own background threads, without those of a watch."""
        others = [thread for thread in threading.enumerate() if thread is not self._main and not thread.name.startswith("job-")]
        return [thread for thread in others if _runs_here(thread)]

    def _leave_for(self, failure: Failure, board: FailureBoard) -> None:
        mine, watched = failure.by == self.rank, failure.kind in ("silent", "stalled")
        self._progress.end(str(failure))
        if watched:
            where, stack = _stack_of(self._main)
            for thread in self._helpers():  # what the main thread waits for: data, or the other ranks
                place_of_it, its_stack = _stack_of(thread)
                where, stack = f"{where}; {thread.name} at {place_of_it}", f"{stack}\n  thread {thread.name}:\n{its_stack}"
            _say(f"[rank {self.rank}] stands at {place(self._progress.standing)}:\n{stack}")
            board.place(f"{place(self._progress.standing)}, {where}")
        if mine and watched:
            self.told = True
            _say(f"[rank {self.rank}] {failure}\n{self._table(board, failure.rank)}")
        elif not mine and self._reported is None:
            self.told = True
            _say(f"[rank {self.rank}] {failure.leaving(self.rank)}")
        board.tell()
        if self._hosts_store:
            self._outlive_the_others(board, failure)
        self._leave(failure)

    def _table(self, board: FailureBoard, silent: int | None) -> str:
        """Where every rank stands; ranks at the same place share a line."""
        deadline, places = time.monotonic() + _TABLE_SECS, {}
        while (missing := set(range(self.world)) - set(places) - {silent}) and time.monotonic() < deadline:
            for rank in missing:
                found = board.place_of(rank)
                if found is not None:
                    places[rank] = found
            time.sleep(0.1)
        lines: dict[str, list[int]] = {}
        for rank in range(self.world):
            if rank not in places:
                beat = board.beat_of(rank)
                places[rank] = "no answer" + (f"; last seen at {place(Standing(**_fields(beat)))}" if beat else "")
            lines.setdefault(places[rank], []).append(rank)
        return "\n".join(f"    rank {', '.join(map(str, ranks))}: {text}" for text, ranks in lines.items())

    def _outlive_the_others(self, board: FailureBoard, failure: Failure) -> None:
        waiting = set(range(self.world)) - {self.rank, failure.rank if failure.kind == "silent" else None}
        deadline = time.monotonic() + _TELL_SECS
        while waiting and time.monotonic() < deadline:
            waiting = board.untold(waiting)
            time.sleep(0.05)

    # ---- without the store ---------------------------------------------------------------------------------------

    def _judge(self) -> None:
        seen, quiet = -1, 0
        while not self._closed.wait(1.0):
            seen, quiet = self._ticks, quiet + 1 if self._ticks == seen else 0
            if self.root is None and self._heartbeat_secs and quiet > self._heartbeat_secs + GRACE_SECS:
                return self._without_store(f"no answer for {quiet} s")

    def _without_store(self, what: str) -> None:
        if self.root is not None:  # it went away while this rank was leaving
            return self._leave(self.root)
        if self._closed.is_set() or self._finishing:
            return
        if self.asked_to_stop:
            self._resolved.set()  # the launcher was stopped, too: save, unwatched
            return
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        host = "the launcher" if uses_launchers_store() else "rank 0's process"
        reason = f"{host}, which holds the job's store at {address}, is gone or frozen ({what})"
        self.root = Failure(kind="silent", rank=None if host == "the launcher" else 0, by=self.rank, reason=reason)
        self._progress.end(reason)
        self.told = True
        _say(f"[rank {self.rank}] leaving because {reason}")
        self._leave(self.root)

    def _leave(self, failure: Failure) -> None:
        """Give the main thread a moment to leave by itself."""
        self._resolved.set()
        if not self._closed.wait(GRACE_SECS):
            self._end(failure.status)


def place(standing: Standing) -> str:
    """'step 12, microbatch 3 of 8 (T 96), forward and backward for 4 s'."""
    words = [] if standing.step is None else [f"step {standing.step}"]
    if standing.microbatch is not None:
        of = f" of {standing.num_microbatches}" if standing.num_microbatches else ""
        words.append(f"microbatch {standing.microbatch + 1}{of} (T {standing.rows})")
    return ", ".join([*words, f"{standing.phase} for {standing.age:.0f} s"])


def _fields(beat: str) -> dict:
    """A beat as the fields of a Standing on this host's clock."""
    values = json.loads(beat)
    del values["ticks"]
    return values | {"at": time.monotonic() - values.pop("age")}


def _stack_of(thread: threading.Thread) -> tuple[str, str]:
    """The innermost place in this package and the innermost of all, and the whole Python stack of a thread."""
    frame = sys._current_frames().get(thread.ident)
    if frame is None:
        return "no Python frame", "    (no Python frame)"
    frames = traceback.extract_stack(frame)
    ours = [entry for entry in frames if "megatron_dyn" in entry.filename] or frames
    told = dict.fromkeys(f"{os.path.basename(entry.filename)}:{entry.lineno} ({entry.name})" for entry in (ours[-1], frames[-1]))
    return " > ".join(told), "".join(traceback.format_list(frames)).rstrip()


def _runs_here(thread: threading.Thread) -> bool:
    """Whether a thread is in this package's code, however deep."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        if "megatron_dyn" in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("job_watch.py"):
            return True
        frame = frame.f_back
    return False


def _say(text: str) -> None:
    """To stderr, at once: the process may end right after."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody reads, or it is closed: no reason to stay
        pass
