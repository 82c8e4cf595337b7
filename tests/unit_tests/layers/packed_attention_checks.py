# SPDX-License-Identifier: Apache-2.0
"""A naive attention in fp64, packs to try, and the check that both tests of the layer and its mutants go through.

    query [T, heads, channels], key and value [T, groups, channels]
    output, its gradient [T, heads * channels]
"""

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn.layers import ThdAttention

HEADS, GROUPS, CHANNELS = 4, 2, 8


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Documents, and rows of padding behind each of them."""

    lengths: tuple[int, ...]
    padding: tuple[int, ...]

    @property
    def starts(self) -> list[int]:
        rooms = [n + p for n, p in zip(self.lengths, self.padding)]
        return [sum(rooms[:i]) for i in range(len(rooms))]

    @property
    def T(self) -> int:
        return sum(self.lengths) + sum(self.padding)

    def params(self) -> PackedSeqParams:
        cu = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)
        cu_padded = torch.tensor([*self.starts, self.T], dtype=torch.int32)
        longest = max(n + p for n, p in zip(self.lengths, self.padding))
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            cu_seqlens_q_padded=cu_padded,
            cu_seqlens_kv_padded=cu_padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


def pack(*lengths: int, tail: int = 0) -> Pack:
    return Pack(lengths=lengths, padding=(0,) * (len(lengths) - 1) + (tail,))


MANY_TINY = tuple(1 + (7 * i) % 13 for i in range(60))
PACKS = {
    "one token": pack(1),
    "one token, padded": pack(1, tail=3),
    "three of one token": pack(1, 1, 1),
    "one document": pack(8),
    "case 3": pack(5, 4, 8, tail=3),
    "case 10": pack(3, 5, 2),
    "equal neighbours": pack(6, 6, 6, 2, 6),
    "many tiny": pack(*MANY_TINY, tail=5),
    "long and tiny": pack(40, *MANY_TINY, 90),
    "each padded": Pack(lengths=(3, 3, 7, 1), padding=(1, 1, 1, 3)),
    "many tiny, each padded": Pack(lengths=MANY_TINY, padding=tuple(-n % 4 for n in MANY_TINY)),
}


def make_attention(*, heads=HEADS, groups=GROUPS, dropout=0.0, sequence_parallel=False, softmax_scale=None, **more) -> ThdAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * CHANNELS,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=dropout,
        use_cpu_initialization=True,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=2 if sequence_parallel else 1,
        **more,
    )
    return ThdAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=softmax_scale)


def random_inputs(T: int, *, heads=HEADS, groups=GROUPS, dtype=torch.float32, seed=0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key and value that want gradients, and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    qkv = [draw(T, n, CHANNELS).requires_grad_() for n in (heads, groups, groups)]
    return qkv, draw(T, heads * CHANNELS)


def results(attention: ThdAttention, pack: Pack, qkv: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and the three gradients."""
    output = attention(*qkv, None, packed_seq_params=pack.params())
    return [output.detach(), *torch.autograd.grad(output, qkv, grad)]


def naive(pack: Pack, qkv: list[torch.Tensor], grad: torch.Tensor, *, scale: float = 1 / math.sqrt(CHANNELS)) -> list[torch.Tensor]:
    """The same by definition, in fp64, one document and one head at a time."""
    qkv64 = [x.detach().double().requires_grad_() for x in qkv]
    query, key, value = qkv64
    output = torch.zeros(query.size(0), query.size(1), query.size(2), dtype=torch.float64)
    share = query.size(1) // key.size(1)
    for start, length in zip(pack.starts, pack.lengths):
        rows = slice(start, start + length)
        for head in range(query.size(1)):
            scores = query[rows, head] @ key[rows, head // share].T * scale
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            output[rows, head] = scores.softmax(-1) @ value[rows, head // share]
    output = output.flatten(1)
    return [output.detach(), *torch.autograd.grad(output, qkv64, grad.double())]


def assert_equals_naive(pack: Pack, *, dtype=torch.float32, tolerance: float = 2e-6, heads=HEADS, groups=GROUPS) -> None:
    """Output and all gradients, relative to the largest number of each."""
    qkv, grad = random_inputs(pack.T, heads=heads, groups=groups, dtype=dtype)
    found, expected = results(make_attention(heads=heads, groups=groups), pack, qkv, grad), naive(pack, qkv, grad)
    for name, a, b in zip(("output", "gradient of the query", "gradient of the key", "gradient of the value"), found, expected):
        assert a.dtype == dtype and torch.isfinite(a).all(), name
        # A pack of single tokens has no gradient to queries and keys at all: rounding is then measured against 1.
        off = (a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)
        assert off <= tolerance, f"{name} is {off:.1e} off"
