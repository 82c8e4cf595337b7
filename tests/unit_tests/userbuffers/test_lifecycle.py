# SPDX-License-Identifier: Apache-2.0
"""From initialize_ub to destroy_ub and back, on one gloo rank: what there is, what is refused, and that nothing half-made stays."""

from enum import Enum

import pytest
import torch
import torch.distributed as dist

from megatron_dyn import device, userbuffers as ub
from megatron_dyn.userbuffers import lifecycle, manager as manager_module, reference

HIDDEN = 8


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('gloo')}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(device, "compute_device", lambda: torch.device("cpu"))
    assert not ub.is_ub_initialized()
    yield
    ub.destroy_ub()


def start(shape=(64, HIDDEN), tp_size=1, **options):
    return ub.initialize_ub(list(shape), tp_size, **dict(dtype=torch.float32, backend="reference") | options)


def test_what_is_made_is_found_set_and_read():
    made = start()
    assert ub.is_ub_initialized() and ub.current() is made
    assert ub.get_ub_capacity_shape() == ub.get_ub_active_shape() == [64, HIDDEN]
    ub.set_ub_active_shape([24, HIDDEN])
    one = ub.get_ub("fc1_fprop")
    assert ub.get_ub_active_shape() == one.get_buffer_active_shape() == [24, HIDDEN]
    assert one.get_buffer_capacity_shape() == ub.get_ub_capacity_shape() == [64, HIDDEN]
    one.set_buffer_active_shape([3, HIDDEN])
    assert ub.get_ub("fc2_fprop").get_buffer_active_shape() == ub.get_ub_active_shape() == [24, HIDDEN]
    assert one.get_buffer_active_shape() == [3, HIDDEN]
    with pytest.raises(KeyError, match="no communicator 'fc1_fprop' for FP8; there are: .*fc1_fprop"):
        ub.get_ub("fc1_fprop", use_fp8=True)
    assert "12 communicators (unquantized) registered once for [64, 8]" in made.description() and "(asked for)" in made.description()


def test_twice_is_an_error_that_says_so_and_changes_nothing():
    made = start()
    ub.set_ub_active_shape([8, HIDDEN])
    with pytest.raises(ub.NotInitializedError, match=r"initialised already, for \[64, 8\]: .* Call destroy_ub\(\) first"):
        start((128, HIDDEN))
    assert ub.current() is made and ub.get_ub_active_shape() == [8, HIDDEN]


def test_destroyed_and_made_again_with_another_size():
    ub.destroy_ub()  # nothing there: nothing happens
    start()
    old = ub.get_ub("qkv_fprop")
    ub.destroy_ub()
    ub.destroy_ub()
    assert not ub.is_ub_initialized() and old.buffer is None
    with pytest.raises(ub.ActiveShapeError, match="qkv_fprop was destroyed with destroy_ub"):
        old.set_buffer_active_shape([8, HIDDEN])
    start((16, 2 * HIDDEN))
    assert ub.get_ub_active_shape() == [16, 2 * HIDDEN]
    assert ub.get_ub("qkv_fprop") is not old


@pytest.mark.parametrize(
    "call",
    [
        ub.current,
        ub.get_ub_active_shape,
        ub.get_ub_capacity_shape,
        lambda: ub.get_ub("qkv_fprop"),
        lambda: ub.set_ub_active_shape([8, HIDDEN]),
    ],
    ids=["current", "active", "capacity", "get", "set"],
)
def test_before_and_after_every_call_says_that_nothing_is_initialised(call):
    with pytest.raises(ub.NotInitializedError, match=r"Call initialize_ub\(\[max_tokens, hidden\], tp_size\) on every rank"):
        call()
    start()
    ub.destroy_ub()
    with pytest.raises(ub.NotInitializedError, match="not initialised"):
        call()


def test_without_torch_distributed_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(ub.NotInitializedError, match="torch.distributed is not initialised"):
        start()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (dict(shape=(0, HIDDEN)), "active shape .0, 8. for the capacity is empty"),
        (dict(shape=(64, 0)), "is empty"),
        (dict(shape=(-8, HIDDEN)), "is empty"),
        (dict(shape=(64,)), "two-dimensional"),
        (dict(shape=(4, 16, HIDDEN)), "two-dimensional"),
        (dict(shape=()), "two-dimensional"),
        (dict(shape=(64.0, HIDDEN)), "two-dimensional"),
        (dict(shape=(64, None)), "two-dimensional"),
        (dict(shape=(64, 8.0)), "two-dimensional"),
        (dict(shape=(64, -8)), "is empty"),
        (dict(shape=(7, HIDDEN), tp_size=2), "7 tokens cannot be divided over 2"),
        (dict(shape=(24, HIDDEN), quantization_modes=["fp8"]), "24 local rows are not a multiple of 16"),
        (dict(shape=(64, HIDDEN), quantization_modes=["none", "fp8"], fp8_local_rows=128), "64 local rows are not a multiple of 128"),
        (dict(tp_size=2), r"tp_size is 2, but the tensor-parallel group has 1 ranks"),
        (dict(tp_size=2, tp_group="world"), r"tp_size is 2, but the tensor-parallel group has 1 ranks"),
        (dict(tp_size=0), "tp_size is 0: it must be a whole number"),
        (dict(tp_size=1.0), "tp_size is 1.0: it must be a whole number"),
        (dict(fp8_local_rows=0), "fp8_local_rows is 0"),
        (dict(quantization_modes=["int4"]), "'int4' is not known"),
        (dict(quantization_modes=[]), "at least one"),
        (dict(quantization_modes=["none", "none"]), "at most once"),
        (dict(layout_fence="sometimes"), "'sometimes' is not known"),
        (dict(backend="nccl"), "backend 'nccl' is not known: use one of auto, te, reference"),
        (dict(ub_cfgs=[{}, {}]), "2 tables in ub_cfgs for 1 quantization modes"),
        (dict(ub_cfgs=[]), "0 tables in ub_cfgs"),
        (dict(ub_cfgs=5), "ub_cfgs is 5: give a table"),
        (dict(ub_cfgs={"qkv_fprop": None}), "table of tables"),
        (dict(dtype=None), "dtype is None: .* floating-point"),
        (dict(dtype=torch.int32), "floating-point"),
        (dict(ub_cfgs={"qkv_fprob": {}}), "did you mean 'qkv_fprop'"),
    ],
)
def test_what_cannot_be_made_is_refused_and_the_next_call_starts_afresh(arguments, says):
    arguments = dict(arguments)
    if "tp_group" in arguments:
        arguments["tp_group"] = dist.group.WORLD
    with pytest.raises(ValueError, match=says):
        start(**arguments)
    assert not ub.is_ub_initialized()
    start()


@pytest.mark.parametrize("shape", [5, None])
def test_a_capacity_that_is_no_sequence_is_refused_like_any_other(shape):
    with pytest.raises(ub.ActiveShapeError, match=f"{shape} for the capacity is not two-dimensional"):
        ub.initialize_ub(shape, 1, backend="reference")


def test_numbers_of_numpy_are_sizes():
    numpy = pytest.importorskip("numpy")
    made = start(tuple(numpy.array([64, HIDDEN])))
    assert made.capacity == (64, HIDDEN) and all(type(size) is int for size in made.capacity)


def test_quantization_modes_are_taken_from_any_enum_by_value_and_have_a_table_each():
    class UserBufferQuantizationMode(Enum):  # as Transformer Engine has it
        NONE = "none"
        FP8 = "fp8"

    tables = [{"proj_fprop": {"method": "ring_exchange"}}, {"fc2_fprop": {"method": "ring_exchange"}}]
    made = start(quantization_modes=list(UserBufferQuantizationMode), ub_cfgs=tables)
    methods = {(name, fp8): ub.get_ub(name, fp8).spec.method for name in ("proj_fprop", "fc2_fprop") for fp8 in (False, True)}
    assert methods == {
        ("proj_fprop", False): "ring_exchange", ("fc2_fprop", False): "pipeline",
        ("proj_fprop", True): "pipeline", ("fc2_fprop", True): "ring_exchange",
    }  # fmt: skip
    assert ub.get_ub("qkv_fprop", True).dtype is torch.uint8 and ub.get_ub("qkv_fprop").dtype is torch.float32
    with pytest.raises(ub.ActiveShapeError, match="8 local rows are not a multiple of 16"):  # there are FP8 buffers
        ub.set_ub_active_shape([8, HIDDEN])
    assert len(made.communicators) == 24


def test_one_table_is_for_every_mode():
    start(quantization_modes=["none", ub.UserBufferQuantizationMode.FP8], ub_cfgs={"proj_fprop": {"method": "ring_exchange"}})
    assert [ub.get_ub("proj_fprop", fp8).spec.method for fp8 in (False, True)] == ["ring_exchange"] * 2


def test_nothing_half_made_stays_behind_when_the_making_fails(monkeypatch):
    allocate, made = reference.ReferenceBackend._allocate, []

    def fails_late(self, numel, dtype):
        made.append(self)
        if len(made) == 7:
            raise MemoryError("no more")
        return allocate(self, numel, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(reference.ReferenceBackend, "_allocate", fails_late)
        with pytest.raises(MemoryError):
            start()
    assert not ub.is_ub_initialized() and lifecycle._manager is None

    def fails(self, backend, **options):
        made.append(backend)
        raise RuntimeError("no manager")

    with monkeypatch.context() as patch:
        patch.setattr(manager_module.UserBuffers, "__init__", fails)
        with pytest.raises(RuntimeError, match="no manager"):
            start()
    assert not ub.is_ub_initialized() and made[-1].communicators == []  # closed: its buffers are gone
    assert start().active_shape == [64, HIDDEN]
