# SPDX-License-Identifier: Apache-2.0
"""The ways of grouping that users come from, as real options: the same documents a step, the same pieces, the same loss.

| `microbatching` | microbatches                                             | rows of a piece                          | T           |
|-----------------|----------------------------------------------------------|------------------------------------------|-------------|
| dynamic         | planned                                                  | its length                               | sum, aligned|
| packed-fixed    | planned                                                  | its length                               | capacity    |
| fixed-count     | in order, `documents_per_microbatch` pieces, or as many as fit   | the longest of the microbatch            | sum, aligned|
| pad-to-max      | in order, as many as fit                                 | the corpus's longest document, at most B | sum, aligned|
| concat-chunk    | documents joined, cut every B tokens (table.py): other data | -                                     | sum, aligned|

None exceeds B, so all can be run in the same memory. Rows behind a piece's tokens are padding: no loss, and no attention either, which
a [batch, length] layout would compute; so the padded ways are a little faster here than where they come from.
"""

import numpy as np

from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.config import PlanConfig

IN_ORDER = ("fixed-count", "pad-to-max")


def group_in_order(length: np.ndarray, config: PlanConfig, longest: int) -> tuple[np.ndarray, int]:
    """Microbatch of each piece in rank-major numbering, int64 [p], and K. Microbatches are dealt to the ranks in turn.

    Args:
        length: tokens of the pieces in the order of the step, int64 [p].
        longest: tokens of the longest piece there can be.
    """
    budget, squares_cap = config.max_tokens_per_microbatch, config.max_sum_squares_per_microbatch
    pieces_cap = config.max_documents_per_microbatch or max(len(length), 1)
    if config.microbatching == "fixed-count":
        pieces_cap = min(pieces_cap, config.documents_per_microbatch)
    pad_to = longest if config.microbatching == "pad-to-max" else 1
    group_of, group, count, widest, squares = [], -1, 0, 0, 0
    for tokens in length.tolist():
        width = max(widest, round_up(max(tokens, pad_to), config.document_alignment))
        fits = group >= 0 and count < pieces_cap and (count + 1) * width <= budget
        if not fits or (squares_cap is not None and squares + tokens * tokens > squares_cap):
            group, count, squares = group + 1, 0, 0
            width = round_up(max(tokens, pad_to), config.document_alignment)
        group_of.append(group)
        count, widest, squares = count + 1, width, squares + tokens * tokens
    ranks = config.data_parallel_size
    per_rank = max(round_up(-(-(group + 1) // ranks), config.microbatch_multiple), config.microbatch_multiple)
    group_of = np.asarray(group_of, dtype=np.int64)
    return group_of % ranks * per_rank + group_of // ranks, per_rank


def slots(length: np.ndarray, count: np.ndarray, config: PlanConfig, longest: int) -> np.ndarray:
    """Rows of each piece, before the microbatch is padded at its end, int64 [p].

    Args:
        length: tokens of the pieces, those of one microbatch next to each other, int64 [p].
        count: pieces of each microbatch, int64 [M].
        longest: tokens of the longest piece there can be.
    """
    if config.microbatching == "pad-to-max":
        return np.full_like(length, round_up(longest, config.document_alignment))
    rows = round_up(length, config.document_alignment)
    if config.microbatching == "fixed-count" and len(length):
        count = count[count > 0]
        return np.repeat(np.maximum.reduceat(rows, np.cumsum(count) - count), count)
    return rows
