# SPDX-License-Identifier: Apache-2.0
"""The error type of this room."""


class CorpusError(ValueError):
    """A corpus, tokenizer or input file is not what it must be; the message says what, where, and the way out."""
