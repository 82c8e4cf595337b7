# SPDX-License-Identifier: Apache-2.0
"""Whole training runs inside a test: the real launch on forked ranks, on a small corpus, with its records read back."""

import contextlib
import gc
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from megatron_dyn.corpus import IndexedWriter
from megatron_dyn.training.arguments import build_parser
from megatron_dyn.training.launch import main
from megatron_dyn.training.metrics_file import MetricsError, read_metrics

VOCABULARY = 61
EOD = 2


def write_corpus(prefix: Path, lengths: list[int], *, seed: int = 5) -> Path:
    """Documents with a learnable pattern (each token is near the one before) that end in EOD.

    Args:
        prefix: Where `.bin` and `.idx` go.
        lengths: Tokens of each document; a document of one token is only EOD.
        seed: Of the tokens.
    """
    generator = np.random.default_rng(seed)
    with IndexedWriter(prefix, vocab_size=VOCABULARY) as writer:
        for length in lengths:
            walk = 3 + np.cumsum(generator.integers(0, 3, size=max(length - 1, 0))) % (VOCABULARY - 3)
            writer.add_document(np.append(walk, EOD)[:length])
    return prefix


def heavy_tailed_lengths(count: int, *, longest: int, seed: int = 3) -> list[int]:
    """Lognormal lengths from 1 to `longest` tokens."""
    drawn = np.random.default_rng(seed).lognormal(3.0, 1.0, size=count)
    return np.clip(drawn.astype(int), 1, longest).tolist()


def flags(corpus: Path, *, run_dir: Path, **settings: object) -> list[str]:
    """Flags of a small run; `settings` are fields by name (True gives a bare flag), and None leaves a default out."""
    values = dict(
        data_path=corpus, vocab_size=VOCABULARY, num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4,
        num_query_groups=2, make_vocab_size_divisible_by=2, max_tokens_per_microbatch=96, global_batch_size=12, split="90,10",
        lr=3e-3, train_iters=12, eval_interval=6, eval_iters=2, run_dir=run_dir, tensorboard=False,
    ) | settings  # fmt: skip
    words = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, str(value)]
    return words


class Ranks:
    """A training run on forked ranks, started by `start` and still going."""

    def __init__(self, processes: list, outputs: list[Path]):
        self.processes = processes
        self._outputs = outputs

    def wait(self, timeout: float = 120.0) -> list[int]:
        """Exit status of each rank (negative: the signal that ended it); ranks that do not end are killed and fail the test."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        assert not hung, f"ranks {hung} did not end within {timeout} s\n{self.output()}"
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def output(self, rank: int | None = None) -> str:
        """What a rank (or each) printed."""
        wanted = self._outputs if rank is None else [self._outputs[rank]]
        return "\n".join(path.read_text(errors="replace") for path in wanted)

    def wait_for_iteration(self, run_dir: Path, iteration: int, timeout: float = 90.0) -> None:
        """Return as soon as the records hold that iteration (or the run has ended)."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if any(not process.is_alive() for process in self.processes):
                return
            with contextlib.suppress(MetricsError):  # not there yet
                if len(losses(run_dir)) >= iteration:
                    return
            time.sleep(0.02)
        raise AssertionError(f"iteration {iteration} was not reached in {timeout} s\n{self.output()}")


def start(world: int, argv: list[str] | Callable[[int], list[str]], folder: Path, *, port: int | None = None) -> Ranks:
    """Start `pretrain_gpt_thd.py` with these flags (of each rank: a function) on forked ranks; output goes to files in `folder`.

    They meet at a free port of this machine unless one is given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    build_parser()  # reads the explanations of the flags once, and not in every fork
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    outputs = [folder / f"rank_{rank}_{time.monotonic_ns()}.txt" for rank in range(world)]
    flags_of = argv if callable(argv) else lambda rank: argv
    processes = [context.Process(target=_rank, args=(rank, world, port, flags_of(rank), outputs[rank])) for rank in range(world)]
    for process in processes:
        process.start()
    return Ranks(processes, outputs)


def train(world: int, argv: list[str] | Callable[[int], list[str]], folder: Path, *, status: int = 0, timeout: float = 120.0) -> Ranks:
    """Run to the end and check every rank's exit status."""
    ranks = start(world, argv, folder)
    statuses = ranks.wait(timeout)
    assert statuses == [status] * world, f"exit statuses {statuses}\n{ranks.output()}"
    return ranks


def losses(run_dir: Path) -> dict[int, float | None]:
    """Iteration -> lm loss, from `metrics.jsonl`."""
    return {record["iteration"]: record["lm loss"] for record in read_metrics(run_dir).steps}


def _rank(rank: int, world: int, port: int, argv: list[str], output: Path) -> None:
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # the test runner had replaced them
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    gc.freeze()  # else a collection (Megatron-Core asks for some) walks and copies all that the test runner has imported
    status = main(argv)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)
