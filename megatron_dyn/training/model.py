# SPDX-License-Identifier: Apache-2.0
"""A GPT from configuration: `ModelConfig` -> Megatron's `TransformerConfig` -> one `GPTModel` per virtual pipeline stage.

tokens, position_ids, labels   [1, T] int64
hidden states                  [T/tp, 1, hidden] under sequence parallelism, else [T, 1, hidden]
loss of each token             [1, T] fp32, from the last stage when labels are given

A model starts from the same weights for any TP, PP and number of virtual stages (`initial_weights`), with local and with
Transformer Engine layers on the same kind of device. Only the number of rows that pad the vocabulary depends on TP.
"""

import importlib.util
import math
from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn import device
from megatron_dyn.layers import gpt_block_spec
from megatron_dyn.pipeline.schedule import schedule_settings
from megatron_dyn.training.initial_weights import initialize_weights
from megatron_dyn.training.model_config import ModelConfig, ParallelSizes, check_model_parallel, one_of, require

__all__ = ["ModelConfig", "build_model", "check_model_parallel", "padded_vocab_size", "transformer_config"]


def transformer_config(
    model: ModelConfig, parallel: ParallelSizes, *, precision: Literal["fp32", "bf16"], **extra: object
) -> TransformerConfig:
    """Megatron's configuration: the model's shape, the parallel sizes, and settings that are right for a varying T.

    Args:
        precision: "fp32" or "bf16" (bf16 parameters and activations; the optimizer keeps fp32 masters).
        **extra: further fields of `TransformerConfig`: those of overlap and FP8 (`training.overlap`).
    Raises:
        ValueError: fp16, or a model that cannot be divided as asked.
    """
    require(precision != "fp16", "fp16 needs loss scaling, which is not supported: use bf16 or fp32")
    one_of("precision", precision, ("fp32", "bf16"))
    check_model_parallel(model, parallel)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    cuda = device.compute_device().type == "cuda"
    return TransformerConfig(
        # shape
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=F.silu if model.swiglu else F.gelu,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        # recomputation
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=model.recompute_modules,
        # precision
        bf16=precision == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        # parallelism
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **schedule_settings(
            parallel.pipeline_model_parallel_size,
            parallel.virtual_pipeline_model_parallel_size,
            overlap=parallel.overlap_p2p_communication,
            warmup_flush=parallel.overlap_p2p_communication_warmup_flush,
        ),
        # Without it variable lengths are refused, for dense models too.
        moe_token_dispatcher_type="alltoall",
        # Exact loss: gradients are divided by the number of loss tokens of the whole step, not per microbatch.
        calculate_per_token_loss=True,
        # The fused loss casts gradients to bf16 (1.9e-3 off).
        cross_entropy_loss_fusion=False,
        # Kernels that exist on CUDA only. The fused accumulation is an NVIDIA Apex extension, used where it is installed.
        use_cpu_initialization=not cuda,
        bias_activation_fusion=cuda and (model.swiglu or model.add_bias_linear),
        apply_rope_fusion=cuda and importlib.util.find_spec("transformer_engine") is not None,
        gradient_accumulation_fusion=cuda and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        # Compiled for the strides of [T, 1, hidden], so each few values of T compile anew until torch.compile gives up and runs it
        # uncompiled; that draws other random numbers, and recomputation would no longer repeat the forward's dropout.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **extra,
    )


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of both ``divisible_by`` and ``tensor_parallel``.

    Padding rows take part in the softmax, so their number is part of the model. Megatron-LM (`vocab_size_with_padding`) rounds up to
    the product of the two, and its loss depends on TP; with the least common multiple, all TP sizes that divide
    ``divisible_by`` train the same model.
    """
    require(vocab_size >= 1, f"a vocabulary of {vocab_size} tokens: it must hold at least 1")
    multiple = math.lcm(divisible_by, tensor_parallel)
    return math.ceil(vocab_size / multiple) * multiple


def build_model(
    config: TransformerConfig,
    model: ModelConfig,
    *,
    vocab_size: int,
    backend: Literal["local", "te"],
    seed: int = 1234,
    fuse_weight_gradients: bool = False,
) -> list[GPTModel]:
    """Build this rank's part of the model, on the compute device and with its initial weights.

    Needs Megatron's parallel state (and, on CUDA, its RNG tracker).

    Args:
        config: from `transformer_config`; each chunk keeps this very object as its ``.config``.
        vocab_size: the tokenizer's; padded here (see `padded_vocab_size`).
        backend: the layers, see `gpt_block_spec`.
        seed: of the initial weights.
        fuse_weight_gradients: Transformer Engine's linear layers add weight gradients to ``main_grad`` (made by Megatron's DDP)
            inside the matrix product. Their own kernel does it; Megatron's switch for all layers needs NVIDIA Apex as well.
    Returns:
        one `GPTModel` for each virtual pipeline stage of this rank.
    Raises:
        ValueError: parallel state and configuration disagree.
    """
    _check_parallel_state(config)
    padded = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, config.tensor_model_parallel_size)
    virtual = config.virtual_pipeline_model_parallel_size
    # Weights are drawn afterwards by name, so the draw during construction, whose order depends on PP, is left out.
    drawn_later = dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), torch.nn.init.zeros_)
    own = {name: getattr(config, name) for name in drawn_later}
    vars(config).update(drawn_later)
    try:
        chunks = [
            _build_chunk(config, model, padded, backend, vp_stage=None if virtual is None else stage)
            for stage in range(virtual or 1)
        ]
    finally:
        vars(config).update(own)
    for chunk in chunks:
        _place(chunk, config)
        initialize_weights(chunk, config, vocab_size=vocab_size, seed=seed)
        if fuse_weight_gradients:
            for layer in chunk.decoder.modules():
                if hasattr(layer, "fuse_wgrad_accumulation"):
                    layer.fuse_wgrad_accumulation = True
    return chunks


def _check_parallel_state(config: TransformerConfig) -> None:
    made = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    }
    for name, size in made.items():
        require(
            getattr(config, name) == size,
            f"the configuration has {name} {getattr(config, name)} but Megatron's process groups were made with {size}: the model "
            "would be cut in the wrong places. Pass the same sizes to initialize_model_parallel.",
        )


def _build_chunk(
    config: TransformerConfig, model: ModelConfig, padded_vocab: int, backend: Literal["local", "te"], *, vp_stage: int | None
) -> GPTModel:
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=gpt_block_spec(config, backend=backend, vp_stage=vp_stage),
        vocab_size=padded_vocab,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )
    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk


def _place(chunk: GPTModel, config: TransformerConfig) -> None:
    """Megatron makes the learned positions on the CPU in fp32, whatever the configuration says."""
    for parameter in chunk.parameters():
        parameter.data = parameter.data.to(device=device.compute_device(), dtype=config.params_dtype)
