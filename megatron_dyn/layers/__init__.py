# SPDX-License-Identifier: Apache-2.0
"""Layers of the model: packed attention, norms that are right under sequence parallelism, and the specs made of them."""

from megatron_dyn.layers.attention import ThdAttention
from megatron_dyn.layers.layout import PackedLayoutError
from megatron_dyn.layers.norm import SequenceParallelLayerNorm, SequenceParallelRMSNorm
from megatron_dyn.layers.specs import gpt_block_spec

__all__ = ["PackedLayoutError", "SequenceParallelLayerNorm", "SequenceParallelRMSNorm", "ThdAttention", "gpt_block_spec"]
