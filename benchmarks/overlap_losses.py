# SPDX-License-Identifier: Apache-2.0
"""The same 30 steps on real documents with and without communication overlap, padded and not, in bf16 and FP8: one loss curve each.

    python benchmarks/overlap_losses.py --data-path PREFIX --tokenizer-model M.model --output DIR            # ranks share one GPU
    python benchmarks/overlap_losses.py --data-path PREFIX --tokenizer-model M.model --output DIR --launcher torchrun

What bf16 rounding alone does is seen from one rank against two: the same steps, sums in another order. Exit status 1 when the loss of
a run with overlap is further from that without than twice this noise. Writes losses.json and losses.png.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --num-query-groups 4 --bf16 "
    "--untie-embeddings-and-output-weights --max-tokens-per-microbatch 4096 --global-batch-tokens 8192 --lr 3e-4 --lr-warmup-iters 4 "
    "--eval-iters 0 --no-tensorboard --split 97,3"
).split()
TENSOR, OVERLAP, FP8 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"], ["--tp-comm-overlap"], ["--fp8", "hybrid"]
RUNS: dict[str, tuple[int, list[str], str | None]] = {  # name -> ranks, flags, the run it is compared with
    "one rank": (1, ["--no-gradient-accumulation-fusion"], None),
    "TP 2": (2, [*TENSOR, "--no-gradient-accumulation-fusion"], "one rank"),
    "TP 2, overlap": (2, [*TENSOR, *OVERLAP], "TP 2"),
    "TP 2, overlap, padded": (2, [*TENSOR, *OVERLAP, "--microbatching", "packed-fixed"], "TP 2"),
    "TP 2, FP8": (2, [*TENSOR, *FP8], None),
    "TP 2, FP8, overlap": (2, [*TENSOR, *FP8, *OVERLAP], "TP 2, FP8"),
}


def run(launcher: list[str], flags: list[str], run_dir: Path) -> tuple[list[float], list[float], float]:
    """Losses, gradient norms, and real tokens a second (median step). Raises when the run fails."""
    log = run_dir.with_suffix(".log")
    with log.open("w") as stream:
        command = [*launcher, "pretrain_gpt_thd.py", *flags, "--run-dir", str(run_dir)]
        ended = subprocess.run(command, cwd=REPOSITORY, stdout=stream, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {ended.returncode}:\n{log.read_text()[-3000:]}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "lm loss" in record]
    speed = sorted(record["tokens-per-second"] for record in steps)[len(steps) // 2]
    return [record["lm loss"] for record in steps], [record["grad-norm"] for record in steps], speed


def draw(losses: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    for (name, values), style in zip(losses.items(), ("-", "--", "-.", ":", "-", "--")):
        top.plot(range(1, len(values) + 1), values, style, label=name, linewidth=1.6)
    for name, (_, _, against) in RUNS.items():
        if against in losses and name in losses:
            difference = [abs(a / b - 1) for a, b in zip(losses[name], losses[against])]
            bottom.semilogy(range(1, len(difference) + 1), difference, label=f"{name} against {against}")
    top.set_ylabel("lm loss")
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    bottom.set_ylim(bottom=1e-8)
    for axis, columns, place in ((top, 1, "upper right"), (bottom, 2, "lower center")):
        axis.legend(fontsize=8, ncols=columns, loc=place)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--launcher", choices=("one_card", "torchrun"), default="one_card")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    base = [*MODEL, "--train-iters", str(arguments.steps), "--data-path", arguments.data_path, "--tokenizer-model", arguments.tokenizer_model]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    losses, norms = {}, {}
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for name, (ranks, flags, _) in RUNS.items():
        launcher = ["bash", "tests/gpu/one_card.sh", str(ranks)] if arguments.launcher == "one_card" and ranks > 1 else [*torchrun, str(ranks)]
        losses[name], norms[name], speed = run(launcher, [*base, *flags], arguments.output / f"run_{len(losses)}")
        print(f"{name:24s}", " ".join(f"{value:.4f}" for value in losses[name][:: max(arguments.steps // 6, 1)]), f"| {speed:,.0f} tokens/s", flush=True)
    (arguments.output / "losses.json").write_text(json.dumps({"losses": losses, "grad-norms": norms}))
    draw(losses, arguments.output / "losses.png")
    apart = {name: max(abs(a / b - 1) for a, b in zip(losses[name], losses[other])) for name, (_, _, other) in RUNS.items() if other}
    for name, value in apart.items():
        print(f"largest relative difference of a loss, {name} against {RUNS[name][2]}: {value:.1e}")
    noise = apart.pop("TP 2")
    raise SystemExit(any(value > 2 * noise for name, value in apart.items() if "FP8" not in name))


if __name__ == "__main__":
    main()
