# SPDX-License-Identifier: Apache-2.0
"""What processes are is compared before any group exists: each difference ends all of them, in seconds, with one text."""

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import megatron_dyn
from megatron_dyn.pipeline import handshake
from megatron_dyn.pipeline.agreement import AgreementError, LostRankError, PlanDisagreement
from megatron_dyn.pipeline.handshake import first_difference, shake_hands
from megatron_dyn.training.rendezvous import meet

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "functional_tests"))
from launch import launch  # noqa: E402

TIMEOUT = timedelta(seconds=20)
TOLD = f"{PlanDisagreement.__name__}: the ranks disagree at the start, before any step: "


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def shake(rank: int, world: int, port: int, facts: dict, *, timeout: timedelta = TIMEOUT):
    """(facts of rank 0, None) or (None, error), and seconds."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    began = time.monotonic()
    meeting = meet(timeout=timeout)
    try:
        found, error = shake_hands(meeting.client("handshake", timeout), rank, world, facts, timeout=timeout), None
        dist.init_process_group("gloo", store=meeting.client("groups", timeout), rank=rank, world_size=world)
        dist.barrier()  # groups can be made of the same store
        dist.destroy_process_group()
    except AgreementError as raised:
        found, error = None, raised
    return found, error and f"{type(error).__name__}: {error}", time.monotonic() - began


def test_differences_end_all_ranks_with_one_text():
    equal, setting, version, world_size, no_say = ports = free_ports(5)

    def job(rank, world):
        facts = {"version of torch": "2", "training.seed": 1, "checkpoint.save": None}
        return {
            equal: shake(rank, world, equal, facts),
            setting: shake(rank, world, setting, facts | {"training.seed": 2 if rank == 2 else 1}),
            version: shake(rank, world, version, facts | ({"version of torch": "3", "training.seed": 2} if rank == 1 else {})),
            world_size: shake(rank, 2 if rank == 1 else world, world_size, facts),
            no_say: shake(rank, world, no_say, facts | ({"fingerprint": "f"} if rank != 1 else {})),
        }

    told = launch(3, job, process_group=False)
    for of_rank in told:
        assert of_rank[equal][0] == {"version of torch": "2", "training.seed": "1", "checkpoint.save": "null"} and of_rank[equal][1] is None
        assert f"{TOLD}training.seed: 1 on ranks 0-1, 2 on rank 2. Nothing was built" in of_rank[setting][1]
        assert f"{TOLD}version of torch: 2 on ranks 0, 2; 3 on rank 1. Nothing" in of_rank[version][1] and "seed" not in of_rank[version][1]
        assert "WORLD_SIZE: 3 on rank 0, 2 on rank 1" in of_rank[world_size][1]
        assert of_rank[no_say][0]["fingerprint"] == "f", "a rank without a say takes over what rank 0 found"
        assert max(of_rank[port][2] for port in ports) < 5
    assert len({of_rank[setting][1] for of_rank in told}) == 1


def test_a_rank_that_does_not_come_is_named():
    [port] = free_ports(1)

    def job(rank, world):
        return shake(rank, world, port, {}, timeout=timedelta(seconds=1)) if rank == 0 else None

    error = launch(2, job, process_group=False)[0][1]
    assert error.startswith(LostRankError.__name__) and "facts/1 did not come within 1 s" in error


def test_one_process_without_a_launcher_agrees_with_itself(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    meeting = meet(timeout=TIMEOUT)
    assert (meeting.rank, meeting.world) == (0, 1)
    assert shake_hands(meeting.client("handshake"), 0, 1, {"seed": 1}, timeout=TIMEOUT) == {"seed": "1"}


def test_the_first_difference_is_told_in_a_readers_words():
    facts = {"version": "1", "--save": "null", "--bf16": "true", "--seed": "1"}
    other = facts | {"--save": "here", "--bf16": "false", "--seed": "2"}
    assert first_difference([facts, other]) == "--save: not given on rank 0, here on rank 1"
    assert first_difference([other | {"--save": "null"}, facts]) == "--bf16: no on rank 0, yes on rank 1"
    assert first_difference([facts, dict(facts), facts]) == ""


def test_the_code_version_changes_with_one_byte_of_a_source(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text("a = 1\n")
    monkeypatch.setattr(megatron_dyn, "__file__", str(tmp_path / "__init__.py"))
    seen = []
    for text in ("a = 1\n", "a = 2\n", "a = 1\n"):
        (tmp_path / "module.py").write_text(text)
        handshake.code_version.cache_clear()
        seen.append(handshake.code_version())
    handshake.code_version.cache_clear()
    assert seen[0] == seen[2] != seen[1]
