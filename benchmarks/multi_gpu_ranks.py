# SPDX-License-Identifier: Apache-2.0
"""The parts of multi_gpu.sh that measure layers and schedules; multi_gpu.py starts them under torchrun.

    torchrun --nproc-per-node 2 benchmarks/multi_gpu_ranks.py overlap --data-path PREFIX --vocab-size 32000 --output FILE.json
    torchrun --nproc-per-node 2 benchmarks/multi_gpu_ranks.py pipeline --data-path PREFIX --vocab-size 32000 --output FILE.json

overlap     all ranks in one tensor-parallel group; for each precision: the same weights with overlap and without, loss and gradients compared
            at several T; then forward and backward at each T, and of real documents, the ways in turn:
                overlap   dynamic microbatches, layers that set the active shape
                no overlap   the same microbatches, collectives of torch.distributed (NCCL on GPUs) between the products
                stock     at T = capacity only: Transformer Engine's own layers on the same buffers (not on a CPU, which has no such layers)
                padded    pad-to-max with overlap
pipeline    two stages, the rest of the ranks tensor-parallel: Megatron's exchange of shapes against the planned one

Ways take turns in a random order, so that what disturbs the machine meets all of them; a ratio is the median of the ratios of turns.
Exit status 3 when results are wrong: nothing is measured then. Results are written after each stage.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", module="megatron.core")  # of packages that are not installed

import torch
import torch.distributed as dist
from models import MODELS, PRECISIONS
from multi_gpu_arms import Arm, Wrong, compared, differences, goes_on, in_turn, in_words, ratio, say, stock_layers
from pipeline import StockSchedule
from throughput import settings_of_way

from megatron_dyn import device, userbuffers
from megatron_dyn.corpus import open_corpus
from megatron_dyn.microbatch import build_microbatch
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.calibrate import microbatch_of
from megatron_dyn.training.distributed import initialize, world_size_from_environment
from megatron_dyn.training.inputs import prepare_device

SHARES = (1, 3 / 4, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""T of the sweep, of the capacity."""
CHECKED = (1, 1 / 4, 3 / 4, 1 / 2, 1)
"""T of the comparison: shrinking and growing."""
REPEAT = 3
"""Microbatches in a turn of the sweep: launching runs ahead of the device, as it does in training."""
DOCUMENT = 1024  # tokens of a document of the sweep
SETTLING = {"fp8": 4}
"""Runs of a microbatch before it counts: a delayed scale is that of the step before."""
WRONG = 3


class Job:
    """The settings, and the results on their way to the file."""

    def __init__(self, own: argparse.Namespace):
        self.own, self.results = own, {"part": own.part, "ranks": world_size_from_environment()}
        self.corpus = open_corpus([own.data_path], split="100", seed=1, vocab_size=own.vocab_size).train

    def settings(self, precision: str, *, overlap: bool, pipeline: int = 1):
        own, tp = self.own, self.results["ranks"] // pipeline
        flags = (
            f"{MODELS[own.model]} {PRECISIONS[precision]} --swiglu --untie-embeddings-and-output-weights "
            f"--data-path none --vocab-size {own.vocab_size} "
            f"--max-tokens-per-microbatch {own.budget} --global-batch-size 1 --lr 1 --train-iters 1 --eval-iters 0 "
            f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pipeline} {'--sequence-parallel' if tp > 1 else ''} "
        )
        if overlap and tp > 1:
            flags += f"--tp-comm-overlap {own.overlap_flags}"
        return parse_arguments(flags.split(), world_size=self.results["ranks"])

    def planned(self, run, way: str) -> tuple[list, float, int]:
        """Microbatches of real documents, as many as were asked for, the share of real tokens in the rows of their whole step, and its documents."""
        mean = min(float(self.corpus.lengths.mean()), self.own.budget)
        documents = min(len(self.corpus.lengths), max(2, round(self.own.microbatches * self.own.budget / mean)))
        _, planner = settings_of_way(run, self.corpus, budget=self.own.budget, documents=documents, way=way, ranks=1)
        plan = planner.plan(0)
        chosen = plan.microbatches[0] if way == "dynamic" else plan.microbatches[0][: self.own.microbatches]
        built = [build_microbatch(one, self.corpus, step=0, index=index).to(device.compute_device()) for index, one in enumerate(chosen)]
        return built, plan.stats.tokens / plan.stats.slots, documents

    def write(self) -> None:
        if dist.get_rank() == 0:
            aside = self.own.output.with_suffix(".partial")
            aside.write_text(json.dumps(self.results, indent=1) + "\n")
            aside.replace(self.own.output)


def overlap_part(job: Job) -> None:
    own = job.own
    backend, layers = prepare_device(job.settings(own.precisions[0], overlap=True))
    initialize(job.settings(own.precisions[0], overlap=True).parallel, backend=backend, seed=1)
    job.results |= about(backend)
    began = time.time()
    for number, precision in enumerate(own.precisions):
        until = began + (own.until - began) * (number + 1) / len(own.precisions)
        if not goes_on(until):
            say(f"TP {job.results['ranks']} {precision}: left out, no time is left")
            continue
        measure_overlap(job, precision, layers=layers, backend=backend, until=until)
        gc.collect()
        device.release_memory()


def measure_overlap(job: Job, precision: str, *, layers: str, backend: str, until: float) -> None:
    own, title = job.own, f"TP {job.results['ranks']} {precision:<4}"
    run, plain_run = (job.settings(precision, overlap=overlap) for overlap in (True, False))
    common = dict(layers=layers, backend=backend, vocab_size=own.vocab_size)
    arm, plain = Arm(run, **common), Arm(plain_run, **common)
    try:
        say(f"{title} {arm.overlap}")
        found = job.results[precision] = {"checked": [], "sweep": [], "documents": None}
        microbatch = {share: microbatch_of(documents_of(int(own.budget * share)), run, own.vocab_size) for share in {*SHARES, *CHECKED}}
        for share in CHECKED:
            row = compared(arm, plain, microbatch[share], precision=precision, settling=SETTLING.get(precision, 1))
            found["checked"].append(row)
            say(
                f"{title} T {row['T']:>6}  loss {row['loss']:.5f}, apart {row['loss_apart']:.1e}, gradients apart {row['gradients_apart']:.1e}: right"
            )
        job.write()
        now = time.time()
        sweep(job, precision, title, arm, plain, microbatch, layers=layers, until=now + 0.6 * (until - now))
        documents(job, precision, title, arm, plain, run, until=until)
    finally:
        device.synchronize()
        job.write()
    dist.barrier()
    userbuffers.destroy_ub()


def sweep(job: Job, precision: str, title: str, arm: Arm, plain: Arm, microbatch: dict, *, layers: str, until: float) -> None:
    """Forward and backward at each T."""
    manager, groups = userbuffers.current(), {}

    def stock(microbatches: list) -> None:
        manager.begin((), manager.capacity[0])  # stock layers set no shape: the turn before left another
        with stock_layers(arm.models):
            arm.step(microbatches)

    for share in SHARES:
        batch = [microbatch[share]] * REPEAT
        ways = {"overlap": lambda batch=batch: arm.step(batch), "no overlap": lambda batch=batch: plain.step(batch)}
        if batch[0].T == manager.capacity[0] and layers == "te":
            ways["stock"] = lambda batch=batch: stock(batch)
        groups[batch[0].T] = ways
    for T, seconds in in_turn(groups, rounds=job.own.rounds, until=until).items():
        if not seconds["overlap"]:
            say(f"{title} T {T:>6}: left out, no time is left")
            continue
        each = {way: statistics.median(values) / REPEAT for way, values in seconds.items()}
        row = {
            "T": T,
            "share": T / manager.capacity[0],
            "rounds": len(seconds["overlap"]),
            "milliseconds": {way: 1e3 * value for way, value in each.items()},
        }
        row |= {"against_no_overlap": ratio(seconds, "no overlap", "overlap"), "against_stock": ratio(seconds, "overlap", "stock")}
        job.results[precision]["sweep"].append(row)
        stock_words = f"; time against stock layers {in_words(row['against_stock'])}" if row["against_stock"] else ""
        say(
            f"{title} T {T:>6} ({row['share']:.2f})  overlap {1e3 * each['overlap']:8.2f} ms, without {1e3 * each['no overlap']:8.2f} ms  "
            f"speed against no overlap {in_words(row['against_no_overlap'])}{stock_words}; {row['rounds']} turns"
        )
    job.write()


def documents(job: Job, precision: str, title: str, arm: Arm, plain: Arm, run, *, until: float) -> None:
    """Forward and backward of real documents: real tokens a second."""
    dynamic, fill, count = job.planned(run, "dynamic")
    padded, padded_fill, _ = job.planned(run, "pad-to-max")
    rows = {"overlap": sum(one.T for one in dynamic), "padded": sum(one.T for one in padded)}
    tokens = {"overlap": rows["overlap"] * fill, "no overlap": rows["overlap"] * fill, "padded": rows["padded"] * padded_fill}
    ways = {"overlap": lambda: arm.step(dynamic), "no overlap": lambda: plain.step(dynamic), "padded": lambda: arm.step(padded)}
    seconds = in_turn({"documents": ways}, rounds=job.own.rounds, until=until)["documents"]
    if not seconds["overlap"]:
        say(f"{title} documents: left out, no time is left")
        return
    speeds = {way: tokens[way] / statistics.median(values) for way, values in seconds.items()}
    each_token = {way: [value / tokens[way] for value in values] for way, values in seconds.items()}
    job.results[precision]["documents"] = row = {
        "documents": count, "T": [one.T for one in dynamic], "fill": {"dynamic": fill, "padded": padded_fill}, "rounds": len(seconds["overlap"]),
        "tokens_per_second": speeds, "against_no_overlap": ratio(each_token, "no overlap", "overlap"),
        "against_padded": ratio(each_token, "padded", "overlap"),
    }  # fmt: skip
    say(
        f"{title} documents  real tokens/s: overlap {speeds['overlap']:,.0f}, "
        f"without {speeds['no overlap']:,.0f}, pad-to-max with overlap {speeds['padded']:,.0f}; "
        f"against no overlap {in_words(row['against_no_overlap'])}, "
        f"against pad-to-max {in_words(row['against_padded'])}; {len(dynamic)} microbatches, {row['rounds']} turns"
    )


def documents_of(tokens: int) -> list[int]:
    return [DOCUMENT] * (tokens // DOCUMENT) + ([tokens % DOCUMENT] if tokens % DOCUMENT else [])


def pipeline_part(job: Job) -> None:
    own, precision = job.own, job.own.precisions[0]  # what travels between stages is the same in FP8
    run = job.settings(precision, overlap=True, pipeline=2)
    backend, layers = prepare_device(run)
    initialize(run.parallel, backend=backend, seed=1)
    job.results |= about(backend)
    arm = Arm(run, layers=layers, backend=backend, vocab_size=own.vocab_size)
    schedules = {"stock": StockSchedule(arm.models[0].config), "planned": arm.stepper.schedule}
    microbatches, _, _ = job.planned(run, "dynamic")
    title = f"PP 2 x TP {job.results['ranks'] // 2} {precision}"

    def step(way: str) -> float:
        arm.stepper.schedule = schedules[way]
        return arm.step(microbatches)

    taken = {}
    for way in schedules:
        arm.clear()
        taken[way] = step(way), [gradient.clone() for gradient in arm.gradients()]
    found = job.results[precision] = {"T": [one.T for one in microbatches]}
    found |= differences(taken.pop("planned"), taken.pop("stock"), precision=precision, what="planned messages against stock ones")
    say(
        f"{title}  {len(microbatches)} microbatches, {len(set(found['T']))} different T; loss apart {found['loss_apart']:.1e}, "
        f"gradients apart {found['gradients_apart']:.1e}: right"
    )
    job.write()
    seconds = in_turn({"step": {way: lambda way=way: step(way) for way in schedules}}, rounds=own.rounds, until=own.until)["step"]
    if seconds["planned"]:
        found |= {"milliseconds": {way: 1e3 * statistics.median(values) for way, values in seconds.items()}, "rounds": len(seconds["planned"])}
        found["speed_against_stock"] = ratio(seconds, "stock", "planned")
        each = found["milliseconds"]
        say(
            f"{title}  a step: stock {each['stock']:.2f} ms, planned {each['planned']:.2f} ms; "
            f"speed against stock {in_words(found['speed_against_stock'])}; {found['rounds']} turns"
        )
    else:
        say(f"{title}: times left out, no time is left")
    dist.barrier()
    userbuffers.destroy_ub()


def about(backend: str) -> dict:
    versions = {"torch": torch.__version__}
    for package in ("transformer-engine", "megatron-core"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    environment = {name: os.environ.get(name) for name in ("UB_SKIPMC", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE")}
    return {"device": device.device_name(), "process_groups": backend, "versions": versions, "environment": environment}


PARTS = {"overlap": overlap_part, "pipeline": pipeline_part}


def run_part(own: argparse.Namespace) -> int:
    """One part on this rank.

    Returns:
        0, or `WRONG`, the same on all ranks.
    """
    job = Job(own)
    try:
        PARTS[own.part](job)
    except Wrong as error:
        say(f"WRONG: {error}")
        job.results["wrong"] = str(error)
        job.write()
        return WRONG
    job.write()
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("part", choices=PARTS)
    made.add_argument("--data-path", required=True, metavar="PREFIX", help=".bin/.idx of the documents")
    made.add_argument("--vocab-size", type=int, required=True)
    made.add_argument("--model", choices=MODELS, default="8x4096")
    made.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8"])
    made.add_argument("--budget", type=int, default=8192, help="the capacity, in tokens")
    made.add_argument("--microbatches", type=int, default=6, help="of real documents in a step")
    made.add_argument("--rounds", type=int, default=15, help="turns at most")
    made.add_argument("--until", type=float, default=math.inf, help="begin no round after this time (seconds since 1970)")
    made.add_argument("--overlap-flags", default="", help="more flags for the runs with overlap")
    made.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    return made


def main() -> None:
    status = run_part(parser().parse_args())
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
