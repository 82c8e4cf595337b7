# SPDX-License-Identifier: Apache-2.0
"""What the backend for Transformer Engine asks of it and of the extension, and what it refuses, with both standing in."""

import gc

import pytest
import torch
from fake_engine import CommOverlap, CommOverlapP2P, Engine, UserBufferQuantizationMode

from megatron_dyn.userbuffers import ActiveShapeError, OverlapConfigError, UserBuffers, UserBufferQuantizationMode as Mode
from megatron_dyn.userbuffers.configuration import DEFAULT_METHODS
from megatron_dyn.userbuffers.native import LayoutMismatchError
from megatron_dyn.userbuffers.te_backend import TransformerEngineBackend

SHAPE, TP, GROUP = (64, 8), 2, object()
RING, PIPELINE = {"method": "ring_exchange"}, {"method": "pipeline"}


@pytest.fixture
def engine(monkeypatch):
    return Engine(monkeypatch)


def made(shape=SHAPE, *, modes=(Mode.NONE,), tables=None, **options):
    options = dict(tp_size=TP, dtype=torch.bfloat16, local_rows=16, tp_group=GROUP) | options
    return TransformerEngineBackend(shape, modes=list(modes), tables=tables or [None] * len(modes), **options)


def made_by_somebody_else(engine, shape=SHAPE, *, modes=(UserBufferQuantizationMode.NONE,), table=None, tp_size=TP):
    engine.base.initialize_ub(
        list(shape), tp_size, quantization_modes=list(modes), dtype=torch.bfloat16, ub_cfgs=[table or {}], bootstrap_backend="gloo"
    )
    theirs = dict(engine.base._ub_communicators)
    engine.events.clear()
    return theirs


def rows(communicators):
    return {communicator.rows for communicator in communicators}


# ---- made ----


def test_all_of_them_are_made_at_capacity_and_known_by_name(engine):
    backend = made()
    assert not backend.adopted and backend.one_sided and backend.name == "te"
    by_name = {c.name: c for c in backend.communicators}
    assert set(by_name) == set(DEFAULT_METHODS)
    for name, method in DEFAULT_METHODS.items():
        assert (by_name[name].spec.method, by_name[name].capacity, by_name[name].quantized) == (method, SHAPE, False)
        assert by_name[name].native is engine.base._ub_communicators[name, UserBufferQuantizationMode.NONE]
        assert by_name[name].nbytes == 64 * 8 * 2
    # Each index is that of its own communicator.
    assert all(engine.shapes[0].communicators[c.index] is c.native for c in backend.communicators)


def test_ring_exchange_reduce_scatter_counts_its_extra_chunks_as_memory(engine):
    by_name = {c.name: c for c in made(tables=[{"fc2_fprop": RING}]).communicators}
    assert by_name["fc2_fprop"].capacity == SHAPE
    assert by_name["fc2_fprop"].nbytes == 3 * 32 * 8 * 2  # 2 * tp - 1 chunks of T / tp rows
    assert by_name["fc1_fprop"].nbytes == 2 * 32 * 8 * 2


def test_the_fence_is_made_first_and_its_helper_lives_until_the_end(engine):
    """Transformer Engine keeps the bootstrap callbacks of the first communicator; those of its own initialize_ub die with that call."""
    backend = made(bootstrap_backend="nccl")
    (first, fence), second = engine.events[:2]
    assert first == "fence made" and second == ("initialize_ub", list(SHAPE))
    assert (fence.rows, fence.hidden, fence.dtype, fence.tp_size) == (TP, 4, torch.bfloat16, TP)
    assert engine.groups == [(2, "nccl")]
    gc.collect()
    assert backend.communicators[0].native.helper() is None
    assert (fence.helper().world, fence.helper().domain) == ("world", "world")
    backend.close()
    gc.collect()
    assert fence.helper() is None


def test_with_data_parallel_ranks_the_fence_joins_those_of_the_tensor_parallel_group(monkeypatch):
    engine = Engine(monkeypatch, world=4)
    backend = made()
    helper = engine.events[0][1].helper()
    assert (helper.world, helper.domain) == ("world", "domain")
    assert engine.groups == [(4, "gloo"), (TP, "gloo")]
    backend.close()


def test_the_fence_is_an_exchange_on_the_current_stream(engine):
    backend = made()
    fence = engine.events[0][1]
    engine.events.clear()
    backend.fence()
    assert engine.events == [("fence", fence, 77)]


def test_what_transformer_engine_is_told(engine):
    tables = [{"proj_fprop": {"num_splits": 2}}, {"fc2_fprop": {"method": "ring_exchange"}}]
    made(modes=(Mode.NONE, Mode.FP8), tables=tables, dtype=torch.float16, bootstrap_backend="gloo")
    told = engine.initialized_with
    assert told["shape"] == list(SHAPE) and type(told["shape"]) is list and told["tp_size"] == TP
    assert told["quantization_modes"] == [UserBufferQuantizationMode.NONE, UserBufferQuantizationMode.FP8]
    assert (told["dtype"], told["bootstrap_backend"], told["with_cublasmp"]) == (torch.float16, "gloo", False)
    assert told["ub_cfgs"] == tables
    told["ub_cfgs"][0]["proj_fprop"]["num_splits"] = 99  # it writes into the tables it is given
    told["ub_cfgs"][1]["more"] = {}
    assert tables == [{"proj_fprop": {"num_splits": 2}}, {"fc2_fprop": {"method": "ring_exchange"}}]


def test_no_table_is_an_empty_one(engine):
    made(tables=[None])
    assert engine.initialized_with["ub_cfgs"] == [{}]


def test_2_11_is_not_told_of_cublasmp(monkeypatch):
    Engine(monkeypatch, knows_cublasmp=False)
    assert len(made().communicators) == 12
    with pytest.raises(ValueError, match="with_cublasmp: this Transformer Engine has no cuBLASMp"):
        Engine(monkeypatch, knows_cublasmp=False)
        made(with_cublasmp=True)


def test_both_modes_have_their_own_communicators_and_fp8_its_alignment(engine):
    backend = made(modes=(Mode.NONE, Mode.FP8), tables=[{}, {"proj_fprop": RING}], local_rows=32)
    known = {(c.name, c.quantized): c for c in backend.communicators}
    assert len(known) == 24
    assert [known["proj_fprop", fp8].spec.method for fp8 in (False, True)] == ["pipeline", "ring_exchange"]
    assert [known["proj_fprop", fp8].local_rows for fp8 in (False, True)] == [1, 32]


# ---- shapes ----


def test_a_change_is_one_native_call_for_all(engine):
    manager = UserBuffers(made(), layout_fence="never")
    natives = list(engine.base._ub_communicators.values())
    engine.events.clear()
    manager.set_active_shape([32, 8])
    assert engine.events == [("set_rows", 32)]
    assert rows(natives) == {32} and rows(manager.communicators.values()) == {32}
    manager.begin((manager.get("qkv_fprop"),), 32)
    assert engine.events == [("set_rows", 32)]
    manager.get("proj_fprop").set_buffer_active_shape([8, 8])
    assert engine.events[1:] == [("set_rows_of", manager.get("proj_fprop").index, 8)]
    assert [comm.rows for (name, _), comm in engine.base._ub_communicators.items() if name in ("proj_fprop", "fc2_fprop")] == [8, 32]


def test_communicators_of_cublasmp_record_their_shape_and_the_extension_never_sees_them(engine):
    backend = made(with_cublasmp=True, tables=[{}])
    assert engine.initialized_with["with_cublasmp"] and engine.events[0][0] == "initialize_ub"  # no buffer for a fence
    assert {c.index for c in backend.communicators} == {None} and engine.shapes[0].communicators == []
    manager = UserBuffers(backend, layout_fence="never")
    one = manager.get("fc1_fprop")
    manager.set_active_shape([32, 8])
    one.set_buffer_active_shape([8, 8])
    assert (one.get_buffer_active_shape(), manager.active_shape, one.get_buffer_capacity_shape()) == ([8, 8], [32, 8], [64, 8])
    with pytest.raises(ActiveShapeError, match="66 tokens"):
        one.set_buffer_active_shape([66, 8])
    assert not [event for event in engine.events if event[0] == "set_rows_of"]
    assert {comm.rows for comm in engine.base._ub_communicators.values()} == {64}
    engine.events.clear()
    backend.fence()
    assert engine.events == [("all_reduce", 1, GROUP)]


def test_every_layout_is_probed_at_the_start_at_two_sizes_and_left_at_capacity(engine):
    backend = made()
    probed = [event[1:] for event in engine.events if event[0] == "set_rows_of"]
    assert probed == [(c.index, size) for c in backend.communicators for size in (32, 64)]
    assert rows(c.native for c in backend.communicators) == {64}


@pytest.mark.parametrize("kind", [CommOverlap, CommOverlapP2P])
def test_a_layout_that_is_not_known_stops_the_start_and_leaves_nothing(engine, monkeypatch, kind):
    monkeypatch.setattr(kind, "extra_rows", 2)
    with pytest.raises(LayoutMismatchError, match="would corrupt memory"):
        made()
    assert engine.base._ub_communicators is None
    monkeypatch.setattr(kind, "extra_rows", 0)
    assert not made().adopted


# ---- adopted ----


@pytest.mark.parametrize("registered", [(64, 8), (128, 8)], ids=["as asked", "larger"])
def test_those_of_somebody_else_are_adopted_with_the_capacity_they_have(engine, registered):
    theirs = made_by_somebody_else(engine, registered)
    backend = made()
    assert backend.adopted and engine.base._ub_communicators == theirs
    assert not [event for event in engine.events if event[0] != "set_rows_of"]  # nothing is made, only probed
    assert engine.groups == [] and {c.capacity for c in backend.communicators} == {registered}
    assert {c.name: (c.spec.method, c.spec.is_reduce_scatter) for c in backend.communicators} == {
        name: (method, name in ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")) for name, method in DEFAULT_METHODS.items()
    }
    manager = UserBuffers(backend)
    manager.set_active_shape([registered[0], 8])
    engine.events.clear()
    manager.set_active_shape([10, 8])
    assert engine.events == [("set_rows", 10), ("all_reduce", 1, GROUP)]


def test_adopted_ones_are_given_back_at_capacity_and_not_destroyed(engine):
    theirs = made_by_somebody_else(engine, (128, 8))
    manager = UserBuffers(made())
    manager.set_active_shape([10, 8])
    manager.get("fc1_fprop").set_buffer_active_shape([6, 8])
    manager.close()
    assert engine.base._ub_communicators == theirs and ("destroy_ub",) not in engine.events
    assert rows(theirs.values()) == {128}


def test_own_ones_are_destroyed(engine):
    manager = UserBuffers(made())
    manager.close()
    assert engine.base._ub_communicators is None and engine.events[-1] == ("destroy_ub",)
    assert manager.backend.communicators == []


@pytest.mark.parametrize(
    "registered, asked, says",
    [
        ((32, 8), {}, r"registered by somebody else for \[32, 8\], but \[64, 8\] is asked for"),
        ((64, 16), {}, r"registered by somebody else for \[64, 16\]"),
        ((64, 8), dict(modes=(Mode.FP8,)), "without quantization mode fp8"),
        ((64, 8), dict(modes=(Mode.NONE, Mode.FP8)), "without quantization mode fp8"),
        ((64, 8), dict(tp_size=4), "for 2 tensor-parallel ranks, but tp_size is 4"),
    ],
)
def test_those_that_do_not_fit_are_refused_and_left_as_they_were(engine, registered, asked, says):
    theirs = made_by_somebody_else(engine, registered)
    with pytest.raises(ValueError, match=says):
        made(**asked)
    assert engine.base._ub_communicators == theirs and rows(theirs.values()) == {registered[0]}
    assert ("destroy_ub",) not in engine.events


def test_what_adopted_ones_do_is_seen_from_what_they_are(engine):
    made_by_somebody_else(engine, table={"fc2_fprop": RING, "fc1_dgrad": RING})
    seen = {c.name: (c.spec.method, c.spec.is_reduce_scatter) for c in made().communicators}
    assert seen["fc2_fprop"] == seen["fc1_dgrad"] == ("ring_exchange", True)
    assert "fc1_wgrad" not in seen and seen["qkv_dgrad"] == ("bulk", False) and seen["fc1_fprop"] == ("ring_exchange", False)


# ---- refused ----


def test_the_pipelined_input_gradient_is_refused_unquantized_whoever_made_it(engine):
    with pytest.raises(OverlapConfigError, match="qkv_dgrad with method 'pipeline' and unquantized operands"):
        made(tables=[{"qkv_dgrad": PIPELINE}])
    assert engine.events == [("destroy_ub",)]  # nothing was made
    theirs = made_by_somebody_else(engine, table={"fc1_dgrad": PIPELINE})
    with pytest.raises(OverlapConfigError, match="fc1_dgrad with method 'pipeline' and unquantized operands"):
        made()
    assert engine.base._ub_communicators == theirs
    for communicator in theirs.values():
        communicator.cublasmp = True
    assert made().adopted


def test_in_fp8_it_is_right(engine):
    made(modes=(Mode.FP8,), tables=[{"qkv_dgrad": PIPELINE}])
    engine.base.destroy_ub()
    made_by_somebody_else(engine, modes=(UserBufferQuantizationMode.FP8,), table={"qkv_dgrad": PIPELINE})
    assert made(modes=(Mode.FP8,)).adopted


@pytest.mark.parametrize("tables", [[{"fc1_dgrad": RING}, {}], [{}, {"qkv_dgrad": RING}]])
def test_two_modes_with_a_reduce_scatter_beside_the_input_gradient_are_refused(engine, tables):
    with pytest.raises(OverlapConfigError, match="together with two quantization modes"):
        made(modes=(Mode.NONE, Mode.FP8), tables=tables)
    assert engine.base._ub_communicators is None


@pytest.mark.parametrize("ranks", [[0, 2], [1, 2], [1, 0]])
def test_ranks_that_are_not_consecutive_are_refused(engine, ranks):
    engine.tp_ranks = ranks
    with pytest.raises(ValueError, match="pair consecutive ranks.*Put TP first"):
        made()
    assert engine.groups == [] and engine.initialized_with is None


def test_a_registration_that_fails_half_way_is_not_adopted_by_the_next(engine):
    with pytest.raises(ValueError, match="Atomic GEMM"):
        made(tables=[{"fc2_fprop": {"atomic_gemm": True}}])
    assert engine.base._ub_communicators is None
    backend = made()
    assert not backend.adopted and len(backend.communicators) == 12


def test_what_somebody_else_left_half_made_is_not_taken_for_buffers(engine):
    engine.base._ub_communicators = {}
    with pytest.raises(ValueError, match="without quantization mode none"):
        made()
