# SPDX-License-Identifier: Apache-2.0
"""One optimizer step over packed microbatches of different T, with an exact loss.

Shapes (s = T / TP under sequence parallelism, else T):

    tokens, labels, position_ids, loss_mask   [1, T]
    activations between pipeline stages       [s, 1, hidden]
    token losses (last stage)                 [1, T] fp32
    totals                                    [3] float64: sum of token losses, loss tokens, microbatches with a non-finite sum

Step loss = sum of token losses / loss tokens of the whole step. Means of microbatches are never formed, so the value does not
depend on how the step was divided. Whatever depends on T travels with its microbatch: 1F1B runs the forward of one microbatch
between the forward and the backward of another.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.utils import get_attr_wrapped_model

from megatron_dyn import device
from megatron_dyn.microbatch import PackedMicrobatch
from megatron_dyn.pipeline.run import ScheduleRunner
from megatron_dyn.training.progress import PROGRESS


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """Loss of one step, the same on every rank."""

    total: float
    """Sum of the token losses (nats)."""

    tokens: int
    """Loss tokens."""

    bad_microbatches: int
    """Microbatches, over all data-parallel ranks, whose loss is NaN or infinite."""

    @property
    def mean(self) -> float:
        """Loss per loss token; NaN when there is none."""
        return self.total / self.tokens if self.tokens else math.nan


class _Totals:
    """Totals of a step on their way to the host.

    Args:
        totals: [3] float64 on the compute device, of the whole step.
        finite: bool [K], of this rank's microbatches; None where this rank has no losses.
    """

    def __init__(self, totals: torch.Tensor, finite: torch.Tensor | None):
        self._copy, self._finite = device.HostCopy(totals), finite

    def read(self) -> tuple[StepLoss, list[int]]:
        """The loss of the step, and the positions of this rank's microbatches whose loss is not finite."""
        total, tokens, bad_microbatches = self._copy.read().tolist()
        bad = []
        if bad_microbatches and self._finite is not None:
            bad = [position for position, fine in enumerate(self._finite.tolist()) if not fine]
        return StepLoss(total=total, tokens=int(tokens), bad_microbatches=int(bad_microbatches)), bad


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a training step did."""

    loss: StepLoss
    grad_norm: float
    updated: bool
    """False where the loss or the gradient was not finite: the weights are those of the step before."""


def forward_step(data_iterator: Iterator[PackedMicrobatch], model: torch.nn.Module):
    """Megatron's `forward_step_func`: one packed microbatch through one model chunk.

    Args:
        data_iterator: Yields the microbatches of this rank, in the plan's order.
        model: A model chunk.

    Returns:
        Output of the chunk ([1, T] token losses on the last stage, else [s, 1, hidden]) and the function that sums them.
    """
    microbatch = next(data_iterator)
    PROGRESS.forward(microbatch.index, microbatch.tokens.shape[1])
    _check_input(model, microbatch)
    output = model(
        microbatch.tokens,
        microbatch.position_ids,
        None,  # causality and boundaries come from the packed sequence parameters
        labels=microbatch.labels,
        packed_seq_params=microbatch.packed_seq_params,
    )

    def sum_losses(token_losses: torch.Tensor):
        losses = token_losses.reshape(-1).float()
        mask = microbatch.loss_mask.reshape(-1)
        total = torch.dot(losses, mask)
        tokens = mask.sum()
        report = {"total": (losses.detach().double() * mask).sum(), "tokens": tokens}
        return total, tokens.to(torch.int32), report

    return output, sum_losses


def _check_input(model: torch.nn.Module, microbatch: PackedMicrobatch) -> None:
    """What this chunk received must be rows of the microbatch it is about to compute.

    Raises:
        RuntimeError: They are another microbatch's.
    """
    chunk = get_attr_wrapped_model(model, "decoder", return_model_obj=True)
    if chunk.pre_process or chunk.decoder.input_tensor is None:
        return
    config, rows = chunk.config, chunk.decoder.input_tensor.size(0)
    parts = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    if rows * parts != microbatch.T:
        raise RuntimeError(
            f"microbatch {microbatch.index} of step {microbatch.step} (T = {microbatch.T}, {microbatch.T // parts} rows on each rank) "
            f"received {rows} rows from the previous stage: they are another microbatch's. This is a defect; please report it"
        )


class Stepper:
    """Runs Megatron's schedule over the microbatches of a step and applies the update.

    Args:
        models: Chunks wrapped in DDP.
        optimizer: Megatron optimizer, or None to compute losses only.
        scheduler: Parameter scheduler, or None.
        measure_waits: Keep the time in which this pipeline stage waits for others.
    """

    def __init__(self, models: list, optimizer=None, scheduler=None, *, measure_waits: bool = False):
        self.models = models
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.bad_positions: list[int] = []
        self.schedule = ScheduleRunner(models[0].config, measure_waits=measure_waits)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return get_canonical_lr_for_logging(self.optimizer.param_groups)

    @property
    def waited_seconds(self) -> float:
        """Seconds of the last forward and backward in which this pipeline stage waited for others, if measured. Wait for the device first."""
        communicator = self.schedule.communicator
        return communicator.waited_seconds() if communicator is not None else 0.0

    def forward_backward(self, microbatches: list[PackedMicrobatch], *, forward_only: bool) -> tuple[StepLoss, list[int]]:
        """All microbatches of one step; gradients, if wanted, are left in the DDP buffers, already divided by the step's loss tokens.

        Args:
            microbatches: This rank's, on the compute device. Every data-parallel rank brings the same number.
            forward_only: No gradients.

        Returns:
            The loss of the whole step, and the positions of this rank's microbatches whose loss is not finite (last stage only).
        """
        return self._start(microbatches, forward_only=forward_only).read()

    def _start(self, microbatches: list[PackedMicrobatch], *, forward_only: bool) -> _Totals:
        """The same, without waiting for the device."""
        iterators = [iter(microbatches) for _ in self.models]
        T = [microbatch.T for microbatch in microbatches]
        reports = self.schedule.run(forward_step, self.models, iterators, T=T, forward_only=forward_only)
        return self._total(microbatches, [report for report in reports if report])

    def train(self, microbatches: list[PackedMicrobatch], *, loss_tokens: int) -> StepOutcome:
        """Forward, backward and update. A non-finite loss or gradient leaves the weights as they are.

        Args:
            microbatches: This rank's, on the compute device.
            loss_tokens: What the plan says of the whole step.

        Raises:
            RuntimeError: The microbatches hold another number of loss tokens than the plan, so that loss and gradients were divided
                by the wrong number; on every rank, before the update.
        """
        self._zero_gradients()
        totals = self._start(microbatches, forward_only=False)
        PROGRESS.mark("updating the weights")
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())  # Megatron waits for the device here; what was copied before has come
        loss, self.bad_positions = totals.read()
        if loss.tokens != loss_tokens:
            raise RuntimeError(
                f"the microbatches of this step hold {loss.tokens} loss tokens, its plan {loss_tokens}: loss and gradients are those of "
                "other tokens than planned. The weights are unchanged. This is a defect; please report it"
            )
        updated = loss.bad_microbatches == 0 and math.isfinite(grad_norm)
        if updated:
            self._update(grad_norm)
        self.scheduler.step(increment=1)
        return StepOutcome(loss=loss, grad_norm=grad_norm, updated=updated)

    def _update(self, grad_norm: float) -> None:
        """Clip by the norm that is already known and step (`ChainedOptimizer.step` would prepare and measure once more)."""
        for part in self.optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm, decoupled)
        self.optimizer.step_with_ready_grads()

    def skip(self) -> None:
        """Let a step without any loss token pass: the schedule of the learning rate goes on, the weights stay."""
        self.scheduler.step(increment=1)

    def find_bad_gradients(self, microbatches: list[PackedMicrobatch]) -> list[int]:
        """Which of this rank's microbatches give a non-finite gradient: each is run again alone.

        Collective over all ranks; weights are not touched. The schedule may need several microbatches at once
        (interleaving), so each is repeated as often as it asks; what is not finite once is not finite in a sum.

        Args:
            microbatches: This rank's, as given to `train`.
        """
        config = self.models[0].config
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        hooks = {name: getattr(config, name) for name in ("no_sync_func", "grad_sync_func", "param_sync_func")}
        repeats = parallel_state.get_pipeline_model_parallel_world_size() if len(self.models) > 1 else 1
        bad = []
        try:
            for name in hooks:
                setattr(config, name, None)
            for position, microbatch in enumerate(microbatches):
                self._zero_gradients()
                with ExitStack() as local_gradients:
                    for model in self.models:  # only now: clearing the buffers switches the overlapped reduction on again
                        local_gradients.enter_context(model.no_sync())
                    self.forward_backward([microbatch] * repeats, forward_only=False)
                finite = all(bool(p.main_grad.isfinite().all()) for model in self.models for p in model.parameters() if p.requires_grad)
                flag = torch.tensor([0 if finite else 1], dtype=torch.int32, device=microbatch.tokens.device)
                dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
                if flag.item():
                    bad.append(position)
        finally:
            for name, value in hooks.items():
                setattr(config, name, value)
            config.finalize_model_grads_func = finalize
            self._zero_gradients()
        return bad

    def _zero_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _total(self, microbatches: list[PackedMicrobatch], reports: list[dict]) -> _Totals:
        """Sum over microbatches and data-parallel ranks on the last stage, then tell the other stages."""
        where = microbatches[0].tokens.device
        totals = torch.zeros(3, dtype=torch.float64, device=where)
        finite = None
        if reports:
            sums = torch.stack([report["total"] for report in reports])
            finite = sums.isfinite()
            totals[0] = sums.sum()
            totals[1] = torch.stack([report["tokens"] for report in reports]).double().sum()
            totals[2] = (~finite).sum()
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.broadcast(
                totals,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return _Totals(totals, finite)
