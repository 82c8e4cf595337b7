# SPDX-License-Identifier: Apache-2.0
"""Packed attention on the CPU against one SDPA call per document, forward and backward, both in one run.

    python benchmarks/cpu_attention.py [--tokens 2048] [--heads 8] [--groups 2] [--channels 32] [--repeats 7] [--dtype fp32|bf16]

The two sides take turns and the processor's time is counted, so that a busy machine changes little. Prints the median
milliseconds of a forward and backward pass of one layer, and the median of the ratios of neighbouring runs (above 1: the grouped
attention is faster). The layout, made once per microbatch and not once per layer, is timed apart.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dyn.layers.attention import ThdAttention
from megatron_dyn.layers.layout import build_layout


def packs(tokens: int) -> dict[str, list[int]]:
    """Document lengths that fill a pack of `tokens`: many tiny documents, few long ones, and between."""
    random = np.random.default_rng(0)
    draw = {
        "tiny, 1 to 16": lambda: random.integers(1, 17),
        "short, 16 to 128": lambda: random.integers(16, 129),
        "heavy tail, median 150": lambda: min(tokens, int(random.lognormal(5.0, 1.2)) + 1),
        "equal, 256": lambda: min(tokens, 256),
        "two halves": lambda: tokens // 2,
        "one document": lambda: tokens,
    }
    found = {}
    for name, next_length in draw.items():
        lengths: list[int] = []
        while (room := tokens - sum(lengths)) > 0:
            lengths.append(min(room, int(next_length())))
        found[name] = lengths
    return found


def packed_seq_params(lengths: list[int]) -> PackedSeqParams:
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = max(lengths)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)


def one_call_per_document(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    outputs = []
    for parts in zip(*(x.split(lengths) for x in (query, key, value))):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        outputs.append(out.squeeze(0).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def milliseconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(tokens=2048, heads=8, groups=2, channels=32, repeats=7, threads=1).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=args.heads * args.channels,
        num_attention_heads=args.heads,
        num_query_groups=args.groups,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    attention = ThdAttention(config, 1, AttnMaskType.causal, "self")
    width = args.heads * args.channels

    print(f"T={args.tokens}, {args.heads} heads, {args.groups} groups, {args.channels} channels, {args.dtype}, {args.threads} thread(s)")
    print(f"{'pack':<24}{'documents':>10}{'calls':>7}{'rows':>10}{'per document':>14}{'grouped':>10}{'ratio':>8}{'layout':>9}")
    for name, lengths in packs(args.tokens).items():
        make = lambda heads: torch.randn(args.tokens, heads, args.channels, dtype=dtype, requires_grad=True)  # noqa: E731
        query, key, value = make(args.heads), make(args.groups), make(args.groups)
        params, grad = packed_seq_params(lengths), torch.randn(args.tokens, width, dtype=dtype)
        sides = {
            "per document": lambda: one_call_per_document(query, key, value, lengths).backward(grad),
            "grouped": lambda: attention(query, key, value, None, packed_seq_params=params).backward(grad),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for repeat in range(args.repeats + 1):
            for side, call in sides.items():
                spent = milliseconds(call)
                if repeat:  # the first is a warm-up
                    times[side].append(spent)
        layout_ms = statistics.median(milliseconds(lambda: build_layout(params, args.tokens, width)) for _ in range(args.repeats))
        layout = build_layout(params, args.tokens, width)
        before, after = (statistics.median(times[side]) for side in sides)
        ratio = statistics.median(a / b for a, b in zip(*times.values()))
        print(
            f"{name:<24}{len(lengths):>10}{layout.num_calls:>7}{'sorted' if layout.sorting else 'in place':>10}"
            f"{before:>11.2f} ms{after:>7.2f} ms{ratio:>8.2f}{layout_ms:>6.2f} ms"
        )


if __name__ == "__main__":
    main()
