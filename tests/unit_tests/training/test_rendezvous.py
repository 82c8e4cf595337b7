# SPDX-License-Identifier: Apache-2.0
"""Ranks of one attempt find each other in a store full of what a dead attempt wrote."""

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_dyn.training import rendezvous
from megatron_dyn.training.rendezvous import RefusedError, find_attempt, meet


def attempt(
    store: dist.Store, world: int, *, refusals: dict[int, str] = {}, late: int | None = None, absent: int | None = None, secs: float = 20
) -> list:
    """What each rank gets: a name or an error."""
    found: list = [None] * world

    def rank_main(rank: int) -> None:
        try:
            found[rank] = find_attempt(store, rank, world, timeout=timedelta(seconds=secs), refusal=refusals.get(rank))
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world) if rank != absent]
    for number, thread in enumerate(threads):
        (threading.Timer(0.3, thread.start) if number == late else thread).start()
    for thread in threads:
        while thread.ident is None:
            time.sleep(0.01)
        thread.join()
    return found


@pytest.mark.parametrize("late", [None, 0, 2])
def test_every_attempt_has_a_name_of_its_own_whoever_comes_last(late):
    store, names = dist.HashStore(), []
    for _ in range(4):
        found = attempt(store, 3, late=late)
        assert len(set(found)) == 1 and isinstance(found[0], str)
        names.append(found[0])
    assert len(set(names)) == 4


@pytest.mark.slow
def test_mutant_without_echoes_a_rank_joins_a_dead_attempt(monkeypatch):
    class Trusting:
        def __init__(self, prefix, store):
            self._store = store

        def __getattr__(self, name):
            return getattr(self._store, name)

        def check(self, keys):
            return keys[0].startswith("echo") or self._store.check(keys)

        def get(self, key):
            return b"null" if key.startswith("echo") else self._store.get(key)

    store = dist.HashStore()
    monkeypatch.setattr(rendezvous.dist, "PrefixStore", Trusting)
    attempt(store, 3)
    assert len(set(map(str, attempt(store, 3, late=0, secs=1)))) > 1


@pytest.mark.parametrize("refusing", [0, 2])
def test_a_rank_that_refuses_is_told_to_all_and_the_next_attempt_knows_nothing_of_it(refusing):
    store = dist.HashStore()
    found = attempt(store, 3, refusals={refusing: "ConfigError: no such file"})
    others = [answer for rank, answer in enumerate(found) if rank != refusing]
    told = f"rank {refusing} refused to start: ConfigError: no such file"
    assert all(isinstance(answer, RefusedError) and told in str(answer) for answer in others)
    assert len(set(attempt(store, 3))) == 1


def test_a_rank_that_does_not_come_is_named():
    found = attempt(dist.HashStore(), 3, absent=2, secs=0.5)
    assert "ranks [2] have not come" in str(found[0]) and "rank 0 has not answered" in str(found[1])


@pytest.mark.parametrize("agent", [True, False])
def test_the_launchers_own_store_is_used_where_there_is_one(agent, monkeypatch):
    """torchrun serves a store that outlives the ranks: rank 0 must not try to serve one at the same place, nor read an earlier attempt's keys."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False) if agent else None
    settings = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(agent)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    meetings = [meet(timeout=timedelta(seconds=20)) for _ in range(2 if agent else 1)]
    clients = [meeting.client("groups") for meeting in meetings]
    clients[0].set("key", "value")
    assert clients[0].get("key") == b"value" and meetings[0].hosts_store is not agent
    if agent:
        assert server.num_keys() > 0 and not clients[1].check(["key"]), "another attempt"
