# SPDX-License-Identifier: Apache-2.0
"""The layout of a pack: what metadata is refused, that it is made once per microbatch, and how pieces are grouped."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.packed_seq_params import PackedSeqParams
from packed_attention_checks import MANY_TINY, PACKS, make_attention, pack, random_inputs

from megatron_dyn.layers import PackedLayoutError, layout

WIDTH = 32


def params(cu, padded=None, longest=None, **more) -> PackedSeqParams:
    tensor = lambda x: None if x is None else torch.tensor(x, dtype=torch.int32)  # noqa: E731
    cu, padded = tensor(cu), tensor(padded)
    named = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    return PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **(named | more))


@pytest.mark.parametrize(
    "metadata, T, complaint",
    [
        (params([0, 3, 8]), 9, "end at 8 but the microbatch has T = 9"),
        (params([0, 3, 8]), 7, "end at 8 but the microbatch has T = 7"),
        (params([0, 3, 8], [0, 3, 10]), 12, "end at 10"),
        (params([1, 3, 8]), 8, "starts at 1"),
        (params([0]), 8, "at least two offsets"),
        (params(None), 8, "at least two offsets"),
        (params([[0, 8]]), 8, "one-dimensional"),
        (params([0, 5, 3, 8]), 8, "piece 1 has -2 tokens"),
        (params([0, 5, 8], [0, 4, 8]), 8, "piece 0 has 5 tokens in a segment of 4 rows"),
        (params([0, 5, 8], [0, 8]), 8, "3 offsets but cu_seqlens_q_padded has 2"),
        (params([0, 0], [0, 8]), 8, "no piece has a token"),
        (params([0, 3, 8], cu_seqlens_kv=torch.tensor([0, 4, 8], dtype=torch.int32)), 8, "cu_seqlens_kv differs"),
        (params([0, 3, 8], [0, 4, 9], cu_seqlens_kv_padded=None), 9, "cu_seqlens_kv_padded differs"),
        (params([0, 3, 8], local_cp_size=2), 8, "context parallelism"),
        (params([0, 3, 8], longest=4), 8, "max_seqlen_q is 4"),
        (params([0, 3, 8], longest=8), 8, "run on across documents"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(metadata, T, complaint):
    with pytest.raises(PackedLayoutError, match=complaint):
        layout.build_layout(metadata, T, WIDTH)


def test_max_seqlen_equal_to_T_really_lets_positions_run_on():
    """Why it is refused: Megatron takes a RoPE table of T rows for one that numbers the rows of the whole pack."""

    class Alone:
        size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)

    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    table = lambda rows: (torch.arange(rows).float()[:, None] * torch.tensor([1.0, 0.1])).repeat(1, 2)[:, None, None]  # noqa: E731
    rotate = lambda rows: _apply_rotary_pos_emb_thd(torch.ones(8, 1, 4), cu, table(rows), cp_group=Alone)  # noqa: E731
    right, beyond, equal = rotate(4), rotate(9), rotate(8)
    assert torch.equal(right[:4], right[4:]) and torch.equal(right, beyond)
    assert not torch.equal(equal[:4], equal[4:])


def test_equal_offsets_in_other_tensors_are_the_same_offsets():
    same = params([0, 3, 8], cu_seqlens_kv=torch.tensor([0, 3, 8], dtype=torch.int32))
    assert layout.build_layout(same, 8, WIDTH).groups == ((1, 3), (1, 5))


def test_made_once_per_microbatch_and_kept_with_it(monkeypatch):
    made = []
    real = layout.build_layout
    monkeypatch.setattr(layout, "build_layout", lambda *a: made.append(a) or real(*a))
    layers = [make_attention() for _ in range(3)]
    one, other = pack(3, 5, 2).params(), pack(4, 4).params()
    for metadata, T in ((one, 10), (other, 8), (one, 10)):  # as 1F1B and recomputation come back to an old microbatch
        qkv, _ = random_inputs(T)
        for layer in layers:
            layer(*qkv, None, packed_seq_params=metadata)
    assert len(made) == 2


def test_other_offsets_on_the_same_object_are_noticed():
    metadata = params([0, 3, 8])
    first = layout.layout_of(metadata, 8, WIDTH)
    metadata.cu_seqlens_q = metadata.cu_seqlens_kv = torch.tensor([0, 8], dtype=torch.int32)
    assert layout.layout_of(metadata, 8, WIDTH).groups == ((1, 8),) != first.groups


def test_rows_stay_in_place_when_moving_them_does_not_pay():
    in_place = layout.build_layout(params([0, 6, 12, 18, 20, 26], [0, 6, 12, 18, 20, 30]), 30, WIDTH)
    assert in_place.sorting is None
    assert in_place.groups == ((3, 6), (1, 2), (1, 6), (0, 4))


@pytest.mark.parametrize("name", ["many tiny", "long and tiny", "many tiny, each padded"])
def test_sorted_rows_hold_each_token_once_and_in_few_calls(name):
    tried = PACKS[name]
    found = layout.build_layout(tried.params(), tried.T, WIDTH)
    tokens = [row for start, length in zip(tried.starts, tried.lengths) for row in range(start, start + length)]
    is_token = torch.ones(len(found.sorting.to_groups), dtype=torch.bool)
    is_token[found.sorting.filler] = False
    assert sorted(found.sorting.to_groups[is_token].tolist()) == tokens
    assert torch.equal(found.sorting.to_groups[found.sorting.to_pack[tokens]], torch.tensor(tokens))
    assert sorted(found.sorting.padding.tolist()) == sorted(set(range(tried.T)) - set(tokens))
    assert sum(count * length for count, length in found.groups) == len(is_token)
    assert found.num_calls <= 4 < len(tried.lengths)
    assert len(is_token) <= 2 * len(tokens)


def test_a_wide_layer_is_filled_up_less():
    falling = sorted(MANY_TINY, reverse=True)
    rows = [sum(layout.group_lengths(falling, width)) for width in (16, 128, 1024, 8192)]
    assert rows == sorted(rows, reverse=True) and rows[-1] == sum(falling)
    assert all(size >= length for size, length in zip(layout.group_lengths(falling, 16), falling))
