# SPDX-License-Identifier: Apache-2.0
"""Everything that needs several GPUs, in one call within a time limit; started by multi_gpu.sh, which sets the environment.

    bash benchmarks/multi_gpu.sh --output DIR [--data-path PREFIX --vocab-size N]         # all GPUs of this host, 9 minutes
    bash tests/gpu/one_card.sh -- bash benchmarks/multi_gpu.sh --gpus 2 --smoke --output DIR   # two ranks on one GPU: does it run?
    bash benchmarks/multi_gpu.sh --cpu --gpus 2 --output DIR                              # the same on the CPU, tiny

Parts, each for its share of the time (what one leaves goes to those after it), in processes of their own: for each TP of 2, 4 and 8 that
divides the GPUs, overlap against none, against stock layers and against padding (multi_gpu_ranks.py); a pipeline with planned and stock
messages; two data-parallel ranks with microbatches of their own T (throughput.py); short runs of pretrain_gpt_thd.py in three
topologies, whose losses must agree; a model under skew (tests/gpu/whole_model.py). Without --data-path documents are a synthetic heavy tail.

Writes DIR/multi_gpu.json after every part, and DIR/multi_gpu.log. Exit status 0; 1 when a part failed or hung, or losses disagree; 2 when this
machine cannot run it; 3 when results are wrong, and then nothing more is run. A part without time is named as left out.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from multi_gpu_parts import TENSOR_PARALLEL, Part, Running, parts_for, write_heavy_tail
from multi_gpu_targets import lines, targets

import megatron_dyn
from megatron_dyn.device import BACKEND_VARIABLE

SIZES = {
    "full": dict(
        seconds=540, least=15, grace=15, starting=20, overlap_share=110, model="8x4096", pretrain="0.6b", precisions=["bf16", "fp8"],
        budget=8192, microbatches=6, rounds=15, documents=400, steps=6, vocab_size=32000, written=4000, longest=65536,
    ),
    "smoke": dict(
        seconds=80, least=5, grace=6, starting=12, overlap_share=250, model="small", pretrain="small", precisions=["bf16", "fp8"],
        budget=512, microbatches=3, rounds=2, documents=16, steps=3, vocab_size=1024, written=400, longest=2048,
    ),
    "cpu": dict(
        seconds=180, least=3, grace=10, starting=8, overlap_share=110, model="tiny", pretrain="tiny", precisions=["fp32"],
        budget=128, microbatches=3, rounds=2, documents=16, steps=3, vocab_size=128, written=400, longest=512,
    ),
}  # fmt: skip
"""Times in seconds (of everything; without which no part starts; that a part may end too late; from its start to its first step, about), the
overlap's share of them against the shares of other parts, and what is run: documents in a step of the data-parallel part, documents
written and the longest of them."""
CANNOT, WRONG = 2, 3


def ranks_for(wanted: int | None, *, cards: int, cpu: bool, shared_card: bool) -> int:
    """How many ranks to start.

    Raises:
        SystemExit: with the reason why this machine cannot run it.
    """
    if not cpu and not cards:
        refuse("there is no GPU here (--cpu runs everything on the CPU at a tiny size, to see whether it works)")
    ranks = wanted or (2 if cpu or shared_card else cards)
    if not cpu and not shared_card and ranks > cards:
        refuse(f"--gpus {ranks}, and this host has {cards}: each rank needs a GPU of its own")
    if ranks < 2:
        refuse(
            "one GPU exchanges with nobody; two ranks can share it for a trial: "
            "bash tests/gpu/one_card.sh -- bash benchmarks/multi_gpu.sh --gpus 2 --smoke"
        )
    if all(ranks % tp for tp in TENSOR_PARALLEL):
        refuse(f"{ranks} GPUs are no multiple of a tensor-parallel size ({', '.join(map(str, TENSOR_PARALLEL))}); give --gpus {ranks - 1}")
    return ranks


def refuse(why: str) -> None:
    print(f"multi_gpu.sh: {why}", file=sys.stderr)
    raise SystemExit(CANNOT)


class Report:
    """What was found so far, on disk after every change."""

    def __init__(self, folder: Path, about: dict):
        self._path = folder / "multi_gpu.json"
        self.found = {"about": about, "parts": {}, "left_out": {}, "failed": {}, "targets": []}

    def write(self) -> None:
        self.found["targets"] = list(targets(self.found["parts"]))
        aside = self._path.with_suffix(".partial")
        aside.write_text(json.dumps(self.found, indent=1) + "\n")
        aside.replace(self._path)


def run_parts(parts: list[Part], report: Report, log, *, end: float, least: float, grace: float) -> int:
    """All parts, one after the other.

    Args:
        end: Of the time for all of them (seconds since 1970).
        least: Seconds without which a part is not started.
        grace: Seconds that a part may end too late before it is killed.

    Returns:
        The exit status.
    """
    found = report.found
    for index, part in enumerate(parts):
        left = [other.share for other in parts[index:] if other.missing is None]
        now = time.time()
        share = (end - now) * part.share / sum(left) if part.missing is None else 0.0
        if part.missing or share < least:
            found["left_out"][part.name] = part.missing or f"{max(0.0, share):.0f} s of its time are left"
            print(f"--- {part.name}: left out: {found['left_out'][part.name]}", flush=True)
            report.write()
            continue
        print(f"--- {part.name}: {part.ranks} ranks, {share:.0f} s", flush=True)
        log.write(f"--- {part.name}\n")
        running = Running(part, now + share, log)
        try:
            status = running.wait(min(now + share, end) + grace)
        finally:  # what there is counts, also when this process is asked to end
            results = part.read()
            found["parts"][part.name] = results | {"seconds": time.time() - now}
        if "wrong" in results:
            found["failed"][part.name] = f"WRONG: {results['wrong']}"
            report.write()
            print("Results are wrong: nothing more is run.", flush=True)
            return WRONG
        if status is None:
            found["failed"][part.name] = f"it hung or was too slow: ended after {time.time() - now:.0f} s"
            print(f"    ended after {time.time() - now:.0f} s, beyond its time; what it had written counts", flush=True)
        elif status:
            found["failed"][part.name] = f"exit status {status}"
            print(f"    FAILED with status {status}; the end of its errors:\n{''.join(running.errors[-25:])}", flush=True)
        report.write()
    return 1 if found["failed"] or any(row["met"] is False and "losses" in row["target"] for row in found["targets"]) else 0


def summary(report: Report, meaningless: str | None) -> None:
    found = report.found
    print("\n=== summary")
    for name, part in found["parts"].items():
        for row in part.get("rows", []):
            print(
                f"  {name}, {row['way']}: {row['tokens_per_second']:,.0f} real tokens/s, "
                f"{row['distinct_T']} different T, {row['against_dynamic']:.3f} of dynamic"
            )
        if part.get("losses"):
            print(f"  {name}: losses {' '.join(f'{value:.4f}' for value in part['losses'])}")
    print("\n".join(lines(found["targets"])))
    for kind in ("left_out", "failed"):
        for name, why in found[kind].items():
            print(f"  {kind.replace('_', ' ')}: {name} ({why})")
    if meaningless:
        print(f"  {meaningless}: only whether it runs and is right counts here; SPEEDS MEAN NOTHING")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, metavar="N", help="ranks of one host (default: a rank for each GPU)")
    parser.add_argument("--seconds", type=float, help="time for everything (default: 540; --smoke: 80; --cpu: 180)")
    parser.add_argument("--data-path", type=Path, metavar="PREFIX", help=".bin/.idx of the documents (default: a synthetic heavy tail)")
    parser.add_argument("--vocab-size", type=int, help="of --data-path")
    parser.add_argument("--output", type=Path, default=Path("runs/multi_gpu"), metavar="DIR", help="default: runs/multi_gpu")
    parser.add_argument("--smoke", action="store_true", help="a small model, a few steps, within 90 seconds: does it run?")
    parser.add_argument("--cpu", action="store_true", help="ranks on the CPU, tiny")
    parser.add_argument(
        "--overlap-flags", default="", help="more flags of pretrain_gpt_thd.py where there is overlap, such as '--tp-comm-bootstrap-backend gloo'"
    )
    own = parser.parse_args()
    if (own.data_path is None) != (own.vocab_size is None):
        parser.error("--data-path and --vocab-size belong together")
    if own.cpu:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    shared_card = not own.cpu and os.environ.get(BACKEND_VARIABLE) == "gloo"
    cards = 0 if own.cpu else torch.cuda.device_count()
    ranks = ranks_for(own.gpus, cards=cards, cpu=own.cpu, shared_card=shared_card)
    kind = "cpu" if own.cpu else "smoke" if own.smoke else "full"
    size = SIZES[kind] | {"overlap_flags": own.overlap_flags} | ({"vocab_size": own.vocab_size} if own.vocab_size else {})
    end = time.time() + (own.seconds or size["seconds"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    meaningless = "Ranks on the CPU" if own.cpu else "Ranks share a GPU over gloo" if shared_card else "A small model" if own.smoke else None
    own.output.mkdir(parents=True, exist_ok=True)
    about = {
        "date": datetime.date.today().isoformat(), "gpus": cards, "ranks": ranks, "size": kind, "settings": size,
        "megatron_dyn": megatron_dyn.__version__,
        "documents": "given" if own.data_path else "synthetic heavy tail", "speeds_mean_nothing": meaningless,
        "arguments": shlex.join(a for a in sys.argv[1:] if "/" not in a),
    }  # fmt: skip
    report, status = Report(own.output, about), 143
    print(
        f"{ranks} ranks, {cards} GPUs, {size['model']}, capacity {size['budget']}, {end - time.time():.0f} s; documents: {about['documents']}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder, (own.output / "multi_gpu.log").open("w") as log:
        prefix = own.data_path.resolve() if own.data_path else Path(folder) / "heavy_tail"
        if own.data_path is None:
            write_heavy_tail(prefix, documents=size["written"], vocab_size=size["vocab_size"], longest=size["longest"])
        parts = parts_for(ranks, size, prefix=prefix, folder=Path(folder), shared_card=shared_card, cpu=own.cpu)
        try:
            status = run_parts(parts, report, log, end=end, least=size["least"], grace=size["grace"])
        finally:
            report.write()
            summary(report, meaningless)
    return status


if __name__ == "__main__":
    sys.exit(main())
