# SPDX-License-Identifier: Apache-2.0
"""The comparison with the reference notices each of these breaks: a check that could not fail would prove nothing.

Each mutant changes one thing in the product, then the very check of the matrix runs. Ranks are forked, so they inherit it.
"""

import dataclasses
import functools
import sys

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from reference import GPT2, LLAMA, make_documents
from trained_steps import Scenario, check_scenario, launch_scenario

import megatron_dyn.layers.attention as attention
import megatron_dyn.layers.norm as norm
import megatron_dyn.microbatch.builder as builder
import megatron_dyn.training.optimizer as optimizer
import megatron_dyn.training.step as step

# Two packs, of 14 and of 13 tokens; the latter gets a row of padding under TP 2.
DOCUMENTS = make_documents([9, 6, 5, 3, 1, 3])
ONE_RANK = Scenario(documents=DOCUMENTS, budget=16, batch=6, gpt=LLAMA)
LEARNED_POSITIONS = dataclasses.replace(ONE_RANK, gpt=GPT2)
TP2 = dataclasses.replace(ONE_RANK, tp=2, sp=True)
DP2 = dataclasses.replace(ONE_RANK, dp=2, documents=make_documents([12, 4]), batch=2)
TWO_STEPS = dataclasses.replace(ONE_RANK, steps=2, batch=3)


# The mutants ----------------------------------------------------------------------------------------------------------


def cu_seqlens_ignored(monkeypatch):
    """Attention sees the pack as one document."""
    change_attention(monkeypatch, lambda real, padded: ([0, padded[-1]], [0, padded[-1]]))


def one_boundary_ignored(monkeypatch):
    """Attention joins the last two documents of a pack."""

    def joined(real: list[int], padded: list[int]):
        return (real, padded) if len(real) < 3 else ([*real[:-2], real[-1]], [*padded[:-2], padded[-1]])

    change_attention(monkeypatch, joined)


def positions_not_reset(monkeypatch):
    """Learned positions run through the pack."""
    change_microbatches(monkeypatch, lambda mb: {"position_ids": torch.arange(mb.T)[None]})


def label_across_the_boundary(monkeypatch):
    """A document's last token is trained to predict the next document's first."""

    def leak(mb) -> dict:
        labels, mask, real = mb.labels.clone(), mb.loss_mask.clone(), mb.plan.num_tokens
        labels[0, : real - 1] = mb.tokens[0, 1:real]
        mask[0, : real - 1] = 1.0
        return {"labels": labels, "loss_mask": mask}

    change_microbatches(monkeypatch, leak)


def padding_not_masked(monkeypatch):
    """Padding rows have a loss."""

    def unmask(mb) -> dict:
        mask = mb.loss_mask.clone()
        mask[0, mb.plan.num_tokens :] = 1.0
        return {"loss_mask": mask}

    change_microbatches(monkeypatch, unmask)


def mean_of_means(monkeypatch):
    """Each microbatch is divided by its own loss tokens, then microbatches weigh the same."""
    change_loss(monkeypatch, lambda total, tokens, mb: (total / tokens.clamp(min=1), torch.ones_like(tokens)))


def divided_by_T(monkeypatch):
    """The gradient is divided by rows instead of loss tokens."""
    change_loss(monkeypatch, lambda total, tokens, mb: (total, torch.full_like(tokens, mb.T)))


def divided_on_each_rank(monkeypatch):
    """Each data-parallel rank divides by its own tokens, then ranks weigh the same."""
    finalize = optimizer.finalize_model_grads

    def local(models, num_tokens=None, **kwargs):
        ranks = parallel_state.get_data_parallel_world_size()
        for chunk in models:
            chunk.scale_gradients(1.0 / (max(1, int(num_tokens)) * ranks))
        return finalize(models, None, **kwargs)

    monkeypatch.setattr(optimizer, "finalize_model_grads", local)


def loss_of_this_rank_only(monkeypatch):
    """The reported loss leaves the other data-parallel ranks out."""
    monkeypatch.setattr(step.dist, "all_reduce", unless_from(step, step.dist.all_reduce))


def norms_without_the_sequence_parallel_flag(monkeypatch):
    """Megatron then does not sum their gradients over the tensor-parallel ranks."""
    build = norm._SequenceParallelNorm.__init__

    def unflagged(self, *args, **kwargs):
        build(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.sequence_parallel = False

    monkeypatch.setattr(norm._SequenceParallelNorm, "__init__", unflagged)


def gradients_not_cleared(monkeypatch):
    """The second step adds to the first one's gradients."""
    monkeypatch.setattr(step.Stepper, "_zero_gradients", lambda self: None)


def norms_decayed(monkeypatch):
    """Weight decay on everything."""
    monkeypatch.setattr(optimizer, "get_standard_config_overrides", lambda config: {})


# Tools of the mutants


def change_attention(monkeypatch, change) -> None:
    forward = attention.ThdAttention.forward

    def changed(self, *qkv_and_mask, packed_seq_params, **kwargs):
        before = packed_seq_params.cu_seqlens_q.tolist(), packed_seq_params.cu_seqlens_q_padded.tolist()
        real, padded = (torch.tensor(offsets, dtype=torch.int32) for offsets in change(*before))
        fields = dict(cu_seqlens_q=real, cu_seqlens_kv=real, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
        return forward(self, *qkv_and_mask, packed_seq_params=PackedSeqParams(qkv_format="thd", **fields), **kwargs)

    monkeypatch.setattr(attention.ThdAttention, "forward", changed)


def change_microbatches(monkeypatch, changes) -> None:
    build = builder.build_microbatch

    def changed(*args, **kwargs):
        microbatch = build(*args, **kwargs)
        return dataclasses.replace(microbatch, **changes(microbatch))

    monkeypatch.setattr(builder, "build_microbatch", changed)


def change_loss(monkeypatch, change) -> None:
    forward = step.forward_step

    def changed(data_iterator, chunk):
        microbatch = None

        def noting():
            nonlocal microbatch
            microbatch = next(data_iterator)
            yield microbatch

        output, sum_losses = forward(noting(), chunk)

        def changed_sum(token_losses):
            total, tokens, report = sum_losses(token_losses)
            return *change(total, tokens, microbatch), report

        return output, changed_sum

    monkeypatch.setattr(step, "forward_step", changed)


def unless_from(module, function):
    """A function that does nothing when it is called from `module`."""
    @functools.wraps(function)
    def called(*args, **kwargs):
        if sys._getframe(1).f_globals.get("__name__") != module.__name__:
            return function(*args, **kwargs)

    return called


# The tests ------------------------------------------------------------------------------------------------------------

MUTANTS = [
    (cu_seqlens_ignored, ONE_RANK, "loss .* off the reference"),
    (cu_seqlens_ignored, TP2, "loss .* off the reference"),
    (one_boundary_ignored, ONE_RANK, "loss .* off the reference"),
    (positions_not_reset, LEARNED_POSITIONS, "loss .* off the reference"),
    (label_across_the_boundary, ONE_RANK, "loss .* off the reference"),
    (padding_not_masked, TP2, "loss .* off the reference"),
    (mean_of_means, ONE_RANK, "gradient of .* off the reference"),
    (mean_of_means, DP2, "gradient of .* off the reference"),
    (divided_by_T, TP2, "gradient of .* off the reference"),
    (divided_on_each_rank, DP2, "gradient of .* off the reference"),
    (loss_of_this_rank_only, DP2, "counts .* loss tokens"),
    (norms_without_the_sequence_parallel_flag, TP2, "gradient of .*norm.weight is .* off the reference"),
    (gradients_not_cleared, TWO_STEPS, "gradient of .* off the reference"),
    (norms_decayed, ONE_RANK, "norm.* off the reference after the update"),
]
SCENARIOS = {
    "one rank": ONE_RANK,
    "one rank, learned positions": LEARNED_POSITIONS,
    "one rank, two steps": TWO_STEPS,
    "TP2 SP": TP2,
    "DP2": DP2,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_a_mutant_the_check_passes(name):
    check_scenario(SCENARIOS[name], launch_scenario(SCENARIOS[name]))


@pytest.mark.parametrize("mutant, scenario, complaint", MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_is_caught(monkeypatch, mutant, scenario, complaint):
    mutant(monkeypatch)
    # The product may notice a wrong number of loss tokens by itself, before the update; what it lets pass, the check must catch.
    with pytest.raises(AssertionError, match=f"{complaint}|loss tokens, its plan"):
        check_scenario(scenario, launch_scenario(scenario))
