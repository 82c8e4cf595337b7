# SPDX-License-Identifier: Apache-2.0
"""The memory model against the published formulas, counts by hand and the peaks that were measured on a GPU; and what it advises."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from megatron_dyn.training import memory_advice as advice_module
from megatron_dyn.training.config import ParallelConfig
from megatron_dyn.training.memory import (
    GIB,
    WORKSPACE_BYTES,
    MemorySettings,
    fullest_rank,
    layer_bytes_per_token,
    most_in_flight,
    parameters,
    rank_memory,
    rounded_down,
    state_bytes_per_parameter,
    tightest_rank,
    usable_bytes,
    userbuffer_bytes_per_token,
)
from megatron_dyn.training.memory_advice import memory_advice
from megatron_dyn.training.model_config import ModelConfig

DATA = Path(__file__).resolve().parents[3] / "docs" / "data"
GPT = ModelConfig(num_layers=24, hidden_size=2048, num_attention_heads=16, swiglu=False, hidden_dropout=0.1, normalization="LayerNorm")
LLAMA = ModelConfig(num_layers=8, hidden_size=1024, num_attention_heads=16, num_query_groups=4, ffn_hidden_size=2816)
MEASURED = {  # benchmarks/throughput.py
    "0.6b": dict(num_layers=10, hidden_size=2048, ffn_hidden_size=5504, num_attention_heads=16, num_query_groups=8),
    "3b": dict(num_layers=27, hidden_size=3072, ffn_hidden_size=8192, num_attention_heads=24, num_query_groups=8),
}
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def settings(model=LLAMA, *, vocab_size=32000, bf16=True, ranks=1, recipe=None, table=None, fused=True, recompute={}, **parallel):
    model, parallel = dataclasses.replace(model, **recompute), ParallelConfig(**parallel)
    return MemorySettings(
        model=model, parallel=parallel, vocab_size=vocab_size, bf16=bf16, data_parallel_size=ranks, fp8_recipe=recipe, overlap_table=table,
        fused_gradients=fused,
    )  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_the_model_says_what_was_measured(name):
    """Peak of the allocator on one H200, bf16, distributed optimizer off; every way of dividing the same documents."""
    of_file = json.loads((DATA / f"throughput_{name}_bf16.json").read_text())
    model = ModelConfig(**MEASURED[name], untie_embeddings_and_output_weights=True)
    memory = fullest_rank(settings(model, vocab_size=of_file["settings"]["vocab_size"]))
    assert memory.parameters == pytest.approx(of_file["parameters"], rel=1e-4)
    ratios = [memory.allocated(row["budget"]) / GIB / row["peak_allocated_gib"] for row in of_file["rows"]]
    assert len(ratios) >= 2 and all(0.98 < ratio < 1.02 for ratio in ratios), ratios


@pytest.mark.parametrize("tp,sp,per_hidden", [(1, False, 34), (4, False, 10 + 24 / 4), (4, True, 34 / 4)])
def test_activations_of_a_layer_are_those_of_the_paper(tp, sp, per_hidden):
    """Korthikanti et al. 2022, table 2, with flash attention's statistics (4 bytes a head) for its square."""
    found = layer_bytes_per_token(settings(GPT, tensor_model_parallel_size=tp, sequence_parallel=sp))
    assert found == per_hidden * 2048 + 4 * 16 / tp


@pytest.mark.parametrize("pp,vp", [(1, 1), (4, 1), (4, 2), (8, 4)])
def test_microbatches_in_flight_are_those_of_the_published_schedules(pp, vp):
    """p on the first rank, times 1 + (p - 1) / (p v) when interleaved (the same paper, section 4.2.3); 1F1B keeps one on the last."""
    shape = dict(pipeline_parallel=pp, virtual_stages=vp)
    assert most_in_flight(0, **shape) / vp == pytest.approx(pp if vp == 1 else pp * (1 + (pp - 1) / (pp * vp)))
    assert most_in_flight(pp - 1, **shape) == 1 if vp == 1 else most_in_flight(pp - 1, **shape) <= most_in_flight(0, **shape)


def test_optimizer_states_are_those_of_megatron():
    found = [state_bytes_per_parameter(settings(ranks=8, use_distributed_optimizer=divided)) for divided in (False, True)]
    assert found == [18, 6 + 12 / 8] and state_bytes_per_parameter(settings(bf16=False)) == 16


def test_parameters_counted_matrix_by_matrix():
    model = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=2, ffn_hidden_size=160)
    qkv, projection, fc1, fc2, norms = 64 * (64 + 2 * 16), 64 * 64, 64 * 2 * 160, 160 * 64, 2 * 64
    assert parameters(model, 1000) == (2 * (qkv + projection + fc1 + fc2 + norms), 64_000)


def test_each_value_that_is_kept_counted_by_hand():
    """h 1024, q 1024, k 256, f 2816, in bf16."""
    norms, attention, mlp, statistics = 4 * 1024 * 2, (2 * 1024 + 2 * 256) * 2, 3 * 2816 * 2, 4 * 16
    whole = norms + attention + mlp + statistics
    assert layer_bytes_per_token(settings()) == whole
    recomputed = {
        ("core_attn",): whole - statistics + (1024 + 256) * 2,  # the values are a view of what the first product made, which stays whole
        ("mlp",): whole - mlp - 1024 * 2,  # and the norm in its first product
        ("layernorm",): whole,
    }
    for modules, expected in recomputed.items():
        found = settings(recompute=dict(recompute_granularity="selective"))
        found.model.recompute_modules = list(modules)  # afterwards: "layernorm" is refused without Transformer Engine
        assert layer_bytes_per_token(found) == expected, modules
    fp8 = whole - 2 * 1024 - 2816
    assert layer_bytes_per_token(settings(recipe="tensorwise")) == fp8 and layer_bytes_per_token(settings(recipe="delayed")) == fp8 + 1024


def test_the_moments_at_which_a_rank_may_be_fullest():
    whole, matrices = rank_memory(settings(), 0), 1024 * (1024 + 512) + 1024**2 + 3 * 1024 * 2816
    kept, moments = layer_bytes_per_token(settings()), {moment.name: moment for moment in whole.moments}
    assert moments["the loss"].token_bytes == 8 * kept + 2 * 2048 + 32000 * 6 == whole.token_bytes - 16 * 4 * 64
    assert moments["the backward pass of a layer"].token_bytes == 8 * kept + (2 * 2816 + 1024) * 2
    assert moments["the gradient of the output layer's weight"].fixed_bytes == 32000 * 1024 * 2
    assert whole.workspace_bytes == WORKSPACE_BYTES + 2 * matrices
    assert rank_memory(settings(recipe="delayed"), 0).workspace_bytes == whole.workspace_bytes + 2 * 8 * matrices
    # Recomputed whole, a layer's activations and the logits are never there together.
    full = {moment.name: moment for moment in rank_memory(settings(recompute=FULL), 0).moments}
    assert full["the loss"].token_bytes == 8 * 2048 + 2 * 2048 + 32000 * 6
    assert full["the backward pass of a layer"].token_bytes == 7 * 2048 + kept + (2 * 2816 + 1024) * 2


def test_a_wide_vocabulary_fills_the_last_rank_of_a_pipeline_and_a_deep_model_the_first():
    for vocab_size, rank in ((256_000, 3), (1000, 0)):
        wide = settings(vocab_size=vocab_size, pipeline_model_parallel_size=4)
        assert fullest_rank(wide).pipeline_rank == tightest_rank(wide, 40 * GIB).pipeline_rank == rank


def test_userbuffers_hold_the_capacity_in_every_communicator():
    assert userbuffer_bytes_per_token(settings(tensor_model_parallel_size=4, sequence_parallel=True)) == 0
    overlap = settings(table={}, tensor_model_parallel_size=4, sequence_parallel=True)
    assert userbuffer_bytes_per_token(overlap) == 12 * 1024 * 2
    assert userbuffer_bytes_per_token(dataclasses.replace(overlap, fp8_recipe="delayed")) == (8 * 1 + 4 * 2) * 1024
    ring = dataclasses.replace(overlap, overlap_table={"proj_fprop": {"method": "ring_exchange"}})
    assert userbuffer_bytes_per_token(ring) == (11 + 7 / 4) * 1024 * 2
    assert fullest_rank(overlap).total(8192) == fullest_rank(overlap).allocated(8192) + 8192 * 12 * 2048


@pytest.mark.parametrize("parallel", [{}, dict(pipeline_model_parallel_size=4), dict(tensor_model_parallel_size=2, sequence_parallel=True)])
def test_the_largest_budget_fits_and_one_more_token_does_not(parallel):
    found, room = settings(**parallel), usable_bytes(24 * GIB)
    memory = tightest_rank(found, room)
    tokens = memory.largest(room)
    assert memory.total(tokens) <= room < memory.total(tokens + 1)
    assert all(rank_memory(found, rank).total(tokens) <= room for rank in (0, found.parallel.pipeline_model_parallel_size - 1))
    assert tightest_rank(found, memory.fixed_bytes - 1).largest(memory.fixed_bytes - 1) <= 0


@pytest.mark.parametrize("tokens,unit,expected", [(8191, 1, 7936), (8191, 48, 7680), (255, 2, 254), (31, 16, 16), (15, 16, 0), (-5, 1, 0)])
def test_budgets_are_rounded_down_to_what_capacity_does_not_exceed(tokens, unit, expected):
    assert rounded_down(tokens, unit) == expected


def test_advice_names_a_budget_that_fits_and_what_lets_a_larger_one_fit():
    found, room = settings(ranks=8), usable_bytes(24 * GIB)
    text = memory_advice(found, device_bytes=24 * GIB, alignment=2, budget=65536)
    said = int(text.partition("--max-tokens-per-microbatch ")[2].split()[0])
    assert said == rounded_down(tightest_rank(found, room).largest(room), 2) and fullest_rank(found).total(said) <= room
    with_full = int(text.partition("--recompute-num-layers 1 up to ")[2].split(";")[0].split(",")[0])
    assert fullest_rank(settings(ranks=8, recompute=FULL)).total(with_full) <= room and with_full > 1.5 * said
    assert "--use-distributed-optimizer" not in text, "it would save less than a tenth"
    assert "no budget fits" in memory_advice(found, device_bytes=4 * GIB, alignment=2, budget=4096)


def test_advice_where_the_budget_should_have_fitted_looks_elsewhere():
    text = memory_advice(settings(), device_bytes=80 * GIB, alignment=1, budget=4096)
    assert "should do" in text and "nvidia-smi" in text and "expandable_segments" in text


def test_advice_offers_what_this_run_does_not_have_yet():
    large = dataclasses.replace(LLAMA, num_layers=64, hidden_size=2048, kv_channels=128, ffn_hidden_size=8192)
    plain = settings(large, ranks=8, tensor_model_parallel_size=2)
    text = memory_advice(plain, device_bytes=40 * GIB, alignment=2, budget=65536)
    assert all(flag in text for flag in ("--use-distributed-optimizer up to", "--sequence-parallel up to", "--recompute-num-layers 1 up to"))
    has_all = settings(large, ranks=8, recompute=FULL, tensor_model_parallel_size=2, sequence_parallel=True, use_distributed_optimizer=True)
    assert list(advice_module._ways_out(has_all)) == [] and math.isfinite(fullest_rank(has_all).token_bytes)
