# SPDX-License-Identifier: Apache-2.0
"""Before the first kernel of a step all ranks hold the same plan, and know that they do.

Every rank plans for itself, so nothing has to be sent; what could go wrong is that two ranks hold different plans (another corpus
file, another version, a setting that differs), that one could not make its step at all, or, if asked for, that ranks which share a
part of the step read other tokens. Any of it would leave the others waiting in a collective, or be wrong in silence.

One all-reduce of a few integers a step finds it: a digest of everything below, over *all* ranks (a step plan holds the microbatches
of every data-parallel rank, so K and T are compared over tensor, pipeline and data parallelism at once). Only where the digests
differ do ranks exchange the parts, to say in words what differs first:

    constants            corpus fingerprint, each setting of the plan, code version, schedule, in this order
    step                 number and epoch of the plan
    K                    microbatches of each data-parallel rank
    T                    of each microbatch of each data-parallel rank
    documents            what each microbatch is packed from
    tokens (on request)  what each rank read, against the ranks of the same data-parallel rank
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_dyn.pipeline.agreement import (
    ABSENT,
    Agreed,
    PlanDisagreement,
    digest_words,
    gather,
    holders,
    in_words,
    meet,
    raise_failures,
)

if TYPE_CHECKING:
    from megatron_dyn.planning import PlanConfig, Planner, StepPlan

_CONSEQUENCE = "Going on would hang or mix different microbatches"


def plan_constants(
    planner: "Planner", *, code_version: str, schedule: Mapping[str, object], called: Callable[[str], str] = str
) -> dict[str, str]:
    """What the plans of a run follow from, in the order in which a difference is told.

    Args:
        planner: Makes the plans.
        code_version: Of this package, see `handshake.code_version`.
        schedule: What decides the order of the pipeline's work, each by the name it is told by.
        called: The name that a setting of `PlanConfig` is told by.
    """
    values = {
        "corpus fingerprint": planner.fingerprint,
        **{called(name): value for name, value in plan_settings(planner.config).items()},
        "code version": code_version,
        **schedule,
    }
    return {name: value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str) for name, value in values.items()}


def plan_settings(config: "PlanConfig") -> dict[str, object]:
    """Each setting of a planner by its name, the cost model's as well: plain values that differ where the settings do."""
    settings = config.to_dict()
    del settings["cost"]
    return settings | {f"cost_{item.name}": getattr(config.cost, item.name) for item in fields(config.cost)}


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank holds of a step."""

    plan: "StepPlan"

    contents: Sequence[int] | None = None
    """Checksum of the tokens of each of this rank's microbatches (`content_checksum`); None where it reads none, or nobody asked."""


class PlanAgreement:
    """Compares the plans of one stream of steps over all ranks. Used by one thread at a time.

    Args:
        constants: See `plan_constants`.
        data_parallel_rank: This rank's part of each step.
        data_parallel_size: Parts of a step.
        check_contents: Compare checksums of the tokens too; equal on all ranks.
        group: Of CPU tensors over all ranks, used for nothing else meanwhile; None is the default group.
    """

    def __init__(
        self,
        constants: Mapping[str, str],
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        check_contents: bool = False,
        group: dist.ProcessGroup | None = None,
    ):
        self.check_contents = check_contents
        self._constants = dict(constants)
        self._rank = data_parallel_rank
        self._size = data_parallel_size
        self._group = group

    def check(
        self, what: str, held: Held | None, *, error: BaseException | None = None, stop_requested: bool = False
    ) -> Agreed:
        """Meet all ranks; return only if all hold the same step and none has failed. A collective of the group.

        Args:
            what: Names the step in messages ("step 12").
            held: What this rank holds; None if it could not even plan.
            error: Why this rank cannot go on, if it cannot.
            stop_requested: This rank was asked to stop.

        Raises:
            PlanDisagreement: On every rank: plans or tokens differ.
            AgreementError: On every rank: a rank failed.
            LostRankError: A rank is gone.
        """
        words = torch.zeros(8, dtype=torch.int64) if held is None else digest_words(self._digest(held.plan))
        if self.check_contents:
            contents = torch.full((self._size,), ABSENT, dtype=torch.int64)
            if held is not None and held.contents is not None:
                contents[self._rank] = _fold(held.contents)
            words = torch.cat([words, contents])
        equal, failed, stop = meet(what, words, error=error, stop_requested=stop_requested, group=self._group)
        if failed or not equal.all():
            self._explain(what, held, error)
        return Agreed(stop_requested=stop)

    def _digest(self, plan: "StepPlan") -> bytes:
        """Everything that must be equal, from the plan in hand: what was changed after it was made counts as well."""
        digest = hashlib.sha256()
        for value in self._parts(plan).values():
            digest.update(value.encode())
            digest.update(b";")
        digest.update(_lengths(plan).tobytes())
        digest.update(plan.digest.encode())
        return digest.digest()

    def _parts(self, plan: "StepPlan") -> dict[str, str]:
        counts = [len(part) for part in plan.microbatches]
        return {
            **self._constants,
            "step of the plan": f"{plan.step} (epoch {plan.epoch})",
            "K (microbatches of each data-parallel rank)": str(counts[0]) if len(set(counts)) == 1 else str(counts),
        }

    def _explain(self, what: str, held: Held | None, error: BaseException | None) -> None:
        """Exchange the parts, and raise the first difference (or the failures) on every rank. All ranks come here or none."""
        parts = None if held is None else self._parts(held.plan)
        everybody = gather((parts, in_words(error)), self._group)
        found = _first_difference([theirs for theirs, _ in everybody])
        if found is None and all(theirs is not None for theirs, _ in everybody):
            found = self._difference_of_microbatches(held)
        if found is None:
            raise_failures(what, [text for _, text in everybody], error)
            raise PlanDisagreement(f"the ranks disagree on {what}, but in nothing that can be named: the digests differ. {_CONSEQUENCE}")
        failed = "; ".join(f"rank {rank} also failed: {text}" for rank, (_, text) in enumerate(everybody) if text is not None)
        raise PlanDisagreement(f"the ranks disagree on {what}: {found}" + (f". {failed}" if failed else "")) from error

    def _difference_of_microbatches(self, held: Held) -> str | None:
        """The first microbatch in which T, documents or tokens differ. All ranks have as many microbatches here."""
        plan = held.plan
        by_rank = [len(part) for part in plan.microbatches]
        for name, mine, cure in (
            ("T", _lengths(plan), "Compare the versions on the ranks that differ: equal settings and lengths must give equal T"),
            ("documents", _documents(plan), "Compare the corpus files and the versions on the ranks that differ"),
        ):
            tables = gather(mine, self._group)
            different = np.flatnonzero((np.stack(tables) != tables[0]).any(axis=0))
            if len(different):
                at = int(different[0])
                rank, index = _place(at, by_rank)
                values = holders([str(int(table[at])) if name == "T" else f"digest {int(table[at]) & 0xFFFFFFFF:08x}" for table in tables])
                return f"{name} of microbatch {index} of data-parallel rank {rank}: {values}. {_CONSEQUENCE}. {cure}"
        return self._difference_of_tokens(held) if self.check_contents else None

    def _difference_of_tokens(self, held: Held) -> str | None:
        everybody = gather((self._rank, None if held.contents is None else list(held.contents)), self._group)
        for index in range(max(len(read or ()) for _, read in everybody)):
            for part in range(self._size):
                values = [f"checksum {read[index]:016x}" if rank == part and read else None for rank, read in everybody]
                if len(set(values) - {None}) > 1:
                    return (
                        f"tokens of microbatch {index} of data-parallel rank {part}: {holders(values)}. The lengths are the same, so training "
                        "would go on with different tokens on ranks that share them. Compare the .bin files on the nodes of these ranks"
                    )
        return None


def _fold(contents: Sequence[int]) -> int:
    digest = hashlib.blake2b(np.asarray(contents, dtype="<i8"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 2


def _lengths(plan: "StepPlan") -> np.ndarray:
    """T of every microbatch in rank-major order, int64 [ranks * K]."""
    return np.array([microbatch.T for part in plan.microbatches for microbatch in part], dtype="<i8")


def _documents(plan: "StepPlan") -> np.ndarray:
    """A digest of pieces and boundaries of every microbatch in rank-major order, int64 [ranks * K]."""

    def digest(microbatch) -> int:
        found = hashlib.blake2b(repr((microbatch.pieces, microbatch.joined, microbatch.following)).encode(), digest_size=8)
        for boundaries in (microbatch.cu_seqlens, microbatch.cu_seqlens_padded):
            found.update(np.asarray(boundaries, dtype="<i8").tobytes())
        return int.from_bytes(found.digest(), "little") >> 2

    return np.array([digest(microbatch) for part in plan.microbatches for microbatch in part], dtype="<i8")


def _place(at: int, by_rank: Sequence[int]) -> tuple[int, int]:
    """Place in the rank-major order -> (data-parallel rank, microbatch)."""
    rank = 0
    while at >= by_rank[rank]:
        at -= by_rank[rank]
        rank += 1
    return rank, at


def _first_difference(everybody: Sequence[Mapping[str, str] | None]) -> str | None:
    """The first named part that differs between the ranks that have a plan."""
    held = [parts for parts in everybody if parts is not None]
    names = list(dict.fromkeys(name for parts in held for name in parts))
    for name in names:
        values = [None if parts is None else parts.get(name, "nothing") for parts in everybody]
        if len(set(values) - {None}) > 1:
            return f"{name}: {holders(values)}. {_CONSEQUENCE}. {_cure(name)}"
    return None


def _cure(name: str) -> str:
    if name == "corpus fingerprint":
        return "The corpus files differ: copy one set of .bin and .idx to all nodes"
    if name == "code version":
        return "Install one version of megatron_dyn on all nodes"
    return "Give all ranks the same flags and the same corpus files"
