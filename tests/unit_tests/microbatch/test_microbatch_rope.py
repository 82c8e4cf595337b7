# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own RoPE and learned positions on our PackedSeqParams (row 11): each document is rotated as if it were alone."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from microbatch_checks import ListCorpus, hand_plan, whole_documents

from megatron_dyn.microbatch import build_microbatch


class OneRank:
    """A context-parallel group of one, without torch.distributed."""

    def size(self):
        return 1

    def rank(self):
        return 0


class Config:
    apply_rope_fusion = False
    rotary_interleaved = False
    multi_latent_attention = False


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def microbatch_of(lengths, **layout):
    documents = [list(range(1, length + 1)) for length in lengths]
    return build_microbatch(hand_plan(lengths, whole_documents(lengths), **layout), ListCorpus(documents), step=0, index=0)


def rotate(x_T, packed, boundaries="cu_seqlens_q_padded"):
    """What GPTModel and SelfAttention do: frequencies for the longest segment, split at the padded boundaries."""
    rope = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=OneRank())
    freqs = rope(rope.get_rotary_seq_len(None, None, None, None, packed), packed_seq=True, cp_group=OneRank())
    return apply_rotary_pos_emb(x_T, freqs, Config, cu_seqlens=getattr(packed, boundaries), cp_group=OneRank())


def rotate_alone(x_T):
    rope = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=OneRank())
    return apply_rotary_pos_emb(x_T[:, None], rope(len(x_T), cp_group=OneRank()), Config, cp_group=OneRank())[:, 0]


def rows_of(microbatch):
    return [(first, piece.length) for piece, first in zip(microbatch.plan.pieces, microbatch.packed_seq_params.cu_seqlens_q_padded.tolist())]


LAYOUTS = [
    ([4, 4], {}),
    ([5, 4, 8], {"alignment": 4}),
    ([8], {"alignment": 4}),
    ([5], {"alignment": 4}),
    ([1, 1, 1], {}),
    ([1, 7, 1], {"alignment": 16}),
    ([5, 4, 8], {"slots": [8, 4, 8]}),
]


@pytest.mark.parametrize("lengths, layout", LAYOUTS)
def test_rope_sees_each_document_alone(lengths, layout):
    microbatch = microbatch_of(lengths, **layout)
    x_T = torch.randn(microbatch.T, 2, 8, generator=torch.Generator().manual_seed(5))
    rotated = rotate(x_T, microbatch.packed_seq_params)
    assert rotated.shape == x_T.shape
    for first, length in rows_of(microbatch):
        torch.testing.assert_close(rotated[first : first + length], rotate_alone(x_T[first : first + length]))


def test_copies_of_a_document_are_rotated_alike():
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(5))
    rotated = rotate(torch.cat([x, x]), microbatch_of([4, 4]).packed_seq_params)
    assert torch.equal(rotated[:4], rotated[4:])


def test_a_max_seqlen_of_T_would_let_rope_run_on():
    """The trap behind `max_seqlen` being the longest segment: with T frequencies megatron-core numbers the pack, not the documents."""
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(5))
    packed = microbatch_of([4, 4]).packed_seq_params
    packed.max_seqlen_q = packed.max_seqlen_kv = 8
    rotated = rotate(torch.cat([x, x]), packed)
    assert not torch.allclose(rotated[:4], rotated[4:])


def test_real_boundaries_would_not_cover_the_padding_rows():
    microbatch = microbatch_of([5, 4, 8], alignment=4)
    with pytest.raises(RuntimeError, match="split"):
        rotate(torch.zeros(microbatch.T, 2, 8), microbatch.packed_seq_params, boundaries="cu_seqlens_q")


@pytest.mark.parametrize("lengths, layout", LAYOUTS)
def test_learned_positions_stay_inside_the_longest_document(lengths, layout):
    """A position table of the longest document's length is enough: padding never asks for a row beyond it."""
    microbatch = microbatch_of(lengths, **layout)
    table = torch.nn.Embedding(max(lengths), 3)
    assert table(microbatch.position_ids).shape == (1, microbatch.T, 3)
