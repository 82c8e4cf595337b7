# SPDX-License-Identifier: Apache-2.0
"""Models and precisions of the benchmarks, as flags of pretrain_gpt_thd.py. Without torch."""

MODELS = {
    "tiny": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4",
    "0.6b": "--num-layers 10 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --num-query-groups 8",
    "small": "--num-layers 2 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --num-query-groups 8",
    "8x4096": "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8",
    "3b": "--num-layers 27 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24 --num-query-groups 8",
}
PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp8": "--bf16 --fp8 hybrid"}
