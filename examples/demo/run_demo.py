# SPDX-License-Identifier: Apache-2.0
"""The main job on this machine's own documents: the Python standard library's source files, one document a file.

    1. tokenizer   sentencepiece, vocabulary 4,000, trained on the same files
    2. preprocess  files -> Megatron .bin/.idx
    3. train       two ranks, TP=2 with sequence parallelism, microbatches of variable T
    4. look        RUN_DIR/plot.png, packing.png, summary.json, metrics.jsonl, tensorboard/, checkpoints/

Nothing is downloaded. Each part is one command, printed before it runs.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 2
# What is not source: installed packages, test data that is broken on purpose, and a generated file of help texts.
EXCLUDED = ("pydoc_data/*", "site-packages/*", "dist-packages/*", "**/site-packages/*", "**/lib2to3/tests/data/*", "test/*", "**/test/*", "**/tests/*")


def run(title: str, command: list[str]) -> None:
    """Run one command from the repository's root; leave with its status if it fails."""
    print(f"\n== {title}\n$ {shlex.join(command)}", flush=True)
    started = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": str(REPOSITORY)}
    status = subprocess.run(command, cwd=REPOSITORY, env=environment).returncode
    if status:
        print(f"demo: '{title}' failed with status {status}", file=sys.stderr)
        raise SystemExit(status)
    print(f"   ({time.perf_counter() - started:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", default="runs/demo", help="folder for everything the demo makes; an earlier demo there is replaced")
    parser.add_argument("--vocab-size", type=int, default=4000)
    parser.add_argument("train_flags", nargs="*", metavar="-- FLAGS", help="more flags of pretrain_gpt_thd.py, after --")
    arguments = parser.parse_args()

    run_dir = (Path.cwd() / arguments.run_dir).resolve()
    marker = run_dir / ".megatron-dyn-demo"
    if run_dir.exists() and any(run_dir.iterdir()) and not marker.exists():
        parser.error(f"{run_dir} holds other files: name an empty folder")
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    marker.touch()
    data = run_dir / "data"
    data.mkdir()
    library = sysconfig.get_paths()["stdlib"]
    excluded = [part for pattern in EXCLUDED for part in ("--exclude", pattern)]
    documents = ["--input", library, "--glob", "**/*.py", *excluded]
    package = [sys.executable, "-m", "megatron_dyn"]

    run("train the tokenizer", [*package, "tokenizer", "train", *documents, "--vocab-size", str(arguments.vocab_size), "--model-prefix", str(data / "tokenizer")])
    run(
        "make the corpus",
        [*package, "preprocess", *documents, "--tokenizer-model", str(data / "tokenizer.model"), "--append-eod"]
        + ["--output-prefix", str(data / "stdlib"), "--workers", "2", "--on-bad-record", "skip"],
    )
    run(
        f"train on {RANKS} ranks",
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "pretrain_gpt_thd.py"]
        + ["--config", str(Path("examples") / "demo" / "demo.yaml")]
        + ["--data-path", str(data / "stdlib"), "--tokenizer-model", str(data / "tokenizer.model")]
        + ["--save", str(run_dir / "checkpoints"), "--run-dir", str(run_dir), *arguments.train_flags],
    )
    print(f"\nLook at {run_dir / 'plot.png'} (loss, and T of every microbatch) and {run_dir / 'packing.png'} (one step, packed).")


if __name__ == "__main__":
    main()
