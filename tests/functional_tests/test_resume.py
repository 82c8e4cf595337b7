# SPDX-License-Identifier: Apache-2.0
"""Pull the plug, resume, and compare every loss with a run that was never disturbed."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import training_run  # noqa: E402
from training_run import flags, heavy_tailed_lengths, losses, start, train, write_corpus  # noqa: E402

from megatron_dyn.planning import TokenBudgetBatchSampler  # noqa: E402
from megatron_dyn.training.loop import Trainer  # noqa: E402
from megatron_dyn.training.metrics_file import read_metrics  # noqa: E402

STEPS = 14
# Two epochs of 54 training documents (the last step of the first is short), dropout on, every generator in use.
BUSY = dict(train_iters=STEPS, hidden_dropout=0.1, attention_dropout=0.1, tensor_model_parallel_size=2, sequence_parallel=True, save_interval=3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", heavy_tailed_lengths(60, longest=150))


@pytest.fixture(scope="module")
def unbroken(corpus, tmp_path_factory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("unbroken")
    train(2, flags(corpus, run_dir=folder, **BUSY | dict(save_interval=None)), folder)
    found = losses(folder)
    assert sorted(found) == list(range(1, STEPS + 1)) and found[STEPS] < found[1]
    return found


def hold_after(monkeypatch, iteration: int, secs: float) -> None:
    """Have every rank of the next run wait after an iteration, so that what is done to it comes then on any machine."""
    iterate = Trainer._iterate

    def held(self, stop):
        stopped = iterate(self, stop)
        if self.iteration == iteration and not stopped:
            time.sleep(secs)
        return stopped

    monkeypatch.setattr(Trainer, "_iterate", held)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="same"),
        pytest.param({"prefetch_steps": 0}, id="no prefetch"),
        pytest.param({"prefetch_steps": 5}, id="deeper prefetch", marks=pytest.mark.slow),
    ],
)
def test_killed_at_a_random_step_the_losses_go_on_bit_for_bit(corpus, unbroken, tmp_path, monkeypatch, changes):
    victim = int(np.random.default_rng().integers(4, STEPS))
    print(f"killed after iteration {victim}")
    busy = flags(corpus, run_dir=tmp_path, save=tmp_path / "checkpoints", load=tmp_path / "checkpoints", **BUSY)
    with monkeypatch.context() as first_run:
        hold_after(first_run, victim, 300)
        ranks = start(2, busy, tmp_path)
        ranks.wait_for_iteration(tmp_path, victim)
        ranks.kill()
    assert len(losses(tmp_path)) == victim

    resumed = flags(corpus, run_dir=tmp_path, save=tmp_path / "checkpoints", load=tmp_path / "checkpoints", **BUSY | changes)
    output = train(2, resumed, tmp_path).output(0)
    assert "continued from iteration" in output
    assert losses(tmp_path) == unbroken, "equal bits"


@pytest.mark.slow
def test_a_resume_that_forgets_its_generators_is_noticed(corpus, unbroken, tmp_path, monkeypatch):
    """Mutant: the same run, but the generators are seeded anew after loading."""
    from megatron_dyn.training import checkpoint

    busy = BUSY | dict(save=tmp_path / "checkpoints", load=tmp_path / "checkpoints")
    train(2, flags(corpus, run_dir=tmp_path, **busy | dict(train_iters=6, lr_decay_iters=STEPS)), tmp_path)
    monkeypatch.setattr(checkpoint, "set_rng_state", lambda *args, **kwargs: None)
    train(2, flags(corpus, run_dir=tmp_path, **busy), tmp_path)
    found = losses(tmp_path)
    assert found[6] == unbroken[6] and found != unbroken


def test_sigterm_saves_and_leaves_with_status_0(corpus, unbroken, tmp_path, monkeypatch):
    busy = flags(corpus, run_dir=tmp_path, save=tmp_path / "checkpoints", load=tmp_path / "checkpoints", **BUSY | dict(save_interval=1000))
    with monkeypatch.context() as first_run:
        hold_after(first_run, 4, 5)
        ranks = start(2, busy, tmp_path)
        ranks.wait_for_iteration(tmp_path, 4)
        # One rank is told; all of them stop after the same step: the one that they had already agreed on.
        os.kill(ranks.processes[1].pid, signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.output()
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "5"
    train(2, busy, tmp_path)
    assert losses(tmp_path) == unbroken


# Dropout differs between topologies by design, and so does the padding of the vocabulary; everything else must go on alike.
TOKEN_STEPS = dict(global_batch_size=None, global_batch_tokens=330, document_order="length-window", length_window=25)
CALM = dict(train_iters=10, save_interval=5, lr_decay_iters=10, use_distributed_optimizer=True)


@pytest.mark.parametrize(
    "before, after",
    [
        (dict(world=2, tensor_model_parallel_size=2, sequence_parallel=True), dict(world=1)),
        (dict(world=1), dict(world=2)),
        (dict(world=2), dict(world=2, pipeline_model_parallel_size=2, max_tokens_per_microbatch=151)),
        (dict(world=2, steps=TOKEN_STEPS), dict(world=1, max_tokens_per_microbatch=151, prefetch_steps=5)),
    ],
    ids=["TP 2 to 1", "DP 1 to 2", "DP 2 to PP 2 and another budget", "DP 2 to 1 in steps of tokens"],
)
def test_another_topology_goes_on_alike(corpus, tmp_path, before, after):
    before, after = dict(before), dict(after)
    common = CALM | before.pop("steps", {}) | dict(max_tokens_per_microbatch=150)  # no document is split: a budget may then change
    whole = tmp_path / "unbroken"
    world = before.pop("world")
    train(world, flags(corpus, run_dir=whole, **common | before | dict(save_interval=None)), whole)

    parts = common | dict(save=tmp_path / "checkpoints", load=tmp_path / "checkpoints")
    train(world, flags(corpus, run_dir=tmp_path, **parts | before | dict(train_iters=5)), tmp_path)
    world = after.pop("world")
    train(world, flags(corpus, run_dir=tmp_path, **parts | after), tmp_path)
    ours, expected = losses(tmp_path), losses(whole)
    assert sorted(ours) == sorted(expected)
    for iteration, loss in expected.items():
        assert ours[iteration] == pytest.approx(loss, rel=1e-6), f"iteration {iteration}"
    assert ours[10] < ours[1] - 0.1, "something was learned"


def test_another_corpus_is_refused_before_anything_is_loaded(corpus, tmp_path):
    settings = CALM | dict(save=tmp_path / "checkpoints", load=tmp_path / "checkpoints", train_iters=5)
    train(1, flags(corpus, run_dir=tmp_path, **settings), tmp_path)
    other = write_corpus(tmp_path / "other", heavy_tailed_lengths(60, longest=150, seed=4))
    ranks = train(1, flags(other, run_dir=tmp_path, **settings | dict(train_iters=8)), tmp_path, status=2)
    assert "fingerprint" in ranks.output() and "Traceback" not in ranks.output()


def overridden(run_dir: Path) -> dict[int, list[str]]:
    """Iteration -> what the records say was another than saved."""
    key = "data-mismatch-overridden"
    return {step["iteration"]: step[key] for step in read_metrics(run_dir).steps if key in step}


def check_override_is_told(corpus: Path, tmp_path: Path) -> None:
    settings = CALM | dict(save=tmp_path / "checkpoints", load=tmp_path / "checkpoints", train_iters=3)
    train(1, flags(corpus, run_dir=tmp_path, **settings), tmp_path)
    other = write_corpus(tmp_path / "other", heavy_tailed_lengths(70, longest=150, seed=4))
    changed = settings | dict(train_iters=5, seed=1)
    refused = train(1, flags(other, run_dir=tmp_path, **changed), tmp_path, status=2).output()
    assert "--seed 1 (saved 1234)" in refused and "63 documents" in refused and "saved 54 documents" in refused
    assert overridden(tmp_path) == {} and sorted(losses(tmp_path)) == [1, 2, 3]

    output = train(1, flags(other, run_dir=tmp_path, override_data_mismatch=True, **changed), tmp_path).output()
    assert "after iteration 3 (--override-data-mismatch)" in output and "--seed 1 (saved 1234)" in " ".join(output.split())
    assert list(overridden(tmp_path)) == [4] and "--seed 1 (saved 1234)" in overridden(tmp_path)[4]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [entry["step"] for entry in summary["data_overrides"]] == [3]

    # The new order is the run's own from here on, and the record stays.
    output = train(1, flags(other, run_dir=tmp_path, **changed | dict(train_iters=6)), tmp_path).output()
    assert "after iteration 3 (--override-data-mismatch)" in output and sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert list(overridden(tmp_path)) == [4]


def test_an_overridden_mismatch_goes_on_and_is_told(corpus, tmp_path):
    check_override_is_told(corpus, tmp_path)


@pytest.mark.slow
def test_mutant_a_silent_override_is_noticed(corpus, tmp_path, monkeypatch):
    load = TokenBudgetBatchSampler.load_state_dict

    def silent(sampler, state):
        load(sampler, state)
        sampler.overrides = []

    monkeypatch.setattr(TokenBudgetBatchSampler, "load_state_dict", silent)
    with pytest.raises(AssertionError, match="--override-data-mismatch"):
        check_override_is_told(corpus, tmp_path)


def test_nodes_that_keep_the_same_files_in_different_places_save_and_go_on(tmp_path, monkeypatch):
    for node in (0, 1):
        (tmp_path / f"node{node}").mkdir()
        write_corpus(tmp_path / f"node{node}" / "documents", heavy_tailed_lengths(40, longest=60))
    real = training_run.main
    monkeypatch.setattr(training_run, "main", lambda argv: real([word.replace("NODE", f"node{os.environ['RANK']}") for word in argv]))
    settings = dict(tensor_model_parallel_size=2, sequence_parallel=True, save=tmp_path / "saved", load=tmp_path / "saved", save_interval=2, eval_iters=0)
    argv = flags(tmp_path / "NODE" / "documents", run_dir=tmp_path / "run", train_iters=4, **settings)
    train(2, [*argv, "--exit-interval", "2"], tmp_path)
    train(2, argv, tmp_path)
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4]
