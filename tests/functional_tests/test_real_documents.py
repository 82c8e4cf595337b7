# SPDX-License-Identifier: Apache-2.0
"""Real documents of wildly different lengths, a book of 68,651 tokens among them, with a 32,000-piece tokenizer."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from training_run import flags, train  # noqa: E402

from megatron_dyn.__main__ import main  # noqa: E402
from megatron_dyn.training.metrics_file import read_metrics  # noqa: E402

BUDGET, STEPS, SEED = 8192, 30, 52  # with this seed the book comes in step 21
BOOK = 68_651


@pytest.mark.slow
def test_thirty_steps_train_with_the_book_in_them(shared, tmp_path):
    tokenizer = shared / "data" / "tokenizers" / "mistral_v1_32k.model"
    prefix = tmp_path / "mix"
    assert 0 == main(
        ["preprocess", "--input", str(shared / "data" / "mix_heavytail.jsonl"), "--tokenizer-model", str(tokenizer), "--append-eod"]
        + ["--on-empty", "keep", "--output-prefix", str(prefix), "--workers", "2"]
    )  # fmt: skip
    for end in (".bin", ".idx"):
        by_megatron = shared / "data" / "megatron" / f"mix_heavytail_mistral_v1{end}"
        assert prefix.with_suffix(end).read_bytes() == by_megatron.read_bytes(), "the bytes that Megatron's own builder wrote"
    settings = dict(
        tokenizer_model=tokenizer, vocab_size=None, tensor_model_parallel_size=2, sequence_parallel=True, num_attention_heads=2,
        max_tokens_per_microbatch=BUDGET, global_batch_size=8, split="98,2", train_iters=STEPS, seed=SEED, lr=1e-2, eval_iters=1,
        eval_interval=STEPS, make_vocab_size_divisible_by=128,
    )  # fmt: skip
    train(2, flags(prefix, run_dir=tmp_path, **settings), tmp_path, timeout=280)
    metrics = read_metrics(tmp_path)
    steps = metrics.steps
    assert [step["iteration"] for step in steps] == list(range(1, STEPS + 1))
    assert all(T <= BUDGET and T % 2 == 0 for step in steps for T in step["T"])
    with_book = [step for step in steps if step["num-tokens"] > BOOK]
    assert len(with_book) == 1 and with_book[0]["split-documents"] == 1
    assert with_book[0]["microbatches"] >= -(-BOOK // BUDGET) and with_book[0]["documents"] == 8
    losses = [step["lm loss"] for step in steps]
    assert losses[0] == pytest.approx(np.log(32_000), abs=0.05), "the first loss is that of guessing"
    assert np.mean(losses[-5:]) < losses[0] - 1.0
    assert metrics.validations[-1]["validation lm loss"] < losses[0] - 1.0
