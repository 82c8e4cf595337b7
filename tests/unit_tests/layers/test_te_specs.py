# SPDX-License-Identifier: Apache-2.0
"""Specifications with Transformer Engine's layers: which of them are replaced for overlap."""

import copy
import dataclasses
import importlib.util
from types import SimpleNamespace

import pytest
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


@pytest.mark.parametrize("overlap", [False, True])
def test_the_te_block_of_this_package_is_megatrons_but_for_overlap(te_overlap, monkeypatch, overlap):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *package: True if name == "transformer_engine" else find(name, *package))
    given = block_spec()
    monkeypatch.setattr(gpt_layer_specs, "get_gpt_decoder_block_spec", lambda config, **options: given)
    found = specs.gpt_block_spec(SimpleNamespace(tp_comm_overlap=overlap), backend="te")
    assert (found is given) is not overlap
    linear = found.layer_specs[0].submodules.self_attention.submodules.linear_qkv
    assert linear.__name__ == ("OverlapTELayerNormColumnParallelLinear" if overlap else "TELayerNormColumnParallelLinear")
