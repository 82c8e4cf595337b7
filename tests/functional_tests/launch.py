# SPDX-License-Identifier: Apache-2.0
"""Run a function on several gloo ranks, each a forked process, inside a test.

    from launch import launch

    def job(rank, world, size):             # torch.distributed is already initialised here
        ...
        return anything_picklable

    results = launch(2, job, 64)            # [result of rank 0, result of rank 1]

Ranks are forked, so what the test module has imported costs nothing again. Results travel as pickled
bytes (tensors by value). A rank that raises, dies or hangs makes `launch` raise `RanksFailed` with each
rank's traceback, or for a hung rank the stack it hangs in. Tests in which ranks *should* fail
call `outcomes` and look at each rank.
"""

import datetime
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Callable, Optional

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

GRACE_SECS = 5.0  # how long the peers of a failed rank may go on before they are killed


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended: exactly one of returned, raised, died, hung."""

    rank: int
    result: Any = None
    error: Optional[str] = None  # traceback text, or the reason why there is none
    exception: Optional[str] = None  # "TypeName: message" when the rank raised
    hung: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung; `.outcomes` has every rank's Outcome."""

    def __init__(self, ranks: "list[Outcome]"):
        self.outcomes = ranks
        failed = [o for o in ranks if not o.ok]
        parts = [f"{len(failed)} of {len(ranks)} ranks failed"]
        parts += [f"--- rank {o.rank} after {o.seconds:.1f} s\n{o.error}" for o in failed]
        super().__init__("\n".join(parts))


def launch(world: int, fn: Callable, *args, timeout: float = 60.0, process_group: bool = True) -> list:
    """Call `fn(rank, world, *args)` on `world` forked ranks and return their results in rank order.

    Args:
        world: number of ranks.
        fn: any callable, also a closure (nothing is pickled on the way in).
        timeout: seconds for the whole run; also the time-out of the collectives.
        process_group: initialise torch.distributed (gloo, file:// rendezvous) before calling `fn`.

    Raises:
        RanksFailed: with each failed rank's traceback.
    """
    ended = outcomes(world, fn, *args, timeout=timeout, process_group=process_group)
    if not all(o.ok for o in ended):
        raise RanksFailed(ended)
    return [o.result for o in ended]


def outcomes(
    world: int, fn: Callable, *args, timeout: float = 60.0, process_group: bool = True, grace: float = GRACE_SECS
) -> "list[Outcome]":
    """As `launch`, but never raises for a failing rank: returns one `Outcome` a rank."""
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp(prefix="ranks_"))
    sys.stdout.flush(), sys.stderr.flush()  # else the forks print the parent's buffer again
    started = time.monotonic()
    readers, processes = [], []
    try:
        for rank in range(world):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world, fn, args, folder, writer, timeout, process_group), daemon=False
            )
            process.start()
            writer.close()
            readers.append(reader), processes.append(process)
        return _collect(readers, processes, folder, started, timeout, grace)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for reader in readers:
            reader.close()
        shutil.rmtree(folder, ignore_errors=True)


def _collect(readers, processes, folder, started, timeout, grace) -> "list[Outcome]":
    ended: dict = {}
    deadline = started + timeout
    while len(ended) < len(readers) and time.monotonic() < deadline:
        open_ranks = {readers[r]: r for r in range(len(readers)) if r not in ended}
        for reader in wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic())):
            rank = open_ranks[reader]
            seconds = time.monotonic() - started
            try:
                ended[rank] = Outcome(rank=rank, seconds=seconds, **pickle.loads(reader.recv_bytes()))
            except EOFError:
                processes[rank].join()
                text = f"died without an answer, exit code {processes[rank].exitcode}"
                ended[rank] = Outcome(rank=rank, seconds=seconds, error=text)
            if not ended[rank].ok:
                deadline = min(deadline, time.monotonic() + grace)
    for rank in range(len(readers)):
        if rank not in ended:
            text = "did not end; killed. It was here:\n" + _stack_of(processes[rank], folder / f"stack_{rank}")
            ended[rank] = Outcome(rank=rank, seconds=time.monotonic() - started, error=text, hung=True)
    return [ended[rank] for rank in range(len(readers))]


def _stack_of(process, path: Path) -> str:
    """Ask a hung rank for its Python stack (it cannot answer by itself)."""
    os.kill(process.pid, signal.SIGUSR2)
    for _ in range(20):
        time.sleep(0.05)
        if path.exists() and path.stat().st_size:
            return path.read_text()
    return "(no stack was given)"


def _rank_main(rank, world, fn, args, folder, writer, timeout, process_group):
    stack = open(folder / f"stack_{rank}", "w")
    faulthandler.register(signal.SIGUSR2, file=stack, all_threads=True)
    torch.set_num_threads(1)
    try:
        if process_group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout),
            )
        answer = pickle.dumps({"result": fn(rank, world, *args)})
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the test must hear of them
        text = f"{type(error).__name__}: {error}"
        answer = pickle.dumps({"error": traceback.format_exc(), "exception": text})
    writer.send_bytes(answer)
    writer.close()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)  # skip the interpreter's shutdown: gloo threads of a failed group could block it
