# SPDX-License-Identifier: Apache-2.0
"""The sampler: iteration, length, strict and elastic restoring."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from megatron_dyn.planning import CostModel, PlanConfig, Planner, PlanError, TokenBudgetBatchSampler

LENGTHS = np.random.default_rng(5).integers(0, 60, size=97)
BY_SIZE = PlanConfig(max_tokens_per_microbatch=64, global_batch_size=10, data_parallel_size=2)
BY_TOKENS = dataclasses.replace(BY_SIZE, global_batch_size=None, global_batch_tokens=400)
both = pytest.mark.parametrize("config", [BY_SIZE, BY_TOKENS], ids=["size", "tokens"])


def make(config, lengths=LENGTHS, **kwargs):
    return TokenBudgetBatchSampler(Planner(lengths, config), **kwargs)


def after(sampler, steps):
    for _ in range(steps):
        next(sampler)
    return json.loads(json.dumps(sampler.state_dict()))


@both
@pytest.mark.parametrize("drop_last", [False, True])
def test_length_and_end(config, drop_last):
    sampler = make(dataclasses.replace(config, drop_last=drop_last), num_epochs=3)
    plans = list(sampler)
    assert len(plans) == len(sampler) and [plan.step for plan in plans] == list(range(len(plans)))
    assert [plan.epoch for plan in plans] == sorted(plan.epoch for plan in plans) and plans[-1].epoch == 2
    assert list(sampler) == []
    target = config.global_batch_tokens
    full = [plan.stats.tokens >= target if target else len(plan.documents) == 10 for plan in plans]
    if drop_last:
        assert all(full)
        left_out = 3 * int((LENGTHS > 0).sum()) - sum(len(plan.documents) for plan in plans)
        assert sampler.totals["drop_last_documents"] == left_out
    else:
        assert sum(not whole for whole in full) <= 3 and sampler.totals["tokens"] == 3 * LENGTHS.sum()


def test_an_endless_sampler_has_no_length():
    with pytest.raises(TypeError, match="endless"):
        len(make(BY_SIZE))


@both
@pytest.mark.parametrize("steps", [0, 1, 9, 10, 33])
def test_resume_is_the_unbroken_run(config, steps):
    unbroken = make(config)
    state = after(unbroken, steps)
    resumed = make(config)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for _ in range(15):
        assert next(resumed).digest == next(unbroken).digest
    assert resumed.totals == unbroken.totals


@both
def test_resume_is_elastic(config):
    unbroken = make(config)
    state = after(unbroken, 7)
    changed = dataclasses.replace(
        config, data_parallel_size=3, max_tokens_per_microbatch=100, alignment=4, microbatch_multiple=2,
        max_documents_per_microbatch=4, cost=CostModel(linear=1, quadratic=1),
    )
    resumed = make(changed, data_parallel_rank=2)
    resumed.load_state_dict(state)
    for _ in range(15):
        theirs, ours = next(unbroken), next(resumed)
        assert ours.step == theirs.step and ours.documents.tolist() == theirs.documents.tolist()
        assert ours.num_loss_tokens == theirs.num_loss_tokens
        assert resumed.local_microbatches(ours) is ours.microbatches[2]


@pytest.mark.parametrize(
    "change, names",
    [
        (dict(seed=99), ["seed (saved 1234, now 99)"]),
        (dict(global_batch_size=11), ["global_batch_size (saved 10, now 11)"]),
        (dict(global_batch_size=None, global_batch_tokens=400), ["global_batch_size", "global_batch_tokens"]),
        (dict(document_order="sequential"), ["document_order (saved 'shuffle', now 'sequential')"]),
        (dict(oversize="truncate"), ["oversize (saved 'split', now 'truncate')", "max_tokens_per_microbatch (saved None, now"]),
        (dict(drop_last=True), ["drop_last (saved False, now True)"]),
        (dict(seed=3, drop_last=True), ["seed", "drop_last"]),
    ],
)
def test_another_data_order_is_refused_by_name(change, names):
    state = after(make(BY_SIZE), 3)
    sampler = make(dataclasses.replace(BY_SIZE, **change))
    before = sampler.state_dict()
    with pytest.raises(PlanError) as refusal:
        sampler.load_state_dict(state)
    assert all(name in str(refusal.value) for name in names)
    assert str(refusal.value).count("(saved ") == len(names)
    assert sampler.state_dict() == before


def test_another_corpus_is_refused():
    longer = LENGTHS.copy()
    longer[50] += 1
    with pytest.raises(PlanError, match="fingerprint"):
        make(BY_SIZE, longer).load_state_dict(after(make(BY_SIZE), 3))


@pytest.mark.parametrize("damage, message", [
    (lambda s: s.pop("step"), "not a state of this sampler"),
    (lambda s: s.pop("totals"), "not a state of this sampler"),
    (lambda s: s.update(extra=1), "not a state of this sampler"),
    (lambda s: s["totals"].pop("tokens"), "not a state of this sampler"),
    (lambda s: s.update(totals=7), "not a state of this sampler"),
    (lambda s: s.update(version=2), "version"),
    (lambda s: s.update(step=-1), "damaged"),
    (lambda s: s.update(step="3"), "damaged"),
    (lambda s: s.update(epoch_first_step=99), "damaged"),
    (lambda s: s.update(step=1000), "damaged"),
    (lambda s: s.update(epoch=1), "epoch 1 starts at step 10, not 0"),
])
def test_damaged_states_are_refused(damage, message):
    state = copy.deepcopy(after(make(BY_SIZE), 3))
    damage(state)
    with pytest.raises(PlanError, match=message):
        make(BY_SIZE).load_state_dict(state)


def test_restoring_far_ahead_replays_nothing(monkeypatch):
    """Token steps of a late epoch are found from the state, not by ordering all epochs before it."""
    from megatron_dyn.planning import planner as module

    state = after(make(BY_TOKENS), 60)
    assert state["epoch"] >= 6
    ordered, real = [], module.epoch_order

    def record(*args, epoch, **kwargs):
        ordered.append(epoch)
        return real(*args, epoch=epoch, **kwargs)

    monkeypatch.setattr(module, "epoch_order", record)
    resumed = make(BY_TOKENS)
    resumed.load_state_dict(state)
    next(resumed)
    assert resumed.planner.first_step_of(state["epoch"]) == state["epoch_first_step"]
    assert ordered and min(ordered) >= state["epoch"]


def test_ranks_are_checked():
    with pytest.raises(PlanError, match=r"data_parallel_rank=2 is not in 0\.\.1"):
        make(BY_SIZE, data_parallel_rank=2)
    with pytest.raises(PlanError, match="num_epochs=-1"):
        make(BY_SIZE, num_epochs=-1)
