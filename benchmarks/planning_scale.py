# SPDX-License-Identifier: Apache-2.0
"""Planning over very many documents: open, first plan, plans anywhere, resume, and memory beside the lengths.

    python benchmarks/planning_scale.py [--documents 100000000] [--dtype uint16] [--empty 0.001] [--folder FOLDER]

Writes a synthetic index (lognormal lengths, some documents empty) as a memory-mapped file into a temporary folder, which it removes, and
plans from it. Both wall and processor time are given, of one try each unless said otherwise; the file lies in the page cache (it was just
written) unless --cold drops it from there. "Documents" is what a step's documents take to be found, "plan" has their division too. Memory
is the peak of what Python and numpy allocate (tracemalloc, in a second run of the same calls); pages of the map are the system's to give
and to take back. The extrapolation takes opening, which reads every length, proportionally and leaves the rest as it is.
"""

import argparse
import json
import os
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from megatron_dyn.planning import PlanConfig, Planner, TokenBudgetBatchSampler
from megatron_dyn.planning.sampler import POSITION

CHUNK = 1 << 22
EXTRAPOLATED = 10**9
FAR = 10_000


def write_lengths(path: Path, documents: int, dtype: str, empty: float, median: float, sigma: float) -> np.ndarray:
    """A synthetic index; drawn chunk by chunk from one block of a million, so that writing is quick."""
    generator = np.random.default_rng(0)
    block = np.clip(generator.lognormal(np.log(median), sigma, 1 << 20), 1, np.iinfo(dtype).max).astype(dtype)
    lengths = np.memmap(path, dtype=dtype, mode="w+", shape=documents)
    for begin in range(0, documents, CHUNK):
        size = min(CHUNK, documents - begin)
        part = np.roll(np.resize(block, size), int(generator.integers(0, 1 << 20)))
        part[generator.integers(0, size, size=int(size * empty))] = 0
        lengths[begin : begin + size] = part
    lengths.flush()
    return np.memmap(path, dtype=dtype, mode="r")


def drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def timed(call) -> tuple[np.ndarray, object]:
    """(wall, processor) seconds, and the result."""
    wall, processor = time.perf_counter(), time.process_time()
    result = call()
    return np.array([time.perf_counter() - wall, time.process_time() - processor]), result


def median(call, steps) -> np.ndarray:
    return np.median([timed(lambda: call(step))[0] for step in steps], axis=0)


def measure(lengths: np.ndarray, config: PlanConfig, *, far: bool) -> dict[str, np.ndarray]:
    """Seconds of each call, on a new planner where an earlier call would have helped."""
    found = {}
    found["open"], planner = timed(lambda: Planner(lengths, config, fingerprint="of the corpus"))
    found["first plan"], _ = timed(lambda: planner.plan(0))
    found["next documents, median of 100"] = median(planner.documents, range(1, 101))
    found["next plan, median of 50"] = median(planner.plan, range(101, 151))
    by_size = config.global_batch_size is not None
    if by_size:
        random = np.random.default_rng(1).integers(0, 10**9, size=100).tolist()
        found["documents of a random step, median of 100"] = median(planner.documents, random)
    # The state of a run that has made a million steps, then what a resumed process does up to its first plan.
    state = TokenBudgetBatchSampler(planner).state_dict() | {"step": 10**6}
    half = planner.num_documents // 2
    if by_size:
        state |= dict(zip(POSITION, planner.position_of(10**6)))
    elif config.document_order == "length-window":  # the begin of an epoch
        state |= dict(zip(POSITION, (100, 10**6, 0, 0)))
    else:  # the middle of one
        state |= dict(zip(POSITION, (100, 10**6 - half // 1024, half, half)))
    state = json.loads(json.dumps(state))
    resumed = TokenBudgetBatchSampler(Planner(lengths, config, fingerprint="of the corpus"))
    found["resume at step 1,000,000: load the state and plan"], _ = timed(lambda: (resumed.load_state_dict(state), next(resumed)))
    if far and not by_size:
        found[f"documents of step {FAR:,} without a state (a scan)"], _ = timed(lambda: planner.documents(FAR))
    return found


def peak_memory(lengths: np.ndarray, config: PlanConfig) -> float:
    """Peak MiB allocated by open, plans and resume."""
    tracemalloc.start()
    planner = Planner(lengths, config, fingerprint="of the corpus")
    sampler = TokenBudgetBatchSampler(planner)
    for _ in range(3):
        next(sampler)
    resumed = TokenBudgetBatchSampler(planner)
    resumed.load_state_dict(sampler.state_dict())
    next(resumed)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10**8)
    parser.add_argument("--dtype", choices=["uint16", "int32", "int64"], default="uint16")
    parser.add_argument("--empty", type=float, default=0.001, help="share of empty documents")
    parser.add_argument("--median", type=float, default=403.0, help="median length (tokens)")
    parser.add_argument("--sigma", type=float, default=1.2)
    parser.add_argument("--batch", type=int, default=1024, help="documents a step; the token target is as many documents of mean length")
    parser.add_argument("--folder", help="where the temporary folder is made")
    parser.add_argument("--cold", action="store_true", help="drop the file from the page cache before each configuration")
    parser.add_argument("--no-scan", action="store_true", help="leave the scan for a far step out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "lengths"
        lengths = write_lengths(path, arguments.documents, arguments.dtype, arguments.empty, arguments.median, arguments.sigma)
        mean = int(lengths[: 1 << 20].mean())
        size = f"{lengths.nbytes / 2**20:,.0f} MiB of {lengths.dtype}"
        print(f"{len(lengths):,} documents, {size}, {arguments.empty:.2%} empty, mean {mean} tokens")
        print("| order, step | call | wall | processor | wall at 10^9 |\n|---|---|---|---|---|")
        common = dict(max_tokens_per_microbatch=8192, data_parallel_size=8, alignment=2)
        for order in ("shuffle", "sequential", "length-window"):
            for batch in (dict(global_batch_size=arguments.batch), dict(global_batch_tokens=arguments.batch * mean)):
                if arguments.cold:
                    drop_from_page_cache(path)
                config = PlanConfig(document_order=order, **common, **batch)
                label = f"{order}, {'documents' if 'global_batch_size' in batch else 'tokens'}"
                for call, seconds in measure(lengths, config, far=not arguments.no_scan).items():
                    show(label, call, seconds, EXTRAPOLATED / len(lengths) if call == "open" else 1)
                memory = peak_memory(lengths, config)
                print(f"| {label} | peak memory beside the map | {memory:.1f} MiB | | |", flush=True)
        seconds, _ = timed(lambda: Planner(lengths, config).fingerprint)
        show("any", "open without a fingerprint of the corpus (digests the lengths)", seconds, EXTRAPOLATED / len(lengths))


def show(label: str, call: str, seconds: np.ndarray, growth: float) -> None:
    wall, processor = 1e3 * seconds
    print(f"| {label} | {call} | {wall:,.1f} ms | {processor:,.1f} ms | {wall * growth:,.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
