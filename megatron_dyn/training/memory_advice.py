# SPDX-License-Identifier: Apache-2.0
"""What the memory model says where memory ran out: the budget that fits, and what would let a larger one fit."""

import dataclasses
from collections.abc import Iterator

from megatron_dyn import device
from megatron_dyn.training.inputs import Inputs
from megatron_dyn.training.memory import GIB, MARGIN, MemorySettings, memory_settings, rounded_down, tightest_rank, usable_bytes
from megatron_dyn.training.model import padded_vocab_size
from megatron_dyn.training.run_config import RunConfig

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, recompute_modules=None)


def settings_of(run: RunConfig, inputs: Inputs) -> MemorySettings:
    """What decides what a rank of this run holds."""
    rows = padded_vocab_size(inputs.vocab_size, run.model.make_vocab_size_divisible_by, run.parallel.tensor_model_parallel_size)
    return memory_settings(run, vocab_size=rows, data_parallel_size=inputs.data_parallel_size)


def advice_for(run: RunConfig, inputs: Inputs) -> str:
    """`memory_advice` for the device of this rank; "" where nothing says how much memory there is."""
    stats, limit = device.memory_stats(), run.data.device_memory_gib
    limits = ([stats["total"]] if stats else []) + ([limit * GIB] if limit else [])
    if not limits:
        return ""
    return memory_advice(settings_of(run, inputs), device_bytes=min(limits), alignment=inputs.plan_config.alignment, budget=inputs.budget)


def memory_advice(settings: MemorySettings, *, device_bytes: float, alignment: int, budget: int | None) -> str:
    """In sentences.

    Args:
        settings: what decides what a rank holds.
        device_bytes: memory of one device.
        alignment: a budget is rounded down to a multiple of it.
        budget: B of the run; None: not known yet.
    """
    room = usable_bytes(device_bytes)

    def fits(changed: MemorySettings) -> int:
        return rounded_down(tightest_rank(changed, room).largest(room), alignment)

    memory, tokens = tightest_rank(settings, room), fits(settings)
    said = (
        f"By the memory model (docs/planning.md) a rank holds {memory.fixed_bytes / GIB:.1f} GiB and {memory.token_bytes / 1024:,.0f} KiB a token of the "
        f"budget, so that {f'--max-tokens-per-microbatch {tokens}' if tokens else 'no budget'} fits into {1 - MARGIN:.0%} of {device_bytes / GIB:.1f} GiB"
    )
    if budget is not None and tokens >= budget:
        return (
            f"{said}: the budget of {budget} should do. Look for other programs on the device (nvidia-smi) and for fragments (a peak of reserved memory far "
            "above what was asked for: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        )
    larger = [f"{flags} up to {found}" for flags, changed in _ways_out(settings) if (found := fits(changed)) > 1.1 * tokens]
    return said + (f"; with {', with '.join(larger)}" if larger else "")


def _ways_out(settings: MemorySettings) -> Iterator[tuple[str, MemorySettings]]:
    """Flags that cost little, with the settings they make."""
    parallel = settings.parallel
    if settings.data_parallel_size > 1 and not parallel.use_distributed_optimizer and settings.optimizer == "adam":
        yield "--use-distributed-optimizer", dataclasses.replace(settings, parallel=dataclasses.replace(parallel, use_distributed_optimizer=True))
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield "--sequence-parallel", dataclasses.replace(settings, parallel=dataclasses.replace(parallel, sequence_parallel=True))
    if settings.model.recompute_granularity != "full":
        flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield flags, dataclasses.replace(settings, model=dataclasses.replace(settings.model, **FULL))
