# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one attempt find each other in a store that an earlier attempt has used.

`torchrun --max-restarts` keeps its store over restarts, and torch reads from it what the dead attempt wrote: addresses of
processes that are gone (torch 2.13: "Connection refused" in `init_process_group`, on every restart). The number of restarts does not tell
attempts apart either: after a fault only the agent whose worker failed counts it. So the ranks agree on a fresh name first:

    rank 0         attempt = N (drawn at random)         sees hello/N/r = n_r  ->  echo/N/n_r
    rank r         reads attempt (perhaps a dead one)  ->  hello/<attempt>/r = n_r (drawn at random); reads again until it finds
                   echo/<attempt>/n_r: only a rank 0 that is alive can have written that

A rank that refuses to start says so in its greeting, and nobody waits for it.
"""

import json
import os
import time
import uuid
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

_POLL_SECS = 0.05
_ANSWER_SECS = 60


class RefusedError(RuntimeError):
    """Another rank refused to start, before any process group existed."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """This attempt of the job, as one of its ranks sees it."""

    rank: int
    world: int
    namespace: str
    """In the store; no earlier attempt has used it."""
    hosts_store: bool
    """The store's server lives in this process (without a launcher's: in rank 0) and ends with it."""
    store: dist.Store | None = field(default=None, repr=False, compare=False)
    """Keeps a server in this process alive between its clients."""

    def client(self, purpose: str, timeout: timedelta = timedelta(seconds=_ANSWER_SECS)) -> dist.Store:
        """A client of its own for one user (threads must not share one), under the attempt's namespace.

        Args:
            purpose: Second part of the namespace.
            timeout: Longest wait for a key.
        """
        if "WORLD_SIZE" not in os.environ:
            return dist.PrefixStore(purpose, dist.HashStore())
        return dist.PrefixStore(f"{self.namespace}/{purpose}", _connect(timeout))


def uses_launchers_store() -> bool:
    """Whether the store's server lives in the launcher, and so outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(*, timeout: timedelta, refusal: str | None = None) -> Meeting:
    """Meet the other ranks of this attempt.

    Args:
        timeout: Longest wait for them.
        refusal: Why this rank does not start; the others are told, and this one need not stay.

    Raises:
        RefusedError: Another rank refused.
        RuntimeError: The store, or a rank, did not come.
    """
    if "WORLD_SIZE" not in os.environ:
        return Meeting(rank=0, world=1, namespace="", hosts_store=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _connect(timeout)
    # A server in rank 0 is as young as the attempt.
    name = find_attempt(store, rank, world, timeout=timeout, refusal=refusal) if uses_launchers_store() else "first"
    hosts_store = rank == 0 and not uses_launchers_store()
    return Meeting(rank=rank, world=world, namespace=f"megatron_dyn/{name}", hosts_store=hosts_store, store=store)


def find_attempt(store: dist.Store, rank: int, world: int, *, timeout: timedelta, refusal: str | None = None) -> str:
    """A name that the ranks of this attempt share, and no earlier attempt used; see the module's text.

    Raises:
        RefusedError: Another rank refused.
        RuntimeError: A rank did not come in time.
    """
    store = dist.PrefixStore("megatron_dyn/attempts", store)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return _gather(store, world, deadline, refusal)
    nonce = uuid.uuid4().hex
    greeting = json.dumps({"nonce": nonce, "refusal": refusal})
    while True:
        name = store.get("attempt").decode() if store.check(["attempt"]) else None
        if name is not None:
            store.set(f"hello/{name}/{rank}", greeting)
            if store.check([f"echo/{name}/{nonce}"]):
                _raise_refusal(json.loads(store.get(f"echo/{name}/{nonce}").decode()), refusal)
                return name
        _wait(deadline, "rank 0 has not answered")


def _gather(store: dist.Store, world: int, deadline: float, refusal: str | None) -> str:
    """Rank 0: greet everybody. The echoes carry the first refusal, so they are held back until all have come or one refused."""
    name = uuid.uuid4().hex
    store.set("attempt", name)
    refused = None if refusal is None else [0, refusal]
    nonces: dict[int, str] = {}
    while len(nonces) < world - 1:
        for rank in set(range(1, world)) - set(nonces):
            if store.check([f"hello/{name}/{rank}"]):
                greeting = json.loads(store.get(f"hello/{name}/{rank}").decode())
                nonces[rank] = greeting["nonce"]
                if refused is None and greeting["refusal"] is not None:
                    refused = [rank, greeting["refusal"]]
                if refused is not None:
                    _echo(store, name, nonces, refused)
        if len(nonces) < world - 1:
            missing = sorted(set(range(1, world)) - set(nonces))
            _wait(deadline, f"ranks {missing[:8]}{' ...' if len(missing) > 8 else ''} have not come")
    _echo(store, name, nonces, refused)
    _raise_refusal(refused, refusal)
    return name


def _echo(store: dist.Store, name: str, nonces: dict[int, str], refused: list | None) -> None:
    for nonce in nonces.values():
        store.set(f"echo/{name}/{nonce}", json.dumps(refused))


def _raise_refusal(refused: list | None, mine: str | None) -> None:
    if refused is not None and mine is None:
        raise RefusedError(f"leaving because rank {refused[0]} refused to start: {refused[1]}")


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"{what} at the start of the job within --distributed-timeout-minutes: look at the output of those ranks and their launchers")
    time.sleep(_POLL_SECS)


def _connect(timeout: timedelta) -> dist.Store:
    """A client of its own; waits for the server, and for no rank (which `init_process_group` would do: for a world that may be wrong)."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=int(os.environ["RANK"]) == 0 and not uses_launchers_store(),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,  # the clients of one process share its server
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )
