# SPDX-License-Identifier: Apache-2.0
"""Which active shapes a registered buffer can take: one pure check, used by every way to set one.

capacity       [max_tokens, hidden]    what was allocated and registered, once
active shape   [T, hidden]             a contiguous prefix of it: the microbatch that runs now
local rows     T / tp                  what a rank holds under sequence parallelism
"""

import numbers
from typing import Sequence

FP8_LOCAL_ROWS = 16
"""Local rows of an FP8 buffer come in multiples of this: Transformer Engine transposes the T / tp local rows for the weight gradient,
where they are the inner dimension of an FP8 GEMM, which cuBLAS takes in multiples of 16 only."""


class ActiveShapeError(ValueError):
    """A shape that a buffer cannot take. The shape that was set before is untouched."""


def check_active_shape(shape: Sequence[int], *, capacity: tuple[int, int], tp_size: int, local_rows: int = 1, name: str = "") -> int:
    """Whether a buffer can take ``shape``.

    Args:
        shape: [T, hidden] in rows and elements.
        capacity: [max_tokens, hidden] of the buffer.
        tp_size: ranks that share T.
        local_rows: T / tp must be a multiple of it: 1, or `FP8_LOCAL_ROWS` for FP8 buffers.
        name: of the communicator, for the message.
    Returns:
        T.
    Raises:
        ActiveShapeError: not two whole numbers, nothing in it, beyond the capacity, another hidden size, T that TP does not
            divide, or FP8 rows that are not aligned.
    """
    try:
        rows, hidden = shape
    except (TypeError, ValueError):
        rows = hidden = None
    # The one path that a training step takes; everything else ends in a refusal, or in a number that is not Python's own.
    if type(rows) is int and 0 < rows <= capacity[0] and hidden == capacity[1] and rows % (tp_size * local_rows) == 0:
        return rows
    where = f"active shape {_shown(shape)}" + (f" for {name}" if name else "")
    if not (_is_whole(rows) and _is_whole(hidden)):
        raise ActiveShapeError(
            f"{where} is not two-dimensional: a buffer holds [tokens, hidden], in whole numbers. Flatten batch and sequence into T."
        )
    max_rows, width = capacity
    if rows <= 0 or hidden <= 0:
        raise ActiveShapeError(f"{where} is empty: there would be nothing to exchange. Leave a microbatch without tokens out of the plan.")
    if hidden != width:
        raise ActiveShapeError(
            f"{where} has {hidden} columns, but the buffer was registered for a hidden size of {width}: rows would be cut at the wrong "
            f"places. Only the number of tokens may change; register [{max_rows}, {hidden}] for another model."
        )
    if rows > max_rows:
        raise ActiveShapeError(
            f"{where} has {rows} tokens, but the buffer was registered for {max_rows}: the exchange would write {rows - max_rows} rows past "
            f"its end into a peer's memory. Plan microbatches of at most {max_rows} tokens, or initialise with [{rows}, {hidden}] or more."
        )
    if rows % tp_size:
        raise ActiveShapeError(
            f"{where}: {rows} tokens cannot be divided over {tp_size} tensor-parallel ranks ({rows % tp_size} left over): chunks would start "
            f"within a row. Pad T in the plan to a multiple of {tp_size} (PlanConfig.alignment)."
        )
    if rows // tp_size % local_rows:
        raise ActiveShapeError(
            f"{where}: {rows // tp_size} local rows are not a multiple of {local_rows}, which FP8 buffers need: the FP8 GEMM would refuse "
            f"them or read scales of other rows. Pad T in the plan to a multiple of {tp_size * local_rows} (PlanConfig.alignment)."
        )
    return int(rows)


def _is_whole(size: object) -> bool:
    return isinstance(size, numbers.Integral) and not isinstance(size, bool)


def _shown(shape: object) -> str:
    try:
        return str(list(shape))  # type: ignore[call-overload]
    except TypeError:
        return repr(shape)
