# SPDX-License-Identifier: Apache-2.0
"""Which document of which file an epoch has at a place: computed, but for the order of a weighted blend, which takes 4 bytes a document.

Shapes: F files, V documents of an epoch.

| name      | shape   | dtype | meaning                                                                    |
|-----------|---------|-------|----------------------------------------------------------------------------|
| ranges    | [F][2]  | int   | documents [first, last) of each file                                       |
| bounds    | [F + 1] | int64 | documents of the files before, one file after the other                    |
| order     | [V]     | int32 | place in the files one after the other; None: that is the order of an epoch |
"""

import bisect
from collections.abc import Sequence

import numpy as np

FEW = 8
"""Files up to which comparing with each bound is quicker than bisection."""


class DocumentOrder:
    """An epoch's documents.

    Args:
        ranges: documents [first, last) of each file.
        order: see above.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], order: np.ndarray | None = None) -> None:
        self._firsts = [int(first) for first, _ in ranges]
        self._bounds = [0]
        for first, last in ranges:
            self._bounds.append(self._bounds[-1] + int(last) - int(first))
        self._order = order

    def __len__(self) -> int:
        return self._bounds[-1] if self._order is None else len(self._order)

    def one(self, place: int) -> tuple[int, int]:
        """(file, document of that file) at a place."""
        if self._order is not None:
            place = int(self._order[place])
        file = bisect.bisect_right(self._bounds, place) - 1
        return file, place - self._bounds[file] + self._firsts[file]

    def at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Files and their documents at any places, int64 [n] each."""
        if self._order is not None:
            places = self._order[places]
        files = self._files_of(places)
        return files, self._documents_of(places, files)

    def files(self, begin: int, end: int) -> np.ndarray:
        """At places begin .. end - 1, begin < end: int64 [end - begin]."""
        stretches = self.stretches(begin, end)
        if stretches is None:
            return self._files_of(self._order[begin:end])
        return np.repeat([file for file, _, _ in stretches], [last - first for _, first, last in stretches])

    def documents(self, begin: int, end: int) -> np.ndarray:
        """Numbers within their files, at places begin .. end - 1, begin < end: int64 [end - begin]."""
        stretches = self.stretches(begin, end)
        if stretches is None:
            places = self._order[begin:end]
            return self._documents_of(places, self._files_of(places))
        parts = [np.arange(first, last, dtype=np.int64) for _, first, last in stretches]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def stretches(self, begin: int, end: int) -> list[tuple[int, int, int]] | None:
        """(file, first, last): the documents [first, last) of each file at places begin .. end - 1; None where they are in no such order."""
        if self._order is not None:
            return None
        found = []
        for file, first in enumerate(self._firsts):
            low, high = max(begin, self._bounds[file]), min(end, self._bounds[file + 1])
            if low < high:
                found.append((file, low - self._bounds[file] + first, high - self._bounds[file] + first))
        return found

    def _files_of(self, places: np.ndarray) -> np.ndarray:
        if len(self._firsts) == 1:
            return np.zeros(len(places), dtype=np.int64)
        if len(self._firsts) > FEW:
            return np.searchsorted(self._bounds, places, side="right") - 1
        files = np.zeros(len(places), dtype=np.int64)
        for bound in self._bounds[1:-1]:
            files += places >= bound
        return files

    def _documents_of(self, places: np.ndarray, files: np.ndarray) -> np.ndarray:
        return places + (np.asarray(self._firsts) - self._bounds[:-1])[files]
