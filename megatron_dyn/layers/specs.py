# SPDX-License-Identifier: Apache-2.0
"""Module specs of the GPT decoder: "local" (PyTorch, any device) and "te" (Transformer Engine, GPU)."""

import dataclasses
import importlib.util
from typing import Literal

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn.layers.attention import ThdAttention
from megatron_dyn.layers.norm import SequenceParallelLayerNorm, SequenceParallelRMSNorm
from megatron_dyn.layers.overlap import OverlapColumnParallelLinear, OverlapRowParallelLinear

Backend = Literal["local", "te"]


def gpt_block_spec(
    config: TransformerConfig, *, backend: Backend, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers that this pipeline rank (and virtual stage) builds, for ``GPTModel(transformer_layer_spec=...)``.

    Args:
        config: also decides the kind of norm (``normalization``) and ``qk_layernorm``.
        backend: "local": Megatron's local linear layers (those of `layers.overlap` with ``tp_comm_overlap``) with `ThdAttention`
            and the norms of `layers.norm`; "te": Transformer Engine's modules as Megatron wires them.
        vp_stage: the virtual pipeline stage; None without interleaving.
    Raises:
        ValueError: an unknown backend or normalization, or "te" without Transformer Engine.
    """
    if backend == "te":
        if importlib.util.find_spec("transformer_engine") is None:
            raise ValueError(
                "the 'te' layers need Transformer Engine, which is not installed: install transformer-engine[pytorch] on a "
                "machine with CUDA, or use the 'local' layers."
            )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        from megatron_dyn.layers.te_swiglu import uses_swiglu_kernel, with_swiglu_kernel

        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
        if uses_swiglu_kernel(config):
            block = dataclasses.replace(block, layer_specs=[with_swiglu_kernel(layer) for layer in block.layer_specs])
        if config.tp_comm_overlap:
            from megatron_dyn.layers.te_overlap import with_active_shape

            block = with_active_shape(block)
        return block
    if backend != "local":
        raise ValueError(f"layer backend {backend!r} is not known: use 'local' or 'te'.")

    norm = norm_class(config)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    attention = dataclasses.replace(
        attention, submodules=dataclasses.replace(attention.submodules, core_attention=ThdAttention)
    )
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    if config.tp_comm_overlap:
        column, row = OverlapColumnParallelLinear, OverlapRowParallelLinear
        attention.submodules.linear_qkv, attention.submodules.linear_proj = column, row
        mlp = dataclasses.replace(mlp, submodules=dataclasses.replace(mlp.submodules, linear_fc1=column, linear_fc2=row))
    layer = dataclasses.replace(
        layer,
        submodules=dataclasses.replace(
            layer.submodules, input_layernorm=norm, self_attention=attention, pre_mlp_layernorm=norm, mlp=mlp
        ),
    )
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def norm_class(config: TransformerConfig) -> type:
    """The norm of the local layers.

    Raises:
        ValueError: ``config.normalization`` is neither "RMSNorm" nor "LayerNorm".
    """
    classes = {"RMSNorm": SequenceParallelRMSNorm, "LayerNorm": SequenceParallelLayerNorm}
    if config.normalization not in classes:
        raise ValueError(f"normalization {config.normalization!r} has no local norm: use one of {', '.join(classes)}.")
    return classes[config.normalization]
