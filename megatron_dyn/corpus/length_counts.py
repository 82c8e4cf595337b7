# SPDX-License-Identifier: Apache-2.0
"""How many documents there are of each length: what quantiles and histograms need, in memory that does not grow with the documents."""

from collections.abc import Sequence

import numpy as np

from megatron_dyn.corpus.computed_lengths import ComputedLengths, chunks

COUNTED = 1 << 20
"""Lengths below it are counted; longer documents, of a million tokens each, are few enough to be listed."""


class LengthCounts:
    """One pass over the lengths.

    Args:
        lengths: integer [D], none negative.
        empty: count empty documents, too.

    Attributes:
        lengths: int64 [n], those that occur, rising.
        counts: int64 [n], documents of each.
    """

    def __init__(self, lengths: np.ndarray | ComputedLengths, *, empty: bool = True) -> None:
        counts, longer = np.zeros(COUNTED, dtype=np.int64), [np.zeros(0, dtype=np.int64)]
        for chunk in chunks(lengths):
            if int(chunk.max()) >= COUNTED:
                longer.append(chunk[chunk >= COUNTED].astype(np.int64))
                chunk = chunk[chunk < COUNTED]
            found = np.bincount(chunk)
            counts[: len(found)] += found
        if not empty:
            counts[0] = 0
        short = np.flatnonzero(counts)
        long, times = np.unique(np.concatenate(longer), return_counts=True)
        self.lengths = np.concatenate((short, long))
        self.counts = np.concatenate((counts[short], times))

    @property
    def documents(self) -> int:
        """How many were counted."""
        return int(self.counts.sum())

    def ranked(self, ranks: Sequence[int] | np.ndarray) -> np.ndarray:
        """Lengths at places 0 .. documents - 1 of the sorted list, int64 [n]."""
        return self.lengths[np.searchsorted(np.cumsum(self.counts), ranks, side="right")]

    def quantiles(self, shares: Sequence[float], *, method: str = "linear") -> np.ndarray:
        """As ``np.quantile`` of all lengths with the same method, "linear" or "lower": float64 or int64 [n].

        Raises:
            ValueError: another method, or no document.
        """
        if method not in ("linear", "lower") or not len(self.lengths):
            raise ValueError(f"method {method!r} of {self.documents} lengths: linear and lower are known, of one length at least")
        place = (self.documents - 1) * np.asarray(shares, dtype=np.float64)
        below = np.floor(place).astype(np.int64)
        low = self.ranked(below)
        if method == "lower":
            return low
        return low + (self.ranked(np.minimum(below + 1, self.documents - 1)) - low) * (place - below)
