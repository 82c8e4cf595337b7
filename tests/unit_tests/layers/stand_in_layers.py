# SPDX-License-Identifier: Apache-2.0
"""Layers that stand in for Megatron's of Transformer Engine, and look at the shape of the buffers when they exchange.

column   x [T/tp, 1, h] -> y [T, 1, h]     dy [T, 1, h] -> dx [T/tp, 1, h]
row      x [T, 1, h] -> y [T/tp, 1, h]     dy [T/tp, 1, h] -> dx [T, 1, h]

What a layer sees is written down as (name, "forward" or "backward", T of its own input, T of the buffers when it exchanges).
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dyn.userbuffers import UserBuffers, lifecycle
from megatron_dyn.userbuffers.communicator import Communicator
from megatron_dyn.userbuffers.configuration import communicator_specs

TP, HIDDEN, CAPACITY = 2, 4, 128
FLAGS = ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
COLUMN = dict(ub_overlap_ag_fprop=True, ub_bulk_dgrad=True, ub_bulk_wgrad=True)
ROW = dict(ub_overlap_rs_fprop=True, ub_overlap_ag_dgrad=True)


class Backend:
    """Communicators and nothing behind them."""

    name, one_sided = "te", True

    def __init__(self, *, modes: tuple, table: dict | None = None, without: tuple = ()):
        self.communicators = [
            Communicator(spec, quantized=fp8, capacity=(CAPACITY, HIDDEN), tp_size=TP, local_rows=16 if fp8 else 1)
            for fp8 in modes
            for spec in communicator_specs(table, TP).values()
            if spec.name not in without
        ]

    def set_rows(self, rows):
        pass

    def fence(self):
        pass

    def close(self):
        pass


class Exchange(torch.autograd.Function):
    """Gathers (a row layer: reduces) rows, and tells the layer when."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer, ctx.rows = layer, x.size(0) * (TP if layer.parallel_mode == "column" else 1)
        layer.sees("forward", ctx.rows)
        return x.repeat(TP, 1, 1) if layer.parallel_mode == "column" else x.chunk(TP)[0] + x.chunk(TP)[1]

    @staticmethod
    def backward(ctx, dy):
        ctx.layer.sees("backward", ctx.rows)
        return dy.chunk(TP)[0] + dy.chunk(TP)[1] if ctx.layer.parallel_mode == "column" else dy.repeat(TP, 1, 1), None


class Linear(torch.nn.Module):
    """What the layers of Megatron for Transformer Engine have in common, as far as the mixin reads it."""

    parallel_mode = ""

    def __init__(self, ub_name, log, **flags):
        super().__init__()
        self.ub_name, self.tp_size, self.log = ub_name, TP, log
        for flag in FLAGS:
            setattr(self, flag, flags.get(flag, False))

    def sees(self, what, rows):
        manager = lifecycle.current()
        self.log.append((self.ub_name, what, rows, manager.rows))

    def forward(self, x):
        return Exchange.apply(x, self), None


class TELayerNormColumnParallelLinear(Linear):
    parallel_mode = "column"


class TEColumnParallelLinear(Linear):
    parallel_mode = "column"


class TERowParallelLinear(Linear):
    parallel_mode = "row"


@pytest.fixture
def te_overlap(monkeypatch):
    """The module, over the layers above."""
    megatron, fp8 = ModuleType("megatron.core.extensions.transformer_engine"), ModuleType("transformer_engine.pytorch.fp8")
    for layer in (TELayerNormColumnParallelLinear, TEColumnParallelLinear, TERowParallelLinear):
        setattr(megatron, layer.__name__, layer)
    fp8.FP8GlobalStateManager = SimpleNamespace(enabled=False, is_fp8_enabled=lambda: fp8.FP8GlobalStateManager.enabled)
    for module in (ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch"), megatron, fp8):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "megatron_dyn.layers.te_overlap"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    yield module
    sys.modules.pop(name, None)
    if getattr(sys.modules["megatron_dyn.layers"], "te_overlap", None) is module:
        del sys.modules["megatron_dyn.layers"].te_overlap


@pytest.fixture
def start(monkeypatch):
    """Makes a manager, writes down what its layer calls use, and has the layers find it."""

    def make(*, modes=(False,), **options):
        manager = UserBuffers(Backend(modes=modes, **options))
        manager.calls, begin = [], manager.begin

        def seen_begin(used, rows):
            assert all(manager.communicators[c.name, c.quantized] is c for c in used)
            manager.calls.append(([(c.name, c.quantized) for c in used], rows))
            begin(used, rows)

        manager.begin = seen_begin
        monkeypatch.setattr(lifecycle, "_manager", manager)
        return manager

    return make


class Block:
    """qkv, proj, fc1, fc2: a column and a row layer, twice."""

    def __init__(self, te_overlap):
        self.log = []
        self.layers = torch.nn.Sequential()
        for name in ("qkv", "fc1"):
            self.layers.append(te_overlap.OverlapTELayerNormColumnParallelLinear(name, self.log, **COLUMN))
            self.layers.append(te_overlap.OverlapTERowParallelLinear("proj" if name == "qkv" else "fc2", self.log, **ROW))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x

    def forward(self, T, recompute=None):
        x = torch.ones(T // TP, 1, HIDDEN, requires_grad=True)
        return self(x * 1) if recompute is None else checkpoint(self, x, use_reentrant=recompute == "reentrant")

    def wrong(self):
        """What exchanged in another shape than its own."""
        return [seen for seen in self.log if seen[2] != seen[3]]
