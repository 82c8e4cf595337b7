# SPDX-License-Identifier: Apache-2.0
"""Alignment, cost model and the validation of settings and corpora."""

import numpy as np
import pytest

from megatron_dyn.planning import CostModel, PlanConfig, Planner, PlanError, alignment_for, document_alignment_for


@pytest.mark.parametrize(
    "sizes, expected",
    [
        (dict(tensor_parallel=1, sequence_parallel=False), 1),
        (dict(tensor_parallel=4, sequence_parallel=True), 4),
        (dict(tensor_parallel=4, sequence_parallel=False), 1),
        (dict(tensor_parallel=2, context_parallel=2, sequence_parallel=True), 8),
        (dict(tensor_parallel=2, context_parallel=4, sequence_parallel=False), 8),
        (dict(tensor_parallel=2, sequence_parallel=True, fp8=True), 32),
        (dict(tensor_parallel=3, context_parallel=2, sequence_parallel=True, fp8=True), 96),
        (dict(tensor_parallel=1, sequence_parallel=False, fp8=True), 16),
        (dict(tensor_parallel=1, sequence_parallel=False, token_bucket=500), 500),
        (dict(tensor_parallel=8, sequence_parallel=True, token_bucket=500), 504),
        (dict(tensor_parallel=2, sequence_parallel=True, fp8=True, token_bucket=33), 64),
        (dict(tensor_parallel=4, sequence_parallel=True, token_bucket=1), 4),
    ],
)
def test_alignment_rule(sizes, expected):
    assert alignment_for(**sizes) == expected


def test_document_alignment_and_bad_sizes():
    assert [document_alignment_for(context_parallel=cp) for cp in (1, 2, 4)] == [1, 4, 8]
    with pytest.raises(ValueError, match="tensor_parallel=0"):
        alignment_for(tensor_parallel=0, sequence_parallel=True)
    with pytest.raises(ValueError, match="token_bucket is 0"):
        alignment_for(tensor_parallel=1, sequence_parallel=False, token_bucket=0)
    with pytest.raises(ValueError, match="context_parallel must be at least 1"):
        document_alignment_for(context_parallel=0)


def count_operations(L, *, layers, h, f, heads, groups, d, gated, V):
    """Forward operations counted matrix by matrix, backward twice as many; causal attention position by position."""
    products = [(h, heads * d), (h, groups * d), (h, groups * d), (heads * d, h)] + [(h, f)] * (2 if gated else 1) + [(f, h)]
    dense = sum(2 * L * rows * columns for rows, columns in products)
    scores_and_values = 2 * sum(2 * heads * d * (position + 0.5) for position in range(L))  # half of the diagonal
    return 3 * (layers * (dense + scores_and_values) + 2 * L * h * V)


@pytest.mark.parametrize("groups, gated", [(8, False), (2, True)])
@pytest.mark.parametrize("L", [1, 17, 256])
def test_cost_from_model_counts_every_product(groups, gated, L):
    cost = CostModel.from_model(
        num_layers=3, hidden_size=64, ffn_hidden_size=160, num_attention_heads=8, num_query_groups=groups, kv_channels=12,
        gated_linear_unit=gated, vocab_size=100,
    )
    expected = count_operations(L, layers=3, h=64, f=160, heads=8, groups=groups, d=12, gated=gated, V=100)
    assert cost.of(L) == pytest.approx(expected, rel=1e-12)


def test_cost_defaults():
    shape = dict(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4)
    assert CostModel.from_model(**shape) == CostModel.from_model(**shape, num_query_groups=4, kv_channels=16)
    full = CostModel.from_model(num_layers=1, hidden_size=4096, ffn_hidden_size=4 * 4096, num_attention_heads=32)
    assert CostModel().quadratic / CostModel().linear == pytest.approx(full.quadratic / full.linear)


@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_a_window_leaves_out_the_scores_beyond_it(window):
    """Against the scores counted one by one: twice as many, within the diagonal, which L^2 counts once and not twice."""
    cost = CostModel(linear=0, quadratic=1, window=window)
    for L in range(1, 20):
        exact = sum(min(row + 1, window) for row in range(L))
        assert cost.of(L) == cost.attended(np.array([L]))[0]
        assert abs(cost.of(L) - 2 * exact) <= L
    assert cost.of(window) == window**2 and CostModel(linear=0, quadratic=1).of(30) == 900


@pytest.mark.parametrize(
    "bad",
    [
        dict(linear=-1), dict(quadratic=float("nan")), dict(linear=0, quadratic=0), dict(linear=1e308), dict(quadratic=1e308),
        dict(linear=1e-310, quadratic=0),
    ],
)  # fmt: skip
def test_cost_refuses(bad):
    with pytest.raises(ValueError, match="CostModel"):
        CostModel(**bad)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(max_tokens_per_microbatch=0), "max_tokens_per_microbatch must be an integer of at least 1"),
        (dict(max_tokens_per_microbatch=8.0), "must be an integer"),
        (dict(data_parallel_size=True), "data_parallel_size must be an integer"),
        (dict(global_batch_tokens=5), "exactly one of global_batch_size"),
        (dict(global_batch_size=None), "exactly one of global_batch_size"),
        (dict(oversize="cut"), "choose one of split, truncate, drop, error"),
        (dict(document_order="random"), "choose one of shuffle, sequential"),
        (dict(alignment=4, document_alignment=3), "does not divide alignment=4"),
        (dict(seed=-1), "seed must be an integer of at least 0"),
        (dict(seed=2**63), "does not fit 63 bits"),
        (dict(max_documents_per_microbatch=0), "max_documents_per_microbatch"),
        (dict(microbatch_multiple=0), "microbatch_multiple"),
        (dict(drop_last="no"), "drop_last"),
        (dict(cost=1.0), "cost must be a CostModel"),
        (dict(max_tokens_per_microbatch=2**31 - 1, alignment=2), "exceeds int32"),
    ],
)
def test_settings_are_refused(change, message):
    with pytest.raises(PlanError, match=message):
        PlanConfig(**(dict(max_tokens_per_microbatch=8, global_batch_size=2) | change))


def test_numpy_integers_make_the_same_plan():
    plain = PlanConfig(max_tokens_per_microbatch=8, global_batch_size=2)
    numpy = PlanConfig(max_tokens_per_microbatch=np.int64(8), global_batch_size=np.int32(2))
    assert Planner(np.array([3, 4]), plain).plan(0).digest == Planner(np.array([3, 4]), numpy).plan(0).digest


@pytest.mark.parametrize(
    "lengths, change, message",
    [
        ([], {}, "no usable documents: of 0"),
        ([0, 0], {}, "no usable documents: of 2, 2 are empty"),
        ([3, -1], {}, "document 1 has a negative length"),
        ([[3, 4]], {}, "flat array of integers"),
        ([3.0, 4.0], {}, "flat array of integers"),
        ([3], dict(drop_last=True), "smaller than one global batch"),
        ([3], dict(drop_last=True, global_batch_size=None, global_batch_tokens=4), "smaller than one global batch"),
    ],
)
def test_corpora_are_refused(lengths, change, message):
    config = PlanConfig(**(dict(max_tokens_per_microbatch=8, global_batch_size=2) | change))
    with pytest.raises(PlanError, match=message):
        Planner(np.array(lengths), config)


def test_negative_steps_are_refused():
    with pytest.raises(PlanError, match="steps count from 0"):
        Planner(np.array([3]), PlanConfig(max_tokens_per_microbatch=8, global_batch_size=2)).plan(-1)


def test_a_step_of_dropped_documents_only_is_made_of_fillers():
    config = PlanConfig(
        max_tokens_per_microbatch=8, global_batch_size=1, data_parallel_size=2, microbatch_multiple=3, alignment=4,
        oversize="drop", document_order="sequential",
    )
    plan = Planner(np.array([9, 5]), config).plan(0)
    assert [[mb.T for mb in rank] for rank in plan.microbatches] == [[4, 4, 4]] * 2
    assert plan.stats.fillers == 6 and plan.num_loss_tokens == 0 and plan.num_documents == 0
    assert (plan.stats.T_min, plan.stats.imbalance, plan.stats.rank_imbalance) == (4, 1.0, 1.0)


def test_documents_of_one_token_have_no_loss_token():
    plan = Planner(np.ones(5, dtype=int), PlanConfig(max_tokens_per_microbatch=3, global_batch_size=5)).plan(0)
    assert plan.stats.tokens == 5 and plan.num_loss_tokens == 0


def test_document_alignment_pads_each_piece_and_the_budget_counts_it():
    config = PlanConfig(max_tokens_per_microbatch=16, global_batch_size=9, alignment=8, document_alignment=4,
                        document_order="sequential")
    plan = Planner(np.array([5, 4, 3]), config).plan(0)
    [mb] = plan.microbatches[0]
    assert mb.cu_seqlens.tolist() == [0, 5, 9, 12] and mb.cu_seqlens_padded.tolist() == [0, 8, 12, 16]
    plan = Planner(np.array([5, 5, 5]), config).plan(0)  # 15 tokens, 24 rows
    assert sorted(mb.T for mb in plan.microbatches[0]) == [8, 16]
