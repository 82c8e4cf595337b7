# SPDX-License-Identifier: Apache-2.0
"""Whole runs that meet trouble or a corner: every rank ends, says why, and loses nothing that was saved."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from training_run import flags, heavy_tailed_lengths, losses, start, train, write_corpus  # noqa: E402

from megatron_dyn.microbatch import stream as stream_module  # noqa: E402
from megatron_dyn.planning import Planner  # noqa: E402
from megatron_dyn.training import loop  # noqa: E402
from megatron_dyn.training.console import RunConsole  # noqa: E402
from megatron_dyn.training.evaluate import Evaluator  # noqa: E402
from megatron_dyn.training.metrics_file import read_metrics  # noqa: E402
from megatron_dyn.training.run_log import load_summary  # noqa: E402


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", heavy_tailed_lengths(60, longest=90))


def on_rank_1() -> bool:
    return os.environ.get("RANK") == "1"


@pytest.mark.parametrize("split", [dict(), dict(tensor_model_parallel_size=2)], ids=["DP 2", "TP 2"])
def test_case_34_a_builder_that_fails_on_one_rank_ends_both_and_names_itself(corpus, tmp_path, monkeypatch, split):
    build = stream_module.build_microbatch

    def fails_at_step_4(plan, corpus, *, step, **named):
        if step == 4 and on_rank_1():
            raise OSError("the disk went away")
        return build(plan, corpus, step=step, **named)

    settings = dict(save=tmp_path / "ck", load=tmp_path / "ck", save_interval=2, lr_decay_iters=12) | split
    with monkeypatch.context() as broken:
        broken.setattr(stream_module, "build_microbatch", fails_at_step_4)
        ranks = train(2, flags(corpus, run_dir=tmp_path, **settings), tmp_path, status=1, timeout=60)
    for rank in range(2):
        output = ranks.output(rank)
        assert "step 5 cannot start, because rank 1: StreamError" in output and "the disk went away" in output
        assert "microbatch-builder" in output and "Traceback" not in output
    train(2, flags(corpus, run_dir=tmp_path, **settings), tmp_path)
    assert len(losses(tmp_path)) == 12, "the last checkpoint loads and the run goes on"


def test_case_18_ranks_with_different_plans_end_before_the_step(corpus, tmp_path, monkeypatch):
    plan = Planner.plan

    def another_plan(self, step):
        return plan(self, step + 1 if step == 3 and on_rank_1() else step)

    monkeypatch.setattr(Planner, "plan", another_plan)
    ranks = train(2, flags(corpus, run_dir=tmp_path, eval_iters=0), tmp_path, status=1, timeout=60)
    assert all("the ranks disagree on step 4" in ranks.output(rank) for rank in range(2))
    assert sorted(losses(tmp_path)) == [1, 2, 3]


def test_a_validation_document_that_cannot_be_read_ends_both_ranks_and_the_steps_are_saved(corpus, tmp_path, monkeypatch):
    build = stream_module.build_microbatch
    train_documents = 54

    def fails_on_validation(plan, corpus, **named):
        if on_rank_1() and len(corpus) < train_documents:
            raise OSError("unreadable")
        return build(plan, corpus, **named)

    monkeypatch.setattr(stream_module, "build_microbatch", fails_on_validation)
    ranks = train(2, flags(corpus, run_dir=tmp_path, save=tmp_path / "ck"), tmp_path, status=1, timeout=60)
    assert all("step 1 of the evaluation cannot start, because rank 1" in ranks.output(rank) for rank in range(2))
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text().strip() == "6"


def test_case_28_the_default_generators_of_tensor_parallel_ranks_stay_together(corpus, tmp_path, monkeypatch):
    record = loop.Trainer._record

    def with_generator(self, *arguments, **named):
        with open(tmp_path / f"generators_{os.environ['RANK']}.txt", "a") as file:
            file.write(f"{torch.get_rng_state().double().sum().item()} {torch.rand(1, generator=_copy()).item()}\n")
        return record(self, *arguments, **named)

    def _copy():
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        return generator

    monkeypatch.setattr(loop.Trainer, "_record", with_generator)
    # Without sequence parallelism hidden dropout draws from the default generator, which the ranks of a TP group share.
    found = []
    for prefetch in (0, 2):
        run_dir = tmp_path / str(prefetch)
        settings = dict(tensor_model_parallel_size=2, hidden_dropout=0.1, attention_dropout=0.1, train_iters=8, prefetch_steps=prefetch)
        train(2, flags(corpus, run_dir=run_dir, **settings), run_dir)
        found.append(losses(run_dir))
    states = [(tmp_path / f"generators_{rank}.txt").read_text().splitlines() for rank in range(2)]
    assert states[0] == states[1] and len(set(states[0][:8])) == 8
    assert found[0] == found[1]


def test_case_16_validation_documents_without_loss_tokens_give_no_number(tmp_path):
    corpus = write_corpus(tmp_path / "documents", [20, 30, 25, 40, 1, 1])
    ranks = train(1, flags(corpus, run_dir=tmp_path, split="66,34", train_iters=2, eval_interval=1), tmp_path)
    validation = read_metrics(tmp_path).validations[-1]
    assert validation["validation lm loss"] is None and validation["validation ppl"] is None
    assert "hold no loss token" in ranks.output(0) and load_summary(tmp_path)["validation_loss"] is None


def test_case_20_documents_that_drop_last_leaves_out_are_counted(corpus, tmp_path):
    train(1, flags(corpus, run_dir=tmp_path, drop_last=True, train_iters=5, eval_iters=0), tmp_path)
    counts = [step["drop-last-documents"] for step in read_metrics(tmp_path).steps]
    assert counts == [0, 0, 0, 54 % 12, 0], "54 documents in steps of 12"
    assert load_summary(tmp_path)["drop_last_documents"] == 6


def test_the_log_states_the_capacity_and_an_empty_load_folder(corpus, tmp_path):
    folder = tmp_path / "none"
    settings = dict(max_tokens_per_microbatch=95, tensor_model_parallel_size=2, sequence_parallel=True, train_iters=1, load=folder, save=folder)
    output = train(2, flags(corpus, run_dir=tmp_path, **settings), tmp_path).output(0)
    assert "capacity      96 tokens (95 rounded up to a multiple of 2)" in output
    assert "no checkpoint in" in output and "starting from iteration 0" in output


def test_the_last_evaluation_comes_also_where_the_exit_interval_divides(corpus, tmp_path):
    train(1, flags(corpus, run_dir=tmp_path, train_iters=4, exit_interval=4, eval_interval=100), tmp_path)
    assert [record["iteration"] for record in read_metrics(tmp_path).validations] == [4]


def test_a_console_that_is_gone_does_not_end_the_run(corpus, tmp_path, monkeypatch):
    def broken(self, text):
        raise BrokenPipeError("nobody reads")

    monkeypatch.setattr(RunConsole, "_print", broken)
    train(2, flags(corpus, run_dir=tmp_path, train_iters=3), tmp_path)
    assert len(losses(tmp_path)) == 3 and load_summary(tmp_path)["steps"] == 3


def test_weights_beyond_repair_stop_a_run_that_skips(corpus, tmp_path):
    settings = dict(lr=1e30, clip_grad=0, on_nan="skip", train_iters=40, eval_iters=0, save=tmp_path / "ck", save_interval=5)
    output = train(1, flags(corpus, run_dir=tmp_path, **settings), tmp_path, status=1).output(0)
    assert "it is the weights or the learning rate rather than a document" in output
    assert "step 10 in a row that is not finite: the weights are spoilt" in output
    assert "not saved after iteration 5" in output and len(losses(tmp_path)) < 15


def test_sigterm_while_evaluating_saves_the_steps_done(corpus, tmp_path, monkeypatch):
    evaluate = Evaluator.evaluate

    def interrupted(self, stepper, stop=None):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, stepper, stop)

    settings = dict(save=tmp_path / "ck", load=tmp_path / "ck")
    with monkeypatch.context() as first_run:
        first_run.setattr(Evaluator, "evaluate", interrupted)
        train(2, flags(corpus, run_dir=tmp_path, **settings, train_iters=6), tmp_path)
    assert (tmp_path / "ck" / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    assert not read_metrics(tmp_path).validations
    train(2, flags(corpus, run_dir=tmp_path, **settings, train_iters=6), tmp_path)
    assert [record["iteration"] for record in read_metrics(tmp_path).validations] == [6], "the interrupted evaluation is made up for"


def test_a_rank_lost_in_an_evaluation_is_told_and_nothing_is_attempted_together(corpus, tmp_path, monkeypatch):
    build = stream_module.build_microbatch

    def dies_on_validation(plan, corpus, **named):
        if on_rank_1() and len(corpus) < 54:
            os.kill(os.getpid(), signal.SIGKILL)
        return build(plan, corpus, **named)

    monkeypatch.setattr(stream_module, "build_microbatch", dies_on_validation)
    ranks = start(2, flags(corpus, run_dir=tmp_path, save=tmp_path / "ck"), tmp_path)
    assert ranks.wait(60) == [1, -signal.SIGKILL]
    assert "rank 1 has given no sign of life" in ranks.output(0) and "CheckpointError" not in ranks.output(0)


def test_two_runs_do_not_share_a_folder(corpus, tmp_path):
    settings = dict(run_dir=tmp_path / "run", save=tmp_path / "ck", load=tmp_path / "ck", train_iters=300, eval_iters=0)
    first = start(1, flags(corpus, **settings), tmp_path)
    try:
        first.wait_for_iteration(tmp_path / "run", 2)
        second = train(1, flags(corpus, **settings), tmp_path / "second", status=2)
        assert f"in use by another run (process {first.processes[0].pid} on" in second.output()
        assert first.processes[0].is_alive()
    finally:
        os.kill(first.processes[0].pid, signal.SIGTERM)
        assert first.wait() == [0]


def test_checkpoints_of_another_run_are_not_buried(corpus, tmp_path):
    train(1, flags(corpus, run_dir=tmp_path, save=tmp_path / "ck", train_iters=3), tmp_path)
    again = train(1, flags(corpus, run_dir=tmp_path, save=tmp_path / "ck", train_iters=2), tmp_path, status=2)
    assert "holds iteration 3 of an earlier run" in again.output()
    records = (tmp_path / "metrics.jsonl").read_bytes()
    done = train(1, flags(corpus, run_dir=tmp_path, save=tmp_path / "ck", load=tmp_path / "ck", train_iters=3), tmp_path)
    assert "nothing to train" in done.output()
    assert (tmp_path / "metrics.jsonl").read_bytes() == records
    for wrong, hint in (("typo", "holds no checkpoint:"), ("ck/iter_0000003", f"name the folder above it: {tmp_path}/ck")):
        mistaken = train(1, flags(corpus, run_dir=tmp_path, load=tmp_path / wrong, train_iters=4), tmp_path, status=2)
        assert hint in mistaken.output() and "would start from scratch" in mistaken.output()
