# SPDX-License-Identifier: Apache-2.0
"""Trains a SentencePiece tokenizer that gives back every text exactly: newlines, tabs and indentation included."""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

import sentencepiece

from megatron_dyn.corpus.errors import CorpusError
from megatron_dyn.corpus.indexed_format import partial_path
from megatron_dyn.corpus.indexed_writer import sync_directory
from megatron_dyn.corpus.inputs import InputSelection, read_records
from megatron_dyn.corpus.records import BadRecordError, text_of

MAX_LINE_CHARACTERS = 4096
MAX_SENTENCE_BYTES = 4 * MAX_LINE_CHARACTERS  # a character has at most 4 bytes: no line is dropped for its length
QUIET = 2  # SentencePiece's log level: errors only


@dataclass(frozen=True, kw_only=True)
class TokenizerTrainingConfig:
    """What to learn from, and what to learn."""

    selection: InputSelection
    model_prefix: str
    vocab_size: int = 4000
    model_type: str = "bpe"
    """``bpe`` (seconds on tens of megabytes) or ``unigram`` (about twenty times slower to train)."""
    max_bytes: int = 16_000_000
    """Text to learn from; more input is sampled: whole documents, spread evenly over the input, the same ones each time."""
    on_bad_record: str = "skip"
    """A bad record only makes the sample smaller, so it is left out and counted unless ``error`` is asked for."""

    def __post_init__(self) -> None:
        if self.vocab_size < 300:
            raise CorpusError(f"--vocab-size {self.vocab_size}: at least 300 are needed (256 bytes, 3 special ids, and characters)")
        if self.max_bytes < 1:
            raise CorpusError(f"--max-bytes {self.max_bytes}: give 1 or more")


@dataclass(kw_only=True)
class TrainingSample:
    """What the sample held."""

    documents: int = 0
    lines: int = 0
    text_bytes: int = 0
    seen: int = 0  # documents in the input
    skipped: int = 0  # bad records


class _SampledLines:
    """Iterates over the lines of the sampled documents."""

    def __init__(self, config: TokenizerTrainingConfig, on_progress: Callable[[int, int], None] | None) -> None:
        self.config = config
        self.sample = TrainingSample()
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[str]:
        config, sample = self.config, self.sample
        files = config.selection.files()
        total = max(1, sum(file.size for file in files))
        for record in read_records(files):
            sample.seen += 1
            # The quota grows with the input passed: an even spread, without knowing the number of documents before.
            if sample.text_bytes + len(record.raw) > max(config.max_bytes * record.position // total, 1):
                continue
            try:
                text = text_of(record, config.selection.json_key)
            except BadRecordError:
                if config.on_bad_record == "error":
                    raise
                sample.skipped += 1
                continue
            sample.documents += 1
            sample.text_bytes += len(record.raw)
            for line in text.split("\n"):
                for start in range(0, len(line), MAX_LINE_CHARACTERS):
                    piece = line[start : start + MAX_LINE_CHARACTERS]
                    if "\0" not in piece:  # SentencePiece's trainer takes no NUL; byte fallback still encodes it
                        sample.lines += 1
                        yield piece
            if self._on_progress is not None:
                self._on_progress(record.position, total)


def train_tokenizer(config: TokenizerTrainingConfig, on_progress: Callable[[int, int], None] | None = None) -> TrainingSample:
    """Writes ``{model_prefix}.model``: ids 0 unknown, 1 begin, 2 end, then 256 bytes, then pieces.

    Identity normalisation, byte fallback, no prefix added and no whitespace dropped: ``decode(encode(text)) == text``, except that
    U+2581, which SentencePiece writes for a space, comes back as one.

    Args:
        config: see `TokenizerTrainingConfig`.
        on_progress: called with (input bytes read, all input bytes); the training proper follows the reading.

    Raises:
        CorpusError: an input is unusable, or has too little text for the vocabulary.
    """
    lines = _SampledLines(config, on_progress)
    sentences = list(lines)  # read first: an exception must not travel through the C++ trainer
    if not sentences:
        raise CorpusError("--input: no text to learn a tokenizer from")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=MAX_SENTENCE_BYTES,
            num_threads=1,  # sums of floats over threads would make the model depend on the machine
            minloglevel=QUIET,
        )
    except (RuntimeError, OSError) as error:
        raise CorpusError(
            f"SentencePiece could not train {config.vocab_size} pieces on {lines.sample.text_bytes} bytes of text: {error}. "
            "Give more text or a smaller --vocab-size"
        ) from error
    _write_model(Path(f"{config.model_prefix}.model"), model.getvalue())
    return lines.sample


def _write_model(path: Path, content: bytes) -> None:
    """Writes a file under its name only when it is complete on the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial_path(path), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial_path(path), path)
        sync_directory(path.parent)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be written ({error.strerror}); give another --model-prefix") from error
