# SPDX-License-Identifier: Apache-2.0
"""Specifications with Transformer Engine's layers: which of them are replaced for overlap."""

import copy
import dataclasses
import importlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from stand_in_layers import TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear, te_overlap  # noqa: F401

from megatron_dyn.layers import specs


class Norm:
    pass


class Attention:
    pass


def block_spec(layers=2):
    attention = SelfAttentionSubmodules(
        linear_qkv=TELayerNormColumnParallelLinear, core_attention=Attention, linear_proj=TERowParallelLinear, q_layernorm=Norm
    )
    columns = (TELayerNormColumnParallelLinear, TEColumnParallelLinear)
    mlps = [MLPSubmodules(linear_fc1=column, linear_fc2=TERowParallelLinear) for column in columns]
    specs = [
        ModuleSpec(
            module=TransformerLayer,
            params={"kept": 1},
            submodules=TransformerLayerSubmodules(
                self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": "causal"}, submodules=attention),
                mlp=ModuleSpec(module=MLP, submodules=mlp),
                sharded_state_dict_keys_map={"a": "b"},
            ),
        )
        for mlp in mlps[:layers]
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def leaves(spec):
    """(path, value) of everything in a specification."""
    if isinstance(spec, list):
        return [(f"{number}.{path}", leaf) for number, item in enumerate(spec) for path, leaf in leaves(item)]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return [(f"{f.name}.{path}", leaf) for f in dataclasses.fields(spec) for path, leaf in leaves(getattr(spec, f.name))]
    return [("", spec)]


def test_every_tensor_parallel_linear_of_a_block_is_replaced_and_nothing_else(te_overlap):
    spec = block_spec()
    before = copy.deepcopy(spec)
    found = te_overlap.with_active_shape(spec)
    assert leaves(spec) == leaves(before)  # the given one is as it was
    old, new = leaves(spec), leaves(found)
    assert [path for path, _ in old] == [path for path, _ in new] and type(found) is TransformerBlockSubmodules
    changed = {path: (leaf, other) for (path, leaf), (_, other) in zip(old, new) if leaf is not other and leaf != other}
    assert len(changed) == 8
    for leaf, other in changed.values():
        assert issubclass(other, leaf) and other.__name__ == "Overlap" + leaf.__name__
    assert not [path for path, leaf in new if leaf in (TELayerNormColumnParallelLinear, TEColumnParallelLinear, TERowParallelLinear)]
    assert te_overlap.with_active_shape(TERowParallelLinear) is te_overlap.OverlapTERowParallelLinear
    assert te_overlap.with_active_shape(None) is None and te_overlap.with_active_shape(Norm) is Norm


@pytest.fixture
def te_swiglu(monkeypatch):
    """`layers.te_swiglu` over kernels that stand in for Transformer Engine's."""

    def swiglu(x, quantizer):
        gate, linear = x.chunk(2, dim=-1)
        return F.silu(gate) * linear

    def dswiglu(gradient, x, quantizer):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(swiglu(x, None), x, gradient)[0]

    monkeypatch.setitem(sys.modules, "transformer_engine_torch", SimpleNamespace(swiglu=swiglu, dswiglu=dswiglu))
    monkeypatch.delitem(sys.modules, "megatron_dyn.layers.te_swiglu", raising=False)
    yield importlib.import_module("megatron_dyn.layers.te_swiglu")
    sys.modules.pop("megatron_dyn.layers.te_swiglu", None)


PLAIN = dict(gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, glu_linear_offset=0.0, activation_func_clamp_value=None)


def configuration(**changes):
    return SimpleNamespace(**(PLAIN | dict(activation_func_fp8_input_store=False, tp_comm_overlap=False) | changes))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_the_te_block_of_this_package_is_megatrons_but_for_overlap_and_swiglu(te_overlap, te_swiglu, monkeypatch, overlap, plain):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *package: True if name == "transformer_engine" else find(name, *package))
    given = block_spec()
    monkeypatch.setattr(gpt_layer_specs, "get_gpt_decoder_block_spec", lambda config, **options: given)
    found = specs.gpt_block_spec(configuration(tp_comm_overlap=overlap, add_bias_linear=not plain), backend="te")
    assert (found is given) is not (overlap or plain)
    linear = found.layer_specs[0].submodules.self_attention.submodules.linear_qkv
    assert linear.__name__ == ("OverlapTELayerNormColumnParallelLinear" if overlap else "TELayerNormColumnParallelLinear")
    mlps = {layer.submodules.mlp.module for layer in found.layer_specs}
    assert mlps == {te_swiglu.SwiGLUMLP if plain else MLP} and {layer.submodules.mlp.module for layer in given.layer_specs} == {MLP}
    old, new = leaves(given), leaves(found)
    changed = [path for (path, leaf), (_, other) in zip(old, new) if leaf is not other and leaf != other]
    assert len(changed) == 8 * overlap + 2 * plain


@pytest.mark.parametrize(
    "changes", [dict(gated_linear_unit=False), dict(activation_func=F.gelu), dict(add_bias_linear=True), dict(glu_linear_offset=1.0),
                dict(activation_func_clamp_value=7.0), dict(activation_func_fp8_input_store=True)],
)  # fmt: skip
def test_the_swiglu_kernel_is_used_for_plain_swiglu_alone(te_swiglu, changes):
    assert te_swiglu.uses_swiglu_kernel(configuration())
    assert not te_swiglu.uses_swiglu_kernel(configuration(**changes))


def test_the_swiglu_mlp_computes_what_megatrons_does(te_swiglu):
    """Linear layers in fp64; Megatron's own forward beside it."""
    first, second = torch.randn(16, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    answers = []
    for kind in (MLP, te_swiglu.SwiGLUMLP):
        mlp = kind.__new__(kind)
        torch.nn.Module.__init__(mlp)
        mlp.config = configuration(use_te_activation_func=False, bias_activation_fusion=False)
        mlp.linear_fc1, mlp.linear_fc2 = (lambda x: (x @ first.T, None)), (lambda x: (x @ second.T, None))
        x = torch.linspace(-2, 2, 5 * 6, dtype=torch.float64).reshape(5, 1, 6).requires_grad_()
        out, bias = mlp(x)
        out.square().sum().backward()
        assert bias is None
        answers.append((out.detach(), x.grad))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-12, atol=1e-12)
