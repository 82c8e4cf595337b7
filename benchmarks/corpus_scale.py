# SPDX-License-Identifier: Apache-2.0
"""A run's way to its first plan over very many documents on disk: open_corpus, planner, plan; and `python -m megatron_dyn plan`.

    python benchmarks/corpus_scale.py [--documents 100000000] [--folder FOLDER] [--cases one two sequences weighted plan]

Writes Megatron `.bin/.idx` pairs (lognormal lengths, 0.1% of the documents empty, uint16) into a temporary folder, which it removes. The
`.idx` is whole (20 bytes a document of one sequence); the `.bin` is sparse: of the right size, all zeros, without taking room on the disk.
Each case runs in a process of its own, from the page cache (the index was just written) unless --cold drops it from there. Memory is the
largest RssAnon (heap and stack) of that process, looked at every 5 ms, less what it had after the imports; pages of the maps are the
system's to give and to take back, and are not counted. Times are wall (processor) seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from megatron_dyn.corpus.indexed_format import CODE_BY_DTYPE, HEADER, MAGIC, VERSION, bin_path, idx_path

CHUNK = 1 << 22
TOKEN = np.dtype("<u2")
CASES = {
    "one": "one file",
    "two": "two files, no weights",
    "sequences": "one file, two sequences a document",
    "broadcast": "one file, lengths only (--data-broadcast)",
    "weighted": "two files, weights 0.6 and 0.4",
    "plan": "python -m megatron_dyn plan, one file",
}


def write_pair(prefix: Path, documents: int, sequences: int = 1) -> None:
    """A pair of `documents` documents of `sequences` sequences each; lengths drawn once for a million, so that writing is quick."""
    random = np.random.default_rng(0)
    block = np.clip(random.lognormal(np.log(403 / sequences), 1.2, 1 << 20), 1, 10**6).astype("<i4")
    count = documents * sequences

    def chunks():
        random = np.random.default_rng(1)
        for begin in range(0, count, CHUNK):
            part = np.roll(np.resize(block, min(CHUNK, count - begin)), int(random.integers(0, 1 << 20)))
            part[random.integers(0, len(part), size=len(part) // 1000)] = 0
            yield part

    with open(idx_path(str(prefix)), "wb", buffering=0) as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, CODE_BY_DTYPE[TOKEN], count, documents + 1))
        for part in chunks():
            stream.write(part)
        reached = 0
        for part in chunks():
            ends = reached + np.cumsum(part, dtype="<i8") * TOKEN.itemsize
            stream.write(np.concatenate(([reached], ends[:-1])).astype("<i8"))
            reached = int(ends[-1])
        for begin in range(0, documents + 1, CHUNK):
            stream.write(np.arange(begin, min(begin + CHUNK, documents + 1), dtype="<i8") * sequences)
    with open(bin_path(str(prefix)), "wb") as stream:
        stream.truncate(reached)


def drop_from_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def child(data_path: list[str], read_tokens: bool) -> None:
    """What a rank does; one line of JSON."""
    from megatron_dyn.corpus import open_corpus
    from megatron_dyn.planning import PlanConfig, Planner

    print(json.dumps({"imported": anonymous_memory(os.getpid())}), flush=True)
    config = PlanConfig(max_tokens_per_microbatch=8192, global_batch_size=1024, data_parallel_size=8, alignment=2)
    times = [clocks()]
    splits = open_corpus(data_path, split="98,2", read_tokens=read_tokens)
    times.append(clocks())
    planner = Planner(splits.train.lengths, config, fingerprint=splits.train.fingerprint)
    times.append(clocks())
    plan = planner.plan(0)
    times.append(clocks())
    sizes = [len(splits.train.tokens(piece.document)) for piece in plan.microbatches[0][0].pieces] if read_tokens else []
    names = ("open_corpus", "Planner", "first plan")
    found = {name: (end - begin).tolist() for name, begin, end in zip(names, times, times[1:])}
    print(json.dumps(found | {"documents": len(splits.train), "digest": plan.digest, "read": sum(sizes)}), flush=True)


def clocks() -> np.ndarray:
    """Wall and processor seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def anonymous_memory(process: int) -> int:
    """RssAnon in bytes; 0 when the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def watch(command: list[str]) -> tuple[list[dict], int, float]:
    """Runs a command: its lines of JSON, its largest RssAnon, its wall seconds."""
    began, most = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        while process.poll() is None:
            most = max(most, anonymous_memory(process.pid))
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
        output.seek(0)
        text = output.read()
    return [json.loads(text)] if text.startswith("{\n") else [json.loads(line) for line in text.splitlines()], most, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10**8)
    parser.add_argument("--folder", help="where the temporary folder is made")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--cold", action="store_true", help="drop the index from the page cache before each case")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--lengths-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, not arguments.lengths_only)
    print("| | open_corpus | Planner | first plan | all | memory beside the maps |\n|---|---|---|---|---|---|")
    for case in arguments.cases:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            run_case(case, Path(folder), arguments)


def run_case(case: str, folder: Path, arguments: argparse.Namespace) -> None:
    prefixes = [folder / name for name in (("a", "b") if case in ("two", "weighted") else ("a",))]
    for prefix in prefixes:
        write_pair(prefix, arguments.documents // len(prefixes), 2 if case == "sequences" else 1)
        if arguments.cold:
            drop_from_page_cache(idx_path(str(prefix)))
    data_path = ["0.6", str(prefixes[0]), "0.4", str(prefixes[1])] if case == "weighted" else list(map(str, prefixes))
    if case == "plan":
        flags = "--max-tokens-per-microbatch 8192 --global-batch-size 1024 --data-parallel-size 8 --tensor-model-parallel-size 2 --json"
        idle = watch([sys.executable, "-c", "import megatron_dyn.training.plan_command, time; time.sleep(0.2)"])[1]
        found, most, seconds = watch([sys.executable, "-m", "megatron_dyn", "plan", "--data-path", *data_path, *flags.split()])
        plans = found[0]["plans"]
        cells = ["", f"{plans['open_seconds']:.2f} s", f"{plans['first_plan_ms']:.0f} ms", f"{seconds:.1f} s"]
    else:
        broadcast = ["--lengths-only"] if case == "broadcast" else []
        found, most, seconds = watch([sys.executable, __file__, *broadcast, "--child", *data_path])
        idle, times = found[0]["imported"], found[1]
        cells = [f"{wall:.3g} s ({processor:.3g} s)" for wall, processor in (times[name] for name in ("open_corpus", "Planner", "first plan"))]
        cells.append(f"{seconds:.1f} s ({times['documents']:,} documents, plan {times['digest'][:12]})")
    print(f"| {CASES[case]} | {' | '.join(cells)} | {(most - idle) / 2**20:,.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
