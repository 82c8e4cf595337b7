# SPDX-License-Identifier: Apache-2.0
"""Two ranks with overlap on Transformer Engine's UserBuffers, one of which plans another T for a microbatch of step 3: both leave before the exchange.

    python tests/gpu/disagreement.py

Without agreement the exchange would wait for the peer until UB_TIMEOUT (110 s). Prints what each rank said and how long after step 2 the
job was over; exit status 1 when a rank did not say it, or it took longer than 20 s.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
LIMIT_SECS = 20.0
SAID = "PlanDisagreement: the ranks disagree on step 3: T of microbatch 0 of data-parallel rank 0"


def one_rank(folder: Path) -> int:
    """A rank of the run; rank 1 has 16 rows more in the first microbatch of step 3, as another alignment rule would make it."""
    from megatron_dyn.corpus import IndexedWriter
    from megatron_dyn.planning import Planner
    from megatron_dyn.training.launch import main

    rank = int(os.environ["RANK"])
    if rank == 0:
        generator = np.random.default_rng(1)
        with IndexedWriter(folder / "documents", vocab_size=500) as writer:
            for length in generator.integers(10, 300, size=400):
                writer.add_document(generator.integers(0, 500, size=length))
        (folder / "written").touch()
    while not (folder / "written").exists():
        time.sleep(0.1)
    plan = Planner.plan

    def changed(self, step):
        made = plan(self, step)
        if step != 2 or rank != 1:
            return made
        parts = [list(part) for part in made.microbatches]
        first = parts[0][0]
        padded = first.cu_seqlens_padded.copy()
        padded[-1] += 16
        parts[0][0] = dataclasses.replace(first, T=first.T + 16, cu_seqlens_padded=padded, max_seqlen=int(np.diff(padded).max()))
        return dataclasses.replace(made, microbatches=tuple(map(tuple, parts)))

    Planner.plan = changed
    flags = (
        f"--data-path {folder / 'documents'} --vocab-size 500 --num-layers 2 --hidden-size 512 --num-attention-heads 4 --bf16 --max-tokens-per-microbatch 2048 "
        f"--global-batch-tokens 8192 --lr 1e-3 --train-iters 8 --eval-iters 0 --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap "
        f"--no-tensorboard --run-dir {folder / 'run'}"
    )
    return main(flags.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rank-in", type=Path, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.rank_in:
        return one_rank(own.rank_in)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["bash", str(HERE / "one_card.sh"), "2", str(HERE / "disagreement.py"), "--rank-in", name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
        over = time.time()
        text = ended.stdout + ended.stderr
        metrics = folder / "run" / "metrics.jsonl"
        steps = [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
        seconds = over - metrics.stat().st_mtime if steps else float("nan")
    told = [line for line in text.splitlines() if SAID in line]
    for line in told:
        print(line[:300])
    sound = ended.returncode != 0 and steps == [1, 2] and {rank for rank in (0, 1) if any(f"[rank {rank}]" in line for line in told)} == {0, 1}
    print(f"steps {steps}; the job was over {seconds:.1f} s after step 2; exit status {ended.returncode}")
    if not sound or not seconds <= LIMIT_SECS:
        print(text[-4000:])
        return 1
    print("all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
