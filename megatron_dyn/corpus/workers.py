# SPDX-License-Identifier: Apache-2.0
"""Worker processes that map a function over tasks: results in order, bounded memory, and a dead worker is an error at once.

Each worker has one task in flight over its own pipe, so neither side can fill a pipe that the other does not read.
(``multiprocessing.Pool`` waits for ever when a worker is killed; ``ProcessPoolExecutor`` does not say which one it was.)
"""

import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection, wait
from typing import Callable, Iterable, Iterator, TypeVar

from megatron_dyn.corpus.errors import CorpusError

Task = TypeVar("Task")
Result = TypeVar("Result")
TASKS_AHEAD_PER_WORKER = 4  # finished results kept while an earlier task is still running
JOIN_TIMEOUT_SECS = 5.0


def _serve(connection: Connection, inherited: list[Connection], make_function: Callable[[], Callable]) -> None:
    """A worker's life: make the function once, then answer tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; Ctrl-C reaches the whole process group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:  # a copy of the parent's end would hide the parent's death from a sibling
        other.close()
    try:
        function = make_function()
        while True:
            task = connection.recv()
            try:
                answer = (True, function(task))
            except CorpusError as error:
                answer = (False, str(error))
            except Exception:  # whatever it is, the parent must hear of it
                answer = (False, traceback.format_exc())
            connection.send(answer)
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone or done


class WorkerPool:
    """Processes that each hold a function made by ``make_function``; a context manager that ends them.

    Start it before threads (progress bars): it forks.

    Args:
        make_function: called once in each worker, then its result is called for every task.
        num_workers: processes; 1 runs in this process.
    """

    def __init__(self, make_function: Callable[[], Callable[[Task], Result]], num_workers: int) -> None:
        if num_workers < 1:
            raise CorpusError(f"--workers {num_workers}: give 1 or more")
        self._function = make_function() if num_workers == 1 else None
        self._connections: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("fork")
        for number in range(num_workers if num_workers > 1 else 0):
            ours, theirs = context.Pipe()
            self._connections.append(ours)
            process = context.Process(
                target=_serve, args=(theirs, list(self._connections), make_function), name=f"worker {number}", daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exc) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(JOIN_TIMEOUT_SECS)
            if process.is_alive():
                process.kill()
                process.join()

    def _died(self, number: int) -> CorpusError:
        process = self._processes[number]
        process.join(JOIN_TIMEOUT_SECS)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        return CorpusError(
            f"worker {number} (process {process.pid}) {how}; the run stops and leaves no output. "
            "If the machine was out of memory, give fewer --workers"
        )

    def map(self, tasks: Iterable[Task]) -> Iterator[Result]:
        """Results in the order of the tasks; tasks are drawn only as workers become free.

        Raises:
            CorpusError: a worker died (names it) or its function raised.
        """
        if self._function is not None:
            yield from map(self._function, tasks)
            return
        source = enumerate(tasks)
        idle = list(range(len(self._processes)))
        running: dict[int, int] = {}  # worker -> task number
        finished: dict[int, Result] = {}
        next_out, exhausted = 0, False
        ahead = TASKS_AHEAD_PER_WORKER * len(self._processes)
        while True:
            while idle and not exhausted and len(running) + len(finished) < ahead:
                number_and_task = next(source, None)
                if number_and_task is None:
                    exhausted = True
                    break
                number, task = number_and_task
                worker = idle.pop()
                try:
                    self._connections[worker].send(task)
                except OSError as error:
                    raise self._died(worker) from error
                running[worker] = number
            while next_out in finished:
                yield finished.pop(next_out)
                next_out += 1
            if running:
                self._collect(running, finished, idle)
            elif exhausted and not finished:
                return

    def _collect(self, running: dict[int, int], finished: dict[int, Result], idle: list[int]) -> None:
        """Waits until a running worker answers or any worker dies."""
        sentinels = {process.sentinel: number for number, process in enumerate(self._processes)}
        answers = {self._connections[worker]: worker for worker in running}
        for ready in wait([*sentinels, *answers]):
            if ready in sentinels:
                raise self._died(sentinels[ready])
            worker = answers[ready]
            try:
                good, result = ready.recv()
            except (EOFError, OSError) as error:
                raise self._died(worker) from error
            if not good:
                raise CorpusError(f"worker {worker} (process {self._processes[worker].pid}) failed: {result}")
            finished[running.pop(worker)] = result
            idle.append(worker)
