# SPDX-License-Identifier: Apache-2.0
"""All ranks agree on a step before the first kernel of it runs.

Every rank plans for itself, so nothing has to be sent; what could go wrong is that two ranks hold different plans (another
corpus file, another version, a flag that differs), or that one could not make its plan at all. Both would leave the others
waiting in a collective. One all-reduce of a few integers per step finds either, and every rank raises the same error.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist


class AgreementError(RuntimeError):
    """Ranks hold different plans for a step, or one of them failed; raised on every rank, before the step starts."""


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
        words = torch.frombuffer(bytearray(hashlib.sha256(value.encode()).digest()), dtype=torch.int32).to(torch.int64)
        if error is not None:
            words = torch.zeros_like(words)
        flags = torch.tensor([error is not None, stop_requested], dtype=torch.int64)
        # The largest of x and the largest of -x are opposite only where all ranks hold the same x.
        message = torch.cat([words, -words, flags])
        try:
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as lost:
            raise LostRankError(
                f"a rank was lost while the ranks agreed on {what}: {lost}. Nothing of it was computed; the last checkpoint is intact"
            ) from (error or lost)
        failed, stop = (bool(flag) for flag in message[-2:])
        if failed or not torch.equal(message[: words.numel()], -message[words.numel() : 2 * words.numel()]):
            self._explain(what, value, error)
        return Agreed(stop_requested=stop)

    def _explain(self, what: str, value: str, error: BaseException | None) -> None:
        mine = (value, None if error is None else f"{type(error).__name__}: {error}")
        everybody: list = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everybody, mine, group=self._group)
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(everybody) if text is not None]
        if failures:
            raise AgreementError(f"{what} cannot start, because {'; '.join(failures)}. No rank has begun it") from error
        described = _describe_differences([held for held, _ in everybody])
        raise AgreementError(
            f"the ranks disagree on {what}: {described}. Going on would hang or mix different microbatches. "
            "Compare the corpus files, the flags and the versions on the ranks that differ"
        )


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
    """'a on ranks 0-2; b on ranks 3'; of JSON objects, that for each entry that differs."""
    try:
        objects = [json.loads(value) for value in held]
        names = sorted({name for entries in objects for name in entries})
        shown = [(f"{name}: ", [json.dumps(entries.get(name)) for entries in objects]) for name in names]
    except (ValueError, TypeError):
        shown = [("", [value[:16] for value in held])]
    described = []
    for label, values in shown:
        holders: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            by_size = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
            described.append(label + "; ".join(f"{value} on ranks {_ranges(ranks)}" for value, ranks in by_size))
    return " | ".join(described)


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
