# SPDX-License-Identifier: Apache-2.0
"""Lengths computed from memory-mapped arrays when they are looked at: nothing with an entry for each document is kept.

Shapes: S sequences, D documents of a file, V documents of an epoch of several files.

| name                    | shape   | dtype | meaning                                                 |
|-------------------------|---------|-------|---------------------------------------------------------|
| pointers (mapped)       | [S]     | int64 | where each sequence begins in .bin, bytes               |
| document_indices (mapped) | [D + 1] | int64 | sequence that each document begins with               |
| starts                  | [D + 1] | int64 | where each document begins in .bin, tokens; and the end |
| lengths                 | [D]     | int64 | tokens per document                                     |
"""

import bisect
import operator
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_dyn.corpus.document_order import DocumentOrder

CHUNK = 1 << 20
"""Lengths looked at together where all are: bounds the memory, whatever the number of documents."""


class Starts:
    """Where documents begin in ``.bin``, in tokens.

    Args:
        pointers: int64 [S], bytes.
        document_indices: int64 [D + 1]; None where each document is one sequence.
        num_tokens: of the file.
        itemsize: bytes of a token: 1, 2, 4 or 8.
    """

    def __init__(self, pointers: np.ndarray, document_indices: np.ndarray | None, *, num_tokens: int, itemsize: int) -> None:
        self._pointers = pointers
        self._indices = document_indices
        self._shift = itemsize.bit_length() - 1
        self._num_tokens = num_tokens
        self._size = len(pointers) + 1 if document_indices is None else len(document_indices)

    def __len__(self) -> int:
        return self._size

    def one(self, document: int) -> int:
        """Of one document, 0 .. D."""
        sequence = document if self._indices is None else int(self._indices[document])
        return self._num_tokens if sequence == len(self._pointers) else int(self._pointers[sequence]) >> self._shift

    def between(self, begin: int, end: int) -> np.ndarray:
        """Of documents begin .. end - 1, int64 [end - begin]."""
        if self._indices is not None:
            sequences = self._indices[begin:end]
            inside = int(np.searchsorted(sequences, len(self._pointers)))  # they never fall
            found = np.full(len(sequences), self._num_tokens)
            np.right_shift(self._pointers[sequences[:inside]], self._shift, out=found[:inside])
            return found
        found = self._pointers[begin:end] >> self._shift
        return np.append(found, self._num_tokens) if end > len(self._pointers) >= begin else found

    def at(self, documents: np.ndarray) -> np.ndarray:
        """Of any documents, integers [n], each 0 .. D: int64 [n]."""
        sequences = documents if self._indices is None else self._indices[documents]
        last = len(self._pointers) - 1
        found = self._pointers[np.minimum(sequences, last)] >> self._shift
        found[sequences > last] = self._num_tokens
        return found

    def document_of(self, token: int) -> int:
        """The document that holds a token of the file: by bisection."""
        return bisect.bisect_right(range(self._size), token, key=self.one) - 1


class ComputedLengths:
    """Reads like a flat array of int64: ``len``, an integer, a slice, an array of integers. ``np.asarray`` makes it one."""

    dtype = np.dtype(np.int64)
    ndim = 1

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    @property
    def shape(self) -> tuple[int]:
        """(documents,)"""
        return (self._size,)

    def __getitem__(self, key: int | slice | np.ndarray) -> np.int64 | np.ndarray:
        if isinstance(key, slice):
            begin, end, step = key.indices(self._size)
            return self._between(begin, max(begin, end)) if step == 1 else self._at(np.arange(begin, end, step))
        if not hasattr(key, "__index__") or isinstance(key, np.ndarray) and key.ndim:
            places = np.asarray(key)
            if places.size and places.dtype.kind not in "iu":
                raise IndexError(f"lengths are looked up by integers, not by {places.dtype}")
            places = places.astype(np.int64, copy=False)
            if places.size and not -self._size <= places.min() <= places.max() < self._size:
                raise IndexError(f"documents {places.min()} to {places.max()} asked for, of {self._size}")
            places = np.where(places < 0, places + self._size, places)
            return self._at(places.reshape(-1)).reshape(places.shape)
        place = operator.index(key)
        if not -self._size <= place < self._size:
            raise IndexError(f"document {place} asked for, of {self._size}")
        return np.int64(self._one(place % self._size))

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self._between(0, self._size).astype(dtype or self.dtype, copy=False)

    def _one(self, place: int) -> int:
        raise NotImplementedError

    def _between(self, begin: int, end: int) -> np.ndarray:
        raise NotImplementedError

    def _at(self, places: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class LengthsOfSequences(ComputedLengths):
    """Of the documents of one file that have any number of sequences each: these lie in ``.bin`` without gaps."""

    def __init__(self, starts: Starts) -> None:
        super().__init__(len(starts) - 1)
        self._starts = starts

    def _one(self, place: int) -> int:
        return self._starts.one(place + 1) - self._starts.one(place)

    def _between(self, begin: int, end: int) -> np.ndarray:
        return np.diff(self._starts.between(begin, end + 1))

    def _at(self, places: np.ndarray) -> np.ndarray:
        return self._starts.at(places + 1) - self._starts.at(places)


class LengthsInOrder(ComputedLengths):
    """Of the documents of an epoch.

    Args:
        order: which document of which file each is.
        lengths: of each file.
    """

    def __init__(self, order: DocumentOrder, lengths: Sequence[np.ndarray | ComputedLengths]) -> None:
        super().__init__(len(order))
        self._order = order
        self._lengths = list(lengths)

    def _one(self, place: int) -> int:
        file, document = self._order.one(place)
        return int(self._lengths[file][document])

    def _between(self, begin: int, end: int) -> np.ndarray:
        stretches = self._order.stretches(begin, end)
        if stretches is None:
            return self._gather(self._order.files(begin, end), self._order.documents(begin, end))
        parts = [np.asarray(self._lengths[file][first:last], dtype=np.int64) for file, first, last in stretches]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def _at(self, places: np.ndarray) -> np.ndarray:
        return self._gather(*self._order.at(places))

    def _gather(self, files: np.ndarray, documents: np.ndarray) -> np.ndarray:
        if len(self._lengths) == 1:
            return self._lengths[0][documents].astype(np.int64, copy=False)
        found = np.empty(len(documents), dtype=np.int64)
        for file in np.flatnonzero(np.bincount(files)).tolist():
            mine = files == file
            found[mine] = self._lengths[file][documents[mine]]
        return found


def chunks(lengths: np.ndarray | ComputedLengths) -> Iterator[np.ndarray]:
    """All lengths in order, integer [at most CHUNK] each."""
    for begin in range(0, len(lengths), CHUNK):
        yield lengths[begin : begin + CHUNK]
