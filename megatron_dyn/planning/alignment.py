# SPDX-License-Identifier: Apache-2.0
"""The one rule for the length T of a microbatch: which multiple it must be, and why.

| who asks                                    | T must be a multiple of        |
|---------------------------------------------|--------------------------------|
| sequence parallelism (and UserBuffers)      | tp                             |
| context parallelism (two chunks a rank)     | 2 * cp (* tp with SP)          |
| FP8 matrix products                         | 16 rows on each rank that holds a shard |
| fewer distinct shapes (a token bucket)      | the bucket, rounded up to all of these  |

Context parallelism also cuts every *document* into `2 * cp` chunks, see :func:`document_alignment_for`.
"""

import math

FP8_ROWS = 16
"""FP8 tensors want local rows in multiples of 16 (Transformer Engine, `assert_dim_for_fp8_exec` and its UserBuffers)."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value` (also element by element on integer arrays)."""
    return -(-value // multiple) * multiple


def alignment_for(
    *, tensor_parallel: int, context_parallel: int = 1, sequence_parallel: bool, fp8: bool = False, token_bucket: int = 1
) -> int:
    """Multiple that T, the padded length of a microbatch in tokens, must be.

    Args:
        tensor_parallel: tensor-parallel ranks.
        context_parallel: context-parallel ranks. Load-balanced causal attention gives each rank two chunks
            (Transformer Engine's `thd` context parallelism), hence the factor 2.
        sequence_parallel: whether activations between tensor-parallel regions are split by rows over those ranks.
        fp8: whether matrix products run in FP8.
        token_bucket: at least this many tokens lie between two values of T, rounded up to what the others ask for; bounds the number
            of distinct shapes.

    Raises:
        ValueError: a size is below 1.
    """
    if tensor_parallel < 1 or context_parallel < 1:
        raise ValueError(
            f"parallel sizes must be at least 1, got tensor_parallel={tensor_parallel}, "
            f"context_parallel={context_parallel}: no length T would be legal; pass the sizes of the process groups"
        )
    row_shards = context_parallel * (tensor_parallel if sequence_parallel else 1)
    chunks = row_shards if context_parallel == 1 else 2 * row_shards
    if token_bucket < 1:
        raise ValueError(f"token_bucket is {token_bucket}: T cannot be a multiple of it; give at least 1")
    return round_up(token_bucket, math.lcm(chunks, FP8_ROWS * row_shards) if fp8 else chunks)


def document_alignment_for(*, context_parallel: int = 1) -> int:
    """Multiple that the padded length of each *piece* must be: `2 * cp` under context parallelism, else 1."""
    if context_parallel < 1:
        raise ValueError(f"context_parallel must be at least 1, got {context_parallel}: pass the size of the process group")
    return 1 if context_parallel == 1 else 2 * context_parallel
