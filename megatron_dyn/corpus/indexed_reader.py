# SPDX-License-Identifier: Apache-2.0
"""A strict, memory-mapped reader of Megatron's ``.bin/.idx`` files.

The stock reader opens many broken files in silence (and a short ``.bin`` then yields uninitialised memory). Here every count
of the header is compared with the size of the file before anything of that size is made, and every entry of the index is checked at open.
Nothing with an entry for each document is kept: lengths and offsets are read from the map, or computed from it, when they are asked for.

| name        | shape | dtype            | meaning                                              |
|-------------|-------|------------------|------------------------------------------------------|
| lengths     | [D]   | integer          | tokens per document, all its sequences together      |
| .bin tokens | [n]   | as the file says | documents one after the other, without gaps          |
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np

from megatron_dyn.corpus.computed_lengths import ComputedLengths, LengthsOfSequences, Starts
from megatron_dyn.corpus.errors import CorpusError
from megatron_dyn.corpus.indexed_format import DTYPE_BY_CODE, HEADER, MAGIC, VERSION, bin_path, idx_path, partial_path
from megatron_dyn.corpus.steady_file import SteadyFile

SCAN_AT_OPEN_BYTES = 1 << 30
CHECK_CHUNK = 1 << 16  # entries looked at together: their arrays stay in the processor's cache, whatever the file's size
SCAN_CHUNK = 1 << 22
SAMPLE_BYTES = 1 << 16
NUM_SAMPLES = 256


@dataclass(frozen=True, kw_only=True)
class _Index:
    """The memory-mapped arrays of an ``.idx`` file, checked."""

    dtype: np.dtype
    lengths: np.ndarray  # [S] int32
    pointers: np.ndarray  # [S] int64
    document_indices: np.ndarray | None  # [N] int64; None: each document is one sequence
    modes: np.ndarray | None  # [S] int8


def _refuse(path: Path, entry: str, found: object, expected: object, hint: str = "") -> NoReturn:
    raise CorpusError(f"{path}: {entry}: found {found}, expected {expected}" + (f". {hint}" if hint else ""))


def _open_size(path: Path, prefix: str) -> int:
    """Size of a regular file in bytes; explains a missing one."""
    try:
        size = os.stat(path).st_size
        if not path.is_file():
            raise CorpusError(f"{path}: not a regular file, so it cannot hold a corpus")
        return size
    except OSError as error:
        hint = f"give the prefix of the pair {prefix}.bin and {prefix}.idx"
        if prefix.endswith((".bin", ".idx")):
            hint = f"give the prefix without its ending: {prefix[:-4]}"
        elif any(partial_path(p).exists() for p in (bin_path(prefix), idx_path(prefix))):
            hint = f"{partial_path(bin_path(prefix))} is of an unfinished or interrupted `preprocess`: run it again"
        raise CorpusError(f"{path}: cannot be opened ({error.strerror}); {hint}") from error


def _read_index(prefix: str, *, tokens: bool) -> _Index:
    path, tokens_path = idx_path(prefix), bin_path(prefix)
    size = _open_size(path, prefix)
    bin_size = _open_size(tokens_path, prefix) if tokens else None
    if size < HEADER.size:
        _refuse(path, "file size", f"{size} bytes", f"at least the {HEADER.size} bytes of a header")
    try:
        with open(path, "rb") as stream:
            header = stream.read(HEADER.size)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror})") from error
    magic, version, code, sequences, indices = HEADER.unpack(header)
    if magic != MAGIC:
        _refuse(path, "magic (bytes 0-8)", magic, MAGIC, "This is not a Megatron index")
    if version != VERSION:
        _refuse(path, "version (bytes 9-16)", version, VERSION)
    dtype = DTYPE_BY_CODE.get(code)
    if dtype is None or dtype.kind == "f":
        name = "an unknown code" if dtype is None else dtype.name
        _refuse(path, "dtype code (byte 17)", f"{code} ({name})", "an integer type: 1, 2, 3, 4, 5 or 8")
    if sequences == 0:
        _refuse(path, "number of sequences (bytes 18-25)", 0, "at least 1", "The corpus is empty: preprocess it again")
    if indices < 2:
        _refuse(path, "number of document indices (bytes 26-33)", indices, "at least 2 (one document)")
    text_size = HEADER.size + 12 * sequences + 8 * indices
    if size not in (text_size, text_size + sequences):
        _refuse(
            path,
            "file size",
            f"{size} bytes",
            f"{text_size} bytes ({text_size + sequences} with modes) for the {sequences} sequences and {indices} document indices of its header",
            "The file was cut or its header damaged",
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r", shape=(size,))
    starts = np.cumsum([HEADER.size, 4 * sequences, 8 * sequences, 8 * indices])
    lengths, pointers = np.frombuffer(raw, "<i4", sequences, starts[0]), np.frombuffer(raw, "<i8", sequences, starts[1])
    document_indices = np.frombuffer(raw, "<i8", indices, starts[2])
    _check_sequences(path, lengths, pointers, dtype.itemsize, tokens_path, bin_size)
    one_each = _check_document_indices(path, document_indices, sequences)
    return _Index(
        dtype=dtype,
        lengths=lengths,
        pointers=pointers,
        document_indices=None if one_each else document_indices,
        modes=np.frombuffer(raw, "i1", sequences, starts[3]) if size > text_size else None,
    )


def _check_sequences(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, tokens_path: Path, bin_size: int | None) -> None:
    """Lengths are not negative, pointers are their running sum in bytes, and the sum is the size of .bin (unless None)."""
    expected_pointer = 0
    for start in range(0, len(lengths), CHECK_CHUNK):
        here, found = lengths[start : start + CHECK_CHUNK], pointers[start : start + CHECK_CHUNK]
        sizes = np.multiply(here, itemsize, dtype=np.int64)
        # Differences wrap where pointers are damaged, but only by 2^64: a first pointer that is right and right differences make all right.
        good = here.min() >= 0 and found[0] == expected_pointer and np.array_equal(np.diff(found), sizes[:-1])
        if not good:
            _refuse_sequence(path, start, here, found, expected_pointer + np.append(0, np.cumsum(sizes)[:-1]))
        expected_pointer = int(found[-1]) + int(sizes[-1])
        if expected_pointer > (2**62 if bin_size is None else bin_size):  # here, not at the end: keeps the running sum far from 2^63
            break
    if bin_size is None:
        if not 0 < expected_pointer <= 2**62:
            _refuse(path, "sum of the lengths", f"{expected_pointer} bytes", "at least one token, and less than 2^62 bytes")
        return
    if expected_pointer != bin_size:
        least = "" if start + CHECK_CHUNK >= len(lengths) else "at least "
        _refuse(
            tokens_path,
            "file size",
            f"{bin_size} bytes",
            f"{least}{expected_pointer} bytes (the sum of the lengths in {path.name})",
            "The file was cut, or the two files are not of one run",
        )
    if bin_size == 0:
        _refuse(tokens_path, "file size", "0 bytes", "at least one token", "All documents are empty: nothing to train on")


def _refuse_sequence(path: Path, start: int, lengths: np.ndarray, pointers: np.ndarray, expected: np.ndarray) -> NoReturn:
    """Names the first wrong entry of a chunk that begins with sequence ``start``."""
    negative = lengths < 0
    if negative.any():
        at = int(negative.argmax())
        _refuse(path, f"length of sequence {start + at}", lengths[at], "0 or more tokens")
    at = int((pointers != expected).argmax())
    found, right = int(pointers[at]), int(expected[at])
    hint = "The writer's byte offsets wrapped at 2^31: preprocess again" if (found - right) % 2**31 == 0 else ""
    _refuse(path, f"pointer of sequence {start + at}", found, f"{right} bytes", hint)


def _check_document_indices(path: Path, indices: np.ndarray, sequences: int) -> bool:
    """Document indices begin with 0, never fall and end with the number of sequences; returns whether each document is one sequence."""
    if indices[0] != 0:
        _refuse(path, "document index 0", indices[0], 0)
    one_each = True
    for start in range(0, len(indices) - 1, CHECK_CHUNK):
        chunk = indices[start : start + CHECK_CHUNK + 1]
        falling = chunk[1:] < chunk[:-1]
        if falling.any():
            at = int(falling.argmax())
            _refuse(path, f"document index {start + at + 1}", chunk[at + 1], f"at least {chunk[at]} (document indices never fall)")
        # They never fall: as many as there are numbers from the first to the last, all different, are all of these numbers.
        one_each = one_each and int(chunk[-1]) - int(chunk[0]) == len(chunk) - 1 and bool((chunk[1:] != chunk[:-1]).all())
    if indices[-1] != sequences:
        _refuse(path, f"document index {len(indices) - 1} (the last)", indices[-1], f"{sequences} (the number of sequences)")
    return one_each


class IndexedReader:
    """One ``.bin/.idx`` pair, checked at open.

    Args:
        prefix: path without ``.bin``/``.idx``.
        vocab_size: token ids must be below it; None: only negative ids are refused.
        scan: look at every token now. None: only when ``.bin`` is at most 1 GiB. Ids are checked on each read anyway.
        read_tokens: False: only lengths are wanted, and the ``.bin`` is not opened and need not exist (another rank reads it).

    Attributes:
        lengths: integer [num_documents], tokens per document; 0 is legal. The mapped int32 array where each document is one sequence, else
            computed from the map when looked at.
        modes: int8 [num_sequences] of a multimodal file, else None.
        scanned: whether every token was checked at open.

    Raises:
        CorpusError: whatever is wrong with the files, naming the file, the entry, the value found and the one expected.
    """

    def __init__(self, prefix: str | os.PathLike, *, vocab_size: int | None = None, scan: bool | None = None, read_tokens: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.vocab_size = vocab_size
        index = _read_index(self.prefix, tokens=read_tokens)
        self.dtype = index.dtype
        self.modes = index.modes
        self._index = index
        self._tokens = np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r") if read_tokens else None
        # Both are read from the map for as long as this lives.
        self._files = [SteadyFile(idx_path(self.prefix), self._has_its_fingerprint)]
        if read_tokens:
            self._files.append(SteadyFile(bin_path(self.prefix), self._has_its_fingerprint))
        self.num_tokens = (int(index.pointers[-1]) + int(index.lengths[-1]) * self.dtype.itemsize) // self.dtype.itemsize
        self._starts = Starts(index.pointers, index.document_indices, num_tokens=self.num_tokens, itemsize=self.dtype.itemsize)
        self.lengths: np.ndarray | ComputedLengths = index.lengths if index.document_indices is None else LengthsOfSequences(self._starts)
        self.scanned = read_tokens and (self._tokens.nbytes <= SCAN_AT_OPEN_BYTES if scan is None else scan)
        if self.scanned:
            self.check_vocabulary()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_sequences(self) -> int:
        """Sequences in the file; a document has any number of them."""
        return len(self._index.lengths)

    def tokens_of(self, first: int, end: int) -> int:
        """Tokens of documents first .. end - 1 together; O(1)."""
        return self._starts.one(end) - self._starts.one(first)

    def look(self) -> None:
        """Call before lengths are read (`tokens` does it by itself); a system call ten times a second, at most.

        Raises:
            CorpusError: a file has changed since it was opened, so that lengths or tokens would be others than those planned.
        """
        for file in self._files:
            file.look()

    def describe(self, document: int) -> str:
        """``prefix, document 17``: for messages."""
        return f"{self.prefix}, document {document}"

    def tokens(self, document: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """A copy of ``length`` tokens of a document (None: to its end), int64 [length].

        Raises:
            CorpusError: the slice is not inside the document, an id is outside the vocabulary, or the file has changed since it was opened.
        """
        if self._tokens is None:
            raise CorpusError(f"{self.describe(document)}: this process was told to read lengths only, no tokens")
        self.look()
        if not 0 <= document < len(self.lengths):
            raise CorpusError(f"{self.prefix}: there is no document {document}; it has documents 0 to {len(self.lengths) - 1}")
        size = int(self.lengths[document])
        length = size - start if length is None else length
        if start < 0 or length < 0 or start + length > size:
            raise CorpusError(f"{self.describe(document)}: tokens {start} to {start + length} asked for, but it has {size}")
        begin = self._starts.one(document) + start
        found = self._tokens[begin : begin + length]
        self._check_ids(found, begin)
        return found.astype(np.int64)

    def token_chunks(self):
        """All tokens of the file in order, as views [at most SCAN_CHUNK] of its dtype."""
        for begin in range(0, self.num_tokens, SCAN_CHUNK):
            yield self._tokens[begin : begin + SCAN_CHUNK]

    def check_vocabulary(self) -> None:
        """Looks at every token.

        Raises:
            CorpusError: an id is negative or not below ``vocab_size``; names the document and position.
        """
        for number, chunk in enumerate(self.token_chunks()):
            self._check_ids(chunk, number * SCAN_CHUNK)

    def _check_ids(self, ids: np.ndarray, begin: int) -> None:
        if not len(ids):
            return
        too_low = self.dtype.kind == "i" and ids.min() < 0
        too_high = self.vocab_size is not None and int(ids.max()) >= self.vocab_size
        if not too_low and not too_high:
            return
        wrong = ids < 0 if self.vocab_size is None else (ids < 0) | (ids.astype(np.int64) >= self.vocab_size)
        at = int(wrong.argmax())
        document = self._starts.document_of(begin + at)
        limit = "a vocabulary of unknown size" if self.vocab_size is None else f"the vocabulary, 0 to {self.vocab_size - 1}"
        raise CorpusError(
            f"{bin_path(self.prefix)}: document {document}, token {begin + at - self._starts.one(document)}: found id {int(ids[at])}, "
            f"expected an id in {limit}. The corpus was made with another tokenizer, or is damaged"
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the documents as they were when it was first asked for: see `_digest`."""
        return self._digest()

    def _has_its_fingerprint(self) -> bool:
        return "fingerprint" in vars(self) and self._digest() == self.fingerprint

    def _digest(self) -> str:
        """Hex digest of the documents: dtype, lengths, boundaries and tokens, independent of where the files lie.

        Above 1 GiB the tokens are sampled (256 evenly spaced runs of 64 KiB), so that opening stays quick.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.dtype.str} {len(self)} {self.num_tokens} ".encode())
        for begin in range(0, len(self._starts), CHECK_CHUNK):
            digest.update(self._starts.between(begin, begin + CHECK_CHUNK).astype("<i8", copy=False))
        size = self._tokens.nbytes
        if size <= SCAN_AT_OPEN_BYTES:
            digest.update(self._tokens)
            return digest.hexdigest()
        # Plain reads: page faults scattered over a large map are many times slower.
        with open(bin_path(self.prefix), "rb", buffering=0) as stream:
            for start in np.linspace(0, size - SAMPLE_BYTES, NUM_SAMPLES).astype(np.int64):
                digest.update(os.pread(stream.fileno(), SAMPLE_BYTES, int(start)))
        return digest.hexdigest()
