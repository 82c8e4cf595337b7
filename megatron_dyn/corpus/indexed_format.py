# SPDX-License-Identifier: Apache-2.0
"""Megatron's ``.bin/.idx`` layout, shared by the reader and the writer.

All numbers are little-endian. Source: ``megatron.core.datasets.indexed_dataset``.

| part of .idx        | bytes | type                                                          |
|---------------------|-------|---------------------------------------------------------------|
| magic               | 9     | ``MMIDIDX\\0\\0``                                             |
| version             | 8     | uint64, 1                                                     |
| dtype code          | 1     | uint8, see `DTYPE_BY_CODE`                                    |
| sequences S         | 8     | uint64                                                        |
| document indices N  | 8     | uint64, one more than there are documents                     |
| sequence lengths    | 4 * S | int32, tokens                                                 |
| sequence pointers   | 8 * S | int64, bytes into .bin: pointer[i+1] = pointer[i] + bytes[i]  |
| document indices    | 8 * N | int64, sequences: first 0, last S, never falling              |
| modes (multimodal)  | S     | int8, optional                                                |
"""

import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
MAX_SEQUENCE_TOKENS = 2**31 - 1

DTYPE_BY_CODE = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_BY_DTYPE = {dtype: code for code, dtype in DTYPE_BY_CODE.items() if dtype.kind in "iu"}


def dtype_for_vocabulary(vocab_size: int) -> np.dtype:
    """The token dtype Megatron chooses for a vocabulary (``DType.optimal_dtype``): uint16 below 65500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str) -> Path:
    """The token file of a prefix."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str) -> Path:
    """The index file of a prefix."""
    return Path(f"{prefix}.idx")


def partial_path(path: Path) -> Path:
    """Where a file is written until it is complete."""
    return path.with_name(path.name + ".partial")
