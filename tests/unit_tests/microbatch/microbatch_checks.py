# SPDX-License-Identifier: Apache-2.0
"""Small documents, hand-made plans, and checks of a microbatch against the documents themselves.

The checks work token by token in plain Python on purpose: they share no idea and no line with the vectorised builder.
"""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    document: int
    start: int
    length: int


class ListCorpus:
    """Documents given as lists of ids; records every read."""

    fingerprint = "list"

    def __init__(self, documents):
        self.documents = [np.asarray(document, dtype=np.int32) for document in documents]
        self.lengths = np.array([len(document) for document in documents], dtype=np.int32)
        self.reads = []

    def __len__(self):
        return len(self.documents)

    def tokens(self, document, start, length):
        self.reads.append((document, start, length))
        return self.documents[document][start : start + length]

    def describe(self, document):
        return f"list, document {document}"


def hand_plan(lengths, pieces, *, alignment=1, T=None, slots=None):
    """A MicrobatchPlan-alike written down by hand: padding at the end, or ``slots`` rows for each piece."""
    pieces = tuple(Piece(*piece) for piece in pieces)
    real = [piece.length for piece in pieces]
    slots = list(slots or real)
    rows = sum(slots)
    T = T or max(alignment, -(-rows // alignment) * alignment)
    if pieces:
        slots[-1] += T - rows
    else:
        real = slots = [T]
    return SimpleNamespace(
        pieces=pieces,
        num_tokens=sum(piece.length for piece in pieces),
        num_loss_tokens=sum(piece.length - (piece.start + piece.length == lengths[piece.document]) for piece in pieces),
        T=T,
        cu_seqlens=np.concatenate(([0], np.cumsum(real))).astype(np.int32),
        cu_seqlens_padded=np.concatenate(([0], np.cumsum(slots))).astype(np.int32),
        max_seqlen=max(slots),
        cost=float(T),
        joined=False,
    )


def whole_documents(lengths):
    return [(document, 0, length) for document, length in enumerate(lengths)]


def check_microbatch(microbatch, documents, pad_token_id=0):
    """Fails unless every row of ``microbatch`` says what the documents say and nothing else."""
    plan, packed = microbatch.plan, microbatch.packed_seq_params
    tokens, labels = microbatch.tokens[0].tolist(), microbatch.labels[0].tolist()
    positions, mask = microbatch.position_ids[0].tolist(), microbatch.loss_mask[0].tolist()
    starts = packed.cu_seqlens_q_padded.tolist()
    assert len(tokens) == len(labels) == len(positions) == len(mask) == plan.T == starts[-1]
    assert packed.max_seqlen_q == packed.max_seqlen_kv == max(b - a for a, b in zip(starts, starts[1:]))
    for boundaries in (packed.cu_seqlens_q.tolist(), starts):
        assert boundaries[0] == 0 and len(boundaries) == max(len(plan.pieces), 1) + 1
        assert all(a < b for a, b in zip(boundaries, boundaries[1:])), f"a repeated or falling value in {boundaries}"
    used = set()
    for piece, first in zip(plan.pieces, starts):
        document = documents[piece.document]
        for offset in range(piece.length):
            row, place = first + offset, piece.start + offset
            used.add(row)
            assert tokens[row] == document[place], f"row {row}: token"
            assert positions[row] == offset, f"row {row}: position {positions[row]} instead of {offset}"
            if place + 1 < len(document):
                assert (labels[row], mask[row]) == (document[place + 1], 1.0), f"row {row}: label of a token that has a next one"
            else:
                assert mask[row] == 0.0, f"row {row}: the last token of document {piece.document} has a loss"
    for row in set(range(plan.T)) - used:
        assert (tokens[row], labels[row], positions[row], mask[row]) == (pad_token_id, 0, 0, 0.0), f"row {row}: padding is not inert"
    assert sum(mask) == plan.num_loss_tokens
