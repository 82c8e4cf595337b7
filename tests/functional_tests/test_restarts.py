# SPDX-License-Identifier: Apache-2.0
"""torchrun --max-restarts: ranks are killed at random, and the run goes on from its last checkpoint to the losses of an unbroken one."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from training_run import flags, heavy_tailed_lengths, losses, train, write_corpus  # noqa: E402

HERE = Path(__file__).resolve().parent
SAVE_INTERVAL = 3
SETTINGS = dict(tensor_model_parallel_size=2, sequence_parallel=True, hidden_dropout=0.1, attention_dropout=0.1, eval_iters=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", heavy_tailed_lengths(60, longest=90))


def torchrun(world: int, arguments: list[str], *, restarts: int, folder: Path, timeout: float) -> str:
    """Run to the end; returns the output. No process is left behind, however it ends."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with open(folder / "output.txt", "w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status = process.wait(timeout)
        finally:
            for group in ranks_of(process.pid) | {process.pid}:  # torchrun gives each rank a session of its own
                try:
                    os.killpg(group, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
        output.seek(0)
        said = output.read()
    assert status == 0, said[-4000:]
    return said


def ranks_of(pid: int) -> set[int]:
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return set()


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
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
