# SPDX-License-Identifier: Apache-2.0
"""Measures the run's own model for `budget.find_budget`, and leaves nothing behind.

The model is built as the run builds it, driven with synthetic microbatches through the run's schedule, and thrown away. Then the generators
get their states back, and the run builds its model anew: so it has the bits of a run that was given the budget as a number.

What is not in the measured peak is added: the optimizer's state, which comes with the first update; and the UserBuffers. The probe runs
without communication overlap, because their capacity is the budget that is being looked for, and they can be registered but once.
"""

import contextlib
import dataclasses
import gc
import math
import random
from collections.abc import Iterator

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.utils import get_attr_wrapped_model

from megatron_dyn import device
from megatron_dyn.pipeline.agreement import Agreement
from megatron_dyn.planning.alignment import round_up
from megatron_dyn.planning.config import INT32_MAX
from megatron_dyn.planning.survey import Survey, survey
from megatron_dyn.training.budget import FIRST_TOKENS, FoundBudget, Room, find_budget
from megatron_dyn.training.build import run_model
from megatron_dyn.training.calibrate import microbatch_of
from megatron_dyn.training.checkpoint import CheckpointManager
from megatron_dyn.training.config import require
from megatron_dyn.training.inputs import Inputs
from megatron_dyn.training.job_failure import is_out_of_memory
from megatron_dyn.training.memory import CONTEXT_BYTES, GIB, MARGIN, fullest_rank, userbuffer_bytes_per_token
from megatron_dyn.training.memory_advice import settings_of
from megatron_dyn.training.optimizer import build_optimizer, wrap_models
from megatron_dyn.training.overlap import OverlapConfig
from megatron_dyn.training.progress import PROGRESS
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.training.step import Stepper, forward_step


class ModelProbe:
    """The run's model on this rank, to be measured and closed.

    Args:
        run: settings; without overlap.
        inputs: vocabulary and layers.
        meter: counts since before the model was built.
        longest: most tokens of a piece in the microbatches that are measured.
    """

    def __init__(self, run: RunConfig, inputs: Inputs, meter: device.MemoryMeter, *, longest: int):
        self._run, self._inputs, self._meter, self._longest = run, inputs, meter, longest
        sizes = dict(vocab_size=inputs.vocab_size, layers=inputs.layers, process_group_backend=inputs.process_group_backend)
        config, chunks, _ = run_model(run, **sizes)
        self._models = wrap_models(chunks, config, run.parallel)
        config.finalize_model_grads_func = config.no_sync_func = config.grad_sync_func = config.param_sync_func = None  # every rank on its own
        optimizer, scheduler = build_optimizer(run, self._models)
        self.stepper = Stepper(self._models, optimizer, scheduler)
        self._update_bytes = _unmade_optimizer_bytes(optimizer, adam=run.optimizer.optimizer == "adam")
        pp = parallel_state.get_pipeline_model_parallel_world_size()
        self._microbatches = max(2, pp if len(chunks) == 1 else 2 * pp)  # so many fill the pipeline
        self._warm = False
        for model in self._models:
            model.train()

    def peak(self, tokens: int) -> int | None:
        """Most bytes of a step with microbatches of `tokens` rows, the optimizer's state included; None: memory ran out.

        Raises:
            torch.OutOfMemoryError: it ran out where ranks share a model, so that others wait for this one: nothing can be tried again.
        """
        try:
            if not self._warm:  # what is made once (workspaces, compiled kernels) is there before the first measurement
                self._forward_and_backward(tokens)
                self._warm = True
            self._meter.restart()
            self._forward_and_backward(tokens)
            peak = self._meter.peak() + self._update_bytes
            _mark()  # the microbatch is done: what goes wrong next is not its fault
            return peak
        except Exception as error:
            if self._run.parallel.model_parallel_size > 1 or not is_out_of_memory(error):
                raise
        gc.collect()
        return None

    def _forward_and_backward(self, tokens: int) -> None:
        run = self._run.with_budget(tokens)
        longest = min(tokens, self._longest)
        lengths = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
        microbatches = [microbatch_of(lengths, run, self._inputs.vocab_size)] * self._microbatches
        iterators = [iter(microbatches) for _ in self._models]
        for model in self._models:
            model.zero_grad_buffer()
        with contextlib.ExitStack() as local_gradients:
            for model in self._models:
                local_gradients.enter_context(model.no_sync())
            self.stepper.schedule.run(forward_step, self._models, iterators, T=[tokens] * len(microbatches), forward_only=False)
        device.synchronize()

    def close(self) -> None:
        """Free what the model takes, whoever still holds one of its parts."""
        for model in self._models:
            get_attr_wrapped_model(model, "decoder").input_tensor = None  # what came from the stage before
            for parameter in model.parameters():
                parameter.main_grad = parameter.grad = None
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                for data in filter(lambda data: data is not None, (buffer.grad_data, buffer.param_data)):
                    data.untyped_storage().resize_(0)
        for part in self.stepper.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self._models, self.stepper = [], None
        RotaryEmbedding.forward.cache_clear()  # of the class: it would keep the tables, and the module that made them
        parallel_state.get_global_memory_buffer().buffer.clear()
        if self._run.fp8.fp8:
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

            FP8GlobalStateManager.reset()  # the buffers of all modules' amax; the histories went with the modules
        gc.collect()
        device.release_memory()


def with_found_budget(
    run: RunConfig, inputs: Inputs, agreement: Agreement, checkpoints: CheckpointManager | None
) -> tuple[RunConfig, str, FoundBudget | None]:
    """The run with a budget in the place of `auto`, and the inputs' planners for it. Collective over all ranks.

    A run that is continued keeps its checkpoint's, so that resuming changes no plan; else it is measured.

    Returns:
        The run, what there is to say, and what was measured.
    Raises:
        ConfigError, PlanError: on every rank: nothing fits, or the documents cannot be planned with what does.
    """
    recorded = checkpoints.recorded_run() if checkpoints is not None else None
    found = measured_budget(run, inputs, agreement) if recorded is None else None
    run = run.with_budget(found.tokens if found else recorded["data"]["max_tokens_per_microbatch"])
    inputs.settle(run)
    return run, str(found) if found else _kept(run, inputs), found


def _kept(run: RunConfig, inputs: Inputs) -> str:
    tokens = run.data.max_tokens_per_microbatch
    said = f"--max-tokens-per-microbatch auto: {tokens:,} tokens, those of the checkpoint in {run.checkpoint.load}"
    needs = fullest_rank(settings_of(run, inputs), budget=tokens).total(tokens) + CONTEXT_BYTES
    stats = device.memory_stats()
    if stats is not None and needs > stats["total"]:
        said += (
            f". They would take about {needs / GIB:.0f} GiB of the {stats['total'] / GIB:.0f} here: should memory run out, give a smaller budget as "
            "a number (the steps keep their documents and their loss; they only have more microbatches)"
        )
    return said


def measured_budget(run: RunConfig, inputs: Inputs, agreement: Agreement) -> FoundBudget:
    """The budget of `--max-tokens-per-microbatch auto`, before anything else of the run is built. Collective over all ranks.

    Raises:
        ConfigError: on every rank: nothing fits, or there is neither a GPU nor `--device-memory-gib`.
    """
    unit = inputs.plan_config.alignment
    documents = survey(inputs.splits.train.lengths, budget=INT32_MAX, fingerprint=False)
    most = most_useful(run, documents, data_parallel_size=inputs.data_parallel_size, unit=unit)
    buffer_bytes = userbuffer_bytes_per_token(settings_of(run, inputs))
    probe_run = dataclasses.replace(run, overlap=OverlapConfig()).with_budget(min(round_up(FIRST_TOKENS, unit), most))
    _mark()
    with generators_kept(), device.MemoryMeter() as meter:
        probe = ModelProbe(probe_run, inputs, meter, longest=longest_piece(run, documents))
        room = Room(memory=allowed_bytes(run.data.device_memory_gib), buffer_bytes=buffer_bytes, unit=unit, most=most)
        try:
            return find_budget(probe.peak, room, least_of_all=lambda tokens: agreement.least("the token budget", tokens))
        finally:
            probe.close()


def check_memory_limit(run: RunConfig) -> None:
    """Refuse `auto` where no device says how much memory there is.

    Raises:
        ConfigError: no GPU, and no `--device-memory-gib`.
    """
    require(
        not run.data.finds_budget or device.has_gpu() or run.data.device_memory_gib is not None,
        "--max-tokens-per-microbatch auto on a CPU: nothing says how much memory the run may take; give --device-memory-gib, or the budget as "
        "a number",
    )


def allowed_bytes(device_memory_gib: float | None) -> float:
    """What this rank's allocator and UserBuffers may take: the device's memory less `MARGIN`, and less what others and contexts hold."""
    stats = device.memory_stats()
    there = min((limit for limit in (stats and stats["total"], device_memory_gib and device_memory_gib * GIB) if limit), default=0.0)
    return there * (1 - MARGIN) - device.memory_outside()


def longest_piece(run: RunConfig, documents: Survey) -> int:
    """Tokens of the longest piece that a microbatch of this run may hold, if the budget does not cut it."""
    limits = [INT32_MAX if run.data.microbatching == "concat-chunk" else documents.longest]
    if run.data.max_sum_squares_per_microbatch is not None:
        limits.append(math.isqrt(run.data.max_sum_squares_per_microbatch))
    if run.model.position_embedding_type == "learned_absolute":
        limits.append(run.model.max_position_embeddings)
    return max(min(limits), 1)


def most_useful(run: RunConfig, documents: Survey, *, data_parallel_size: int, unit: int) -> int:
    """Tokens beyond which a budget is of no use: those of a step over DP x PP, so that a pipeline stays filled, or the longest document.

    Learned positions end a budget where they would not reach over a longer piece.
    """
    data, table = run.data, run.model.max_position_embeddings
    step = data.global_batch_tokens or data.global_batch_size * documents.tokens / max(documents.documents - documents.empty, 1)
    most = max(documents.longest, math.ceil(step / data_parallel_size / run.parallel.pipeline_model_parallel_size))
    if run.model.position_embedding_type == "learned_absolute" and (documents.longest > table or data.microbatching == "concat-chunk"):
        most = min(most, table)
    return min(round_up(most, unit), INT32_MAX // 2)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is drawn inside, all generators go on as if it had not been."""
    kept = device.rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        device.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def _mark() -> None:
    PROGRESS.mark("measuring the model's memory", patient=True)


def _unmade_optimizer_bytes(optimizer, *, adam: bool) -> int:
    """The fp32 moments (of SGD: the momentum) that the first update makes."""
    parameters = [parameter for part in optimizer.chained_optimizers for group in part.optimizer.param_groups for parameter in group["params"]]
    return (8 if adam else 4) * sum(parameter.numel() for parameter in parameters)
