# SPDX-License-Identifier: Apache-2.0
"""Exact causal attention over packed documents, as the ``core_attention`` of Megatron's local spec.

query         [T, heads/tp, channels]         fp32 or bf16; T packed tokens of all documents
key, value    [T, groups/tp, channels]        groups = heads (MHA), 1 (MQA) or between (GQA)
cu_seqlens    [pieces + 1] int32              real lengths; offsets come from cu_seqlens_*_padded where given
q_PHD         [P, heads/tp, channels]         the rows in the order of the layout (P = T, or more where pieces are filled up)
group         [pieces, heads/tp, length, channels]   one SDPA call
output        [T, heads/tp * channels]        rows that belong to no piece are zero

Either the pieces stay where they are, and neighbours of equal length share an SDPA call; or all rows are sorted so that pieces
of similar length share one. Causal attention never looks right, so zero rows appended to a piece change nothing. Sorting turns
the hundreds of calls for tiny documents into a few, and is left alone where moving the rows would cost more than it saves.
"""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dyn.layers.layout import PackedLayout, layout_of


# PyTorch's bf16 kernel for the CPU is up to five times slower than its fp32 kernel below this length.
BF16_FROM_LENGTH = 1024


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
        layout = layout_of(packed_seq_params, query.size(0), query.size(1) * query.size(2))
        rows = (query, key, value)
        if (sorting := layout.sorting) is not None:
            there, back = (sorting.to_groups, sorting.filler), (sorting.to_pack, sorting.padding)
            rows = tuple(_Rearrange.apply(x, *there, *back) for x in rows)
        # Each rank holds other heads, so it must drop other entries. Under sequence parallelism the whole block already runs in
        # the rank's own generator.
        own_generator = self.dropout > 0 and self.training and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if own_generator else nullcontext():
            context_PH = self._attend(*rows, layout)
        return context_PH if sorting is None else _Rearrange.apply(context_PH, *back, *there)

    def _attend(self, q_PHD: Tensor, k_PGD: Tensor, v_PGD: Tensor, layout: PackedLayout) -> Tensor:
        """[P, heads, channels] in groups -> [P, heads * channels], one SDPA call a group."""
        rows = [max(count, 1) * length for count, length in layout.groups]
        outputs = []
        for (count, length), *qkv in zip(layout.groups, *(x.split(rows) for x in (q_PHD, k_PGD, v_PGD))):
            if not count:
                outputs.append(q_PHD.new_zeros(length, q_PHD.size(1) * q_PHD.size(2)))
                continue
            q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
            if q.device.type == "cpu" and length < BF16_FROM_LENGTH:
                q, k, v = q.float(), k.float(), v.float()
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1).flatten(1).to(q_PHD.dtype))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
