# SPDX-License-Identifier: Apache-2.0
"""Pieces -> bins under a second cap: the sum of squared lengths, which bounds what attention takes.

Shapes: p pieces, M bins. `weight` and `squares` are int64 [p] and fall together.
"""

import numpy as np

from megatron_dyn.planning.packing import Caps, fill_empty_bins, longest_first


def squares_of_fullest_bin(bin_of: np.ndarray, squares: np.ndarray) -> int:
    """The largest sum of squares of a bin."""
    total = np.zeros(int(bin_of.max()) + 1, dtype=np.int64)
    np.add.at(total, bin_of, squares)
    return int(total.max())


def pack_under_squares(weight: np.ndarray, squares: np.ndarray, *, caps: Caps, multiple: int, at_least: int) -> tuple[np.ndarray, int]:
    """Divide pieces over few bins, a multiple of `multiple`, none above any of the caps.

    Each piece, longest first, goes to the bin with the smallest sum of squares that has room for it. More bins are tried until that
    fits: in growing steps, then between the last that failed and the first that did not. As many bins as pieces always do.

    Args:
        weight: int64 [p], falling, each in 1..caps.weight.
        squares: int64 [p], each in 1..caps.squares.
        at_least: bins to begin with, a multiple.

    Returns:
        The bin of each piece, int64 [p], and the number of bins. No bin is empty unless there are fewer pieces than bins.
    """

    def fitting(groups: int) -> np.ndarray | None:
        bin_of = longest_first(weight, squares, groups * multiple, caps)
        return None if bin_of is None or squares_of_fullest_bin(bin_of, squares) > caps.squares else bin_of

    mean = -(-int(squares.sum()) // caps.squares)
    groups = max(at_least, mean + -mean % multiple) // multiple
    failed, step = groups - 1, 1
    while (found := fitting(groups)) is None:
        failed, groups, step = groups, groups + step, 2 * step
    while groups - failed > 1:
        between = (failed + groups) // 2
        fewer = fitting(between)
        if fewer is None:
            failed = between
        else:
            groups, found = between, fewer
    return fill_empty_bins(found, squares, groups * multiple), groups * multiple
