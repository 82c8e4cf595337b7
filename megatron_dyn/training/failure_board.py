# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other when collectives cannot be trusted any more: a few keys in the store that the job met through.

| key           | written by                          | holds                                                        |
|---------------|-------------------------------------|--------------------------------------------------------------|
| `failure`     | the first rank that fails or finds a fault | a `Failure`; later writers get the first one back       |
| `alarm`       | with a failure or a suspicion       | anything: the one key that every rank asks for on every tick |
| `suspicion`   | a rank whose connection broke       | anything: silent ranks are now declared lost sooner          |
| `beat/<rank>` | each rank on every tick             | a counter and where its main thread stands                   |
| `place/<rank>`| each rank, when stacks are wanted   | where it stands, in one line                                 |
| `told/<rank>` | each rank that knows the failure    | anything                                                     |

A board is used by one thread. Every call is one or two messages to the store and none waits for another rank.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Literal

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why the job ends: its root cause, as one rank told it."""

    kind: Literal["raised", "shared", "silent", "stalled"]
    """A rank raised; all ranks raise it (they disagree, say); a rank gives no sign of life; no rank gets on."""
    rank: int | None
    """Who failed (None: nobody in particular)."""
    by: int
    """Who told it."""
    reason: str
    """One paragraph without a traceback."""
    where: str = ""
    """Step, microbatch and phase of the rank that failed."""
    status: int = 1
    """Exit status of every rank."""

    def leaving(self, rank: int) -> str:
        """Why a rank that did not tell this failure leaves, in one line."""
        if self.kind == "shared":
            return f"leaving with all ranks, as rank {self.by} tells: {self.reason}"
        if self.rank == rank:
            return f"leaving because rank {self.by} gave this rank up: {self.reason}"
        return f"leaving because {self}"

    def __str__(self) -> str:
        return f"rank {self.rank} failed{self.where and f' ({self.where})'}: {self.reason}" if self.kind == "raised" else self.reason


class FailureBoard:
    """One rank's hand on the board.

    Args:
        store: A client that no other thread uses, in a namespace that no earlier attempt of the job has used.
        rank: This rank.
        world: Ranks of the job.
    """

    def __init__(self, store: dist.Store, *, rank: int, world: int):
        self._store = store
        self.rank = rank
        self.world = world

    def post(self, failure: Failure) -> Failure:
        """Write a failure unless there is one. Returns the first."""
        text = json.dumps(asdict(failure))
        first = self._store.compare_set("failure", "", text).decode()
        self._store.set("alarm", "1")
        return _failure(first)

    def suspect(self) -> None:
        """Say that some rank seems to be gone."""
        self._store.set("suspicion", "1")
        self._store.set("alarm", "1")

    def alarm(self) -> tuple[Failure | None, bool]:
        """The failure, if there is one, and whether a rank is suspected to be gone."""
        if not self._store.check(["alarm"]):
            return None, False
        text = self._read("failure")
        return None if text is None else _failure(text), self._store.check(["suspicion"])

    def beat(self, text: str) -> None:
        """A sign of life."""
        self._store.set(f"beat/{self.rank}", text)

    def beat_of(self, rank: int) -> str | None:
        """The last sign of life of a rank; None before its first."""
        return self._read(f"beat/{rank}")

    def place(self, text: str) -> None:
        """Where this rank stands, for the table."""
        self._store.set(f"place/{self.rank}", text)

    def place_of(self, rank: int) -> str | None:
        """Where a rank stands, if it answered."""
        return self._read(f"place/{rank}")

    def tell(self) -> None:
        """This rank knows the failure."""
        self._store.set(f"told/{self.rank}", "1")

    def untold(self, ranks: set[int]) -> set[int]:
        """Which of these ranks do not know it yet."""
        return {rank for rank in ranks if not self._store.check([f"told/{rank}"])}

    def _read(self, key: str) -> str | None:
        """A key's value without waiting for it."""
        return self._store.get(key).decode() if self._store.check([key]) else None


def _failure(text: str) -> Failure:
    """Of a rank whose code may be another (they meet here before versions are compared): what this one does not know is left out."""
    known = {item.name for item in fields(Failure)}
    return Failure(**{name: value for name, value in json.loads(text).items() if name in known})
