# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the corpus tests: small files made on the spot, no shared data needed."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_dyn.corpus.inputs import InputSelection
from megatron_dyn.corpus.tokenizer_training import TokenizerTrainingConfig, train_tokenizer

WORDS = "def return if else for while class import value = total ( ) : self.name None 0 1 2 the of a in to".split()


def random_text(rng: np.random.Generator, size: int) -> str:
    """Lines of words with indentation."""
    lines = []
    while sum(map(len, lines)) < size:
        lines.append("    " * int(rng.integers(0, 4)) + " ".join(rng.choice(WORDS, int(rng.integers(1, 9)))))
    return "\n".join(lines)[:size]


def raw_index(lengths, pointers, document_indices, *, code=4, magic=b"MMIDIDX\0\0", version=1, counts=None, modes=b"") -> bytes:
    """An .idx file put together by hand, independent of the writer under test."""
    sequences, indices = counts or (len(lengths), len(document_indices))
    return (
        struct.pack("<9sQBQQ", magic, version, code, sequences, indices)
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(document_indices)}q", *document_indices)
        + modes
    )


@pytest.fixture
def make_index():
    return raw_index


@pytest.fixture(scope="session")
def jsonl_file(tmp_path_factory) -> Path:
    """600 documents with heavy-tailed lengths; some are empty."""
    rng = np.random.default_rng(5)
    path = tmp_path_factory.mktemp("jsonl") / "documents.jsonl"
    with open(path, "w", encoding="utf-8", newline="\n") as stream:
        for number in range(600):
            size = 0 if number % 97 == 0 else int(rng.pareto(1.2) * 60) % 20000 + 1
            stream.write(json.dumps({"id": number, "text": random_text(rng, size)}) + "\n")
    return path


@pytest.fixture(scope="session")
def tokenizer_model(tmp_path_factory, jsonl_file) -> Path:
    """A byte-fallback model of 400 pieces."""
    prefix = tmp_path_factory.mktemp("tokenizer") / "small"
    train_tokenizer(TokenizerTrainingConfig(selection=InputSelection(inputs=[str(jsonl_file)]), model_prefix=str(prefix), vocab_size=400))
    return prefix.with_suffix(".model")
