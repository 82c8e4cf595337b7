# SPDX-License-Identifier: Apache-2.0
"""Documents in (JSONL, text files, Megatron's ``.bin/.idx``), lengths and token slices out."""

from megatron_dyn.corpus.corpus import Corpus, CorpusSplits, open_corpus
from megatron_dyn.corpus.errors import CorpusError
from megatron_dyn.corpus.indexed_reader import IndexedReader
from megatron_dyn.corpus.indexed_writer import IndexedWriter
from megatron_dyn.corpus.tokenizer import SentencePieceTokenizer

__all__ = [
    "Corpus",
    "CorpusError",
    "CorpusSplits",
    "IndexedReader",
    "IndexedWriter",
    "SentencePieceTokenizer",
    "open_corpus",
]
