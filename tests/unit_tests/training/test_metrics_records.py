# SPDX-License-Identifier: Apache-2.0
"""A step's record and the summary of a run, against counts made by hand from the plans."""

import json
import math
import statistics

import numpy as np
import pytest
import torch
from metrics_samples import BUDGET, planner, records

from megatron_dyn.training.metrics import Metrics, StepRecord, ValidationRecord, summarize
from megatron_dyn.training.metrics_file import strict_json

# Issue keys: other tools read these, so a rename is a break.
STEP_KEYS = {
    "iteration", "lm loss", "grad-norm", "learning-rate", "num-tokens", "num-loss-tokens", "fill", "slot-fill", "imbalance", "microbatches",
    "documents", "T", "T-min", "T-mean", "T-max", "step-time", "data-time", "tokens-per-second", "consumed-tokens", "consumed-documents", "epoch", "skipped",
}  # fmt: skip
SUMMARY_KEYS = {
    "steps", "loss_first", "loss_last", "validation_loss", "fill", "slot_fill", "imbalance", "tokens", "documents", "microbatches",
    "T_min", "T_mean", "T_max", "capacity", "seconds", "tokens_per_second", "distinct_T",
}  # fmt: skip


def test_record_counts_what_the_plan_holds():
    plans = planner()
    for record in records(5, plans=plans):
        plan = plans.plan(record.iteration - 1)
        microbatches = [microbatch for rank in plan.microbatches for microbatch in rank]
        pieces = [piece for microbatch in microbatches for piece in microbatch.pieces]
        line = record.as_json()
        assert STEP_KEYS <= set(line)
        assert line["num-tokens"] == sum(piece.length for piece in pieces)
        assert line["num-loss-tokens"] == sum(microbatch.num_loss_tokens for microbatch in microbatches)
        assert line["documents"] == len({piece.document for piece in pieces})
        assert line["T"] == [microbatch.T for microbatch in microbatches]
        assert line["microbatches"] == len(microbatches)
        assert line["fill"] == pytest.approx(line["num-tokens"] / (len(microbatches) * BUDGET))
        assert line["slot-fill"] == pytest.approx(line["num-tokens"] / sum(line["T"]))
        assert line["T-max"] == max(line["T"]) <= line["capacity"] == 104
        assert line["tokens-per-second"] == pytest.approx(line["num-tokens"] / 0.5)
        costs = [microbatch.cost for microbatch in microbatches if microbatch.pieces]
        assert line["imbalance"] == pytest.approx(max(costs) / statistics.fmean(costs))


def test_fillers_do_not_count_as_the_shortest_microbatch():
    plans = planner(data_parallel_size=4, documents=1)
    record = next(record for record in records(20, plans=plans) if record.fillers and record.num_tokens > 8)
    held = [microbatch.T for rank in plans.plan(record.iteration - 1).microbatches for microbatch in rank if microbatch.pieces]
    assert min(record.T) == 8 < record.T_min == min(held)
    assert record.T_mean == pytest.approx(statistics.fmean(held))


def test_tensors_and_numpy_numbers_become_plain_numbers():
    (record,) = records(1, lm_loss=torch.tensor(2.5), grad_norm=np.float32(0.5), learning_rate=torch.tensor(1e-3, dtype=torch.float64))
    line = json.loads(strict_json(record.as_json()))
    assert (line["lm loss"], line["grad-norm"], line["learning-rate"]) == (2.5, 0.5, 1e-3)


def test_extra_keys_are_added_but_never_replace():
    (record,) = records(1, extra={"loss-scale": 1.0})
    assert record.as_json()["loss-scale"] == 1.0
    with pytest.raises(ValueError, match="fill"):
        records(1, extra={"fill": 1.0})


def test_values_that_are_not_finite_are_null():
    text = strict_json({"a": [math.nan, {"b": np.array([math.inf, 1.0])}], "c": torch.tensor(-math.inf), "d": (True, None, 2)})
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, {"b": [None, 1.0]}], "c": None, "d": [True, None, 2]}


def as_metrics(steps: list[StepRecord], validations: list[ValidationRecord] = ()) -> Metrics:
    return Metrics(
        steps=[json.loads(strict_json(record.as_json())) for record in steps],
        validations=[json.loads(strict_json(record.as_json())) for record in validations],
    )


def test_summary_ratios_are_of_totals():
    plans = planner()
    steps = records(12, plans=plans)
    microbatches = [microbatch for step in range(12) for rank in plans.plan(step).microbatches for microbatch in rank]
    tokens = sum(microbatch.num_tokens for microbatch in microbatches)
    held = [microbatch.T for microbatch in microbatches if microbatch.pieces]
    summary = summarize(as_metrics(steps))
    assert SUMMARY_KEYS <= set(summary)
    assert summary["fill"] == pytest.approx(tokens / (len(microbatches) * BUDGET))
    assert summary["fill"] != pytest.approx(statistics.fmean(step.fill for step in steps)), "a mean of the steps' fills must differ here"
    assert summary["slot_fill"] == pytest.approx(tokens / sum(microbatch.T for microbatch in microbatches))
    assert (summary["T_min"], summary["T_max"]) == (min(held), max(held))
    assert summary["T_mean"] == pytest.approx(statistics.fmean(held))
    assert summary["distinct_T"] == len({microbatch.T for microbatch in microbatches})
    assert (summary["steps"], summary["microbatches"], summary["tokens"]) == (12, len(microbatches), tokens)
    assert summary["documents"] == sum(plans.plan(step).num_documents for step in range(12))
    assert summary["seconds"] == pytest.approx(6.0)
    assert (summary["loss_first"], summary["loss_last"]) == (8.0, 8.0 / 12)
    assert summary["split_documents"] == sum(plans.plan(step).stats.split_documents for step in range(12)) > 0


def test_summary_passes_over_steps_without_a_loss():
    steps = records(4)
    for index in (0, 3):
        steps[index].lm_loss, steps[index].skipped = math.nan, True
    summary = summarize(as_metrics(steps))
    assert (summary["loss_first"], summary["loss_last"], summary["skipped_steps"]) == (4.0, 8.0 / 3, 2)


def test_summary_takes_the_last_evaluation_with_a_loss():
    validations = [ValidationRecord(iteration=i, loss=loss, tokens=9, documents=1, seconds=1) for i, loss in [(1, 5.0), (2, 3.0), (3, None)]]
    summary = summarize(as_metrics(records(3), validations))
    assert summary["validation_loss"] == 3.0
    assert summary["validation_ppl"] == pytest.approx(math.exp(3.0))


def test_summary_of_nothing():
    summary = summarize(Metrics(steps=[], validations=[]))
    assert summary["steps"] == 0
    assert summary["loss_first"] is summary["fill"] is summary["T_mean"] is summary["tokens_per_second"] is None


def test_perplexity_of_a_hopeless_model_stays_a_number():
    assert ValidationRecord(iteration=1, loss=1e4, tokens=1, documents=1, seconds=1).perplexity == math.exp(20)
