# SPDX-License-Identifier: Apache-2.0
"""The memory formulas against the published ones and counts by hand, and what follows from them."""

import dataclasses

import numpy as np
import pytest

from megatron_dyn.planning import PlanConfig, PlanError, alignment_for
from megatron_dyn.training.config import ConfigError, ParallelConfig
from megatron_dyn.training.memory import fullest_rank, layer_bytes_per_token, most_in_flight, parameters, state_bytes_per_parameter
from megatron_dyn.training.model_config import ModelConfig
from megatron_dyn.training.recommend import GIB, least_microbatches, recommend

GPT = dict(num_layers=24, hidden_size=2048, num_attention_heads=16, swiglu=False, hidden_dropout=0.1, normalization="LayerNorm")
LENGTHS = np.clip(np.random.default_rng(1).lognormal(6.0, 1.2, 20_000), 1, None).astype(np.int64)


@pytest.mark.parametrize("tp,sp,per_hidden", [(1, False, 34), (4, False, 10 + 24 / 4), (4, True, 34 / 4)])
def test_activations_of_a_layer_are_those_of_the_paper(tp, sp, per_hidden):
    """Korthikanti et al. 2022, table 2, without attention's square."""
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sp)
    assert layer_bytes_per_token(ModelConfig(**GPT), parallel, bf16=True) == (per_hidden * 2048, 2 * 2048 / (tp if sp else 1))


@pytest.mark.parametrize("pp,vp", [(1, 1), (4, 1), (4, 2), (8, 4)])
def test_microbatches_in_flight_are_those_of_the_published_schedules(pp, vp):
    """p on the first rank, times 1 + (p - 1) / (p v) when interleaved (the same paper, section 4.2.3); 1F1B keeps one on the last."""
    shape = dict(pipeline_parallel=pp, virtual_stages=vp)
    assert most_in_flight(0, **shape) / vp == pytest.approx(pp if vp == 1 else pp * (1 + (pp - 1) / (pp * vp)))
    assert most_in_flight(pp - 1, **shape) == 1 if vp == 1 else most_in_flight(pp - 1, **shape) <= most_in_flight(0, **shape)


def test_optimizer_states_are_those_of_megatron():
    def bytes_of(**changes):
        return state_bytes_per_parameter(ParallelConfig(**changes), bf16=True, data_parallel_size=8)

    assert bytes_of() == 18 and bytes_of(use_distributed_optimizer=True) == 6 + 12 / 8


def test_parameters_counted_matrix_by_matrix():
    model = ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=2, ffn_hidden_size=160)
    qkv, projection, fc1, fc2, norms = 64 * (64 + 2 * 16), 64 * 64, 64 * 2 * 160, 160 * 64, 2 * 64
    assert parameters(model, 1000) == (2 * (qkv + projection + fc1 + fc2 + norms), 64_000)


def test_recomputation_and_the_output_layer():
    plain = ModelConfig(num_layers=8, hidden_size=1024, num_attention_heads=16)
    sizes = dict(vocab_size=32000, bf16=True, data_parallel_size=1)
    whole = fullest_rank(plain, ParallelConfig(), **sizes)
    full = dataclasses.replace(plain, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert whole.output_bytes == 32000 * 8 + 2 * 1024 * 2
    assert fullest_rank(full, ParallelConfig(), **sizes).token_bytes == 8 * 2048 + whole.layer_bytes + whole.output_bytes
    assert whole.token_bytes == 8 * whole.layer_bytes + whole.output_bytes
    # A wide vocabulary makes the last rank of a pipeline the fullest, a deep model the first.
    pipeline = ParallelConfig(pipeline_model_parallel_size=4)
    assert fullest_rank(plain, pipeline, **(sizes | dict(vocab_size=256_000))).pipeline_rank == 3
    assert fullest_rank(plain, pipeline, **(sizes | dict(vocab_size=1000))).pipeline_rank == 0


def proposal(memory_gib, *, budget=None, global_batch_size=None, token_bucket=None, lengths=LENGTHS, ranks=4, planning={}, **parallel):
    settings = ParallelConfig(**parallel)

    def plan_config(*, max_tokens_per_microbatch, token_bucket, global_batch_tokens):
        alignment = alignment_for(
            tensor_parallel=settings.tensor_model_parallel_size, sequence_parallel=settings.sequence_parallel, token_bucket=token_bucket
        )
        batch = dict(global_batch_size=global_batch_size) if global_batch_size else dict(global_batch_tokens=global_batch_tokens)
        return PlanConfig(
            max_tokens_per_microbatch=max_tokens_per_microbatch, data_parallel_size=ranks, alignment=alignment, **batch, **planning
        )

    return recommend(
        lengths, plan_config=plan_config, model=ModelConfig(**GPT), parallel=settings, vocab_size=50304, bf16=True,
        device_memory_gib=memory_gib,
        data_parallel_size=ranks, budget=budget, token_bucket=token_bucket, global_batch_given=global_batch_size is not None,
    )  # fmt: skip


def test_what_is_proposed_fits_and_fills():
    found = proposal(80)
    assert found.memory.total(found.largest_budget) < 0.9 * 80 * GIB - 2 * GIB < found.memory.total(found.largest_budget + 512)
    chosen = next(choice for choice in found.budgets if choice.max_tokens_per_microbatch == found.max_tokens_per_microbatch)
    assert chosen.cut_documents <= 0.01 and chosen.max_tokens_per_microbatch <= found.largest_budget
    assert chosen.busy >= max(choice.busy for choice in found.budgets) - 0.02
    assert chosen.microbatches_per_rank == pytest.approx(found.least_microbatches, abs=0.5) and chosen.fill > 0.9
    assert next(choice.slot_fill for choice in found.buckets if choice.token_bucket == found.token_bucket) >= 0.995


def test_less_memory_means_a_smaller_budget_and_too_little_is_refused():
    assert proposal(32).largest_budget < proposal(40).largest_budget
    with pytest.raises(ConfigError, match="no budget of use would fit"):
        proposal(24)
    assert proposal(24, tensor_model_parallel_size=4, sequence_parallel=True).largest_budget > 0


def test_given_settings_are_kept_and_judged():
    found = proposal(40, budget=65536, global_batch_size=512)
    assert found.max_tokens_per_microbatch == 65536 and found.global_batch_tokens is None and "does NOT fit" in found.reasons[0]


@pytest.mark.parametrize(
    "lengths,ranks,none_left,planning,message",
    [
        (np.append(np.minimum(LENGTHS, 4000), 9000), 1, dict(lengths=LENGTHS * 1000), dict(oversize="error"), "above the budget of"),
        (np.full(50, 9000), 1, dict(lengths=np.full(50, 9_000_000)), dict(oversize="drop"), "no usable documents"),
        (np.full(40, 2000), 1, dict(ranks=64), dict(drop_last=True), "smaller than one global batch"),
    ],
)
def test_impossible_budgets_are_skipped_and_named_when_none_is_left(lengths, ranks, none_left, planning, message):
    settings = dict(lengths=lengths, planning=planning, ranks=ranks)
    found = proposal(80, **settings)
    assert found.impossible and all(message in reason for reason in found.impossible.values())
    possible = {choice.max_tokens_per_microbatch for choice in found.budgets}
    assert possible.isdisjoint(found.impossible) and found.max_tokens_per_microbatch in possible
    with pytest.raises(PlanError, match=rf"no budget makes a plan.*possible: B [\d,]+: .*{message}.*; B [\d,]+: "):
        proposal(80, **(settings | none_left))


def test_a_given_bucket_is_kept_and_padding_is_not_busy():
    found, coarse = proposal(80, budget=8192), proposal(80, budget=8192, token_bucket=2048)
    assert coarse.token_bucket is None and [choice.token_bucket for choice in coarse.buckets] == [2048]
    assert "token bucket 2048 was given" in coarse.reasons[-1] and found.token_bucket is not None
    slot_fill = coarse.buckets[0].slot_fill
    assert coarse.budgets[0].busy < found.budgets[0].busy * (slot_fill + 0.01) < found.budgets[0].busy


def test_no_bucket_is_praised_for_a_fill_it_does_not_keep():
    found = proposal(80, ranks=512, budget=4096, global_batch_size=4, lengths=np.full(4000, 1), tensor_model_parallel_size=8, sequence_parallel=True)
    assert found.token_bucket == 8 == found.buckets[0].token_bucket and found.buckets[0].slot_fill < 0.01
    assert "the smallest: the slot fill is 0." in found.reasons[-1] and "99.5%" not in found.reasons[-1]
    assert "the global batch should grow: 4 documents do not feed 512 ranks" in found.reasons[-2]


@pytest.mark.parametrize("pp,vp,least", [(1, None, 4), (2, None, 9), (4, None, 27), (4, 2, 16), (8, 4, 16)])
def test_microbatches_that_a_pipeline_needs(pp, vp, least):
    found = least_microbatches(ParallelConfig(pipeline_model_parallel_size=pp, num_virtual_stages_per_pipeline_rank=vp))
    assert found == least
    bubble = (pp - 1) / (vp or 1)
    assert bubble / (found + bubble) <= 0.1 + 1e-9
