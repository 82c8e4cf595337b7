# SPDX-License-Identifier: Apache-2.0
"""torchrun --max-restarts: ranks are killed at random, and the run goes on from its last checkpoint to the losses of an unbroken one."""

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from torchrun import torchrun  # noqa: E402
from training_run import flags, heavy_tailed_lengths, losses, train, write_corpus  # noqa: E402

HERE = Path(__file__).resolve().parent
SAVE_INTERVAL = 3
SETTINGS = dict(tensor_model_parallel_size=2, sequence_parallel=True, hidden_dropout=0.1, attention_dropout=0.1, eval_iters=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", heavy_tailed_lengths(60, longest=90))


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, 10])
def test_ranks_killed_at_random_and_restarted_end_with_equal_losses(corpus, tmp_path, rounds):
    chance = random.Random()
    kills = [[chance.randrange(2), chance.randint(1, 2 * SAVE_INTERVAL), round(chance.uniform(0, 0.3), 3)] for _ in range(rounds)]
    print(f"kills (rank, iterations, seconds): {kills}")
    steps = 8 * rounds
    settings = SETTINGS | dict(train_iters=steps, lr_decay_iters=steps)
    unbroken = tmp_path / "unbroken"
    train(2, flags(corpus, run_dir=unbroken, **settings), unbroken)

    saved = dict(save=tmp_path / "ck", load=tmp_path / "ck", save_interval=SAVE_INTERVAL)  # --load may be empty the first time
    arguments = [str(HERE / "restarting_job.py"), json.dumps(kills), *flags(corpus, run_dir=tmp_path, **settings, **saved)]
    said = torchrun(2, arguments, restarts=rounds, folder=tmp_path, timeout=120 + 30 * rounds)
    assert losses(tmp_path) == losses(unbroken) and len(losses(tmp_path)) == steps, "equal bits"
    assert said.count("starting from iteration 0") + said.count("continued from iteration") == 1 + rounds
