# SPDX-License-Identifier: Apache-2.0
"""Builds the tensors of one planned microbatch.

    plan.pieces                       P pieces (document, start, length)
    plan.cu_seqlens                   [P + 1] int32   real:   [0, 5, 9, 17]
    plan.cu_seqlens_padded            [P + 1] int32   padded: [0, 5, 9, 20]      T = 20
    rows of piece i                   cu_seqlens_padded[i] ... + length
    ids read for piece i              length tokens, and one more where the document goes on: the last label

The planner alone decides T and where padding lies; this module follows it, and refuses a plan that contradicts itself, since a
microbatch with another T than its peers' would hang them in the next collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_dyn.microbatch.packed import PackedMicrobatch

if TYPE_CHECKING:
    from megatron_dyn.corpus import Corpus
    from megatron_dyn.planning import MicrobatchPlan


class MicrobatchError(RuntimeError):
    """A microbatch cannot be built as planned; the message names the step, the document and the way out."""


def check_pad_token_id(pad_token_id: int) -> int:
    """Returns ``pad_token_id`` if it can stand in a tensor of token ids.

    Raises:
        ValueError: it is negative or no integer. Tokenizers without a padding token say -1 or None, and -1 would index the
            embedding from its end, or crash the kernel, on the padding rows.
    """
    if isinstance(pad_token_id, bool) or not isinstance(pad_token_id, (int, np.integer)) or pad_token_id < 0:
        raise ValueError(
            f"pad_token_id is {pad_token_id!r}: padding rows are looked up in the embedding like any other, so they need a real id. "
            "Use the tokenizer's pad id where it has one, else its end-of-document id or 0: the loss mask keeps padding inert"
        )
    return int(pad_token_id)


def build_microbatch(
    plan: MicrobatchPlan,
    corpus: Corpus,
    *,
    pad_token_id: int = 0,
    step: int,
    index: int,
    segments: Sequence[np.ndarray] | None = None,
) -> PackedMicrobatch:
    """Reads the pieces of ``plan`` and lays them out in T rows, on the CPU.

    The label of a piece's last token is the document's next token if the document goes on there (so cutting a long document costs no
    loss token), else the row has loss mask 0. In a joined microbatch it is the first token of the next piece, and positions run on.
    A filler (no pieces) is all padding. No random number is drawn.

    Args:
        plan: what to pack, and where.
        corpus: the documents that the plan's piece numbers refer to.
        pad_token_id: token id of padding rows, at least 0.
        step: the optimizer step, for messages and the log.
        index: the microbatch's place in its rank's part of the step.
        segments: ids of each segment where another rank has read them (`segment_sizes` of them); None reads ``corpus``.

    Returns:
        The microbatch; shapes and dtypes as at the top of ``packed.py``.

    Raises:
        MicrobatchError: the plan contradicts itself, or the corpus answers with other tokens than asked for.
        ValueError: ``pad_token_id`` is negative.
    """
    pad_token_id = check_pad_token_id(pad_token_id)
    where = f"step {step}, microbatch {index}"
    _check_layout(plan, where)
    T = int(plan.T)
    tokens_T = np.full(T, pad_token_id, dtype=np.int64)
    labels_T = np.zeros(T, dtype=np.int64)
    positions_T = np.zeros(T, dtype=np.int64)
    mask_T = np.zeros(T, dtype=np.float32)
    counter = np.arange(T, dtype=np.int64)
    if segments is None:
        segments = [_read_joined(plan, corpus, where)] if plan.joined else (_read(piece, corpus, where) for piece in plan.pieces)
    for first_row, length, ids in zip(plan.cu_seqlens_padded.tolist(), np.diff(plan.cu_seqlens).tolist(), segments):
        labelled = len(ids) - 1
        tokens_T[first_row : first_row + length] = ids[:length]
        positions_T[first_row : first_row + length] = counter[:length]
        labels_T[first_row : first_row + labelled] = ids[1:]
        mask_T[first_row : first_row + labelled] = 1.0

    loss_tokens = int(np.count_nonzero(mask_T))
    if loss_tokens != plan.num_loss_tokens:
        raise MicrobatchError(
            f"{where}: the plan counts {plan.num_loss_tokens} loss tokens, the documents give {loss_tokens}: the step's loss would be divided "
            "by the wrong number. The planner was made for other document lengths: build it from this corpus's `lengths`"
        )
    cu_real = torch.from_numpy(plan.cu_seqlens.astype(np.int32))
    cu_padded = torch.from_numpy(plan.cu_seqlens_padded.astype(np.int32))
    longest = int(plan.max_seqlen)
    return PackedMicrobatch(
        tokens=torch.from_numpy(tokens_T)[None],
        labels=torch.from_numpy(labels_T)[None],
        position_ids=torch.from_numpy(positions_T)[None],
        loss_mask=torch.from_numpy(mask_T)[None],
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_real,
            cu_seqlens_kv=cu_real,
            cu_seqlens_q_padded=cu_padded,
            cu_seqlens_kv_padded=cu_padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        plan=plan,
        step=step,
        index=index,
    )


def segment_sizes(plan: MicrobatchPlan, lengths: np.ndarray) -> list[int]:
    """Ids that are read for each segment: its tokens, and one more where the last of them has a label.

    Args:
        plan: of the microbatch.
        lengths: of the corpus's documents, integer [num_documents].
    """
    if plan.joined:
        return [sum(piece.length for piece in plan.pieces) + (plan.following is not None)]
    return [length + int(start + length < lengths[document]) for document, start, length in plan.pieces]


def _read_joined(plan: MicrobatchPlan, corpus: Corpus, where: str) -> np.ndarray:
    """Returns the ids of all pieces, one after the other, and the next one of the step where there is one."""
    pieces = [*plan.pieces, *([plan.following._replace(length=1)] if plan.following else [])]
    return np.concatenate([_read(piece, corpus, where)[: piece.length] for piece in pieces])


def _read(piece, corpus: Corpus, where: str) -> np.ndarray:
    """Returns the piece's ids, with the document's next id behind them where there is one."""
    document, start, length = piece
    known = len(corpus.lengths)
    if not 0 <= document < known:
        raise MicrobatchError(f"{where}: the plan asks for document {document}, the corpus has {known}. Build the planner from this corpus's `lengths`")
    end, document_length = start + length, int(corpus.lengths[document])
    if start < 0 or length < 1 or end > document_length:
        raise MicrobatchError(
            f"{where}: the plan asks for tokens {start}..{end} of {corpus.describe(document)}, which has {document_length}. "
            "Build the planner from this corpus's `lengths`"
        )
    goes_on = end < document_length
    ids = np.asarray(corpus.tokens(document, start, length + goes_on))
    if ids.shape != (length + goes_on,) or ids.dtype.kind not in "iu":
        raise MicrobatchError(
            f"{where}: asked {corpus.describe(document)} for {length + goes_on} token ids from {start}, got {ids.dtype} of shape {list(ids.shape)}"
        )
    if ids.dtype.kind == "i" and ids.min() < 0:
        at = int(np.argmax(ids < 0))
        raise MicrobatchError(
            f"{where}: token {start + at} of {corpus.describe(document)} is {ids[at]}: a negative id would index the embedding from its end. "
            "Preprocess the corpus again with a tokenizer that has the missing special token"
        )
    return ids


def _check_layout(plan: MicrobatchPlan, where: str) -> None:
    """Refuses a plan whose pieces, cu_seqlens and T do not tell the same story."""
    lengths = [piece.length for piece in plan.pieces] or [plan.T]
    if plan.joined:
        lengths = [sum(lengths)]
    real, padded = np.asarray(plan.cu_seqlens), np.asarray(plan.cu_seqlens_padded)
    if not len(real) == len(padded) == len(lengths) + 1:
        raise MicrobatchError(f"{where}: {len(lengths)} segments need {len(lengths) + 1} boundaries, the plan has {len(real)} real and {len(padded)} padded")
    slots = np.diff(padded)
    if (
        real[0] != 0
        or padded[0] != 0
        or padded[-1] != plan.T
        or np.any(np.diff(real) != lengths)
        or np.any(slots < lengths)
        or slots.max() != plan.max_seqlen
    ):
        raise MicrobatchError(
            f"{where}: the plan contradicts itself: piece lengths {lengths}, cu_seqlens {real.tolist()}, cu_seqlens_padded {padded.tolist()}, "
            f"max_seqlen {plan.max_seqlen}, T {plan.T}. Attention would cross documents or ranks would disagree on T; take plans from Planner.plan unchanged"
        )
