# SPDX-License-Identifier: Apache-2.0
"""Facts of a corpus and of a tokenizer, as rows for a table."""

import numpy as np

from megatron_dyn.corpus.computed_lengths import ComputedLengths, chunks
from megatron_dyn.corpus.indexed_reader import IndexedReader
from megatron_dyn.corpus.length_counts import LengthCounts
from megatron_dyn.corpus.tokenizer import SentencePieceTokenizer

PERCENTILES = (1, 10, 50, 90, 99)
Rows = list[tuple[str, str]]


def corpus_facts(prefix: str, tokenizer: SentencePieceTokenizer | None) -> Rows:
    """Checks a whole ``.bin/.idx`` pair, every token included, and describes it.

    Raises:
        CorpusError: the pair is broken, or an id is outside the tokenizer's vocabulary.
    """
    reader = IndexedReader(prefix, vocab_size=tokenizer.vocab_size if tokenizer else None, scan=True)
    lengths = LengthCounts(reader.lengths)
    longest = int(lengths.lengths[-1])
    largest = max(int(chunk.max()) for chunk in reader.token_chunks())
    lengths_line = ", ".join(f"p{p} {value:.0f}" for p, value in zip(PERCENTILES, lengths.quantiles([percent / 100 for percent in PERCENTILES])))
    rows = [
        ("documents", f"{len(reader):,} ({int(lengths.counts[lengths.lengths == 0].sum()):,} empty)"),
        ("sequences", f"{reader.num_sequences:,}" + ("" if reader.modes is None else ", multimodal (modes array)")),
        ("tokens", f"{reader.num_tokens:,}"),
        ("tokens per document", f"min {lengths.lengths[0]}, {lengths_line}, max {longest}, mean {reader.num_tokens / len(reader):.1f}"),
        ("longest document", str(_first_of(reader.lengths, longest))),
        ("dtype", reader.dtype.name),
        ("largest id", str(largest)),
        ("fingerprint", reader.fingerprint),
    ]
    if tokenizer is not None:
        rows.append(("vocabulary", f"{tokenizer.vocab_size:,}: every id is inside"))
        for label, found in (("unknown ids", tokenizer.unk), ("end-of-document ids", tokenizer.eod)):
            if found is not None:
                count = sum(int(np.count_nonzero(chunk == found)) for chunk in reader.token_chunks())
                rows.append((label, f"{count:,} ({count / reader.num_tokens:.3%} of the tokens)"))
    return rows


def _first_of(lengths: np.ndarray | ComputedLengths, length: int) -> int:
    """The first document of a length that occurs."""
    begin = 0
    for chunk in chunks(lengths):
        if (found := np.flatnonzero(chunk == length)).size:
            return begin + int(found[0])
        begin += len(chunk)
    raise AssertionError(f"no document has {length} tokens")


def tokenizer_facts(tokenizer: SentencePieceTokenizer, text: str | None) -> Rows:
    """Describes a tokenizer and, with a text, how it is encoded and whether it comes back."""
    processor = tokenizer.processor
    rows = [("vocabulary", f"{tokenizer.vocab_size:,}")]
    for label, found in (
        ("end of document (eod)", tokenizer.eod),
        ("begin (bos)", tokenizer.bos),
        ("padding (pad)", tokenizer.pad),
        ("unknown (unk)", tokenizer.unk),
    ):
        rows.append((label, "none" if found is None else f"{found} {processor.id_to_piece(found)}"))
    bytes_found = sum(processor.is_byte(i) for i in range(tokenizer.vocab_size))
    rows.append(("byte fallback", f"{bytes_found} byte pieces" if bytes_found else "no: unseen characters become the unknown id"))
    if text is not None:
        ids = tokenizer.encode(text)
        back = tokenizer.decode(ids)
        unknown = ids.count(tokenizer.unk) if tokenizer.unk is not None else 0
        rows += [
            ("text", repr(text)),
            ("ids", " ".join(map(str, ids)) or "none"),
            ("pieces", " ".join(processor.id_to_piece(i) for i in ids) or "none"),
            ("tokens", f"{len(ids)} ({unknown} unknown)"),
            ("decoded", repr(back) + (", equal" if back == text else ", NOT equal to the text")),
        ]
    return rows
