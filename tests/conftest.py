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
