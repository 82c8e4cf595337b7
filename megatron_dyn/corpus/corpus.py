# SPDX-License-Identifier: Apache-2.0
"""What planning and microbatch see of the data: documents with lengths, and slices of their tokens.

| name        | shape    | dtype   | meaning                                     |
|-------------|----------|---------|---------------------------------------------|
| lengths     | [D]      | integer | tokens per (virtual) document; 0 is legal   |
| tokens(...) | [length] | int64   | a slice of one document, a copy             |

Nothing with an entry for each document is kept, but for the order of a weighted blend (4 bytes a document): lengths are a view of the
mapped index, or computed from it when they are looked at.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron_dyn.corpus.blending import SPLIT_NAMES, blended_order, parse_data_path, parse_split, split_ranges
from megatron_dyn.corpus.computed_lengths import CHUNK, ComputedLengths, LengthsInOrder, chunks
from megatron_dyn.corpus.document_order import DocumentOrder
from megatron_dyn.corpus.errors import CorpusError
from megatron_dyn.corpus.indexed_reader import IndexedReader

DIGEST_CHUNK = 1 << 16  # documents: their numbers stay in the processor's cache


class Corpus:
    """One split (train, valid or test) of a data set, blended or not.

    Args:
        readers: the files it draws from.
        ranges: document range [first, last) of each reader that belongs to this split.
        weights: share of the tokens of an epoch each reader has; None: each document once.
        seed: of the selection for fractional passes of a blend.
        name: ``train``, ``valid`` or ``test``, for messages.
        read_tokens: False where the readers give lengths only.

    Attributes:
        lengths: integer [num_documents], tokens per document: reads like a flat array.
        fingerprint: hex digest; changes when documents, their order, lengths, weights or split change, not when files move. Without
            tokens it stands for the lengths only, until the owner sets the fingerprint that a process with tokens found.

    Raises:
        CorpusError: a reader has no tokens in its range.
    """

    def __init__(
        self,
        readers: Sequence[IndexedReader],
        ranges: Sequence[tuple[int, int]],
        *,
        weights: Sequence[float] | None = None,
        seed: int = 1234,
        name: str = "train",
        read_tokens: bool = True,
    ) -> None:
        self.name = name
        self.weights = None if weights is None or len(readers) == 1 else list(weights)
        self._readers = list(readers)
        self._ranges = list(ranges)
        self._seed = seed
        for reader, (first, end) in zip(readers, ranges):
            if not reader.tokens_of(first, end):
                raise CorpusError(
                    f"{reader.prefix}: documents {first} to {end - 1}, its {name} part, hold no token; change --split or leave the corpus out"
                )
        order = None
        if self.weights is not None:
            order = blended_order([reader.lengths[first:end] for reader, (first, end) in zip(readers, ranges)], self.weights, seed)
        self._order = DocumentOrder(ranges, order)
        lengths = [reader.lengths for reader in readers]
        mapped = len(readers) == 1 and isinstance(lengths[0], np.ndarray)
        self.lengths: np.ndarray | ComputedLengths = lengths[0][slice(*ranges[0])] if mapped else LengthsInOrder(self._order, lengths)
        self.fingerprint: str = self._fingerprint() if read_tokens else self.lengths_fingerprint

    @cached_property
    def lengths_fingerprint(self) -> str:
        """Hex digest of the documents' order and lengths alone: also without tokens."""
        digest = hashlib.blake2b(digest_size=16)
        self._digest(digest, self._order.files, "<i8")
        self._digest(digest, self._order.documents, "<i8")
        self._digest(digest, lambda begin, end: self.lengths[begin:end], "<i8")
        return digest.hexdigest()

    def _digest(self, digest: "hashlib._Hash", between: Callable[[int, int], np.ndarray], dtype: str) -> None:
        """Adds numbers of all documents, chunk by chunk."""
        for begin in range(0, len(self), DIGEST_CHUNK):
            digest.update(np.ascontiguousarray(between(begin, min(begin + DIGEST_CHUNK, len(self))), dtype))

    def _fingerprint(self) -> str:
        facts = {
            "documents": [reader.fingerprint for reader in self._readers],
            "ranges": [[int(first), int(end)] for first, end in self._ranges],
            "weights": self.weights,
            "seed": None if self.weights is None else self._seed,
        }
        digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16)
        # The order itself as well: a new numpy that selected otherwise must not pass for the old corpus.
        self._digest(digest, self._order.files, "<i4")
        self._digest(digest, self._order.documents, "<i8")
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch."""
        return sum(self._tokens_of_files)

    @cached_property
    def _tokens_of_files(self) -> list[int]:
        """That an epoch holds of each file."""
        if self.weights is None:
            return [reader.tokens_of(first, end) for reader, (first, end) in zip(self._readers, self._ranges)]
        found = [0] * len(self._readers)
        for begin in range(0, len(self), CHUNK):
            end = min(begin + CHUNK, len(self))
            files, lengths = self._order.files(begin, end), self.lengths[begin:end]
            for file in range(len(found)):
                found[file] += int(lengths[files == file].sum())
        return found

    @property
    def num_different_documents(self) -> int:
        """Documents that an epoch holds at least once: a blend repeats some, and leaves none out."""
        parts = {(id(reader), first, end): end - first for reader, (first, end) in zip(self._readers, self._ranges)}
        return int(sum(parts.values()))

    def _locate(self, document: int) -> tuple[IndexedReader, int]:
        if not 0 <= document < len(self.lengths):
            raise CorpusError(f"the {self.name} corpus has documents 0 to {len(self.lengths) - 1}, not {document}")
        file, found = self._order.one(document)
        return self._readers[file], found

    def tokens(self, document: int, start: int = 0, length: int | None = None) -> np.ndarray:
        """``length`` tokens of a document (None: to its end), int64 [length], ids checked against the vocabulary.

        Raises:
            CorpusError: the slice is not inside the document, or an id is outside the vocabulary.
        """
        reader, found = self._locate(document)
        return reader.tokens(found, start, length)

    def look(self) -> None:
        """Call before a step is planned: lengths are read from files for as long as this lives.

        Raises:
            CorpusError: a file has changed since it was opened.
        """
        for reader in self._readers:
            reader.look()

    def describe(self, document: int) -> str:
        """Where a document lies, for messages: ``prefix, document 17`` (its number in the file)."""
        reader, found = self._locate(document)
        return reader.describe(found)

    def report(self) -> list[str]:
        """Lines for the log: what an epoch holds, and the share each corpus of a blend really has."""
        empty = len(self) - sum(int(np.count_nonzero(chunk)) for chunk in chunks(self.lengths))
        lines = [f"{self.name}: {len(self)} documents ({empty} empty), {self.num_tokens} tokens an epoch"]
        if len(self._readers) == 1:
            return lines
        for i, (reader, (first, end), tokens) in enumerate(zip(self._readers, self._ranges, self._tokens_of_files)):
            passes = tokens / reader.tokens_of(first, end)
            asked = "" if self.weights is None else f" (asked {self.weights[i]:.2%})"
            lines.append(f"{self.name}: {reader.prefix}: {tokens / self.num_tokens:.2%} of the tokens{asked}, {passes:.3f} passes an epoch")
        return lines


@dataclass(frozen=True, kw_only=True)
class CorpusSplits:
    """The splits of a data set; None where the split has no share."""

    train: Corpus | None
    valid: Corpus | None
    test: Corpus | None = None
    report: list[str] = field(default_factory=list)  # lines for the log


def open_corpus(
    data_path: Sequence[str], *, split: str = "98,2", seed: int = 1234, vocab_size: int | None = None, read_tokens: bool = True
) -> CorpusSplits:
    """Opens one corpus or a blend, split by document.

    Args:
        data_path: as Megatron's ``--data-path``: ``["A"]``, ``["A", "B"]`` or ``["0.7", "A", "0.3", "B"]``.
        split: shares of train, valid and, if a third is given, documents set aside as test; contiguous by document number.
        seed: of the selection for fractional passes of a blend.
        vocab_size: ids must be below it.
        read_tokens: False opens the ``.idx`` files only: lengths without tokens.

    Raises:
        CorpusError: an argument or a file is wrong, or a split with a share would be empty.
    """
    if isinstance(data_path, str):
        raise CorpusError(f'data_path is the text {data_path!r}; give a list: ["{data_path}"]')
    blend = parse_data_path(data_path)
    shares = parse_split(split)
    opened: dict[str, IndexedReader] = {}
    for prefix in blend.prefixes:
        if prefix not in opened:
            opened[prefix] = IndexedReader(prefix, vocab_size=vocab_size, read_tokens=read_tokens)
    readers = [opened[prefix] for prefix in blend.prefixes]
    ranges = [split_ranges(len(reader), shares, reader.prefix) for reader in readers]
    report = [
        f"{reader.prefix}: {len(reader)} documents, {reader.num_tokens} tokens, {reader.dtype.name}, "
        f"{'all ids checked' if reader.scanned else 'ids checked when read (above 1 GiB)' if read_tokens else 'lengths only'}"
        for reader in opened.values()
    ]
    corpora: dict[str, Corpus | None] = {}
    for i, name in enumerate(SPLIT_NAMES):
        corpora[name] = None
        if shares[i] > 0:
            parts = [found[i] for found in ranges]
            corpora[name] = Corpus(readers, parts, weights=blend.weights, seed=seed, name=name, read_tokens=read_tokens)
            report += corpora[name].report()
    return CorpusSplits(report=report, **corpora)
