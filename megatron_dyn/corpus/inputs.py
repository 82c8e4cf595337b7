# SPDX-License-Identifier: Apache-2.0
"""Input files: which ones, in which order, and their records as bytes with file, line and offset.

A record is one line of a JSONL file (only ``\\n`` ends it) or one whole text file. ``.gz``, ``.xz`` and ``.zst`` are read
through; offsets count decompressed bytes. A cut or damaged compressed file is an error, never a shorter corpus.
"""

import fnmatch
import glob as globbing
import gzip
import io
import lzma
import os
import zlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

from megatron_dyn.corpus.errors import CorpusError

BOM = b"\xef\xbb\xbf"
ZSTD_READ_BYTES = 1 << 14  # small: one read of a highly compressed file must not fill the memory


class InputFile(NamedTuple):
    """One file to read; ``whole``: a text file that is one document, else JSONL."""

    path: str
    whole: bool
    size: int


class Record(NamedTuple):
    """One document, not yet decoded.

    ``line`` counts from 1 (0: the file is the document); ``offset`` is of ``raw`` in the decompressed file; ``position`` is the
    bytes of all inputs, as they lie on the disk, passed so far (for progress).
    """

    path: str
    line: int
    offset: int
    raw: bytes
    position: int

    @property
    def where(self) -> str:
        """``file, line 3``: for messages."""
        return printable(self.path) + (f", line {self.line}" if self.line else "")


@dataclass(frozen=True, kw_only=True)
class InputSelection:
    """Which documents a command reads."""

    inputs: Sequence[str]
    """JSONL files, glob patterns of them, or folders of text files."""
    glob: str | None = None
    """Pattern of the text files inside folders, such as ``**/*.py``."""
    exclude: Sequence[str] = ()
    """Shell patterns of relative paths to leave out; ``*`` also matches ``/``."""
    json_key: str = "text"
    """Key of the text in a JSONL record."""

    def files(self) -> list[InputFile]:
        """Every input file: arguments in their order, patterns and folders sorted by (relative) path.

        Raises:
            CorpusError: an argument matches nothing, a file comes twice, or a folder has no ``--glob``.
        """
        found: list[InputFile] = []
        folders = 0
        for item in self.inputs:
            if os.path.isdir(item):
                folders += 1
                found += self._folder(item)
            else:
                found += self._jsonl(item)
        if self.glob is not None and not folders:
            raise CorpusError(f"--glob {self.glob}: it selects text files inside a folder, but no --input is a folder")
        seen: set[str] = set()
        for file in found:
            real = os.path.realpath(file.path)
            if real in seen:
                raise CorpusError(f"--input: {printable(file.path)} is given twice; its documents would be doubled (use weights in --data-path instead)")
            seen.add(real)
        if not found:
            raise CorpusError("--input: no file given")
        return found

    def _excluded(self, relative: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude for name in (relative, f"/{relative}"))

    def _folder(self, folder: str) -> list[InputFile]:
        if self.glob is None:
            raise CorpusError(f"--input {folder}: it is a folder; say which text files in it with --glob, for example '**/*.py'")
        root = Path(folder)
        try:
            names = sorted(path.relative_to(root).as_posix() for path in root.glob(self.glob) if path.is_file())
        except (ValueError, NotImplementedError) as error:
            raise CorpusError(f"--glob {self.glob}: not a pattern relative to the folder ({error})") from error
        kept = [name for name in names if not self._excluded(name)]
        if not kept:
            raise CorpusError(f"--input {folder}: {len(names)} files match --glob {self.glob}, none is left after --exclude")
        return [InputFile(str(root / name), True, (root / name).stat().st_size) for name in kept]

    def _jsonl(self, item: str) -> list[InputFile]:
        paths = [item] if os.path.exists(item) else sorted(p for p in globbing.glob(item, recursive=True) if os.path.isfile(p))
        if not paths:
            raise CorpusError(f"--input {item}: no such file, and no file matches it as a pattern")
        kept = [path for path in paths if not self._excluded(path)]
        return [InputFile(path, False, os.stat(path).st_size) for path in kept]


def printable(path: str) -> str:
    """A path safe to print, also when its name is not valid UTF-8."""
    return path.encode("utf-8", "backslashreplace").decode()


class _ZstdStream(io.RawIOBase):
    """Decompressed bytes of all frames of a .zst file; unlike zstandard's own reader, a cut last frame raises EOFError."""

    def __init__(self, file) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise CorpusError(f"{file.name}: reading .zst needs the package zstandard: pip install zstandard") from error
        self.error = zstandard.ZstdError
        self._new_decoder = zstandard.ZstdDecompressor().decompressobj
        self._decoder, self._file, self._compressed, self._ready, self._inside = None, file, b"", b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._file.read(ZSTD_READ_BYTES)
            if not self._compressed:
                if self._inside:
                    raise EOFError("Compressed file ended before the end of its last frame")
                return 0
            if not self._inside:
                self._decoder, self._inside = self._new_decoder(), True
            try:
                self._ready = self._decoder.decompress(self._compressed)
            except self.error as error:
                raise OSError(str(error)) from error
            self._inside = not self._decoder.eof
            self._compressed = self._decoder.unused_data if self._decoder.eof else b""
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _decompressed(file, path: str):
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    if path.endswith(".xz"):
        return lzma.LZMAFile(file)
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstdStream(file), 1 << 17)
    return file


def read_records(files: Sequence[InputFile]) -> Iterator[Record]:
    """All records of the files in order; memory holds one record (and one buffer) at a time.

    Raises:
        CorpusError: a file cannot be read or decompressed to its end.
    """
    passed = 0
    for file in files:
        line = 0
        try:
            with open(file.path, "rb") as compressed, closing(_decompressed(compressed, file.path)) as stream:
                if file.whole:
                    raw = stream.read()
                    start = len(BOM) if raw.startswith(BOM) else 0
                    yield Record(file.path, 0, start, raw[start:], passed + file.size)
                else:
                    offset = 0
                    for raw in stream:
                        line += 1
                        size = len(raw)
                        start = len(BOM) if line == 1 and raw.startswith(BOM) else 0
                        if size > start:
                            yield Record(file.path, line, offset + start, raw[start:], passed + compressed.tell())
                        offset += size
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            where = f" after line {line}" if line else ""
            raise CorpusError(f"{printable(file.path)}: cannot be read{where}: {error}") from error
        passed += file.size
