# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's layers set the shape of their own microbatch, forward and backward, and name what they exchange through."""

import pytest
import torch
from stand_in_layers import CAPACITY, COLUMN, HIDDEN, ROW, TP, Block, Linear, start, te_overlap  # noqa: F401 (fixtures)

from megatron_dyn.userbuffers import ActiveShapeError, NotInitializedError, UserBuffers, lifecycle


def one_forward_one_backward(block, recompute=None):
    """F1 F2 B1 F3 B2 B3, all of another T, growing and shrinking."""
    outputs = {}
    for what, microbatch, T in [("F", 1, 48), ("F", 2, 96), ("B", 1, 48), ("F", 3, 2), ("B", 2, 96), ("B", 3, 2)]:
        if what == "F":
            outputs[microbatch] = block.forward(T, recompute)
        else:
            outputs[microbatch].sum().backward()
            assert block.log[-1][2] == T


# ---- when ----


@pytest.mark.parametrize("recompute", [None, "reentrant", "not reentrant"])
def test_each_forward_and_each_backward_runs_in_its_own_shape_whatever_ran_in_between(te_overlap, start, recompute):
    manager, block = start(), Block(te_overlap)
    one_forward_one_backward(block, recompute)
    assert block.wrong() == []
    names = ["qkv", "proj", "fc1", "fc2"]
    forward, backward = [(name, "forward") for name in names], [(name, "backward") for name in reversed(names)]
    again = [] if recompute is None else forward
    seen = [entry[:2] for entry in block.log]
    if recompute != "not reentrant":  # that one stops as soon as it has what it needs
        assert seen == forward * 2 + again + backward + forward + (again + backward) * 2
    assert len(manager.calls) == len(block.log)  # each sets it once, and nothing else does


def test_the_shape_of_the_backward_is_set_right_before_it(te_overlap, start):
    """Not when the gradient of the whole model is asked for, and not by the layer behind it."""
    manager, block = start(), Block(te_overlap)
    late, early = block.forward(48) * 1, block.forward(96) * 1
    for out in (late, early):  # somebody else's microbatch at the last moment
        out.register_hook(lambda grad: manager.set_active_shape([6, HIDDEN]))
    late.sum().backward()
    early.sum().backward()
    assert block.wrong() == []


@pytest.mark.parametrize("kind, given, T", [("OverlapTELayerNormColumnParallelLinear", 3, 6), ("OverlapTEColumnParallelLinear", 3, 6),
                                            ("OverlapTERowParallelLinear", 6, 6)])  # fmt: skip
def test_a_column_layer_has_its_part_of_the_rows_and_a_row_layer_all_of_them(te_overlap, start, kind, given, T):
    manager = start()
    layer = getattr(te_overlap, kind)("fc1", [])
    layer(torch.ones(given, 1, HIDDEN))
    layer(torch.ones(given // 3, 3, HIDDEN))  # a batch is rows too
    assert manager.calls == [([], T), ([], T)]


def test_without_gradients_there_is_one_call_and_no_hook(te_overlap, start):
    manager, block = start(), Block(te_overlap)
    with torch.no_grad():
        block.forward(10)
    assert [rows for _, rows in manager.calls] == [10] * 4
    assert not Block(te_overlap)(torch.ones(5, 1, HIDDEN)).requires_grad  # nothing trains: nothing to hook either
    assert block.wrong() == []


def test_what_the_layer_gives_is_passed_on(te_overlap, start, monkeypatch):
    start()
    bias = torch.ones(1)
    monkeypatch.setattr(Linear, "forward", lambda self, x: (x * 2, bias))
    out, given = te_overlap.OverlapTERowParallelLinear("proj", [])(torch.ones(4, 1, HIDDEN, requires_grad=True))
    assert given is bias and out.unique().tolist() == [2.0]


def test_a_shape_that_the_buffers_cannot_take_stops_the_layer_before_it_exchanges(te_overlap, start):
    manager, block = start(), Block(te_overlap)
    block.forward(8)
    seen = len(block.log)
    for local_rows in (CAPACITY // TP + 1, 0):
        with pytest.raises(ActiveShapeError):
            block(torch.ones(local_rows, 1, HIDDEN))
    with pytest.raises(ActiveShapeError, match="7 tokens cannot be divided"):
        block.layers[1](torch.ones(7, 1, HIDDEN))
    assert len(block.log) == seen and manager.active_shape == [8, HIDDEN]


# ---- through what ----

CASES = [
    # flags, communicators of a forward, of a backward
    ("column", COLUMN, ["fprop"], ["dgrad", "wgrad"]),
    ("column", {}, [], []),
    ("column", dict(ub_overlap_ag_fprop=True), ["fprop"], []),
    ("column", dict(ub_bulk_dgrad=True), [], ["dgrad"]),
    ("column", dict(ub_bulk_wgrad=True), [], ["wgrad"]),
    ("column", dict(ub_overlap_rs_dgrad=True), [], ["dgrad"]),
    ("row", ROW, ["fprop"], ["dgrad", "wgrad"]),
    ("row", dict(ub_overlap_rs_fprop=True), ["fprop"], []),
    ("row", dict(ub_overlap_ag_dgrad=True), [], ["dgrad", "wgrad"]),
    ("row", {}, [], []),
]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind, flags, forward, backward", CASES)
def test_the_flags_of_the_layer_tell_what_it_exchanges_through(te_overlap, start, kind, flags, forward, backward, fp8):
    manager = start(modes=(fp8,))
    te_overlap.FP8GlobalStateManager.enabled = fp8
    name = "fc1" if kind == "column" else "fc2"
    layer = getattr(te_overlap, "OverlapTEColumnParallelLinear" if kind == "column" else "OverlapTERowParallelLinear")(name, [], **flags)
    out, _ = layer(torch.ones(32, 1, HIDDEN, requires_grad=True))
    te_overlap.FP8GlobalStateManager.enabled = False  # Transformer Engine's backward runs outside of its autocast
    out.sum().backward()
    used = [[(f"{name}_{gemm}", fp8) for gemm in gemms] for gemms in (forward, backward)]
    assert [names for names, _ in manager.calls] == used


def test_reduce_scatter_beside_dgrad_needs_no_wgrad_communicator(te_overlap, start):
    manager = start(table={"fc1_dgrad": {"method": "ring_exchange"}})
    layer = te_overlap.OverlapTEColumnParallelLinear("fc1", [], ub_overlap_rs_dgrad=True)
    layer(torch.ones(4, 1, HIDDEN, requires_grad=True))[0].sum().backward()
    assert manager.calls[1] == ([("fc1_dgrad", False)], 8)


def test_external_communicators_are_optional_and_others_are_missed_by_name(te_overlap, start):
    """cuBLASMp makes none of the former."""
    manager = start(without=("fc2_wgrad", "fc1_wgrad"))
    layer = te_overlap.OverlapTERowParallelLinear("fc2", [], **ROW)
    layer(torch.ones(4, 1, HIDDEN, requires_grad=True))[0].sum().backward()
    assert manager.calls[1] == ([("fc2_dgrad", False)], 4)
    with pytest.raises(KeyError, match="no communicator 'fc1_wgrad'"):
        te_overlap.OverlapTEColumnParallelLinear("fc1", [], **COLUMN)(torch.ones(2, 1, HIDDEN))


def test_fp8_without_fp8_buffers_is_missed_by_name(te_overlap, start):
    start()
    te_overlap.FP8GlobalStateManager.enabled = True
    with pytest.raises(KeyError, match="no communicator 'fc2_fprop' for FP8"):
        te_overlap.OverlapTERowParallelLinear("fc2", [], **ROW)(torch.ones(32, 1, HIDDEN))


def test_bf16_and_fp8_in_turn_have_their_own_communicators(te_overlap, start):
    manager = start(modes=(False, True))
    layer = te_overlap.OverlapTERowParallelLinear("fc2", [], **ROW)
    for fp8 in (False, True, False):
        te_overlap.FP8GlobalStateManager.enabled = fp8
        layer(torch.ones(32, 1, HIDDEN))
    assert [names for names, _ in manager.calls] == [[("fc2_fprop", fp8)] for fp8 in (False, True, False)]


def test_other_buffers_are_found_at_the_next_call_be_it_a_backward(te_overlap, start, monkeypatch):
    first, block = start(), Block(te_overlap)
    out = block.forward(24)
    first.close()
    monkeypatch.setattr(lifecycle, "_manager", None)
    with pytest.raises(NotInitializedError):
        block.forward(24)
    second = start()
    out.sum().backward()
    assert len(first.calls) == 4 and [rows for _, rows in second.calls] == [24] * 4
    assert block.wrong() == []


# ---- mutants ----


def hook_left_out(module, patch):
    patch.setattr(torch.Tensor, "register_hook", lambda tensor, hook: None)


def rows_of_the_manager(module, patch):
    patch.setattr(UserBuffers, "begin", lambda self, used, rows: None)  # whoever set it last decides


def rows_of_the_last_forward(module, patch):
    begin, last = module._SetsActiveShape._begin, []

    def wrong(self, backward, fp8, rows):
        if not backward:
            last.append(rows)
        begin(self, backward, fp8, last[-1])

    patch.setattr(module._SetsActiveShape, "_begin", wrong)


@pytest.mark.parametrize("mutant", [hook_left_out, rows_of_the_manager, rows_of_the_last_forward])
def test_mutants_are_caught(te_overlap, start, monkeypatch, mutant):
    mutant(te_overlap, monkeypatch)
    start()
    block = Block(te_overlap)
    one_forward_one_backward(block)
    assert block.wrong()
