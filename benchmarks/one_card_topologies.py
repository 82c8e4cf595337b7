# SPDX-License-Identifier: Apache-2.0
"""The same short run under several topologies on one GPU, side by side: losses and gradient norms must agree.

    python benchmarks/one_card_topologies.py --data-path PREFIX --tokenizer-model M.model

Ranks share the card over gloo, so speeds mean nothing here. bf16: values agree to about three digits, not to the bit. The last row
saves under DP=2 with the distributed optimizer and goes on under TP=2 with sequence parallelism.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS = 6
MODEL = (
    "--bf16 --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --num-query-groups 4 "
    "--untie-embeddings-and-output-weights --max-tokens-per-microbatch 4096 --global-batch-tokens 16384 --lr 2e-4 "
    f"--lr-warmup-iters 1 --train-iters {STEPS} --eval-iters 1 --eval-interval {STEPS} --no-tensorboard --split 97,3"
).split()
TENSOR = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
DISTRIBUTED = ["--use-distributed-optimizer"]


def run(ranks: int, flags: list[str], run_dir: Path) -> None:
    """One training run; raises when it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "pretrain_gpt_thd.py"]
    environment = os.environ | {"MEGATRON_DYN_DISTRIBUTED_BACKEND": "gloo" if ranks > 1 else "nccl", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    log = run_dir.with_suffix(".log")
    with log.open("w") as stream:
        ended = subprocess.run(
            [*command, *flags, "--run-dir", str(run_dir)], cwd=REPOSITORY, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
    if ended.returncode:
        raise SystemExit(f"{' '.join(flags)} failed with status {ended.returncode}:\n{log.read_text()[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--tolerance", type=float, default=5e-3, help="largest relative difference of a loss (bf16)")
    arguments = parser.parse_args()
    base = [*MODEL, "--data-path", arguments.data_path, "--tokenizer-model", arguments.tokenizer_model]
    rows: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        saved = ["--save", f"{folder}/checkpoints"]
        for name, runs in {
            "one rank": [(1, [])],
            "TP 2, SP": [(2, TENSOR)],
            "DP 2": [(2, [])],
            "DP 2, distributed optimizer": [(2, DISTRIBUTED)],
            "the same to TP 2, SP": [(2, [*DISTRIBUTED, *saved, "--exit-interval", "3"]), (2, [*DISTRIBUTED, *TENSOR, "--load", saved[1]])],
        }.items():
            run_dir = Path(folder) / f"run_{len(rows)}"
            for ranks, flags in runs:
                run(ranks, [*base, *flags], run_dir)
            records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            rows[name] = [record for record in records if "lm loss" in record]
            print(f"{name:28s}", "  ".join(f"{row['lm loss']:.4f} ({row['grad-norm']:.2f})" for row in rows[name]), flush=True)
    expected = rows["one rank"]
    worst = max(abs(row["lm loss"] / own["lm loss"] - 1) for found in rows.values() for row, own in zip(found, expected, strict=True))
    print(f"largest relative difference of a loss: {worst:.1e}")
    raise SystemExit(worst > arguments.tolerance)


if __name__ == "__main__":
    main()
