# SPDX-License-Identifier: Apache-2.0
"""What is proposed for a device's memory and a corpus."""

import numpy as np
import pytest

from megatron_dyn.planning import PlanConfig, PlanError, alignment_for
from megatron_dyn.training.config import ConfigError, ParallelConfig
from megatron_dyn.training.memory import GIB, MemorySettings, usable_bytes
from megatron_dyn.training.model_config import ModelConfig
from megatron_dyn.training.recommend import least_microbatches, recommend

GPT = dict(num_layers=24, hidden_size=2048, num_attention_heads=16, swiglu=False, hidden_dropout=0.1, normalization="LayerNorm")
LENGTHS = np.clip(np.random.default_rng(1).lognormal(6.0, 1.2, 20_000), 1, None).astype(np.int64)


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
        lengths, plan_config=plan_config, device_memory_gib=memory_gib,
        settings=MemorySettings(model=ModelConfig(**GPT), parallel=settings, vocab_size=50304, bf16=True, data_parallel_size=ranks),
        budget=budget, token_bucket=token_bucket, global_batch_given=global_batch_size is not None,
    )  # fmt: skip


def test_what_is_proposed_fits_and_fills():
    found = proposal(80)
    assert found.memory.total(found.largest_budget) < usable_bytes(80 * GIB) == 0.9 * 80 * GIB - 2 * GIB < found.memory.total(found.largest_budget + 512)
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
