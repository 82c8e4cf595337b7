# SPDX-License-Identifier: Apache-2.0
"""ModelConfig and transformer_config: defaults, refusals, and the settings that a varying T needs."""

import importlib.machinery
import importlib.util
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from megatron_dyn import device
from megatron_dyn.training.model import ModelConfig, padded_vocab_size, transformer_config
from megatron_dyn.training.model_config import check_model_parallel


@dataclass(kw_only=True)
class Parallel:
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    overlap_p2p_communication: bool = True
    overlap_p2p_communication_warmup_flush: bool = False
    virtual_pipeline_model_parallel_size: int | None = None


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(device, "compute_device", lambda: torch.device("cpu"))


def model(**changes) -> ModelConfig:
    return ModelConfig(**(dict(num_layers=4, hidden_size=64, num_attention_heads=4) | changes))


def test_defaults_follow_from_the_shape():
    plain = model()
    assert (plain.kv_channels, plain.num_query_groups) == (16, 4)
    assert model(hidden_size=4096, num_attention_heads=32).ffn_hidden_size == 10880  # int(4 * 4096 * 2 / 3 / 64) * 64
    assert model(swiglu=False).ffn_hidden_size == 256
    assert model(kv_channels=10, num_attention_heads=7).kv_channels == 10  # heads need not divide the hidden size then


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (dict(num_layers=0), "--num-layers is 0"),
        (dict(num_attention_heads=5), "cannot be divided over 5 attention heads"),
        (dict(num_query_groups=3), "cannot share 3 query groups"),
        (dict(ffn_hidden_size=0), "--ffn-hidden-size is 0"),
        (dict(normalization="BatchNorm"), "'BatchNorm' is not known"),
        (dict(norm_epsilon=0.0), "--norm-epsilon"),
        (dict(position_embedding_type="alibi"), "'alibi' is not known"),
        (dict(hidden_dropout=1.0), "--hidden-dropout is 1.0"),
        (dict(attention_dropout=-0.1), "--attention-dropout is -0.1"),
        (dict(init_method_std=0.0), "--init-method-std"),
        (dict(rotary_percent=0.0), "--rotary-percent"),
        (dict(rotary_percent=0.2), "RoPE rotates pairs"),
        (dict(kv_channels=7), "RoPE rotates pairs"),
        (dict(rotary_base=1), "--rotary-base"),
        (dict(recompute_granularity="full"), "needs both"),
        (dict(recompute_granularity="full", recompute_method="uniform"), "needs both"),
        (dict(recompute_method="uniform", recompute_num_layers=1), "needs both"),
        (dict(recompute_granularity="selective", recompute_num_layers=1), "needs both"),
        (dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=0), "at least 1"),
        (dict(recompute_granularity="some"), "'some' is not known"),
        (dict(recompute_modules=["core_attn"]), "belongs to --recompute-granularity selective"),
        (dict(recompute_granularity="selective", recompute_modules=["moe_act"]), "'moe_act' is not known"),
        (
            dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"], add_bias_linear=True),
            "mlp with --add-bias-linear: .* never end",
        ),
    ],
)
def test_impossible_models_are_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        model(**changes)


def test_recomputing_the_mlp_is_refused_for_its_output_bias_alone():
    assert model(recompute_granularity="selective", recompute_modules=["mlp"], add_qkv_bias=True).recompute_modules == ["mlp"]
    assert model(recompute_granularity="selective", recompute_modules=["core_attn"], add_bias_linear=True).add_bias_linear


def test_recomputing_norms_needs_transformer_engine(monkeypatch):
    wanted = dict(recompute_granularity="selective", recompute_modules=["layernorm"])
    find = importlib.util.find_spec
    te = {"installed": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: te["installed"] if name == "transformer_engine" else find(name))
    with pytest.raises(ValueError, match="which is not installed"):
        model(**wanted)
    te["installed"] = importlib.machinery.ModuleSpec("transformer_engine", None)
    assert model(**wanted).recompute_modules == ["layernorm"]


def test_positions_without_rope_do_not_need_even_channels():
    assert model(kv_channels=7, position_embedding_type="learned_absolute").kv_channels == 7


@pytest.mark.parametrize(
    "changes, parallel, complaint",
    [
        ({}, dict(tensor_model_parallel_size=3), "4 attention heads cannot be divided over TP 3"),
        (dict(num_attention_heads=6, kv_channels=16, num_query_groups=3), dict(tensor_model_parallel_size=2), "one must be a multiple"),
        (dict(ffn_hidden_size=99), dict(tensor_model_parallel_size=2), "width 99"),
        ({}, dict(sequence_parallel=True), "needs TP above 1"),
        ({}, dict(pipeline_model_parallel_size=3), "4 layers cannot be divided over PP 3"),
        ({}, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3), "PP 2 x 3 virtual stages"),
        ({}, dict(virtual_pipeline_model_parallel_size=2), "at least two pipeline ranks"),
        (
            dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
            dict(pipeline_model_parallel_size=4),
            "does not fit the 1 layers",
        ),
        (dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3), {}, "does not fit the 4 layers"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(changes, parallel, complaint):
    with pytest.raises(ValueError, match=complaint):
        transformer_config(model(**changes), Parallel(**parallel), precision="fp32")


def test_what_can_be_divided_is_not_refused():
    check_model_parallel(model(num_query_groups=1), Parallel(tensor_model_parallel_size=4, sequence_parallel=True))
    check_model_parallel(model(), Parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2))


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="fp16 needs loss scaling"):
        transformer_config(model(), Parallel(), precision="fp16")
    with pytest.raises(ValueError, match="'int8' is not known"):
        transformer_config(model(), Parallel(), precision="int8")


def test_settings_that_a_varying_T_needs():
    config = transformer_config(model(), Parallel(pipeline_model_parallel_size=2), precision="bf16")
    assert config.calculate_per_token_loss and config.variable_seq_lengths and config.deallocate_pipeline_outputs
    assert config.moe_token_dispatcher_type == "alltoall" and not config.cross_entropy_loss_fusion
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16 and config.bf16
    fused = ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
    assert config.use_cpu_initialization and not any(getattr(config, name) for name in fused)
    assert transformer_config(model(), Parallel(), precision="fp32").params_dtype == torch.float32


def test_fused_kernels_on_a_gpu_only(monkeypatch):
    monkeypatch.setattr(device, "compute_device", lambda: torch.device("cuda", 0))
    config = transformer_config(model(), Parallel(), precision="bf16")
    assert config.bias_activation_fusion and not config.use_cpu_initialization
    assert not config.bias_dropout_fusion  # its compiled dropout depends on how many values of T came before
    # Megatron has no fused GELU without a bias and refuses to be asked for one.
    assert not transformer_config(model(swiglu=False), Parallel(), precision="bf16").bias_activation_fusion


def test_activation_follows_swiglu():
    gated, plain = (transformer_config(model(swiglu=s), Parallel(), precision="fp32") for s in (True, False))
    assert gated.gated_linear_unit and gated.activation_func is F.silu
    assert not plain.gated_linear_unit and plain.activation_func is F.gelu


@pytest.mark.parametrize(
    "vocabulary, divisible_by, tensor_parallel, rows",
    [(4000, 128, 1, 4096), (32000, 128, 1, 32000), (32000, 128, 4, 32000), (32000, 128, 3, 32256), (1, 128, 2, 128), (7, 1, 1, 7)],
)
def test_vocabulary_padding(vocabulary, divisible_by, tensor_parallel, rows):
    assert padded_vocab_size(vocabulary, divisible_by, tensor_parallel) == rows
    assert padded_vocab_size(rows, divisible_by, tensor_parallel) == rows


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 0 tokens"):
        padded_vocab_size(0, 128, 1)


def test_cost_follows_the_shape():
    small, wide = model().cost_model(), model(hidden_size=128, num_attention_heads=8, kv_channels=16).cost_model()
    assert wide.linear > 2 * small.linear and wide.quadratic == 2 * small.quadratic
    assert model().cost_model(vocab_size=1000).linear == small.linear + 3 * 2 * 64 * 1000
