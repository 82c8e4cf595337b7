# SPDX-License-Identifier: Apache-2.0
"""Quantization modes of the buffers, with Transformer Engine's names and values, so that either's enum is accepted."""

from enum import Enum
from typing import Iterable


class UserBufferQuantizationMode(Enum):
    """What a set of communicators carries: GEMM operands as they are, or in FP8."""

    NONE = "none"
    FP8 = "fp8"


def quantization_modes(modes: Iterable[object] | None) -> list[UserBufferQuantizationMode]:
    """The modes asked for: this enum, Transformer Engine's, or the words "none" and "fp8". None stands for unquantized.

    Raises:
        ValueError: none at all, an unknown one, or one twice.
    """
    asked = [UserBufferQuantizationMode.NONE] if modes is None else [_mode(mode) for mode in modes]
    if not asked or len(set(asked)) != len(asked):
        raise ValueError(f"quantization_modes {[m.value for m in asked]}: give each of 'none' and 'fp8' at most once, and at least one.")
    return asked


def _mode(mode: object) -> UserBufferQuantizationMode:
    try:
        return UserBufferQuantizationMode(getattr(mode, "value", mode))
    except ValueError:
        raise ValueError(f"quantization mode {mode!r} is not known: use UserBufferQuantizationMode.NONE or .FP8.") from None
