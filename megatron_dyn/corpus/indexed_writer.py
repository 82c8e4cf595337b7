# SPDX-License-Identifier: Apache-2.0
"""An atomic writer of Megatron's ``.bin/.idx`` files.

Everything is written to ``*.partial`` files; they get their names only when complete and flushed to the disk, ``.idx`` last.
A pair without ``.idx`` opens in no reader, so a run killed at any moment leaves nothing that looks finished.
"""

import contextlib
import fcntl
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Sequence

import numpy as np

from megatron_dyn.corpus.errors import CorpusError
from megatron_dyn.corpus.indexed_format import (
    CODE_BY_DTYPE,
    HEADER,
    MAGIC,
    MAX_SEQUENCE_TOKENS,
    VERSION,
    bin_path,
    dtype_for_vocabulary,
    idx_path,
    partial_path,
)

WRITE_CHUNK = 1 << 20


def _lock_partial(path: Path):
    """Opens the partial file of ``path`` for us alone, emptied: what a killed run left in it is dropped here."""
    partial = partial_path(path)
    try:
        stream = open(partial, "ab", buffering=1 << 20)
    except OSError as error:
        raise CorpusError(f"{partial}: cannot be written ({error.strerror}); give another output prefix") from error
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = partial.exists() and os.stat(partial).st_ino == os.fstat(stream.fileno()).st_ino
    except BlockingIOError:
        same = False
    if not same:  # locked, or finished and renamed between our open and our lock
        stream.close()
        raise CorpusError(f"{partial}: another run is writing this prefix; wait for it, or give another output prefix")
    stream.truncate(0)
    return stream


def sync_directory(folder: Path) -> None:
    """Makes renames inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class IndexedWriter:
    """Writes one ``.bin/.idx`` pair; a context manager: finished on a clean exit, removed on an exception.

    Args:
        prefix: path without ``.bin``/``.idx``; the folder must exist. A finished pair there is replaced at the very end.
        vocab_size: ids must be below it; also chooses the dtype, as Megatron does.
        dtype: integer dtype of the tokens; None: by ``vocab_size``.

    Raises:
        CorpusError: an id outside the vocabulary or dtype, no documents at the end, or another writer on this prefix.
    """

    def __init__(self, prefix: str | os.PathLike, *, vocab_size: int | None = None, dtype: np.dtype | type | None = None) -> None:
        if dtype is None and vocab_size is None:
            raise CorpusError("IndexedWriter needs vocab_size or dtype to choose the type of the tokens")
        self.prefix = os.fspath(prefix)
        self.dtype = dtype_for_vocabulary(vocab_size) if dtype is None else np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_BY_DTYPE:
            names = ", ".join(known.name for known in CODE_BY_DTYPE)
            raise CorpusError(f"dtype {self.dtype.name} cannot hold tokens in a .bin file; use one of {names}")
        limit = np.iinfo(self.dtype).max + 1
        self.vocab_size = limit if vocab_size is None else vocab_size
        if self.vocab_size > limit:
            raise CorpusError(f"dtype {self.dtype.name} holds ids below {limit}, the vocabulary has {self.vocab_size}")
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        self.num_tokens = 0
        self._bin = _lock_partial(bin_path(self.prefix))

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._document_ends) - 1

    def add_document(self, tokens: Sequence[int] | np.ndarray, sequence_lengths: Sequence[int] | None = None) -> None:
        """Adds a document of one sequence, or of several whose lengths add up to its tokens."""
        ids = np.asarray(tokens)
        if not ids.size:
            ids = ids.astype(self.dtype)
        lengths = [ids.size] if sequence_lengths is None else list(sequence_lengths)
        if sum(lengths) != ids.size or any(length < 0 for length in lengths):
            raise CorpusError(f"{self.prefix}, document {self.num_documents}: sequence lengths {lengths} do not add up to its {ids.size} tokens")
        self._write(ids, lengths)
        self._document_ends.append(len(self._lengths))

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Adds many documents of one sequence each: their tokens one after the other, and the length of each."""
        if int(np.sum(lengths, dtype=np.int64)) != len(tokens):
            raise CorpusError(f"{self.prefix}: lengths of {np.sum(lengths)} tokens given with {len(tokens)} tokens")
        first = len(self._lengths)
        self._write(tokens, lengths)
        self._document_ends.extend(range(first + 1, len(self._lengths) + 1))

    def _write(self, ids: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise CorpusError(f"{self.prefix}: token ids must be a list of integers, not {ids.dtype} of shape {ids.shape}")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size):
            bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise CorpusError(f"{self.prefix}, document {self.num_documents} or later: id {bad} is outside 0 to {self.vocab_size - 1}")
        if len(lengths) and max(lengths) > MAX_SEQUENCE_TOKENS:
            raise CorpusError(f"{self.prefix}: a sequence of {max(lengths)} tokens; the format holds at most {MAX_SEQUENCE_TOKENS}: divide it")
        with self._naming_the_file():
            self._bin.write(np.ascontiguousarray(ids, self.dtype).data)
        self._lengths.extend(int(length) for length in lengths)
        self.num_tokens += len(ids)

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """A full disk says neither what was being written nor what is left of it."""
        try:
            yield
        except OSError as error:
            if error.filename is not None:
                raise
            raise CorpusError(
                f"{self.prefix}: could not be written ({error.strerror}); nothing of it is kept, and a finished pair of that name stays "
                "as it was. Free some space, or name another folder"
            ) from error

    def finish(self) -> None:
        """Flushes both files to the disk and gives them their names."""
        try:
            with self._naming_the_file():
                if not self.num_tokens:
                    raise CorpusError(f"{self.prefix}: no tokens to write: every document is empty, or there is none")
                tokens_path, index_path = bin_path(self.prefix), idx_path(self.prefix)
                self._bin.flush()
                os.fsync(self._bin.fileno())
                with open(partial_path(index_path), "wb") as stream:
                    self._write_index(stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                # An older index must never stand beside the new tokens.
                index_path.unlink(missing_ok=True)
                os.replace(partial_path(tokens_path), tokens_path)
                sync_directory(tokens_path.parent)
                os.replace(partial_path(index_path), index_path)
                sync_directory(index_path.parent)
        except BaseException:
            self.abort()
            raise
        self._bin.close()

    def _write_index(self, stream) -> None:
        stream.write(HEADER.pack(MAGIC, VERSION, CODE_BY_DTYPE[self.dtype], len(self._lengths), len(self._document_ends)))
        lengths = np.frombuffer(self._lengths, np.int32)
        chunks = [lengths[start : start + WRITE_CHUNK] for start in range(0, len(lengths), WRITE_CHUNK)]
        for chunk in chunks:
            stream.write(chunk.astype("<i4").data)
        pointer = 0
        for chunk in chunks:
            ends = pointer + np.cumsum(chunk, dtype=np.int64) * self.dtype.itemsize
            stream.write(np.concatenate(([pointer], ends[:-1])).astype("<i8").data)
            pointer = int(ends[-1])
        stream.write(np.frombuffer(self._document_ends, np.int64).astype("<i8").data)

    def abort(self) -> None:
        """Removes the partial files; a finished pair of an earlier run stays as it was."""
        if self._bin.closed:
            return
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            partial_path(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what is still buffered may not fit on the disk either
            self._bin.close()
