# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes: kernels, gaps between them, the host's own work, waits for the device, and what a new T costs.

    python benchmarks/step_profile.py --data-path PREFIX --vocab-size 32000 --model 0.6b --budget 8192 --output runs/profile
    python benchmarks/step_picture.py runs/profile                      # shares of the kernels, and a picture; no GPU needed

Four parts, on one model and with the training loop of a run (dynamic microbatches):

    waits    every place where the host waited for the device in a step, counted by line of code (torch's synchronisation warnings)
    host     what the main thread was doing, sampled every millisecond: code of megatron_dyn, of Megatron, of Transformer Engine,
             of torch, or waiting for the device
    trace    two steps under torch's profiler (trace.json.gz), for step_picture.py
    shapes   forward and backward of microbatches whose T is new each time, against microbatches of one T and as many tokens, in turn

Writes profile.json beside the trace. Without a GPU the parts run too, and only the host's shares mean anything.
"""

import argparse
import collections
import contextlib
import gzip
import json
import shutil
import statistics
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from models import MODELS, PRECISIONS
from throughput import RECOMPUTE, Harness

from megatron_dyn import device
from megatron_dyn.corpus import open_corpus
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.calibrate import microbatch_of
from megatron_dyn.training.distributed import world_size_from_environment
from megatron_dyn.training.step import Stepper
from megatron_dyn.training.stop_request import StopRequest

OWNERS = {"/megatron_dyn/": "megatron_dyn", "/megatron/": "Megatron-Core", "/transformer_engine/": "Transformer Engine", "/torch/": "torch"}
DOCUMENT = 512  # tokens of a document in the part "shapes": attention then costs the same for every token


def owner_of(path: str) -> str | None:
    return next((name for part, name in OWNERS.items() if part in path), None)


def place(frames: list[tuple[str, int, str]]) -> tuple[str, str]:
    """(owner, place) of a stack, innermost frame last: the innermost frame that is not torch's or the standard library's."""
    for path, number, function in reversed(frames):
        owner = owner_of(path)
        if owner not in (None, "torch"):
            name = path.rsplit("/site-packages/", 1)[-1]
            name = name[name.index("megatron_dyn/") :] if "megatron_dyn/" in name else name
            return owner, f"{name}:{number} {function}"
    return "torch", "torch"


class Waits:
    """Counts, by line of code, where the host waits for the device."""

    def __init__(self) -> None:
        self.found: collections.Counter = collections.Counter()

    @contextlib.contextmanager
    def counted(self):
        if not device.has_gpu():
            yield
            return
        originals = {(holder, "synchronize"): holder.synchronize for holder in (torch.cuda, torch.cuda.Event, torch.cuda.Stream)}
        for (holder, name), original in originals.items():
            setattr(holder, name, self._noting(original))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = lambda message, *_, **__: self._note() if "synchroniz" in str(message) else None
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for (holder, name), original in originals.items():
                setattr(holder, name, original)

    def _noting(self, original):
        def wrapper(*args, **kwargs):
            self._note()
            return original(*args, **kwargs)

        return wrapper

    def _note(self) -> None:
        frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_stack()[:-2] if frame.filename != __file__]
        self.found[" - ".join(place(frames))] += 1


class Samples:
    """What the main thread was doing, sampled about every millisecond by another one."""

    def __init__(self, waiting_lines: set[str]) -> None:
        self.waiting = waiting_lines
        self.owners: collections.Counter = collections.Counter()
        self.lines: collections.Counter = collections.Counter()

    def start(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(threading.get_ident(), self._done), daemon=True)
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # else a sample waits for up to 5 ms, until the main thread lets go
        self._thread.start()

    def end(self) -> None:
        self._done.set()
        self._thread.join()
        sys.setswitchinterval(self._before)

    def _watch(self, main: int, done: threading.Event) -> None:
        while not done.wait(0.001):
            frame, frames = sys._current_frames().get(main), []
            while frame is not None:
                frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
                frame = frame.f_back
            frames.reverse()
            if any("threading.py" in path and function == "wait" for path, _, function in frames[-1:]):
                owner, where = "waiting for data or agreement", place(frames)[1]
            else:
                owner, where = place(frames)
                if f"{owner} - {where}" in self.waiting or where.endswith(" synchronize"):
                    owner = "waiting for the device"
                elif frames and frames[-1][2] == "_engine_run_backward":
                    owner = "backward pass (autograd's own thread)"
            self.owners[owner] += 1
            self.lines[f"{owner} - {where}"] += 1

    def shares(self) -> dict:
        total = sum(self.owners.values()) or 1
        return {
            "samples": total,
            "owners": {name: count / total for name, count in self.owners.most_common()},
            "own_lines": {name: count / total for name, count in self.lines.most_common(60) if name.startswith("megatron_dyn")},
        }


def new_shapes(stepper: Stepper, run, vocab_size: int, *, budget: int, rounds: int, count: int = 8) -> dict:
    """Seconds of `count` microbatches whose T was never seen, and of as many of one T, taking turns; and with T in steps of 256."""
    base = budget * 3 // 4 // 256 * 256

    def made(T: int):
        return microbatch_of([DOCUMENT] * (T // DOCUMENT) + ([T % DOCUMENT] if T % DOCUMENT else []), run, vocab_size)

    def timed(batch: list) -> float:
        for model in stepper.models:
            model.zero_grad_buffer()
        device.synchronize()
        began = time.perf_counter()
        stepper.forward_backward(batch, forward_only=False)
        device.synchronize()
        return time.perf_counter() - began

    stepper.models[0].config.finalize_model_grads_func = None
    constant = [made(base)] * count
    buckets = [made(base + 256 * (i - count // 2)) for i in range(count)]
    seen = [made(base + 34 * i - 17 * (count - 1)) for i in range(count)]
    for batch in (constant, buckets, seen):  # warm up
        timed(batch)
        timed(batch)
    took: dict[str, list[float]] = collections.defaultdict(list)
    unseen = 2
    for _ in range(rounds):
        fresh = []
        for i in range(count // 2):  # pairs around the constant T: as many tokens
            unseen += 2
            fresh += [made(base - unseen), made(base + unseen)]
        for name, batch in (("one T", constant), ("T never seen", fresh), ("T seen before", seen), ("multiples of 256", buckets)):
            took[name].append(timed(batch) / sum(microbatch.T for microbatch in batch) * base)
    median = {name: statistics.median(values) for name, values in took.items()}
    return {
        "T": base, "microbatches": count, "rounds": rounds, "milliseconds_a_microbatch": {name: 1e3 * value for name, value in median.items()},
        "ratio": {name: value / median["one T"] for name, value in median.items()}, "seconds": took,
    }  # fmt: skip


def copy_rate() -> float | None:
    """Bytes read and written a second by a large copy on the device."""
    if not device.has_gpu():
        return None
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device.compute_device())
    target, seconds = torch.empty_like(source), []
    for _ in range(10):
        begin = device.time_mark()
        target.copy_(source)
        end = device.time_mark()
        device.synchronize()
        seconds.append(device.seconds_between(begin, end))
    return 2 * source.numel() / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-path", required=True, metavar="PREFIX")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--documents", type=int, default=256, help="in a step")
    parser.add_argument("--steps", type=int, default=4, help="sampled")
    parser.add_argument("--rounds", type=int, default=9, help="of the part shapes (a budget of at least 4096); 0 leaves it out")
    parser.add_argument("--run-flags", default="", help="more flags of pretrain_gpt_thd.py")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    own = parser.parse_args()
    flags = (
        f"{MODELS[own.model]} {PRECISIONS[own.precision]} --swiglu --untie-embeddings-and-output-weights "
        f"--data-path none --vocab-size {own.vocab_size} --max-tokens-per-microbatch {own.budget} --global-batch-size {own.documents} "
        f"--lr 1e-4 --train-iters 100000 --eval-iters 0 {own.run_flags}"
    )
    harness = Harness(parse_arguments(flags.split(), world_size=world_size_from_environment()), own.vocab_size, own.steps, 3)
    harness.recompute(own.recompute)
    corpus = open_corpus([own.data_path], split="100", seed=1, vocab_size=own.vocab_size).train
    first = dist.get_rank() == 0
    own.output.mkdir(parents=True, exist_ok=True)

    waits = Waits()
    settings = harness.settings(corpus, budget=own.budget, documents=own.documents)
    trainer, _ = harness.trainer(corpus, *settings, begin=0, steps=3)  # warms up
    train(trainer)
    trainer, _ = harness.trainer(corpus, *settings, begin=3, steps=2)
    with waits.counted():
        train(trainer)
    trainer, records = harness.trainer(corpus, *settings, begin=5, steps=1 + own.steps)
    samples = Samples(set(waits.found))
    # The first step waits for its documents (nothing was prefetched), and after the last one the loop is taken down.
    after_steps(trainer, {1: samples.start, 1 + own.steps: samples.end})
    train(trainer)
    steps = records.steps[1:]
    operations = [harness.operations.of_sums(plan.stats.tokens, plan.stats.squared_tokens) for _, plan in steps]
    trainer, traced_records = harness.trainer(corpus, *settings, begin=6 + own.steps, steps=2)
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if device.has_gpu() else [])
    with torch.profiler.profile(activities=activities) as traced:
        train(trainer)
    found = {
        "device": device.device_name(), "torch": torch.__version__, "parameters": harness.parameters,
        "settings": {name: str(value) for name, value in vars(own).items() if name not in ("output", "data_path")},
        "bf16_product_flops": harness.rate, "copy_bytes_per_second": copy_rate(),
        "steps": described(steps), "operations": operations, "traced_steps": described(traced_records.steps),
        "waits_in_two_steps": dict(waits.found.most_common()), "host": samples.shares(),
    }  # fmt: skip
    if own.rounds:
        found["shapes"] = new_shapes(trainer.stepper, harness.run, own.vocab_size, budget=own.budget, rounds=own.rounds)
    if first:
        trace = own.output / "trace.json"
        traced.export_chrome_trace(str(trace))
        with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb", compresslevel=6) as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
        (own.output / "profile.json").write_text(json.dumps(found, indent=1) + "\n")
        shapes = {name: value for name, value in found.get("shapes", {}).items() if name != "seconds"}
        print(json.dumps({name: found[name] for name in ("waits_in_two_steps", "host")} | {"shapes": shapes}, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def described(steps: list) -> list[dict]:
    return [{"seconds": record.step_time, "tokens": plan.stats.tokens, "T": list(record.T)} for record, plan in steps]


def after_steps(trainer, calls: dict) -> None:
    """Call something when a number of steps is done."""
    record, done = trainer.log.step, 0

    def recording(*args):
        nonlocal done
        record(*args)
        done += 1
        calls.get(done, lambda: None)()

    trainer.log.step = recording


def train(trainer) -> None:
    stop = StopRequest()
    trainer.train(stop)
    stop.close()


if __name__ == "__main__":
    main()
