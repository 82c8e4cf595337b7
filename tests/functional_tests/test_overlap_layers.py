# SPDX-License-Identifier: Apache-2.0
"""The layers with overlap against Megatron's own Column- and RowParallelLinear with sequence parallelism, in fp32.

Steps overlap as in 1F1B: a step's forward runs before the backward of the one before, whose T is another. Before every forward and
backward all buffers are filled with NaN, over their whole capacity.
"""

import random
import re

import pytest
import torch
from launch import launch, outcomes
from layer_pairs import CAPACITY, HIDDEN, KINDS, PIPELINE, RING, RS_DGRAD, Pair, Poison, start

import megatron_dyn.layers.overlap as overlap
import megatron_dyn.userbuffers.reference_exchanges as exchanges
from megatron_dyn import userbuffers

# --- every method, T at random -----------------------------------------------------------------------------------------

# Each layer with its communicators: the defaults (ring all-gather, pipeline, bulk) for qkv and proj, ring reduce-scatters for fc1 and fc2.
TABLES = {
    "defaults and rings": (RING, {"qkv": {}, "proj": {}, "fc1": RS_DGRAD, "fc2": {}}),
    "pipelined dgrad": (PIPELINE, {"fc1": RS_DGRAD}),
}


def random_steps(rank: int, world: int, table: str, steps: int) -> tuple[int, set[str]]:
    table, layers = TABLES[table]
    manager = start(table)
    poison = Poison(manager)
    pairs = [Pair(name, seed=rank, **flags) for name, flags in layers.items()]
    draw = random.Random(7)
    sizes = [world, CAPACITY, world] + [world * draw.randint(1, CAPACITY // world) for _ in range(steps - 3)]
    before = None
    for T in sizes:
        pair = draw.choice(pairs)
        forward = pair, *pair.forward(T)
        if before is not None:
            before[0].backward(*before[1:])
        before = forward
    poison.check()
    assert manager.fences == 0
    return poison.calls, {communicator.name for communicator in manager.backend.communicators if communicator.used_in >= 0}


def check_random_steps(tp: int, table: str, steps: int) -> None:
    for calls, used in launch(tp, random_steps, table, steps, timeout=250):
        assert calls == 2 * steps - 1
        assert {"fc1_fprop", "fc1_dgrad"} <= used
        if len(TABLES[table][1]) == 4:  # all but those that only Transformer Engine uses, with MXFP8
            assert used == {f"{name}_{what}" for name in KINDS for what in ("fprop", "dgrad")} | {"qkv_wgrad"}


@pytest.mark.parametrize(
    "tp, table, steps",
    [(2, "defaults and rings", 1000), (2, "pipelined dgrad", 60), (4, "defaults and rings", 250), (4, "pipelined dgrad", 30)],
)
def test_every_method_equals_megatron_over_random_T(tp, table, steps):
    check_random_steps(tp, table, steps)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_every_method_equals_megatron_over_a_thousand_T_on_four_ranks(table):
    check_random_steps(4, table, 1000)


# --- the exchanges themselves ------------------------------------------------------------------------------------------


def sums_in_bf16(rank: int, world: int) -> torch.Tensor:
    """Ranks bring 256, 1, 1 and 0.5: added up in bf16, one after the other, that stays 256."""
    manager = start(RING, dtype=torch.bfloat16)
    manager.set_active_shape([world, HIDDEN])
    left = torch.full((world, 1), (256.0, 1.0, 1.0, 0.5)[rank], dtype=torch.bfloat16)
    local = torch.empty(1, HIDDEN, dtype=torch.bfloat16)
    manager.get("fc2_fprop").gemm_reduce_scatter(left, torch.ones(1, HIDDEN, dtype=torch.bfloat16), local)
    return local


def test_a_ring_reduce_scatter_of_bf16_rounds_once():
    for local in launch(4, sums_in_bf16):
        assert local.unique().tolist() == [258.0]


def gathers(rank: int, world: int) -> None:
    """FP8 bytes, and an external gather beside somebody's GEMM."""
    manager = start(quantization_modes=["none", "fp8"], capacity=16 * 2 * world, dtype=torch.bfloat16)
    for T in (32 * world, 16 * world):
        manager.set_active_shape([T, HIDDEN])
        whole = torch.randint(0, 256, (T, HIDDEN), generator=torch.Generator().manual_seed(T), dtype=torch.uint8)
        for name in ("qkv_fprop", "qkv_dgrad", "proj_dgrad", "proj_wgrad"):
            assert torch.equal(manager.get(name, True).gather(whole.chunk(world)[rank]), whole), name
        wide = whole.bfloat16()
        pending = manager.get("fc2_wgrad").start_all_gather(wide.chunk(world)[rank])
        torch.ones(64, 64).mm(torch.ones(64, 64))
        assert torch.equal(pending.wait(), wide) and torch.equal(pending.wait(), wide)


def test_bytes_and_external_gathers_arrive_whole():
    launch(2, gathers)


# --- mutants -----------------------------------------------------------------------------------------------------------


def products_in_order_of_arrival(monkeypatch):
    """The product of the own chunk comes first, wherever the chunk belongs."""
    arriving = exchanges.RingAllGather._arriving

    def in_order(self, local):
        for step, (_, chunk) in enumerate(arriving(self, local)):
            yield step, chunk

    monkeypatch.setattr(exchanges.RingAllGather, "_arriving", in_order)


def not_waited_for(monkeypatch):
    """The result of a collective is read as soon as it was asked for."""
    monkeypatch.setattr(exchanges.Pending, "wait", lambda self: self._result)


def one_chunk_too_early(monkeypatch):
    """The sum starts one chunk before the own one, and leaves the last received out."""
    view = exchanges.RingReduceScatter._view

    def shifted(self, first_row, rows):
        return view(self, first_row - (rows // self.tp_size if rows == self.rows and first_row else 0), rows)

    monkeypatch.setattr(exchanges.RingReduceScatter, "_view", shifted)


def chunks_at_capacity(monkeypatch):
    """Chunks lie where they would at capacity, so the gathered matrix is no longer their prefix."""

    def chunk(self, index):
        return self._view(index * self.capacity[0] // self.tp_size, self.rows // self.tp_size)

    monkeypatch.setattr(exchanges.ReferenceCommunicator, "_chunk", chunk)


def capacity_for_counts(monkeypatch):
    """Collectives count all rows that are registered."""
    at_capacity = property(lambda self: self._view(0, self.capacity[0]))
    monkeypatch.setattr(exchanges.ReferenceCommunicator, "matrix", at_capacity)


def stale_shape_in_backward(monkeypatch):
    """Only forwards set the shape."""
    begin = overlap._begin

    def forward_only(layer, rows, **used):
        if "fprop" in used:
            return begin(layer, rows, **used)
        return {what: userbuffers.get_ub(f"{layer.name}_{what}") for what, is_used in used.items() if is_used}

    monkeypatch.setattr(overlap, "_begin", forward_only)


MUTANTS = {
    products_in_order_of_arrival: "output is .* off Megatron's",
    not_waited_for: "off Megatron's",
    one_chunk_too_early: "output is .* off Megatron's",
    chunks_at_capacity: "gradient is nan off Megatron's",
    capacity_for_counts: "invalid tensor size",  # says gloo
    stale_shape_in_backward: "peers would wait for other rows",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(monkeypatch, mutant):
    mutant(monkeypatch)
    ended = outcomes(2, random_steps, "defaults and rings", 30, grace=0.5)
    assert any(re.search(MUTANTS[mutant], rank.exception or "") for rank in ended), ended
