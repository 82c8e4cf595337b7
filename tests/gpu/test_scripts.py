# SPDX-License-Identifier: Apache-2.0
"""The scripts of this folder, shortened, as tests: on one GPU two ranks share it, with more each rank has its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]


def test_another_T_on_one_rank_ends_both_before_the_exchange():
    ended = subprocess.run([sys.executable, str(HERE / "disagreement.py")], cwd=HERE.parents[1], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0 and "all right" in ended.stdout, ended.stdout[-4000:] + ended.stderr[-2000:]


@pytest.mark.parametrize(
    "script, arguments",
    [
        ("overlap_values.py", ["--steps", "40", "--precision", "bf16", "fp8 delayed"]),
        ("layout_fence.py", ["--calls", "60"]),
        ("whole_model.py", ["--steps", "10"]),
    ],
)
def test_the_script_finds_everything_right(script, arguments):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    alone = torch.cuda.device_count() < 2
    launcher = ["bash", str(HERE / "one_card.sh")] if alone else torchrun
    environment = os.environ | {"TURNS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ended = subprocess.run(
        [*launcher, "2", str(HERE / script), *arguments], cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0 and "all right" in ended.stdout, ended.stdout[-4000:] + ended.stderr[-2000:]
