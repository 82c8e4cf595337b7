# SPDX-License-Identifier: Apache-2.0
"""Ranks tell each other what they hold, and every rank raises the same error where they differ or one of them failed.

Here is what all such meetings have in common, and the one that the main threads hold while nothing else runs (at the start, around
checkpoints). `plan_agreement.py` compares the plan of each step, `handshake.py` what the processes are before any group exists.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_IN_WORDS = {"null": "not given", "true": "yes", "false": "no"}
"""JSON's words -> a reader's."""

ABSENT = -(2**63) + 1
"""A word of a rank that has no say in it: below every digest and below every negated one."""


class AgreementError(RuntimeError):
    """Ranks hold different plans for a step, or one of them failed; raised on every rank, before the step starts."""


class PlanDisagreement(AgreementError):
    """Ranks hold different plans (or tokens) for a step; raised on every rank before its first kernel, naming ranks, step and field."""


class LostRankError(AgreementError):
    """A rank is gone, so nothing that needs all of them (such as saving) can be done any more."""


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What the ranks found out together."""

    stop_requested: bool
    """At least one rank was asked to stop (SIGTERM): all of them save and leave after this exchange."""


class Agreement:
    """Compares small facts over a process group of CPU tensors.

    Args:
        group: Group whose backend moves CPU tensors (gloo), over all ranks of the job; None is the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group

    def check(self, what: str, value: str, *, error: BaseException | None = None, stop_requested: bool = False) -> Agreed:
        """Meet all ranks; return only if every one of them holds the same value and none has failed.

        Args:
            what: What the value is, for the message ("the plan of step 12").
            value: What this rank holds: for a plan its digest, for settings a JSON object (the message then names the entries that
                differ). Ignored when `error` is given.
            error: Why this rank cannot go on, if it cannot.
            stop_requested: This rank was asked to stop.

        Returns:
            Agreed: The facts that any rank reported.

        Raises:
            AgreementError: On every rank, naming the ranks that failed or differ.
        """
        words = digest_words(value.encode())
        equal, failed, stop = meet(what, words if error is None else torch.zeros_like(words), error=error, stop_requested=stop_requested, group=self._group)
        if failed or not equal.all():
            self._explain(what, value, error)
        return Agreed(stop_requested=stop)

    def least(self, what: str, number: int) -> int:
        """Meet all ranks; the least of their numbers.

        Args:
            what: What the number is, for the message.
            number: This rank's.

        Raises:
            LostRankError: The connection to a rank broke, or it did not come in time.
        """
        least = torch.tensor([number], dtype=torch.int64)
        try:
            dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as lost:
            raise LostRankError(f"a rank was lost while the ranks agreed on {what}: {lost}") from lost
        return int(least)

    def _explain(self, what: str, value: str, error: BaseException | None) -> None:
        everybody = gather((value, in_words(error)), self._group)
        raise_failures(what, [text for _, text in everybody], error)
        described = _describe_differences([held for held, _ in everybody])
        raise AgreementError(
            f"the ranks disagree on {what}: {described}. Going on would hang or mix different microbatches. "
            "Compare the corpus files, the flags and the versions on the ranks that differ"
        )


def new_cpu_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A gloo group of all ranks with an order of collectives of its own: for a thread, which must not share one with another thread.

    A collective: all ranks call it.
    """
    return dist.new_group(backend="gloo", timeout=timeout)


def digest_words(data: bytes) -> torch.Tensor:
    """Sha256 as int64 [8], each word small enough to be negated."""
    return torch.frombuffer(bytearray(hashlib.sha256(data).digest()), dtype=torch.int32).to(torch.int64)


def meet(
    what: str,
    words: torch.Tensor,
    *,
    error: BaseException | None,
    stop_requested: bool,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, bool, bool]:
    """The one collective: every rank's words in, and whether they are the same on all ranks.

    Args:
        what: Names the meeting in the error.
        words: int64 [n], none the smallest integer; `ABSENT` where this rank has no say.
        error: Why this rank cannot go on.
        stop_requested: This rank was asked to stop.
        group: Of CPU tensors.

    Returns:
        Equal: bool [n], for each word whether all ranks that have a say hold the same; failed: some rank has an error; stop: some rank was asked.

    Raises:
        LostRankError: The connection to a rank broke, or it did not come in time.
    """
    flags = torch.tensor([error is not None, stop_requested], dtype=torch.int64)
    # The largest of x and the largest of -x are opposite only where all ranks hold the same x.
    message = torch.cat([words, torch.where(words == ABSENT, words, -words), flags])
    try:
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    except RuntimeError as lost:
        raise LostRankError(
            f"a rank was lost while the ranks agreed on {what}: {lost}. Nothing of it was computed; the last checkpoint is intact"
        ) from (error or lost)
    most, least = message[: words.numel()], message[words.numel() : -2]
    failed, stop = (bool(flag) for flag in message[-2:])
    return (most == -least) | (most == ABSENT), failed, stop


def gather(mine: Any, group: dist.ProcessGroup | None) -> list:
    """Every rank's object, in the order of ranks (in the order of the group's, where that is smaller)."""
    everybody: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, mine, group=group)
    return everybody


def in_words(error: BaseException | None) -> str | None:
    """'TypeError: what it says', or None."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_failures(what: str, failures: Sequence[str | None], error: BaseException | None) -> None:
    """Raise what made a rank fail, if one did.

    Args:
        what: What cannot start.
        failures: For each rank, why it cannot go on.
        error: This rank's own reason.

    Raises:
        AgreementError: Naming every rank that failed.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(failures):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    told = [f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {text}" for text, ranks in ranks_of.items()]
    if told:
        raise AgreementError(f"{what} cannot start, because {'; '.join(told)}. No rank has begun it") from error


@contextlib.contextmanager
def losing_a_rank_during(what: str) -> Iterator[None]:
    """Say what it means when a collective inside fails because another rank is gone.

    Raises:
        LostRankError: In place of the backend's RuntimeError about a connection or a time-out.
    """
    try:
        yield
    except RuntimeError as error:
        signs = ("connection closed", "connection reset", "timed out", "nccl", "broken pipe", "socket")
        if not any(sign in str(error).lower() for sign in signs):
            raise
        first_line = str(error).splitlines()[0]
        raise LostRankError(
            f"a rank was lost during {what}: {first_line}. Look for the first rank that failed; its update was not made, and the last "
            "checkpoint is intact"
        ) from error


def _describe_differences(held: list[str]) -> str:
    """'a on ranks 0-2, b on rank 3'; of JSON objects, that for each entry that differs."""
    try:
        objects = [json.loads(value) for value in held]
        names = sorted({name for entries in objects for name in entries})
        shown = [(f"{name}: ", [json.dumps(entries.get(name)) for entries in objects]) for name in names]
    except (ValueError, TypeError):
        shown = [("", [value[:16] for value in held])]
    described = [label + holders(values) for label, values in shown if len(set(values)) > 1]
    return " | ".join(described)


def holders(values: Sequence[str | None]) -> str:
    """'a on ranks 0-2, b on rank 3': who holds what, the most common first; a rank whose value is None is left out."""
    held: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            held.setdefault(value, []).append(rank)
    by_size = sorted(held.items(), key=lambda item: (-len(item[1]), item[1]))
    where = [ranges(ranks) for _, ranks in by_size]
    between = "; " if any("," in ranks for ranks in where) else ", "
    return between.join(
        f"{_IN_WORDS.get(value, value)} on rank{'s' if len(ranks) > 1 else ''} {place}" for (value, ranks), place in zip(by_size, where)
    )


def ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
