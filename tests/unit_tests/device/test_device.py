# SPDX-License-Identifier: Apache-2.0
"""device.py: what it chooses, that the CPU replacements come and go as a whole, and that they never touch a machine with CUDA."""

import importlib.util
import logging

import pytest
import torch
from megatron.core.tensor_parallel import random as tracker_module
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megatron_dyn import device

REPLACED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch, "zeros"),
    (torch, "tensor"),
    (torch, "empty"),
    (torch, "empty_like"),
    (torch.Tensor, "cuda"),
    (torch.Tensor, "type"),
    (torch.cuda, "get_rng_state"),
    (torch.cuda.random, "get_rng_state"),
    (tracker_module, "_set_cuda_rng_state"),
    (torch.cuda, "manual_seed"),
]


def now() -> list[object]:
    return [getattr(owner, name) for owner, name in REPLACED]


@pytest.fixture
def original(monkeypatch):
    """A machine without CUDA, nothing replaced."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device.uninstall_cpu_replacements()
    yield now()
    device.uninstall_cpu_replacements()


@pytest.fixture
def installed(original):
    device.install_cpu_replacements()
    return original


def as_if_there_were_a_gpu(monkeypatch, cards=1):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1] if chosen else 0)


def test_importing_replaces_nothing(original):
    spec = importlib.util.spec_from_file_location("device_imported_again", device.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert now() == original


def test_installing_replaces_exactly_the_table_and_uninstalling_restores_it(original):
    names = device.install_cpu_replacements()
    assert names == [entry.name for entry in device.CPU_REPLACEMENTS] and len(set(names)) == len(names)
    assert all(new is not old for new, old in zip(now(), original))
    assert len(names) == len(REPLACED) + 1  # and one warning
    assert all(entry.reason.endswith(".") for entry in device.CPU_REPLACEMENTS)
    device.uninstall_cpu_replacements()
    assert now() == original


def test_installing_twice_is_installing_once(original):
    device.install_cpu_replacements()
    once = now()
    assert device.install_cpu_replacements() == [entry.name for entry in device.CPU_REPLACEMENTS]
    assert now() == once
    device.uninstall_cpu_replacements()
    assert now() == original


def test_a_machine_with_cuda_is_never_touched(original, monkeypatch):
    as_if_there_were_a_gpu(monkeypatch)
    before = now()
    with pytest.raises(RuntimeError, match="machine with CUDA"):
        device.install_cpu_replacements()
    assert now() == before


def test_only_calls_that_name_cuda_change(installed):
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(1).type() == "torch.FloatTensor"  # this module is not Megatron's optimizer
    assert torch.ones(1).type(torch.int64).dtype == torch.int64
    asked_by_the_optimizer = eval("lambda x: x.type()", {"__name__": "megatron.core.optimizer.clip_grads"})
    assert asked_by_the_optimizer(torch.ones(1)) == "torch.cuda.FloatTensor"
    assert asked_by_the_optimizer(torch.ones(1, dtype=torch.bfloat16)) == "torch.cuda.BFloat16Tensor"


def seed(tp_rank: int) -> None:
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, tp_rank=tp_rank, ep_rank=0, etp_rank=0, force_reset_rng=True)


def test_megatrons_tracker_works_on_the_cpu(installed, caplog):
    drawn = {}
    with caplog.at_level(logging.WARNING):
        for rank in (0, 1):
            seed(rank)
            before = torch.get_rng_state()
            with get_cuda_rng_tracker().fork():
                first = torch.rand(4)
            assert torch.equal(torch.get_rng_state(), before)  # restored
            with get_cuda_rng_tracker().fork():
                assert not torch.equal(torch.rand(4), first)  # and the fork's own state went on
            drawn[rank] = (torch.rand(4), first)
    assert torch.equal(drawn[0][0], drawn[1][0])  # default generator: the same on all tensor-parallel ranks
    assert not torch.equal(drawn[0][1], drawn[1][1])  # model-parallel generator: each rank's own
    assert not caplog.records


def test_the_silenced_warning_comes_back(installed, caplog):
    device.uninstall_cpu_replacements()
    with caplog.at_level(logging.WARNING):
        logging.getLogger(tracker_module.__name__).warning("CPU RNG state changed within GPU RNG context")
    assert len(caplog.records) == 1


def test_rng_state_brings_every_generator_back(installed):
    seed(0)

    def draw():
        with get_cuda_rng_tracker().fork():
            own = torch.rand(3)
        return torch.cat([own, torch.rand(3)])

    draw()
    state = device.rng_state()
    expected = draw(), draw()
    device.set_rng_state(state)
    assert torch.equal(draw(), expected[0])
    device.set_rng_state(state)  # reading and drawing left the state itself alone
    assert torch.equal(draw(), expected[0]) and torch.equal(draw(), expected[1])
    assert state["cuda"] is None and "model-parallel-rng" in state["tracker"]


def test_rng_state_of_another_kind_of_device_is_refused(installed):
    seed(0)
    with pytest.raises(ValueError, match="saved on a GPU and this is a CPU"):
        device.set_rng_state(device.rng_state() | {"cuda": torch.zeros(16, dtype=torch.uint8)})


def test_on_a_cpu(original, monkeypatch):
    monkeypatch.delenv(device.BACKEND_VARIABLE, raising=False)
    assert device.compute_device() == device.initialize_device() == torch.device("cpu")
    assert device.distributed_backend() == "gloo"
    assert device.memory_stats() is None
    assert device.device_name().startswith("CPU")
    tensor = torch.ones(2)
    assert device.pin(tensor) is tensor
    device.synchronize()
    with pytest.raises(ValueError, match="needs CUDA"):
        device.distributed_backend("nccl")
    with pytest.raises(ValueError, match="not known"):
        device.distributed_backend("mpi")


def test_on_a_gpu(original, monkeypatch):
    monkeypatch.delenv(device.BACKEND_VARIABLE, raising=False)
    as_if_there_were_a_gpu(monkeypatch, cards=2)
    assert device.distributed_backend() == "nccl"
    assert device.initialize_device(1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="3 processes on this host have 2 visible cards"):
        device.initialize_device(2)
    with monkeypatch.context() as launcher:
        launcher.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(ValueError, match="3 processes on this host have 2 visible cards"):
            device.initialize_device(0)  # a rank that has a card refuses too, or it would wait for the others
    monkeypatch.setenv(device.BACKEND_VARIABLE, "gloo")  # ranks that share a card
    assert device.distributed_backend() == "gloo"
    assert device.initialize_device(2) == torch.device("cuda", 0)
    assert device.distributed_backend("nccl") == "nccl"  # the argument wins
