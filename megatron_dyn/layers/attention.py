# SPDX-License-Identifier: Apache-2.0
"""Exact causal attention over packed documents, as the ``core_attention`` of Megatron's local spec.

query         [T, heads/tp, channels]         fp32 or bf16; T packed tokens of all documents
key, value    [T, groups/tp, channels]        groups = heads (MHA), 1 (MQA) or between (GQA)
cu_seqlens    [pieces + 1] int32              real lengths; offsets come from cu_seqlens_*_padded where given
q_PHD         [P, heads/tp, channels]         rows of the pack sorted by piece length, each piece filled to its group's length
group         [pieces, heads/tp, length, channels]   one SDPA call
output        [T, heads/tp * channels]        rows that belong to no piece are zero

Pieces of similar length share one SDPA call: causal attention never looks right, so zero rows appended to a piece change
nothing, and many tiny documents cost a few calls instead of thousands.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

_LAYOUT = "_megatron_dyn_layout"


class PackedLayoutError(ValueError):
    """The packing metadata does not describe the tokens it came with."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """How a pack's T rows are rearranged into groups of equal length; made once per microbatch.

    Attributes:
        cu_seqlens: the tensor it was made from, to notice another one.
        num_rows: T.
        groups: (pieces, length) of each SDPA call, in the order of the rearranged rows.
        to_groups: [P] int64, row of the pack for each rearranged row.
        filler: positions in [0, P) that belong to no token.
        to_pack: [T] int64, rearranged row for each row of the pack.
        padding: positions in [0, T) that belong to no piece.
        in_order: the rearrangement changes nothing (P == T, same order, no filler).
    """

    cu_seqlens: Tensor
    num_rows: int
    groups: tuple[tuple[int, int], ...]
    to_groups: Tensor
    filler: Tensor
    to_pack: Tensor
    padding: Tensor
    in_order: bool


def layout_of(params: PackedSeqParams, num_rows: int) -> PackedLayout:
    """The layout of this microbatch, made at its first use and kept on ``params`` itself.

    It is bound to the microbatch because pipelines run the forward of one between the forward and backward of another, and
    recomputation replays an old one.

    Raises:
        PackedLayoutError: see `build_layout`.
    """
    layout = params.__dict__.get(_LAYOUT)
    if layout is None or layout.cu_seqlens is not params.cu_seqlens_q or layout.num_rows != num_rows:
        layout = build_layout(params, num_rows)
        params.__dict__[_LAYOUT] = layout
    return layout


def build_layout(params: PackedSeqParams, num_rows: int) -> PackedLayout:
    """Check the packing metadata against T and sort the pieces into groups.

    Args:
        params: ``cu_seqlens_q`` are real lengths; the pieces start at ``cu_seqlens_q_padded`` where given.
        num_rows: T, the rows of query, key and value.
    Raises:
        PackedLayoutError: offsets that do not run from 0 to T, overlapping or negative pieces, keys packed unlike queries,
            context parallelism, or a ``max_seqlen`` with which Megatron's RoPE would let positions run on.
    """
    real = _offsets(params.cu_seqlens_q, "cu_seqlens_q")
    start = real if params.cu_seqlens_q_padded is None else _offsets(params.cu_seqlens_q_padded, "cu_seqlens_q_padded")
    for name, mine in (("cu_seqlens_kv", params.cu_seqlens_q), ("cu_seqlens_kv_padded", params.cu_seqlens_q_padded)):
        other = getattr(params, name)
        if other is not mine and (other is None or mine is None or not torch.equal(other, mine)):
            raise PackedLayoutError(f"{name} differs from the queries' offsets: self-attention needs the same pieces for both.")
    if getattr(params, "local_cp_size", None) not in (None, 1):
        raise PackedLayoutError("the pack is divided by context parallelism, which local attention does not support.")
    if len(real) != len(start):
        raise PackedLayoutError(f"cu_seqlens_q has {len(real)} offsets but cu_seqlens_q_padded has {len(start)}.")
    if start[-1] != num_rows:
        raise PackedLayoutError(
            f"cu_seqlens end at {start[-1]} but the microbatch has T = {num_rows} rows: the rest would be attended by nobody and "
            "rotated by nothing. Extend the last entry of cu_seqlens_q_padded to T."
        )
    lengths = [b - a for a, b in zip(real, real[1:])]
    rooms = [b - a for a, b in zip(start, start[1:])]
    for piece, (length, room) in enumerate(zip(lengths, rooms)):
        if not 0 <= length <= room:
            raise PackedLayoutError(
                f"piece {piece} has {length} tokens in a segment of {room} rows ({start[piece]} to {start[piece + 1]})."
            )
    longest = max(rooms)
    if params.max_seqlen_q is not None and (params.max_seqlen_q < longest or (params.max_seqlen_q == num_rows > longest)):
        raise PackedLayoutError(
            f"max_seqlen_q is {params.max_seqlen_q} but the longest padded segment has {longest} of T = {num_rows} rows: Megatron's "
            "RoPE would rotate with wrong positions (they run on across documents when max_seqlen equals T). Set it to the "
            "longest padded segment."
        )
    return _arrange(params.cu_seqlens_q, num_rows, start[:-1], lengths)


def _offsets(cu_seqlens: Tensor | None, name: str) -> list[int]:
    if cu_seqlens is None or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise PackedLayoutError(f"{name} must be a one-dimensional tensor of at least two offsets (0 and T).")
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise PackedLayoutError(f"{name} starts at {offsets[0]}, not at 0: the rows before it would belong to no document.")
    return offsets


def group_lengths(lengths: list[int]) -> list[int]:
    """The length at which each piece is computed: its own, or that of a slightly longer piece it shares a call with.

    Args:
        lengths: tokens of each piece, falling.
    Returns:
        for each piece the length of its group. A piece joins the group above it while the rows that fill it up are fewer
        than a call costs: `FILL_RATIO` of its length, or up to `FILL_ROWS` rows.
    """
    chosen: list[int] = []
    current = 0
    for length in lengths:
        if not chosen or current - length > max(FILL_ROWS, FILL_RATIO * length):
            current = length
        chosen.append(current)
    return chosen


FILL_RATIO, FILL_ROWS = 0.25, 16


def _arrange(cu_seqlens: Tensor, num_rows: int, starts: list[int], lengths: list[int]) -> PackedLayout:
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], starts[i]))
    sizes = group_lengths([lengths[i] for i in order])
    groups: list[tuple[int, int]] = []
    for size in sizes:
        groups[-1:] = [(groups[-1][0] + 1, size)] if groups and groups[-1][1] == size else [*groups[-1:], (1, size)]
    device = cu_seqlens.device
    size_N, start_N, length_N = (
        torch.tensor(x, dtype=torch.int64) for x in (sizes, [starts[i] for i in order], [lengths[i] for i in order])
    )
    base_N = size_N.cumsum(0) - size_N
    within_P = torch.arange(int(size_N.sum())) - base_N.repeat_interleave(size_N)
    is_token_P = within_P < length_N.repeat_interleave(size_N)
    to_groups = torch.where(is_token_P, start_N.repeat_interleave(size_N) + within_P, 0)
    tokens = is_token_P.nonzero().squeeze(1)
    to_pack = torch.full((num_rows,), -1, dtype=torch.int64)
    to_pack[to_groups[tokens]] = tokens
    padding = (to_pack < 0).nonzero().squeeze(1)
    to_pack.clamp_(min=0)
    return PackedLayout(
        cu_seqlens=cu_seqlens,
        num_rows=num_rows,
        groups=tuple(groups),
        to_groups=to_groups.to(device),
        filler=(~is_token_P).nonzero().squeeze(1).to(device),
        to_pack=to_pack.to(device),
        padding=padding.to(device),
        in_order=len(tokens) == num_rows == len(to_groups) and bool((to_groups == torch.arange(num_rows)).all()),
    )


class _Rearrange(torch.autograd.Function):
    """rows -> rows[index], with zeros at `blank`. The backward is the same map the other way, which is exact because each
    row that is not blank appears once."""

    @staticmethod
    def forward(ctx, rows, index, blank, back_index, back_blank):  # type: ignore[override]
        ctx.save_for_backward(back_index, back_blank)
        return _take(rows, index, blank)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return _take(grad, *ctx.saved_tensors), None, None, None, None


def _take(rows: Tensor, index: Tensor, blank: Tensor) -> Tensor:
    taken = rows.index_select(0, index)
    return taken.index_fill_(0, blank, 0) if blank.numel() else taken


class ThdAttention(MegatronModule):
    """Causal attention within each packed document, and nowhere else.

    Scaling is ``softmax_scale`` or 1/sqrt(channels). ``apply_query_key_layer_scaling`` only moves a factor from the scores
    into the softmax, and the softmax is always accumulated in fp32, so neither it nor ``attention_softmax_in_fp32`` changes
    what is computed here. Memory is linear in the piece length, except with attention dropout, which PyTorch computes on
    the CPU with the whole [length, length] score matrix.

    Args:
        As Megatron's ``DotProductAttention``.
    Raises:
        ValueError: at construction for what it does not support: context parallelism, sliding windows, softmax offsets,
            masks that are not causal.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object | None = None,
    ) -> None:
        super().__init__(config=config)
        refused = {
            f"context_parallel_size {config.context_parallel_size}": config.context_parallel_size > 1,
            f"window_size {config.window_size}": config.window_size is not None,
            f"softmax_type {config.softmax_type!r}": config.softmax_type != "vanilla",
            f"attention type {attention_type!r}": attention_type != "self",
            f"mask type {attn_mask_type}": attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal),
        }
        for what, is_refused in refused.items():
            if is_refused:
                raise ValueError(f"local packed attention does not support {what}: use the Transformer Engine layers, or leave it out.")
        self.layer_number = layer_number
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each piece.

        Args:
            query: [T, heads/tp, channels]. key, value: [T, groups/tp, channels].
            attention_mask, attention_bias: must be None; the pieces are the mask.
            packed_seq_params: the pieces, ``qkv_format="thd"``.
        Returns:
            [T, heads/tp * channels], zero in rows that belong to no piece.
        Raises:
            ValueError: no packing metadata, or a mask beside it.
            PackedLayoutError: metadata that does not fit T.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError(
                "packed attention got no packed_seq_params with qkv_format='thd': going on would let documents see each other. "
                "Pass the microbatch's packed_seq_params to the model."
            )
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("packed attention takes neither attention_mask nor attention_bias: the pieces are the mask. Pass None.")
        layout = layout_of(packed_seq_params, query.size(0))
        rows_THD = (query, key, value)
        if not layout.in_order:
            there, back = (layout.to_groups, layout.filler), (layout.to_pack, layout.padding)
            rows_THD = tuple(_Rearrange.apply(x, *there, *back) for x in rows_THD)
        if self.dropout and self.training and not self.config.sequence_parallel:
            # Each rank holds other heads, so it must drop other entries. Under sequence parallelism the whole block already
            # runs in the rank's own generator.
            with get_cuda_rng_tracker().fork():
                context_PH = self._attend(*rows_THD, layout)
        else:
            context_PH = self._attend(*rows_THD, layout)
        return context_PH if layout.in_order else _Rearrange.apply(context_PH, *back, *there)

    def _attend(self, q_PHD: Tensor, k_PGD: Tensor, v_PGD: Tensor, layout: PackedLayout) -> Tensor:
        """[P, heads, channels] in groups -> [P, heads * channels], one SDPA call a group."""
        rows = [count * length for count, length in layout.groups]
        outputs = []
        for (count, length), *qkv in zip(layout.groups, *(x.split(rows) for x in (q_PHD, k_PGD, v_PGD))):
            q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
