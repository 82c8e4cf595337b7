# SPDX-License-Identifier: Apache-2.0
"""`--max-tokens-per-microbatch auto` in whole runs: agreed by all ranks, kept when a run is continued, and without a trace in what is trained."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from training_run import flags, heavy_tailed_lengths, losses, train, write_corpus  # noqa: E402

from megatron_dyn import device  # noqa: E402
from megatron_dyn.pipeline.agreement import Agreement  # noqa: E402
from megatron_dyn.training import budget_probe  # noqa: E402
from megatron_dyn.training.budget_probe import ModelProbe  # noqa: E402
from megatron_dyn.training.launch import main  # noqa: E402

GIB = 2**30
DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
SMALL = 0.0015
"""GiB that a hundred or so tokens of the small model fill."""
SPLITS = {
    "TP 2": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "PP 2": dict(pipeline_model_parallel_size=2, num_layers=4),
    "PP 2 VPP 2": dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, num_layers=4),
    "DP 2": dict(use_distributed_optimizer=True),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", heavy_tailed_lengths(60, longest=90))


def auto(corpus, run_dir, **settings) -> list[str]:
    values = dict(max_tokens_per_microbatch="auto", device_memory_gib=SMALL, eval_iters=0, train_iters=3) | settings
    return flags(corpus, run_dir=run_dir, **values)


def about(run_dir: Path) -> dict:
    return json.loads((run_dir / "run.json").read_text())


def with_meter(monkeypatch, fixed: list[float], per_token: list[float]) -> None:
    """Each rank's memory is a line of its own."""
    import torch.distributed as dist

    def peak(self, tokens):
        return int(fixed[dist.get_rank()] + per_token[dist.get_rank()] * tokens)

    monkeypatch.setattr(ModelProbe, "peak", peak)


def run_of_two(corpus, tmp_path, monkeypatch, split, *, status=0):
    with_meter(monkeypatch, [1e9, 2e9], [10e6, 70e6])  # (9 - 1) / 0.01 = 800 tokens fit on rank 0, (9 - 2) / 0.07 = 100 on rank 1
    return train(2, auto(corpus, tmp_path, device_memory_gib=1e10 / GIB, train_iters=1, **split), tmp_path, status=status, timeout=60)


@pytest.mark.parametrize("split", [pytest.param("PP 2"), pytest.param("TP 2", marks=pytest.mark.slow), pytest.param("DP 2", marks=pytest.mark.slow)])
def test_all_ranks_agree_on_the_least(corpus, tmp_path, monkeypatch, split):
    run_of_two(corpus, tmp_path, monkeypatch, SPLITS[split])
    found = about(tmp_path)
    assert found["settings"]["data"]["max_tokens_per_microbatch"] == found["budget"]["tokens"] and 98 <= found["budget"]["tokens"] <= 100


@pytest.mark.slow
def test_mutant_every_rank_for_itself_is_caught(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Agreement, "least", lambda self, what, number: int(number))
    ranks = run_of_two(corpus, tmp_path, monkeypatch, SPLITS["TP 2"], status=1)
    assert "the ranks disagree on" in ranks.output()


def test_a_found_budget_trains_the_bits_of_a_given_one(corpus, tmp_path):
    train(1, auto(corpus, tmp_path / "a", **DROPOUT, train_iters=2), tmp_path)
    tokens = about(tmp_path / "a")["budget"]["tokens"]
    assert 40 < tokens < 90, "memory decides, not the documents"
    train(1, flags(corpus, run_dir=tmp_path / "b", max_tokens_per_microbatch=tokens, eval_iters=0, train_iters=2, **DROPOUT), tmp_path)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 2


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_the_budget_of_its_checkpoint(corpus, tmp_path):
    settings = dict(**DROPOUT, train_iters=4, save=tmp_path / "ck", load=tmp_path / "ck")
    train(1, auto(corpus, tmp_path / "a", **settings, exit_interval=2), tmp_path)
    tokens = about(tmp_path / "a")["budget"]["tokens"]
    more = train(1, auto(corpus, tmp_path / "a", **settings | dict(device_memory_gib=10 * SMALL)), tmp_path)
    assert f"auto: {tokens} tokens, those of the checkpoint" in more.output()
    assert about(tmp_path / "a")["settings"]["data"]["max_tokens_per_microbatch"] == tokens
    straight = dict(max_tokens_per_microbatch=tokens, eval_iters=0, train_iters=4)
    train(1, flags(corpus, run_dir=tmp_path / "b", **straight, **DROPOUT), tmp_path)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_a_found_budget_trains_the_bits_of_a_given_one_on_two_ranks(corpus, tmp_path, split):
    settings = dict(**DROPOUT, **SPLITS[split], bf16=split == "PP 2 VPP 2")
    train(2, auto(corpus, tmp_path / "a", **settings), tmp_path)
    tokens = about(tmp_path / "a")["budget"]["tokens"]
    train(2, flags(corpus, run_dir=tmp_path / "b", max_tokens_per_microbatch=tokens, eval_iters=0, train_iters=3, **settings), tmp_path)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


@pytest.mark.slow
def test_mutant_generators_that_are_not_put_back_are_caught(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(budget_probe, "generators_kept", contextlib.nullcontext)
    train(1, auto(corpus, tmp_path / "a", **DROPOUT), tmp_path)
    tokens = about(tmp_path / "a")["budget"]["tokens"]
    train(1, flags(corpus, run_dir=tmp_path / "b", max_tokens_per_microbatch=tokens, eval_iters=0, train_iters=3, **DROPOUT), tmp_path)
    assert losses(tmp_path / "a") != losses(tmp_path / "b")


@pytest.mark.slow
def test_overlap_is_measured_without_its_buffers_which_are_counted(corpus, tmp_path):
    settings = SPLITS["TP 2"]
    for overlap in (False, True):
        train(2, auto(corpus, tmp_path / str(overlap), **settings, tp_comm_overlap=overlap), tmp_path)
    plain, overlapped = (about(tmp_path / str(overlap))["budget"]["tokens"] for overlap in (False, True))
    assert 0.4 * plain < overlapped < 0.95 * plain


@pytest.mark.slow
def test_nothing_fits_is_said_before_training(corpus, tmp_path):
    ranks = train(2, auto(corpus, tmp_path, device_memory_gib=1e-6, **SPLITS["TP 2"]), tmp_path, status=2)
    said = ranks.output()
    assert "measuring the model's memory" in said and "no budget fits on every rank" in said and "Traceback" not in said
    assert not (tmp_path / "metrics.jsonl").exists()


def test_without_a_device_the_memory_must_be_said(corpus, tmp_path, capsys):
    assert main(auto(corpus, tmp_path, device_memory_gib=None)) == 2
    assert "give --device-memory-gib, or the budget as a number" in capsys.readouterr().err


def test_the_meter_counts_what_lives(tmp_path):
    import torch

    with device.MemoryMeter() as meter:
        kept = torch.zeros(1000)
        meter.restart()
        weight = torch.ones(1000, requires_grad=True)
        (weight * 2).relu().sum().backward()
        assert 3 * 4000 < meter.peak() <= 6 * 4000
        del weight
        meter.restart()
        view = kept.view(10, 100).add_(1)
        assert meter.peak() == 4000 and view.numel() == 1000
