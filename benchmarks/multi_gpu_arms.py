# SPDX-License-Identifier: Apache-2.0
"""Models that do the same work in different ways: compared with each other, then timed in turn on all ranks."""

import contextlib
import math
import random
import statistics
import time
import types
from contextlib import ExitStack

import torch
import torch.distributed as dist

from megatron_dyn import device
from megatron_dyn.training.build import run_model
from megatron_dyn.training.optimizer import wrap_models
from megatron_dyn.training.step import Stepper

TOLERANCES = {"fp32": (1e-5, 1e-4), "bf16": (1e-3, 5e-2), "fp8": (1e-2, 0.25)}
"""Relative differences that are still rounding: of the loss, and of a parameter's gradient (norm of the difference / norm)."""
OWN_KINDS = ("OverlapTELayerNormColumnParallelLinear", "OverlapTEColumnParallelLinear", "OverlapTERowParallelLinear")


class Wrong(Exception):
    """Results differ by more than rounding."""


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


class Arm:
    """One model, and forward and backward of microbatches through it."""

    def __init__(self, run, *, layers: str, backend: str, vocab_size: int):
        config, chunks, self.overlap = run_model(run, vocab_size=vocab_size, layers=layers, process_group_backend=backend)
        self.stepper = Stepper(wrap_models(chunks, config, run.parallel))
        self.models = self.stepper.models
        config.finalize_model_grads_func = None  # gradients stay what this rank's backward made
        self.parameters = [parameter for model in self.models for parameter in model.parameters()]

    def step(self, microbatches: list) -> float:
        """Forward and backward; gradients are added up in `main_grad`. Returns the loss."""
        with ExitStack() as local_gradients:
            for model in self.models:
                local_gradients.enter_context(model.no_sync())
            return self.stepper.forward_backward(microbatches, forward_only=False)[0].mean

    def clear(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.main_grad for parameter in self.parameters]


@contextlib.contextmanager
def stock_layers(models: list):
    """Inside, the layers run forward as Megatron's own: nothing sets the active shape."""
    from megatron_dyn.layers import te_overlap

    kinds = tuple(getattr(te_overlap, kind) for kind in OWN_KINDS)
    layers = [module for model in models for module in model.modules() if type(module) in kinds]
    for layer in layers:
        layer.__dict__["forward"] = types.MethodType(type(layer).__bases__[-1].forward, layer)
    try:
        yield len(layers)
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def everywhere(values: list[float]) -> list[float]:
    """The largest of each over all ranks; what is not a number counts as infinite."""
    largest = torch.tensor([value if math.isfinite(value) else math.inf for value in values], dtype=torch.float64, device=device.compute_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def goes_on(until: float) -> bool:
    """Whether rank 0 has time left."""
    flag = torch.tensor([time.time() < until], dtype=torch.int32, device=device.compute_device())
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Largest |found - wanted| / |wanted| over the tensors."""
    values = torch.stack([(a - b).norm() / b.norm().clamp_min(1e-12) for a, b in zip(found, wanted, strict=True)])
    return float(values.nan_to_num(nan=math.inf).max())


def differences(found: tuple, wanted: tuple, *, precision: str, what: str) -> dict:
    """Of (loss, gradients) from those wanted, the largest over all ranks.

    Raises:
        Wrong: On every rank: they differ by more than rounding.
    """
    loss, gradients = everywhere([abs(found[0] / wanted[0] - 1), apart(found[1], wanted[1])])
    limits = TOLERANCES[precision]
    if not (loss <= limits[0] and gradients <= limits[1]):
        raise Wrong(
            f"{what}, {precision}: loss {found[0]:.6f} is {loss:.1e} apart (limit {limits[0]:.0e}), "
            f"a gradient {gradients:.1e} (limit {limits[1]:.0e})"
        )
    return {"loss_apart": loss, "gradients_apart": gradients}


def compared(arm: Arm, reference: Arm, microbatch, *, precision: str, settling: int = 1) -> dict:
    """Both run the same microbatch.

    Args:
        settling: Runs of it; the last one counts.
    Raises:
        Wrong: See `differences`.
    """
    losses = []
    for one in (arm, reference):
        for _ in range(settling):
            one.clear()
            loss = one.step([microbatch])
        losses.append(loss)
    both = zip(losses, (arm.gradients(), reference.gradients()))
    what = f"T = {microbatch.T}: overlap against none"
    return {"T": microbatch.T, "loss": losses[0]} | differences(*both, precision=precision, what=what)


def in_turn(groups: dict, *, rounds: int, until: float) -> dict:
    """Seconds of each way of each group: {group: {way: [one for each round]}}.

    Groups, and the ways of each, take turns in an order that is random and the same on all ranks; the first round warms up. No round
    begins after `until`.

    Args:
        groups: {group: {way: function without arguments}}.
    """
    taken: dict = {group: {way: [] for way in ways} for group, ways in groups.items()}
    together = random.Random(1)
    for number in range(rounds + 1):
        if not goes_on(until):
            break
        for group in together.sample(list(groups), len(groups)):
            for way in together.sample(list(groups[group]), len(groups[group])):
                device.synchronize()
                dist.barrier()
                began = time.perf_counter()
                groups[group][way]()
                device.synchronize()
                if number:
                    taken[group][way].append(time.perf_counter() - began)
    return taken


def ratio(seconds: dict, way: str, against: str) -> list[float] | None:
    """[lower quartile, median, upper quartile] of seconds[way] / seconds[against], turn by turn; None where one was not measured."""
    pairs = sorted(a / b for a, b in zip(seconds.get(way, []), seconds.get(against, [])))
    if len(pairs) < 2:
        return pairs * 3 or None
    return statistics.quantiles(pairs, n=4, method="inclusive")


def in_words(quartiles: list[float] | None) -> str:
    return f"{quartiles[1]:.3f} ({quartiles[0]:.3f}-{quartiles[2]:.3f})" if quartiles else "-"
