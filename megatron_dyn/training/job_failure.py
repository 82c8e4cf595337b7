# SPDX-License-Identifier: Apache-2.0
"""What an error on this rank means for the job: a cause of its own, the same on all ranks, or the echo of another rank's end."""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_dyn import device
from megatron_dyn.pipeline.agreement import AgreementError, LostRankError
from megatron_dyn.training.checkpoint_files import CheckpointError
from megatron_dyn.training.failure_board import Failure
from megatron_dyn.training.job_watch import LOST_WAIT_SECS, JobWatch, place
from megatron_dyn.training.nonfinite import NonFiniteError
from megatron_dyn.training.progress import JobEnded, Standing

# The first words of what gloo, NCCL and the store say when a peer is gone; torch gives most of them as a plain RuntimeError.
_SIGNS_OF_A_LOST_PEER = ("connection closed", "connection reset", "connection refused", "connection was likely closed", "broken pipe", "timed out")
_SHARED = (AgreementError, CheckpointError, NonFiniteError)
_SHARED_WAIT_SECS = 1.0
_MOST_WORDS = 1500


@dataclass(frozen=True, kw_only=True)
class Told:
    """An error as it is told."""

    reason: str
    """In one paragraph; goes to the other ranks."""
    text: str
    """For this rank's output, with a traceback where the error explains itself to programmers only."""


def tell(
    error: BaseException,
    standing: Standing,
    *,
    budget: int | None,
    explained: tuple[type[BaseException], ...],
    advice: Callable[[], str] = str,
) -> Told:
    """An error in words.

    Args:
        error: What was raised.
        standing: Where the rank stood.
        budget: --max-tokens-per-microbatch.
        explained: Types whose message says all that a user needs.
        advice: What would fit where memory ran out; "" where that is not known.
    """
    reason = out_of_memory(error, standing, budget=budget, advice=advice()) if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
    whole = isinstance(error, explained) or is_out_of_memory(error)
    text = reason if whole else "".join(traceback.format_exception(error)).rstrip()
    return Told(reason=reason[:_MOST_WORDS], text=text)


def report(error: BaseException, told: Told, watch: JobWatch, standing: Standing, *, status: int = 1) -> str:
    """Put an error on the job's board.

    Args:
        error: What was raised.
        told: It, in words.
        watch: Over the job.
        standing: Where this rank stood.
        status: Exit status of all ranks, should it be the root cause.

    Returns:
        What this rank still has to print: the root cause where it is this error, else one line that says whom the rank leaves for
        (nothing, where the watch has told more already).
    """
    lost = is_lost_peer(error)
    shared = isinstance(error, _SHARED) and error.__cause__ is None and not lost
    # Of an error that all ranks share, the rank that has its cause speaks first, and rank 0 before the rest.
    wait = LOST_WAIT_SECS if lost else _SHARED_WAIT_SECS * (1 + (watch.rank > 0)) if shared else 0.0
    if lost and watch.asked_to_stop:  # the launcher knows of the dead rank, and says so; it waits for this one
        return "" if watch.wait_for_root(_SHARED_WAIT_SECS) else told.text
    kind = "shared" if shared else "raised"
    mine = Failure(kind=kind, rank=watch.rank, by=watch.rank, reason=told.reason, where=place(standing), status=status)
    root = watch.report(mine, wait_secs=wait, lost=lost)
    if root is None or root == mine:
        return told.text
    lines = [] if watch.told else [root.leaving(watch.rank)]
    if root.kind == "silent" and root.rank == watch.rank and not lost and not isinstance(error, JobEnded):
        lines.append(told.text)  # the others gave this rank up; its own error may say why it was silent
    return "\n".join(lines)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is what a rank sees when another one is gone."""
    if isinstance(error, AgreementError):
        return isinstance(error, LostRankError)
    return any(
        isinstance(cause, (LostRankError, dist.DistNetworkError, dist.DistStoreError))
        or (isinstance(cause, RuntimeError) and any(sign in str(cause).lower() for sign in _SIGNS_OF_A_LOST_PEER))
        for cause in _chain(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory ran out, also below another error (PyTorch's CPU allocator raises a plain RuntimeError)."""
    return any(
        isinstance(cause, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(cause, RuntimeError) and ("can't allocate memory" in str(cause) or "not enough memory" in str(cause)))
        for cause in _chain(error)
    )


def out_of_memory(error: BaseException, standing: Standing, *, budget: int | None, advice: str = "") -> str:
    """What ran out, at which T, and what to lower."""
    cause = next(cause for cause in _chain(error) if is_out_of_memory(cause) and cause.__cause__ is None)
    stats = device.memory_stats()
    peak = f"; peak {stats['peak_reserved'] / 2**30:.1f} of {stats['total'] / 2**30:.1f} GiB reserved" if stats else ""
    rows = f": its T is {standing.rows}, the budget {budget}" if standing.rows is not None else f", where the budget is {budget}"
    first = str(cause).splitlines()[0] if str(cause) else "no more is known"
    return (
        f"out of memory at {place(standing)}{rows} ({type(cause).__name__}: {first}{peak}). Lower --max-tokens-per-microbatch "
        "(the step keeps its documents and its loss; it only has more microbatches), recompute activations (--recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1), or divide the model further (--tensor-model-parallel-size with "
        "--sequence-parallel, --pipeline-model-parallel-size, --use-distributed-optimizer)" + (f". {advice}" if advice else "")
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
