# SPDX-License-Identifier: Apache-2.0
"""Runs written by hand."""

import json

import numpy as np

from megatron_dyn.training.metrics_file import strict_json

STEPS = 60


def write_run(
    folder, *, seed=1, way="dynamic", bf16=False, resumed=(), corpus="c", change=lambda loss: loss, norm=1.0, held_out=lambda loss: loss, speed=1.0,
    steps=STEPS, digest="d", dropped=0, leave_out=(), tp=1, layers=2, lr=1.0, train_iters=None, ranks=1, data_path=None,
):  # fmt: skip
    """A run of `steps` steps; `change` and `held_out` are applied to the losses that the seed gives."""
    folder.mkdir(parents=True)
    settings = {
        "model": {"num_layers": layers, "hidden_size": 8}, "training": {"seed": seed, "bf16": bf16, "train_iters": train_iters}, "fp8": {"fp8": None},
        "data": {"microbatching": way, "max_tokens_per_microbatch": 64, "data_path": data_path},
        "logging": {"run_dir": str(folder)}, "checkpoint": {"save": str(folder)},
        "optimizer": {"lr": lr}, "parallel": {"tensor_model_parallel_size": tp, "data_timeout_secs": seed},
    }  # fmt: skip
    about = {
        "settings": settings, "documents": {"train": corpus}, "parameters": 10, "parallel": {"TP": ranks, "SP": 0, "PP": 1, "VPP": 1, "DP": 1},
        "operations": {"linear": 1e9, "quadratic": 1e6}, "resumed": list(resumed), "device": "none",
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(about))
    generator = np.random.default_rng(seed)
    loss = change(4 * np.exp(-np.arange(steps) / 30) + 2 + 0.05 * generator.standard_normal(steps))
    with (folder / "metrics.jsonl").open("w") as file:
        for index, value in enumerate(loss.tolist()):
            if index + 1 in leave_out:
                continue
            record = {
                "iteration": index + 1, "lm loss": value, "grad-norm": norm * (2 + index % 3), "step-time": 0.5 / speed, "num-tokens": 100, "T": [64, 64],
                "squared-tokens": 5000, "documents-digest": f"{digest}{seed}.{index}", "dropped-documents": dropped,
            }  # fmt: skip
            file.write(strict_json(record) + "\n")
            if (index + 1) % 20 == 0:
                told = {"validation lm loss": float(held_out(value)), "validation ppl": 1, "validation-tokens": 9}
                told |= {"validation-documents": 2, "validation-time": 0.1}
                file.write(strict_json({"iteration": index + 1, **told}) + "\n")
    return folder


def three_seeds(tmp_path, arm, **changes):
    return [write_run(tmp_path / f"{arm}{seed}", seed=seed, bf16=True, **changes) for seed in (1, 2, 3)]
