# SPDX-License-Identifier: Apache-2.0
"""A run's settings -> its model on this rank, and before it the buffers that its layers exchange through."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn.training.model import build_model, transformer_config
from megatron_dyn.training.overlap import fp8_settings, initialize_overlap, overlap_settings
from megatron_dyn.training.run_config import RunConfig


def run_model(
    run: RunConfig, *, vocab_size: int, layers: str, process_group_backend: str
) -> tuple[TransformerConfig, list[torch.nn.Module], str | None]:
    """The model of a run, and before it the buffers its layers exchange through.

    Returns:
        Its configuration, its chunks on this rank, and what there is of overlap (see `initialize_overlap`).
    """
    capacity = run.plan_config(data_parallel_size=1).capacity
    overlap = initialize_overlap(run, capacity=capacity, layers=layers, process_group_backend=process_group_backend)
    extra = overlap_settings(run.overlap) | fp8_settings(run.fp8)
    config = transformer_config(run.model, run.parallel, precision=run.precision, **extra)
    fused = layers == "te" and run.training.gradient_accumulation_fusion
    seed = run.training.seed
    chunks = build_model(config, run.model, vocab_size=vocab_size, backend=layers, seed=seed, fuse_weight_gradients=fused)
    return config, chunks, overlap
