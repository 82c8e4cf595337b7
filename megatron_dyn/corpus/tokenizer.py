# SPDX-License-Identifier: Apache-2.0
"""SentencePiece tokenizer: its special ids come from the model, never from habit."""

import os
from typing import Sequence

import sentencepiece

from megatron_dyn.corpus.errors import CorpusError


class SentencePieceTokenizer:
    """A SentencePiece model.

    Args:
        model_file: path of the ``.model`` file.

    Attributes:
        vocab_size: ids are 0 to vocab_size - 1.
        eod, bos, pad, unk: ids of the end of a document (the model's ``</s>``), of the begin, of padding and of the unknown
            piece; None where the model has none (SentencePiece says -1, which must never enter a tensor).

    Raises:
        CorpusError: the file is missing or is not a SentencePiece model.
    """

    def __init__(self, model_file: str | os.PathLike) -> None:
        self.model_file = os.fspath(model_file)
        self.processor = sentencepiece.SentencePieceProcessor()
        if not os.path.isfile(self.model_file):
            raise CorpusError(f"{self.model_file}: no such tokenizer model; train one with `python -m megatron_dyn tokenizer train`")
        try:
            self.processor.Load(self.model_file)
        except (RuntimeError, OSError) as error:
            raise CorpusError(f"{self.model_file}: not a usable SentencePiece model ({error})") from error
        # SentencePiece answers only with ids of control pieces here, and those no text can spell.
        model = self.processor
        self.vocab_size: int = model.vocab_size()
        self.eod, self.bos, self.pad, self.unk = (
            None if found < 0 else found for found in (model.eos_id(), model.bos_id(), model.pad_id(), model.unk_id())
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any special id; ``[]`` for a text the model normalises to nothing.

        Raises:
            CorpusError: the text is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CorpusError(f"the text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}") from error
        return self.processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self.processor.decode([int(found) for found in ids])
