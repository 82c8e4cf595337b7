# SPDX-License-Identifier: Apache-2.0
"""The parts of multi_gpu.sh: how each is started, what its share of the time is, and where its results are read."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests" / "functional_tests"))

from models import MODELS, PRECISIONS  # noqa: E402
from torchrun import ranks_of  # noqa: E402

from megatron_dyn.corpus import IndexedWriter  # noqa: E402
from megatron_dyn.training.metrics_file import MetricsError, read_metrics  # noqa: E402

TENSOR_PARALLEL = (8, 4, 2)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command under torchrun."""

    name: str
    share: float
    """Of the time, against those of the others."""
    ranks: int
    command: Callable[[float], list[str]]
    """The end of its time (seconds since 1970) -> script and arguments."""
    read: Callable[[], dict]
    """Its results so far."""
    missing: str | None = None
    """Why it cannot run here."""
    shown: str = ""
    """Which lines of its output go to the console (a regular expression, from their beginning); the log has all of them."""


def parts_for(ranks: int, size: dict, *, prefix: Path, folder: Path, shared_card: bool, cpu: bool) -> list[Part]:
    """All parts for so many ranks.

    Args:
        size: An entry of `multi_gpu.SIZES`.
        prefix: The documents.
        folder: For files between the processes.
        shared_card: The ranks share a GPU over gloo.
        cpu: There is no GPU.
    """
    half = next(tp for tp in (*TENSOR_PARALLEL, 1) if (ranks // 2) % tp == 0)
    largest = next(tp for tp in TENSOR_PARALLEL if ranks % tp == 0)
    over_gloo = "gloo moves no GPU tensors between pipeline stages: it needs a GPU for each rank" if shared_card else None

    def tensor(tp: int) -> str:
        return f"--tensor-model-parallel-size {tp} --sequence-parallel --tp-comm-overlap {size['overlap_flags']}" if tp > 1 else ""

    def ranks_part(what: str, name: str, share: float, count: int, missing: str | None = None) -> Part:
        output = folder / f"{name.replace(' ', '_')}.json"

        def command(until: float) -> list[str]:
            flags = f"--vocab-size {size['vocab_size']} --model {size['model']} --budget {size['budget']} "
            flags += f"--microbatches {size['microbatches']} --rounds {size['rounds']}"
            words = ["benchmarks/multi_gpu_ranks.py", what, "--data-path", str(prefix), *flags.split(), "--precisions", *size["precisions"]]
            return [*words, f"--overlap-flags={size['overlap_flags']}", "--until", str(until), "--output", str(output)]

        return Part(name=name, share=share, ranks=count, command=command, read=lambda: _json(output), missing=missing)

    def data_parallel() -> Part:
        output, precision = folder / "data_parallel", size["precisions"][0]

        def command(until: float) -> list[str]:
            words = f"benchmarks/throughput.py --vocab-size {size['vocab_size']}"
            words += f" --model {size['model']} --precision {precision} --budgets {size['budget']}"
            words += f" --documents {size['documents']} --ways dynamic packed-fixed --rounds {max(2, size['rounds'] // 4)} --steps 2"
            words = [
                *words.split(),
                "--data-path",
                f"documents={prefix}",
                "--seconds",
                str(max(1.0, until - time.time() - size["starting"])),
                "--output",
                str(output),
            ]
            return [*words, f"--run-flags=--use-distributed-optimizer {tensor(half)}"]

        return Part(
            name=f"DP 2 x TP {half}", share=50, ranks=2 * half, command=command, read=lambda: _json(output / f"{size['model']}-{precision}.json")
        )

    def pretraining(name: str, count: int, flags: str, missing: str | None = None) -> Part:
        run_dir = folder / name.replace(" ", "_").replace(",", "")

        def command(until: float) -> list[str]:
            words = (
                f"pretrain_gpt_thd.py {MODELS[size['pretrain']]} {PRECISIONS[size['precisions'][0]]} --swiglu --untie-embeddings-and-output-weights"
            )
            words += f" --vocab-size {size['vocab_size']} --max-tokens-per-microbatch {size['budget']}"
            words += f" --global-batch-tokens {8 * size['budget']} --lr 2e-4"
            words += f" --lr-warmup-iters 1 --train-iters {size['steps']} --eval-iters 1 --eval-interval {size['steps']}"
            words += f" --split 97,3 --no-tensorboard {flags}"
            words += " --oversize truncate"  # where a long document is split depends on the number of data-parallel ranks, and with it the loss
            return [*words.split(), "--data-path", str(prefix), "--run-dir", str(run_dir)]

        return Part(
            name=name,
            share=45,
            ranks=count,
            command=command,
            read=lambda: _records(run_dir),
            missing=missing,
            shown="parallel|overlap|iteration|validation",
        )

    divided = [tp for tp in TENSOR_PARALLEL if ranks % tp == 0]
    parts = [ranks_part("overlap", f"TP {tp}", size["overlap_share"], tp) for tp in divided]
    parts.append(ranks_part("pipeline", f"PP 2 x TP {half}", 55, 2 * half, over_gloo))
    parts.append(data_parallel())
    parts.append(pretraining(f"pretraining, TP {largest}", largest, tensor(largest)))
    parts.append(pretraining(f"pretraining, DP 2 x TP {half}", 2 * half, tensor(half)))
    parts.append(pretraining(f"pretraining, PP 2 x TP {half}", 2 * half, f"--pipeline-model-parallel-size 2 {tensor(half)}", over_gloo))
    skew = "it needs Transformer Engine on GPUs" if cpu else "run tests/gpu/one_card.sh with it instead" if shared_card else None
    parts.append(
        Part(
            name=f"skewed ranks, TP {largest}",
            share=30,
            ranks=largest,
            command=lambda until: ["tests/gpu/whole_model.py", "--steps", "10"],
            read=dict,
            missing=skew,
        )
    )
    return parts


def _json(path: Path) -> dict:
    """What is there: nothing where the part was killed before, or while it wrote."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return json.loads(path.read_text())
    return {}


def _records(run_dir: Path) -> dict:
    try:
        steps = read_metrics(run_dir).steps
    except MetricsError:  # none was written
        return {}
    names = {"losses": "lm loss", "gradient_norms": "grad-norm", "tokens_per_second": "tokens-per-second", "microbatches": "num-microbatches"}
    return {ours: [step[name] for step in steps] for ours, name in names.items() if steps and name in steps[0]}


class Running:
    """A command under torchrun whose output goes to the console and, with the errors, to the log."""

    def __init__(self, part: Part, until: float, log):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(part.ranks)]
        self.errors: list[str] = []
        self._log, self._shown = log, re.compile(part.shown)
        self.process = subprocess.Popen(
            [*launcher, *part.command(until)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        streams = (self.process.stdout, self._say), (self.process.stderr, self.errors.append)
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, use: Callable[[str], None]) -> None:
        for line in stream:
            self._log.write(line)
            self._log.flush()
            use(line)

    def _say(self, line: str) -> None:
        if self._shown.match(line):
            print(line, end="", flush=True)

    def wait(self, until: float) -> int | None:
        """Exit status; None when it was still running then, and was killed with all its ranks."""
        try:
            status = self.process.wait(max(0.0, until - time.time()))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            self.kill()
        for reader in self._readers:
            reader.join(5)
        return status

    def kill(self) -> None:
        for group in ranks_of(self.process.pid) | {self.process.pid}:  # torchrun gives each rank a session of its own
            try:
                os.killpg(group, 9)
            except ProcessLookupError:
                pass
        self.process.wait()


def write_heavy_tail(prefix: Path, *, documents: int, vocab_size: int, longest: int, seed: int = 7) -> np.ndarray:
    """Documents as a public mixture has them: half below 150 tokens, one in fifty lognormal around 4,000; tokens by Zipf's law.

    Returns:
        Their lengths.
    """
    random = np.random.default_rng(seed)
    body, tail = random.lognormal(np.log(150), 0.9, documents), random.lognormal(np.log(4000), 1.0, documents)
    lengths = np.clip(np.where(random.random(documents) < 0.02, tail, body), 16, longest).astype(np.int64)
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for length in lengths.tolist():
            writer.add_document(np.minimum(random.zipf(1.3, length) - 1, vocab_size - 1))
    return lengths
