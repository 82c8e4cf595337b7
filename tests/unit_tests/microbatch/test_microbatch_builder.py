# SPDX-License-Identifier: Apache-2.0
"""Rows 3, 9, 11, 12, 14, 21 and 31 of the fault cases, and the mutants that the checks must catch."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from microbatch_checks import ListCorpus, check_microbatch, hand_plan, whole_documents

from megatron_dyn.microbatch import MicrobatchError, build_microbatch


def documents_of(lengths, base=10):
    return [list(range(base * (document + 1), base * (document + 1) + length)) for document, length in enumerate(lengths)]


def build(documents, pieces=None, pad_token_id=0, **layout):
    lengths = [len(document) for document in documents]
    plan = hand_plan(lengths, whole_documents(lengths) if pieces is None else pieces, **layout)
    return build_microbatch(plan, ListCorpus(documents), pad_token_id=pad_token_id, step=3, index=1)


def test_shapes_and_dtypes_are_what_megatron_core_takes():
    microbatch = build(documents_of([5, 4, 8]), alignment=4)
    for name in ("tokens", "labels", "position_ids"):
        tensor = getattr(microbatch, name)
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, (1, 20)) and tensor.is_contiguous(), name
    assert (microbatch.loss_mask.dtype, tuple(microbatch.loss_mask.shape)) == (torch.float32, (1, 20))
    packed = microbatch.packed_seq_params
    assert packed.qkv_format == "thd"
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert getattr(packed, name).dtype == torch.int32, name
    assert type(packed.max_seqlen_q) is int and type(packed.max_seqlen_kv) is int
    assert (microbatch.step, microbatch.index, microbatch.T) == (3, 1, 20)


@pytest.mark.parametrize(
    "lengths, T, real, padded, longest, loss_tokens",
    [
        ([5, 4, 8], 20, [0, 5, 9, 17], [0, 5, 9, 20], 11, 14),  # row 3, TP=4
        ([1], 4, [0, 1], [0, 4], 4, 0),  # row 3, a single token
    ],
)
def test_padding_to_the_alignment_is_inert(lengths, T, real, padded, longest, loss_tokens):
    documents = documents_of(lengths)
    microbatch = build(documents, alignment=4, pad_token_id=7)
    packed = microbatch.packed_seq_params
    assert microbatch.T == T
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == real
    assert packed.cu_seqlens_q_padded.tolist() == packed.cu_seqlens_kv_padded.tolist() == padded
    assert packed.max_seqlen_q == longest
    assert microbatch.loss_mask.sum().item() == loss_tokens
    check_microbatch(microbatch, documents, pad_token_id=7)


@pytest.mark.parametrize(
    "lengths, cu, longest, loss_tokens",
    [([8], [0, 8], 8, 7), ([1, 1, 1], [0, 1, 2, 3], 1, 0), ([1], [0, 1], 1, 0)],
)
def test_degenerate_packs(lengths, cu, longest, loss_tokens):
    """Row 9: one document, and documents of one token."""
    documents = documents_of(lengths)
    microbatch = build(documents)
    assert microbatch.packed_seq_params.cu_seqlens_q.tolist() == cu
    assert microbatch.packed_seq_params.max_seqlen_q == longest
    assert microbatch.loss_mask.sum().item() == loss_tokens
    check_microbatch(microbatch, documents)


def test_positions_restart_in_each_document():
    """Row 11."""
    assert build([[1, 2, 3, 4]] * 2).position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]


def test_no_label_crosses_a_document():
    """Row 12."""
    microbatch = build([[11, 12, 13], [21, 22]])
    counted = microbatch.loss_mask[0].bool()
    pairs = list(zip(microbatch.tokens[0][counted].tolist(), microbatch.labels[0][counted].tolist()))
    assert pairs == [(11, 12), (12, 13), (21, 22)]


def test_every_loss_token_of_a_cut_document_is_trained_once():
    document = list(range(100, 109))
    pairs = []
    for piece in [(0, 0, 4), (0, 4, 4), (0, 8, 1)]:
        microbatch = build([document], pieces=[piece])
        check_microbatch(microbatch, [document])
        counted = microbatch.loss_mask[0].bool()
        pairs += zip(microbatch.tokens[0][counted].tolist(), microbatch.labels[0][counted].tolist())
    assert pairs == list(zip(document, document[1:]))


def test_each_piece_is_read_once():
    corpus = ListCorpus(documents_of([9, 3]))
    build_microbatch(hand_plan([9, 3], [(0, 2, 4), (1, 0, 3)]), corpus, step=0, index=0)
    assert corpus.reads == [(0, 2, 5), (1, 0, 3)]


def test_the_mask_weighs_tokens_and_not_microbatches():
    """Row 14: token losses [4] and [1, 1, 1] give 7/4, whatever their microbatches."""
    short, long = build([[1, 2]]), build([[1, 2, 3, 4]])
    losses = {id(short): torch.tensor([[4.0, 99.0]]), id(long): torch.tensor([[1.0, 1.0, 1.0, 99.0]])}
    total = sum((losses[id(mb)] * mb.loss_mask).sum() for mb in (short, long))
    assert (total / (short.plan.num_loss_tokens + long.plan.num_loss_tokens)).item() == 1.75


@pytest.mark.parametrize("alignment", [1, 2, 16])
def test_a_filler_builds_and_counts_nothing(alignment):
    microbatch = build([[1, 2]], pieces=[], alignment=alignment, pad_token_id=5)
    assert microbatch.T == alignment
    assert microbatch.packed_seq_params.cu_seqlens_q.tolist() == [0, alignment]
    check_microbatch(microbatch, [[1, 2]], pad_token_id=5)


def test_padding_behind_each_document_is_followed_too():
    documents = documents_of([5, 4, 8])
    microbatch = build(documents, slots=[8, 4, 8], pad_token_id=9)
    assert microbatch.packed_seq_params.cu_seqlens_q_padded.tolist() == [0, 8, 12, 20]
    check_microbatch(microbatch, documents, pad_token_id=9)


@pytest.mark.parametrize("pad", [-1, None, True, 0.0])
def test_a_pad_id_that_is_no_token_is_refused(pad):
    with pytest.raises(ValueError, match="pad_token_id"):
        build([[1, 2]], alignment=4, pad_token_id=pad)


def test_numpy_pad_ids_are_taken():
    assert build([[1]], alignment=2, pad_token_id=np.int32(3)).tokens.tolist() == [[1, 3]]


def test_a_corpus_that_does_not_fit_the_plan_is_refused():
    plan = hand_plan([5, 4], whole_documents([5, 4]))
    cases = {
        "has 3": ListCorpus([[1, 2, 3], [1, 2, 3, 4]]),
        "loss tokens": ListCorpus([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]),
        "the corpus has 1": ListCorpus([[1, 2, 3, 4, 5]]),
        "token 2 of list, document 0 is -1": ListCorpus([[1, 2, -1, 4, 5], [1, 2, 3, 4]]),
    }
    for message, corpus in cases.items():
        with pytest.raises(MicrobatchError, match=message) as caught:
            build_microbatch(plan, corpus, step=12, index=3)
        assert "step 12, microbatch 3" in str(caught.value)


def test_a_corpus_that_answers_short_or_in_floats_is_refused():
    class Short(ListCorpus):
        def tokens(self, document, start, length):
            return super().tokens(document, start, length)[:-1]

    class Floats(ListCorpus):
        def tokens(self, document, start, length):
            return super().tokens(document, start, length).astype(float)

    for kind in (Short, Floats):
        with pytest.raises(MicrobatchError, match=re.escape("list, document 0")):
            build_microbatch(hand_plan([3], whole_documents([3])), kind([[1, 2, 3]]), step=0, index=0)


@pytest.mark.parametrize(
    "field, value",
    [
        ("cu_seqlens", [0, 2, 5]),
        ("cu_seqlens", [0, 5]),
        ("cu_seqlens_padded", [0, 3, 5]),
        ("cu_seqlens_padded", [0, 2, 8]),
        ("max_seqlen", 8),
        ("T", 12),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(field, value):
    documents = documents_of([3, 2])
    plan = hand_plan([3, 2], whole_documents([3, 2]), alignment=8)
    build_microbatch(plan, ListCorpus(documents), step=0, index=0)
    setattr(plan, field, np.array(value, dtype=np.int32) if isinstance(value, list) else value)
    with pytest.raises(MicrobatchError, match="step 0, microbatch 0"):
        build_microbatch(plan, ListCorpus(documents), step=0, index=0)


def test_one_buffer_holds_every_tensor_and_moves_as_one():
    microbatch = build(documents_of([3, 2, 7]))
    together = microbatch.in_one_buffer()
    check_microbatch(together, documents_of([3, 2, 7]))
    packed = together.packed_seq_params
    assert packed.cu_seqlens_q is packed.cu_seqlens_kv
    tensors = [together.tokens, together.labels, together.position_ids, together.loss_mask, packed.cu_seqlens_q, packed.cu_seqlens_q_padded]
    whole = together.buffer.untyped_storage()
    assert all(tensor.untyped_storage().data_ptr() == whole.data_ptr() for tensor in tensors)
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:])), "tensors overlap"
    moved = together.to("meta")
    assert moved.buffer.device.type == moved.tokens.device.type == moved.packed_seq_params.cu_seqlens_kv_padded.device.type == "meta"
    assert (moved.tokens.shape, moved.loss_mask.dtype) == (microbatch.tokens.shape, microbatch.loss_mask.dtype)
    assert moved.packed_seq_params.cu_seqlens_q is moved.packed_seq_params.cu_seqlens_kv
    assert together.to("cpu") is together
    assert together.map(torch.clone).buffer is None, "copies are no views of the buffer"


def test_moving_a_microbatch_keeps_shared_tensors_shared():
    microbatch = build(documents_of([3, 2]))
    calls = []
    moved = microbatch.map(lambda tensor: calls.append(tensor.shape) or tensor.clone())
    assert len(calls) == 6  # four [1, T] tensors and two sets of boundaries
    assert moved.packed_seq_params.cu_seqlens_q is moved.packed_seq_params.cu_seqlens_kv
    assert moved.plan is microbatch.plan
    check_microbatch(moved.to("cpu"), documents_of([3, 2]))
    assert microbatch.to("meta").packed_seq_params.cu_seqlens_kv_padded.device.type == "meta"


lengths_and_budget = st.tuples(st.lists(st.integers(0, 23), min_size=1, max_size=12), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.integers(0, 3))


@settings(max_examples=150, deadline=None)
@given(lengths_and_budget)
def test_microbatches_give_back_the_documents(case):
    """Row 21 and the property behind all the others: what was packed can be unpacked to the very documents."""
    lengths, longest_piece, alignment, pad = case
    documents = [np.random.default_rng(seed).integers(1, 1000, length).tolist() for seed, length in enumerate(lengths)]
    pieces = [(d, s, min(longest_piece, n - s)) for d, n in enumerate(lengths) for s in range(0, n, longest_piece)]
    tokens = {d: [None] * n for d, n in enumerate(lengths)}
    labels = {d: [None] * n for d, n in enumerate(lengths)}
    for at in range(0, len(pieces), 3):
        microbatch = build(documents, pieces=pieces[at : at + 3], alignment=alignment, pad_token_id=pad)
        check_microbatch(microbatch, documents, pad)
        for piece, row in zip(microbatch.plan.pieces, microbatch.packed_seq_params.cu_seqlens_q_padded.tolist()):
            for offset in range(piece.length):
                tokens[piece.document][piece.start + offset] = microbatch.tokens[0, row + offset].item()
                if microbatch.loss_mask[0, row + offset]:
                    labels[piece.document][piece.start + offset] = microbatch.labels[0, row + offset].item()
    for d, document in enumerate(documents):
        assert tokens[d] == document
        assert labels[d] == document[1:] + [None] * min(1, len(document))


def mutant_label_across_the_boundary(mb):
    mb.labels = torch.roll(mb.tokens, -1, dims=1)
    mb.loss_mask[0, :-1] = 1.0


def mutant_labels_shifted_with_the_right_mask(mb):
    mb.labels = torch.roll(mb.tokens, -2, dims=1)


def mutant_positions_not_reset(mb):
    mb.position_ids = torch.arange(mb.T)[None]


def mutant_last_label_of_a_cut_document_lost(mb):
    mb.loss_mask[0, mb.packed_seq_params.cu_seqlens_q[1:].long() - 1] = 0.0


def mutant_padding_is_trained(mb):
    mb.loss_mask[0, -1] = 1.0


def mutant_longest_is_T(mb):
    mb.packed_seq_params.max_seqlen_q = mb.packed_seq_params.max_seqlen_kv = mb.T


def mutant_padding_as_an_empty_document(mb):
    packed = mb.packed_seq_params
    packed.cu_seqlens_q = torch.cat([packed.cu_seqlens_q, packed.cu_seqlens_q[-1:]])


MUTANTS = [value for name, value in sorted(globals().items()) if name.startswith("mutant_")]


@pytest.mark.parametrize("break_it", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_check_catches(break_it):
    documents = documents_of([6, 4, 9])
    pieces = [(0, 0, 4), (1, 0, 4), (2, 3, 5)]
    check_microbatch(build(documents, pieces=pieces, alignment=8), documents)
    broken = build(documents, pieces=pieces, alignment=8)
    break_it(broken)
    with pytest.raises(AssertionError):
        check_microbatch(broken, documents)
