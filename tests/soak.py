#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A long run of a tiny model on TP 2 x PP 2: once unbroken, once with ranks killed at random and restarted by torchrun.

    make soak                                     5,000 steps
    python tests/soak.py --steps 300 --kills 2    a short one

Documents of random lengths (T differs in every microbatch), dropout, a checkpoint every 50 steps. It passes if every loss of the broken
run has the bits of the unbroken one and no rank's resident memory grew. Results: `soak.json` in the run's folder, and a table.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "functional_tests"))
from torchrun import torchrun  # noqa: E402
from training_run import flags, heavy_tailed_lengths, losses, write_corpus  # noqa: E402

WORLD = 4
SAVE_INTERVAL = 50
MOST_GROWTH_MIB = 20.0
"""Between a tenth of the unbroken run, when everything has been allocated once, and its end. A leak of one 4 KiB page a step would be 18 MiB."""


def run_once(folder: Path, corpus: Path, steps: int, kills: list) -> tuple[float, str]:
    """Seconds and output."""
    folder.mkdir(parents=True)
    settings = dict(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True, hidden_dropout=0.1, attention_dropout=0.1,
        train_iters=steps, eval_iters=0, log_interval=100, save=folder / "checkpoints", load=folder / "checkpoints", save_interval=SAVE_INTERVAL,
        keep_last=2,
    )  # fmt: skip
    script = str(Path(__file__).resolve().parent / "functional_tests" / "restarting_job.py")
    os.environ["RSS_FOLDER"] = str(folder)
    began = time.monotonic()
    said = torchrun(
        WORLD, [script, json.dumps(kills), *flags(corpus, run_dir=folder, **settings)], restarts=len(kills), folder=folder, timeout=3600 + 10 * steps
    )
    return time.monotonic() - began, said


def resident(folder: Path) -> dict[int, list[tuple[int, float]]]:
    """Rank -> (iteration, MiB), of all attempts in order."""
    found: dict[int, list[tuple[int, float]]] = {rank: [] for rank in range(WORLD)}
    for path in sorted(folder.glob("rss_*.txt"), key=lambda path: int(re.findall(r"\d+", path.name)[1])):
        rank = int(re.findall(r"\d+", path.name)[0])
        found[rank] += [(int(a), float(b)) for a, b in (line.split() for line in path.read_text().splitlines())]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--run-dir", type=Path, default=Path("runs") / "soak")
    parser.add_argument("--seed", type=int, default=None, help="of the kills (none: another each time)")
    asked = parser.parse_args()
    folder = asked.run_dir.resolve() / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    chance = random.Random(asked.seed)
    apart = max(2, 2 * asked.steps // (asked.kills + 1))  # on average half of it: about all kills fall into the run
    kills = [[chance.randrange(WORLD), chance.randint(1, apart), round(chance.uniform(0, 0.3), 3)] for _ in range(asked.kills)]
    corpus = write_corpus(folder / "documents", heavy_tailed_lengths(600, longest=90))

    print(f"unbroken: {asked.steps} steps", flush=True)
    unbroken_secs, _ = run_once(folder / "unbroken", corpus, asked.steps, [])
    print(f"broken: {len(kills)} kills (rank, iterations after the start, seconds): {kills}", flush=True)
    broken_secs, said = run_once(folder / "broken", corpus, asked.steps, kills)

    expected, found = losses(folder / "unbroken"), losses(folder / "broken")
    restarts = said.count("continued from iteration") + said.count("starting from iteration 0") - 1
    different = sorted(iteration for iteration in expected if found.get(iteration) != expected[iteration])
    memory = {name: resident(folder / name) for name in ("unbroken", "broken")}
    growth = {}
    for rank, samples in memory["unbroken"].items():
        settled = [mib for iteration, mib in samples if iteration >= asked.steps // 10]
        growth[rank] = settled[-1] - settled[0]
    passed = not different and len(expected) == asked.steps and restarts > 0 and max(growth.values()) < MOST_GROWTH_MIB

    print(f"\n| | unbroken | broken |\n|---|---|---|\n| minutes | {unbroken_secs / 60:.1f} | {broken_secs / 60:.1f} |")
    print(f"| restarts | 0 | {restarts} |")
    print(f"| losses | {len(expected)} | {len(expected) - len(different)} of them with equal bits |")
    for rank in range(WORLD):
        both = [samples[rank] for samples in memory.values()]
        cells = [f"{samples[0][1]:.0f} -> {samples[-1][1]:.0f}, most {max(mib for _, mib in samples):.0f}" for samples in both]
        print(f"| rank {rank}, resident MiB, first -> last | {cells[0]} (settled: {growth[rank]:+.1f}) | {cells[1]} |")
    summary = dict(steps=asked.steps, kills=kills, restarts=restarts, different=different[:20], growth_mib=growth)
    summary["seconds"] = [unbroken_secs, broken_secs]
    (folder / "soak.json").write_text(json.dumps(summary | {"resident_mib": memory, "passed": passed}, indent=1))
    print(f"{'passed' if passed else 'FAILED'}; {folder / 'soak.json'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
