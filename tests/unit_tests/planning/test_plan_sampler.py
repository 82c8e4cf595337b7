# SPDX-License-Identifier: Apache-2.0
"""The sampler: iteration, length, strict and elastic restoring."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from megatron_dyn.planning import CostModel, PlanConfig, Planner, PlanError, TokenBudgetBatchSampler
from megatron_dyn.planning.windows import Windows

LENGTHS = np.random.default_rng(5).integers(0, 60, size=97)
BY_SIZE = PlanConfig(max_tokens_per_microbatch=64, global_batch_size=10, data_parallel_size=2)
BY_TOKENS = dataclasses.replace(BY_SIZE, global_batch_size=None, global_batch_tokens=400)
WINDOWED = [dataclasses.replace(config, document_order="length-window", length_window=35) for config in (BY_SIZE, BY_TOKENS)]
both = pytest.mark.parametrize("config", [BY_SIZE, BY_TOKENS], ids=["size", "tokens"])
every = pytest.mark.parametrize("config", [BY_SIZE, BY_TOKENS, *WINDOWED], ids=["size", "tokens", "size windowed", "tokens windowed"])


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


def check_resume(config, steps):
    unbroken = make(config)
    state = after(unbroken, steps)
    resumed = make(config)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state and state["overrides"] == []
    for _ in range(15):
        assert next(resumed).digest == next(unbroken).digest
    assert resumed.totals == unbroken.totals


@every
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 4, 9, 10, 33])
def test_resume_is_the_unbroken_run(config, drop_last, steps):
    check_resume(dataclasses.replace(config, drop_last=drop_last), steps)


@every
def test_mutant_position_off_by_one_is_noticed(config, monkeypatch):
    """A saved position that is one document too far (or too near) is refused, or another step follows: never silence."""
    real = Planner.position_of
    for shift in (1, -1):
        with monkeypatch.context() as patch:
            patch.setattr(
                TokenBudgetBatchSampler, "state_dict",
                lambda self: real_state(self) | {"epoch_documents": real(self.planner, self.step).documents + shift},
            )  # fmt: skip
            with pytest.raises((AssertionError, PlanError)):
                check_resume(config, 4)


real_state = TokenBudgetBatchSampler.state_dict


@every
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
        (dict(seed=99), ["--seed 99 (saved 1234)"]),
        (dict(global_batch_size=11), ["--global-batch-size 11 (saved 10)"]),
        (
            dict(global_batch_size=None, global_batch_tokens=400),
            ["--global-batch-size not given (saved 10)", "--global-batch-tokens 400 (saved not given)"],
        ),
        (dict(document_order="sequential"), ["--document-order sequential (saved shuffle)"]),
        (dict(document_order="length-window"), ["--document-order length-window (saved shuffle)"]),
        (dict(oversize="truncate"), ["--oversize truncate (saved split)"]),
        (dict(drop_last=True), ["--drop-last yes (saved no)"]),
        (dict(seed=3, drop_last=True), ["--seed 3 (saved 1234)", "--drop-last yes (saved no)"]),
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
    assert "--override-data-mismatch" in str(refusal.value)
    assert sampler.state_dict() == before


def test_settings_that_matter_only_sometimes_are_compared_then():
    truncating = dataclasses.replace(BY_SIZE, oversize="truncate")
    with pytest.raises(PlanError, match=r"--max-tokens-per-microbatch 100 \(saved 64\)"):
        make(dataclasses.replace(truncating, max_tokens_per_microbatch=100)).load_state_dict(after(make(truncating), 3))
    with pytest.raises(PlanError, match=r"--length-window 50 \(saved 35\)"):
        make(dataclasses.replace(WINDOWED[0], length_window=50)).load_state_dict(after(make(WINDOWED[0]), 3))
    make(dataclasses.replace(BY_SIZE, length_window=50)).load_state_dict(after(make(BY_SIZE), 3))


def longer_corpus():
    longer = np.append(LENGTHS, 7)
    longer[50] += 1
    return longer


def test_another_corpus_is_refused_with_what_both_hold():
    now, saved = f"98 documents, {LENGTHS.sum() + 8} tokens, fingerprint ", f"(saved 97 documents, {LENGTHS.sum()} tokens, fingerprint "
    with pytest.raises(PlanError) as refusal:
        make(BY_SIZE, longer_corpus()).load_state_dict(after(make(BY_SIZE), 3))
    assert now in str(refusal.value) and saved in str(refusal.value) and "--data-path" in str(refusal.value)
    with pytest.raises(PlanError, match="97 documents.*fingerprint"):  # as many documents and tokens, in another order
        make(BY_SIZE, LENGTHS[::-1]).load_state_dict(after(make(BY_SIZE), 3))


@every
def test_an_override_goes_on_from_the_saved_step_and_is_recorded(config):
    state = after(make(config), 13)
    changed = dataclasses.replace(config, seed=99)
    sampler = make(changed, longer_corpus(), override_data_mismatch=True)
    sampler.load_state_dict(state)
    assert sampler.step == 13 and sampler.totals == state["totals"]
    [override] = sampler.overrides
    assert override["step"] == 13 and [text.split()[0] for text in override["changed"]] == ["--data-path", "--seed"]
    assert next(sampler).digest == Planner(longer_corpus(), changed).plan(13).digest
    again = make(changed, longer_corpus())  # from here on it is this data order, and the record stays
    again.load_state_dict(after(sampler, 2))
    assert again.step == 16 and again.overrides == [override]


def test_an_override_without_a_difference_changes_nothing():
    state = after(make(BY_TOKENS), 13)
    sampler = make(BY_TOKENS, override_data_mismatch=True)
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state


def test_a_state_of_the_earlier_shuffle_is_refused_or_overridden():
    state = after(make(BY_SIZE), 3)
    for name in ("epoch_documents", "epoch_window", "overrides", "corpus_documents", "corpus_tokens", "length_window"):
        del state[name]
    state["version"] = 1
    with pytest.raises(PlanError, match=r"definition of the data order, version 2 \(saved 1\)"):
        make(BY_SIZE).load_state_dict(state)
    sampler = make(BY_SIZE, override_data_mismatch=True)
    sampler.load_state_dict(state)
    assert sampler.step == 3 and "version 2 (saved 1)" in sampler.overrides[0]["changed"][0]
    with pytest.raises(PlanError, match="damaged"):
        make(BY_SIZE, override_data_mismatch=True).load_state_dict(state | {"step": -1})


@pytest.mark.parametrize("damage, message", [
    (lambda s: s.pop("step"), "not a state of this sampler"),
    (lambda s: s.pop("totals"), "not a state of this sampler"),
    (lambda s: s.update(extra=1), "not a state of this sampler"),
    (lambda s: s["totals"].pop("tokens"), "not a state of this sampler"),
    (lambda s: s.update(totals=7), "not a state of this sampler"),
    (lambda s: s.update(version=3), "version"),
    (lambda s: s.pop("version"), "not a state of this sampler"),
    (lambda s: s.update(overrides=None), "not a state of this sampler"),
    (lambda s: s.update(epoch_documents=31), "damaged"),
    (lambda s: s.update(epoch_window=20), "damaged"),
    (lambda s: s.update(epoch_documents=True), "damaged"),
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


@pytest.mark.parametrize("damage", [
    dict(epoch_documents=0), dict(epoch_documents=1), dict(epoch_documents=10**6), dict(epoch_window=3), dict(epoch_first_step=13),
    dict(epoch_first_step=20),
])  # fmt: skip
def test_positions_that_no_token_step_can_have_are_refused(damage):
    """Nothing is scanned for it: a place where a step might begin is believed."""
    state = after(make(BY_TOKENS), 13)
    assert state["step"] - state["epoch_first_step"] > 1
    with pytest.raises(PlanError, match="damaged"):
        make(BY_TOKENS).load_state_dict(state | damage)


@pytest.mark.parametrize("config", [BY_SIZE, BY_TOKENS, *WINDOWED])
def test_restoring_far_ahead_reads_its_own_step_only(config, monkeypatch):
    lengths = np.random.default_rng(8).integers(1, 60, size=100_000)
    number = 0 if config == WINDOWED[1] else 3  # where the steps of its windows end differs from epoch to epoch
    state = after(make(config, lengths), number)
    epoch_first_step = 10**6 if config.global_batch_tokens else 10**6 // 10_000 * 10_000  # a million steps are behind
    state |= {"epoch": epoch_first_step // 10_000, "epoch_first_step": epoch_first_step, "step": epoch_first_step + number}
    read, real = [], Windows._documents

    def recorded(self, epoch, begin, end):
        read.append((epoch, end - begin))
        return real(self, epoch, begin, end)

    monkeypatch.setattr(Windows, "_documents", recorded)
    resumed = make(config, lengths)
    resumed.load_state_dict(state)
    plan = next(resumed)
    assert plan.step == epoch_first_step + number and plan.epoch == state["epoch"]
    assert resumed.state_dict()["epoch_first_step"] == epoch_first_step == resumed.planner.first_step_of(state["epoch"])
    assert {epoch for epoch, _ in read} == {state["epoch"]} and sum(count for _, count in read) <= 100


def test_ranks_are_checked():
    with pytest.raises(PlanError, match=r"data_parallel_rank=2 is not in 0\.\.1"):
        make(BY_SIZE, data_parallel_rank=2)
    with pytest.raises(PlanError, match="num_epochs=-1"):
        make(BY_SIZE, num_epochs=-1)


@pytest.mark.parametrize("state", [None, [], "state", {}])
def test_what_is_no_state_is_refused_by_name(state):
    with pytest.raises(PlanError, match="not a state of this sampler"):
        make(BY_SIZE).load_state_dict(state)


def test_damaged_overrides_change_nothing():
    sampler, state = make(BY_SIZE), after(make(BY_SIZE), 3)
    with pytest.raises(PlanError, match="overrides are damaged"):
        sampler.load_state_dict(state | {"overrides": [1]})
    assert sampler.step == 0 and not any(sampler.totals.values())


@pytest.mark.parametrize("wrong", [dict(num_epochs=1.5), dict(data_parallel_rank=0.5), dict(data_parallel_rank=None), dict(num_epochs=True)])
def test_ranks_and_epochs_are_integers(wrong):
    with pytest.raises(PlanError, match=f"{next(iter(wrong))} must be an integer"):
        TokenBudgetBatchSampler(Planner(LENGTHS, BY_SIZE), **wrong)
