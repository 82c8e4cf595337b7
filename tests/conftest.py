# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by every test."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with public corpora, tokenizers and fault cases that lies beside the repository."""
    folder = Path(os.environ.get("MEGATRON_DYN_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder} (set MEGATRON_DYN_SHARED)")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu` tests, with the reason, on a machine without a CUDA device."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # here, so that collecting a room without GPU tests does not pay for it

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here"))
