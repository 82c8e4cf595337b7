# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dyn calibrate`: what a token costs on this machine, measured on the model of a run.

A few microbatches that differ in T and in the lengths of their documents run forward and backward; their times are fitted by

    seconds = constant + linear * (sum of L) + quadratic * (sum of L^2)

which is what the planner balances by. The constant (launching, exchanges of fixed size) is reported; it is the same for every microbatch
and so decides nothing.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dyn import device, userbuffers
from megatron_dyn.microbatch import PackedMicrobatch, build_microbatch
from megatron_dyn.planning import CostModel, Planner
from megatron_dyn.planning.cost_file import POOR_FIT, write_cost_file
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.build import run_model
from megatron_dyn.training.config import require
from megatron_dyn.training.distributed import initialize, world_size_from_environment
from megatron_dyn.training.inputs import prepare_device
from megatron_dyn.training.optimizer import wrap_models
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.training.step import Stepper

SHORTEST_DOCUMENT = 16  # tokens
USELESS_FIT = 0.5
"""Worst relative error above which nothing is written."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Coefficients in seconds, and how well they explain the measurements."""

    constant: float
    linear: float
    quadratic: float
    worst_error: float
    """Largest |fitted / measured - 1|."""

    def seconds(self, tokens: float, squares: float) -> float:
        """Of a microbatch with these sums of L and L^2."""
        return self.constant + self.linear * tokens + self.quadratic * squares


def mixes(budget: int) -> list[list[int]]:
    """Document lengths of each microbatch to measure: three sizes of T, from one document to many short ones."""
    found = []
    for total in (budget, budget // 2, budget // 4):
        for parts in (1, 2, 4, 16, 64):
            if total // parts >= SHORTEST_DOCUMENT:
                found.append([total // parts] * parts)
    return found


def fit(tokens: Sequence[float], squares: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Least squares of the relative errors with coefficients of at least 0.

    Args:
        tokens, squares: sums of L and of L^2 of each microbatch.
        seconds: its measured time, above 0.

    Raises:
        ValueError: fewer than three different microbatches.
    """
    columns = np.stack([np.ones(len(seconds)), np.asarray(tokens, float), np.asarray(squares, float)], axis=1)
    if len({*zip(tokens, squares)}) < 3:
        raise ValueError("a cost model has three coefficients: measure at least three different microbatches (a larger budget)")
    relative = columns / np.asarray(seconds, float)[:, None]
    scale = relative.max(axis=0)
    best: tuple[float, np.ndarray] | None = None
    # Three coefficients: the best of the eight sets that may be above 0 is the constrained optimum.
    for chosen in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        part, *_ = np.linalg.lstsq(relative[:, chosen] / scale[chosen], np.ones(len(seconds)), rcond=None)
        if (part < 0).any():
            continue
        whole = np.zeros(3)
        whole[chosen] = part / scale[chosen]
        left = float(((relative @ whole - 1) ** 2).sum())
        if best is None or left < best[0] * (1 - 1e-12):
            best = left, whole
    constant, linear, quadratic = best[1].tolist()
    worst = float(np.abs(relative @ best[1] - 1).max())
    return Fit(constant=constant, linear=linear, quadratic=quadratic, worst_error=worst)


class _RandomDocuments:
    """Documents of given lengths with random tokens, as `build_microbatch` reads a corpus."""

    def __init__(self, lengths: list[int], vocab_size: int) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self._ids = np.random.default_rng(1).integers(0, vocab_size, size=int(max(lengths)) + 1)

    def tokens(self, document: int, start: int, length: int) -> np.ndarray:
        return self._ids[start : start + length]

    def describe(self, document: int) -> str:
        return f"random document {document}"


def microbatch_of(lengths: list[int], run: RunConfig, vocab_size: int) -> PackedMicrobatch:
    """One microbatch with exactly these documents, on the compute device."""
    batch = dict(global_batch_size=len(lengths), global_batch_tokens=None, document_order="sequential", microbatching="dynamic")
    caps = dict(max_documents_per_microbatch=None, max_sum_squares_per_microbatch=None, microbatch_multiple=1)
    config = run.plan_config(data_parallel_size=1, **batch, **caps)
    plan = Planner(np.asarray(lengths), config).plan(0)
    built = build_microbatch(plan.microbatches[0][0], _RandomDocuments(lengths, vocab_size), step=0, index=0)
    return built.to(device.compute_device())


def measure(stepper: Stepper, microbatches: list[PackedMicrobatch], *, rounds: int) -> list[float]:
    """Seconds of forward and backward of each microbatch, the least of all rounds: what disturbs a measurement only adds to it.

    They take turns in a random order, the same on all ranks.
    """
    models = stepper.models
    config = models[0].config
    config.finalize_model_grads_func = None
    repeats = parallel_state.get_pipeline_model_parallel_world_size() if len(models) > 1 else 1
    taken: list[list[float]] = [[] for _ in microbatches]
    together = random.Random(1)
    for turn in range(rounds + 1):
        for index in together.sample(range(len(microbatches)), len(microbatches)):
            for model in models:
                model.zero_grad_buffer()
            device.synchronize()
            dist.barrier()
            began = time.perf_counter()
            with ExitStack() as local_gradients:
                for model in models:
                    local_gradients.enter_context(model.no_sync())
                stepper.forward_backward([microbatches[index]] * repeats, forward_only=False)
            device.synchronize()
            if turn:  # the first one warms up
                taken[index].append((time.perf_counter() - began) / repeats)
        if dist.get_rank() == 0 and sys.stderr.isatty():
            print(f"\rround {turn} of {rounds}", end="\n" if turn == rounds else "", file=sys.stderr, flush=True)
    return [min(values) for values in taken]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the table, writes the file.

    Returns:
        0.

    Raises:
        ConfigError: a flag is wrong, or the times say nothing.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-dyn calibrate",
        description="Measure what tokens and attention cost on this machine, for the planner's balance (--cost-file).",
        epilog="All other flags are those of pretrain_gpt_thd.py: give those of your run (--data-path is not read). With several ranks, "
        "start it with torchrun -m megatron_dyn calibrate.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, default=Path("cost.yaml"), metavar="YAML", help="where the coefficients go (default: cost.yaml)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="measurements of each microbatch, of which the shortest counts (default: 7)")
    own, flags = parser.parse_known_args(argv)
    folder = own.output.parent
    require(folder.is_dir() and os.access(folder, os.W_OK), f"--output {own.output}: {folder} is no folder that can be written")
    require(own.rounds >= 1, f"--rounds is {own.rounds}: it must be at least 1")
    if "--config" not in flags:  # needed by a run, and without meaning here
        unused = {"--data-path": "(not read)", "--lr": "1", "--train-iters": "1"}
        if "--global-batch-tokens" not in flags:
            unused["--global-batch-size"] = "1"
        flags += [word for flag, value in unused.items() if flag not in flags for word in (flag, value)]
    run = parse_arguments(flags, world_size=world_size_from_environment())
    require(not run.data.finds_budget, "--max-tokens-per-microbatch auto: give the largest microbatch that is to be measured as a number")
    lengths = mixes(run.data.max_tokens_per_microbatch)
    require(len(lengths) >= 5, f"--max-tokens-per-microbatch {run.data.max_tokens_per_microbatch} leaves too few mixes to measure: give at least 256")
    backend, layers = prepare_device(run)
    initialize(run.parallel, backend=backend, seed=run.training.seed)
    vocab_size = run.data.vocab_size or _vocabulary(run.data.tokenizer_model)
    config, chunks, _ = run_model(run, vocab_size=vocab_size, layers=layers, process_group_backend=backend)
    stepper = Stepper(wrap_models(chunks, config, run.parallel))
    microbatches = [microbatch_of(mix, run, vocab_size) for mix in lengths]
    seconds = measure(stepper, microbatches, rounds=own.rounds)
    tokens, squares = [sum(mix) for mix in lengths], [sum(length * length for length in mix) for mix in lengths]
    measured = [seconds]
    dist.broadcast_object_list(measured, src=0)  # rank 0's times decide, on every rank alike
    seconds = measured[0]
    found = fit(tokens, squares, seconds)
    require(
        found.linear + found.quadratic > 0,
        f"the measured times ({min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f} ms) do not grow with the tokens: there is nothing to balance by. "
        "Measure on an idle machine, with more --rounds, or with a larger --max-tokens-per-microbatch",
    )
    require(
        found.worst_error <= USELESS_FIT,
        f"the measured times do not follow from tokens and attention (worst error {found.worst_error:.0%}): another program ran beside it. "
        f"{own.output} was not written; measure on an idle machine, or with more --rounds",
    )
    if dist.get_rank() == 0:
        print(f"{'T':>8s}{'documents':>11s}{'each':>8s}{'measured ms':>13s}{'fitted ms':>11s}")
        for mix, total, square, value in zip(lengths, tokens, squares, seconds):
            print(f"{total:8d}{len(mix):11d}{mix[0]:8d}{value * 1e3:13.3f}{found.seconds(total, square) * 1e3:11.3f}")
        counted = run.model.cost_model(vocab_size)
        ratio = lambda linear, quadratic: f"{linear / quadratic:,.0f}" if quadratic else "infinity"  # noqa: E731
        print(
            f"constant {found.constant * 1e3:.3f} ms a microbatch, {found.linear * 1e6:.4f} us a token; attention costs as much as the rest at "
            f"L = {ratio(found.linear, found.quadratic)} (by counting operations: {ratio(counted.linear, counted.quadratic)}); worst error {found.worst_error:.1%}"
        )
        write_cost_file(
            own.output,
            CostModel(linear=found.linear, quadratic=found.quadratic),
            constant=found.constant,
            unit="seconds of forward and backward",
            device=device.device_name(),
            model={name: getattr(run.model, name) for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")},
            parallel={"tensor": run.parallel.tensor_model_parallel_size, "pipeline": run.parallel.pipeline_model_parallel_size},
            fit={"microbatches": len(lengths), "rounds": own.rounds, "worst_relative_error": round(found.worst_error, 4)},
            date=date.today().isoformat(),
        )
        if found.worst_error > POOR_FIT:
            print("The fit is poor: another program may have run beside it. Measure again on an idle machine, or with more --rounds.")
        print(f"wrote {own.output}: train with --cost-file {own.output}")
    dist.barrier()
    userbuffers.destroy_ub()
    dist.destroy_process_group()
    return 0


def _vocabulary(tokenizer_model: str) -> int:
    from megatron_dyn.corpus.tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(tokenizer_model).vocab_size
