# SPDX-License-Identifier: Apache-2.0
"""Text documents -> Megatron ``.bin/.idx``: the same bytes for any number of workers, all or nothing on the disk."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np

from megatron_dyn.corpus.errors import CorpusError
from megatron_dyn.corpus.indexed_format import dtype_for_vocabulary
from megatron_dyn.corpus.indexed_writer import IndexedWriter
from megatron_dyn.corpus.inputs import InputSelection, Record, read_records
from megatron_dyn.corpus.records import BadRecordError, text_of
from megatron_dyn.corpus.tokenizer import SentencePieceTokenizer
from megatron_dyn.corpus.workers import WorkerPool

BATCH_BYTES = 1 << 19  # of text, sent to a worker at once
BATCH_RECORDS = 4096
MAX_MESSAGES = 20  # bad records named one by one; all are counted


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """What to read, how to tokenize, and where to write."""

    selection: InputSelection
    tokenizer_model: str
    output_prefix: str
    append_eod: bool = False
    """Put the tokenizer's end-of-document id after every document."""
    workers: int = 1
    on_bad_record: str = "error"
    """``error``: stop at the first record that cannot be used; ``skip``: leave it out, count and report it."""
    on_empty: str = "skip"
    """A document without tokens: ``skip`` leaves it out; ``keep`` writes it (the end-of-document id alone, or no token), so that
    document numbers are those of the input."""

    def __post_init__(self) -> None:
        if self.on_empty not in ("skip", "keep"):
            raise CorpusError(f"--on-empty {self.on_empty}: give skip or keep")
        if self.on_bad_record not in ("error", "skip"):
            raise CorpusError(f"--on-bad-record {self.on_bad_record}: give error or skip")


@dataclass(kw_only=True)
class PreprocessReport:
    """What was written and what was left out."""

    dtype: str = ""
    documents: int = 0
    tokens: int = 0  # ids written, end-of-document ids included
    empty: int = 0  # documents without any token of their own, left out or not
    skipped: int = 0  # bad records left out
    unknown: int = 0  # unknown ids among the tokens
    text_bytes: int = 0
    messages: list[str] = field(default_factory=list)

    @property
    def unknown_share(self) -> float:
        """Unknown ids / tokens."""
        return self.unknown / self.tokens if self.tokens else 0.0


class EncodedBatch(NamedTuple):
    """A worker's answer. tokens: [sum of lengths] in the file's dtype; lengths: int64 [documents]."""

    tokens: np.ndarray
    lengths: np.ndarray
    empty: int
    unknown: int
    bad: list[str]
    text_bytes: int
    position: int


class BatchEncoder:
    """Tokenizes batches of records; one in each worker."""

    def __init__(self, config: PreprocessConfig) -> None:
        self.tokenizer = SentencePieceTokenizer(config.tokenizer_model)
        self.json_key = config.selection.json_key
        self.stop_at_bad = config.on_bad_record == "error"
        self.keep_empty = config.on_empty == "keep"
        self.dtype = dtype_for_vocabulary(self.tokenizer.vocab_size)
        self.end = [self.tokenizer.eod] if config.append_eod else []

    def __call__(self, records: list[Record]) -> EncodedBatch:
        parts: list[np.ndarray] = []
        bad: list[str] = []
        empty = 0
        for record in records:
            try:
                ids = self._encode(record)
            except BadRecordError as error:
                bad.append(str(error))
                if self.stop_at_bad:
                    break
                continue
            empty += not ids
            if ids or self.keep_empty:
                parts.append(np.array(ids + self.end, self.dtype))
        tokens = np.concatenate(parts) if parts else np.empty(0, self.dtype)
        unknown = 0 if self.tokenizer.unk is None else int(np.count_nonzero(tokens == self.tokenizer.unk))
        lengths = np.array([len(part) for part in parts], np.int64)
        text_bytes = sum(len(record.raw) for record in records)
        return EncodedBatch(tokens, lengths, empty, unknown, bad, text_bytes, records[-1].position)

    def _encode(self, record: Record) -> list[int]:
        text = text_of(record, self.json_key)
        try:
            return self.tokenizer.encode(text)
        except CorpusError as error:
            raise BadRecordError(f"{record.where}: {error}") from error


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Groups records by their own bytes and count alone, so the grouping never depends on the workers."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.raw)
        if size >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def preprocess(config: PreprocessConfig, on_progress: Callable[[int, int], None] | None = None) -> PreprocessReport:
    """Tokenizes every document of the inputs into one ``.bin/.idx`` pair.

    Args:
        config: see `PreprocessConfig`.
        on_progress: called with (input bytes done, all input bytes) after each batch.

    Raises:
        CorpusError: an input, the tokenizer or the output is unusable; a bad record with ``on_bad_record="error"``; a worker died.
    """
    files = config.selection.files()
    tokenizer = SentencePieceTokenizer(config.tokenizer_model)
    if config.append_eod and tokenizer.eod is None:
        raise CorpusError(f"{config.tokenizer_model}: --append-eod needs an end-of-document id, and this model has no </s>; leave --append-eod out")
    total_bytes = sum(file.size for file in files)
    if config.output_prefix.endswith(("/", ".bin", ".idx")):
        raise CorpusError(f"--output-prefix {config.output_prefix}: give the name without its ending, as in corpora/mine (two files are made of it)")
    try:
        Path(config.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CorpusError(f"--output-prefix {config.output_prefix}: its folder cannot be made ({error.strerror})") from error
    with (
        WorkerPool(partial(BatchEncoder, config), config.workers) as pool,
        IndexedWriter(config.output_prefix, vocab_size=tokenizer.vocab_size) as writer,
    ):
        report = PreprocessReport(dtype=writer.dtype.name)
        for batch in pool.map(batches(read_records(files))):
            if batch.bad and config.on_bad_record == "error":
                raise CorpusError(f"{batch.bad[0]}. Mend the file, or leave such records out with --on-bad-record skip")
            writer.add_documents(batch.tokens, batch.lengths)
            report.empty += batch.empty
            report.unknown += batch.unknown
            report.text_bytes += batch.text_bytes
            report.skipped += len(batch.bad)
            report.messages += batch.bad[: MAX_MESSAGES - len(report.messages)]
            if on_progress is not None:
                on_progress(batch.position, total_bytes)
        report.documents, report.tokens = writer.num_documents, writer.num_tokens
        if not report.tokens:
            raise CorpusError(
                f"{config.output_prefix}: nothing to write: {report.empty} documents are empty and {report.skipped} were skipped, none has a token"
            )
    return report
