# SPDX-License-Identifier: Apache-2.0
"""The processes of a job compare what they are, before a process group or anything else exists.

It goes through the rendezvous store (the one that process groups are made with), because groups cannot be made where ranks disagree
on their sizes: the ranks would wait in them. Each rank writes its facts; rank 0 reads all of them and writes the verdict, which
everybody waits for. A rank that sees another world than rank 0 says so at once, since rank 0 may wait for ranks that do not exist.

    key             written by   value
    world           rank 0       its WORLD_SIZE
    facts/<rank>    each         JSON object: name -> text
    verdict         rank 0 or the rank that refuses    "" to go on, else what is wrong
    read            each, when refused, a count        so that rank 0, which serves the store, leaves last
"""

import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import megatron_dyn
from megatron_dyn.pipeline.agreement import LostRankError, PlanDisagreement, holders

_POLL_SECS = 0.02
_FAREWELL_SECS = 2.0


@functools.cache
def code_version() -> str:
    """Version of this package and a fingerprint of its sources: two checkouts of one version differ in it."""
    folder = Path(megatron_dyn.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h") and path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{megatron_dyn.__version__} ({digest.hexdigest()[:12]})"


def shake_hands(store: dist.Store, rank: int, world: int, facts: Mapping[str, object], *, timeout: timedelta) -> dict[str, str]:
    """Compare the facts of all ranks.

    Args:
        store: Where they meet; in a namespace that no earlier attempt of the job has used.
        rank: This rank.
        world: Number of ranks it was told.
        facts: Name -> value; of several that differ, the first is told. A rank that lacks a name has no say in it.
        timeout: Longest wait for a rank to come.

    Returns:
        The facts of rank 0, as text.

    Raises:
        PlanDisagreement: On every rank, with one text: the ranks, and the first fact that differs with its values.
        LostRankError: A rank did not come in time, or the store is gone.
    """
    refusal = ""
    try:
        if rank == 0:
            store.set("world", str(world))
        else:
            store.wait(["world"], timeout)
            of_rank_0 = store.get("world").decode()
            if of_rank_0 != str(world):
                refusal = f"WORLD_SIZE: {of_rank_0} on rank 0, {world} on rank {rank}. The ranks were not started as one job"
                store.set("verdict", refusal)
        store.set(f"facts/{rank}", json.dumps({name: _text(value) for name, value in facts.items()}))
        if rank == 0:
            keys = [f"facts/{other}" for other in range(world)]
            if _wait_for(store, keys, timeout):
                store.set("verdict", first_difference([json.loads(store.get(key)) for key in keys]))
        else:
            _wait_for(store, ["verdict"], timeout)
        verdict = refusal or store.get("verdict").decode()
        if not verdict:
            return json.loads(store.get("facts/0"))
        _leave_after_the_others(store, rank, world)
    except (RuntimeError, ValueError) as error:
        raise LostRankError(
            f"not all of the {world} ranks came to compare their settings: {error}. Look for the rank that failed first, or was not started"
        ) from error
    raise PlanDisagreement(
        f"the ranks disagree at the start, before any step: {verdict}. Nothing was built, since ranks that differ would hang or mix different "
        "microbatches. Give all ranks the same flags, files and installed versions"
    )


def first_difference(everybody: Sequence[Mapping[str, str]]) -> str:
    """The first fact, in their order, that differs between the ranks, with its values; empty where none does. (The rest follows from it, or
    is found by the next attempt.)"""
    for name in dict.fromkeys(name for facts in everybody for name in facts):
        values = [facts.get(name) for facts in everybody]
        if len(set(values) - {None}) > 1:
            return f"{name}: {holders(values)}"
    return ""


def _wait_for(store: dist.Store, keys: list[str], timeout: timedelta) -> bool:
    """Wait for all keys or for a verdict; True where the keys came before one."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(["verdict"]):
        if store.check(keys):
            return True
        if time.monotonic() > deadline:
            missing = [key for key in keys if not store.check([key])]
            raise RuntimeError(f"{', '.join(missing)} did not come within {timeout.total_seconds():g} s")
        time.sleep(_POLL_SECS)
    return False


def _leave_after_the_others(store: dist.Store, rank: int, world: int) -> None:
    arrived = store.add("read", 1)
    deadline = time.monotonic() + _FAREWELL_SECS
    while rank == 0 and arrived < world and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
        arrived = store.add("read", 0)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
