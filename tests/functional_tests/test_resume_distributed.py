# SPDX-License-Identifier: Apache-2.0
"""The distributed optimizer goes on bit for bit where its gradient buffers have several buckets, each padded at its end.

Megatron-Core gives a tied embedding a bucket of its own under pipeline parallelism, and cuts a buffer into buckets (of 40 million
elements and more; fewer here) when gradients are reduced during the backward pass. With one bucket everything is easy.
"""

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from training_run import flags, heavy_tailed_lengths, losses, train, write_corpus  # noqa: E402

from megatron_dyn.training import optimizer  # noqa: E402

STOP, STEPS = 3, 6
OVERLAPPED = dict(overlap_grad_reduce=True, overlap_param_gather=True)
CASES = {
    "PP2 tied": (2, dict(pipeline_model_parallel_size=2)),
    "PP2 tied bf16": (2, dict(pipeline_model_parallel_size=2, bf16=True)),
    "PP2 VPP2 tied": (2, dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, num_layers=4)),
    "PP2 VPP2 DP2 tied overlapped": (
        4, dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, num_layers=4) | OVERLAPPED,
    ),
    "DP3 overlapped": (3, dict(untie_embeddings_and_output_weights=True, overlap_grad_reduce=True)),
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", heavy_tailed_lengths(60, longest=90))


def small_buckets(monkeypatch) -> None:
    """Stands for a rank above 40 million parameters."""
    monkeypatch.setattr(
        optimizer, "DistributedDataParallelConfig", functools.partial(optimizer.DistributedDataParallelConfig, bucket_size=3000)
    )


LONG_RUN_ONLY = ("PP2 VPP2 tied", "PP2 tied bf16")  # the others have each of their parts


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG_RUN_ONLY)) for name in CASES])
def test_a_run_with_several_padded_buckets_goes_on_with_equal_bits(corpus, tmp_path, monkeypatch, name):
    world, settings = CASES[name]
    small_buckets(monkeypatch)
    settings = settings | dict(use_distributed_optimizer=True, lr_decay_iters=STEPS, eval_interval=1000)
    whole, parts = tmp_path / "unbroken", tmp_path / "resumed"
    train(world, flags(corpus, run_dir=whole, **settings | dict(train_iters=STEPS)), whole)
    folder = dict(save=parts / "checkpoints", load=parts / "checkpoints")
    for iterations in (STOP, STEPS):
        output = train(world, flags(corpus, run_dir=parts, **settings | folder | dict(train_iters=iterations)), parts).output()
        assert "data corruption" not in output
    assert f"continued from iteration {STOP}" in output
    expected = losses(whole)
    assert sorted(expected) == list(range(1, STEPS + 1)) and expected[STEPS] < expected[1]
    assert losses(parts) == expected, "equal bits"
