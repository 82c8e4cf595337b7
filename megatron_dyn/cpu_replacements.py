# SPDX-License-Identifier: Apache-2.0
"""The table of what Megatron-Core asks of CUDA and what it gets on a CPU; `device.install_cpu_replacements` puts it in place."""

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class CpuReplacement:
    """One thing that Megatron-Core asks of CUDA and that means something simpler on a CPU.

    Attributes:
        name: what is replaced; the installation reports it.
        reason: who calls it, and why the replacement is right.
        apply: puts the replacement in place and returns the function that undoes it.
    """

    name: str
    reason: str
    apply: Callable[[], Callable[[], None]]


def _swap(owner: str, attribute: str, make: Callable[[Any], Any]) -> Callable[[], Callable[[], None]]:
    """An `apply` that sets ``attribute`` of ``owner`` ("module" or "module:Class") to ``make(original)``."""

    def apply() -> Callable[[], None]:
        module, _, member = owner.partition(":")
        target = importlib.import_module(module)
        target = getattr(target, member) if member else target
        original = getattr(target, attribute)
        setattr(target, attribute, make(original))
        return functools.partial(setattr, target, attribute, original)

    return apply


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.split(":")[0] == "cuda") or getattr(device, "type", None) == "cuda"


def _on_cpu_when_cuda_is_named(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _type_as_the_optimizer_expects(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if args or kwargs or not sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer"):
            return answer
        return answer.replace("torch.", "torch.cuda.", 1)

    return type_


def _seed_default_generator(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


class _GeneratorsAreOne(logging.Filter):
    """Drops one warning: "CPU RNG state changed within GPU RNG context" is always so where both are the same generator."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def _silence_generator_warning() -> Callable[[], None]:
    logger, drop = logging.getLogger(_RANDOM), _GeneratorsAreOne()
    logger.addFilter(drop)
    return functools.partial(logger.removeFilter, drop)


_RANDOM = "megatron.core.tensor_parallel.random"
CPU_REPLACEMENTS: tuple[CpuReplacement, ...] = (
    CpuReplacement(
        name="torch.cuda.current_device",
        reason="passed as device= by mappings, p2p and gradient buffers: tensors belong on the CPU.",
        apply=_swap("torch.cuda", "current_device", lambda original: lambda: _CPU),
    ),
    CpuReplacement(
        name="torch.cuda.synchronize",
        reason="p2p with variable shapes, timers and checkpoints wait for the device: a CPU has nothing in flight.",
        apply=_swap("torch.cuda", "synchronize", lambda original: lambda device=None: None),
    ),
    CpuReplacement(
        name="torch.zeros(device='cuda')",
        reason="token counters of the schedules and the gradient norm name device='cuda' literally.",
        apply=_swap("torch", "zeros", _on_cpu_when_cuda_is_named),
    ),
    CpuReplacement(
        name="torch.tensor(device='cuda')",
        reason="gradient clipping and the optimizers' scale factors name device='cuda' literally.",
        apply=_swap("torch", "tensor", _on_cpu_when_cuda_is_named),
    ),
    CpuReplacement(
        name="torch.empty(device='cuda')",
        reason="the parallel loading of checkpoints receives into tensors on device='cuda'.",
        apply=_swap("torch", "empty", _on_cpu_when_cuda_is_named),
    ),
    CpuReplacement(
        name="torch.empty_like(device='cuda')",
        reason="the parallel loading of checkpoints receives into tensors on device='cuda'.",
        apply=_swap("torch", "empty_like", _on_cpu_when_cuda_is_named),
    ),
    CpuReplacement(
        name="torch.Tensor.cuda",
        reason="tied embeddings under pipeline parallelism and the loading of optimizer states move tensors to the device.",
        apply=_swap("torch:Tensor", "cuda", lambda original: lambda self, *args, **kwargs: self),
    ),
    CpuReplacement(
        name="torch.Tensor.type()",
        reason="megatron.core.optimizer compares it with 'torch.cuda.FloatTensor'; other callers get the true answer.",
        apply=_swap("torch:Tensor", "type", _type_as_the_optimizer_expects),
    ),
    CpuReplacement(
        name="torch.cuda.get_rng_state",
        reason="the RNG tracker stores the state of the generator that dropout draws from: on a CPU, the default one.",
        apply=_swap("torch.cuda", "get_rng_state", lambda original: lambda device=None: torch.get_rng_state()),
    ),
    CpuReplacement(
        name="torch.cuda.random.get_rng_state",
        reason="the same function under the name by which the tracker's fork and activation recomputation call it.",
        apply=_swap("torch.cuda.random", "get_rng_state", lambda original: lambda device=None: torch.get_rng_state()),
    ),
    CpuReplacement(
        name=f"{_RANDOM}._set_cuda_rng_state",
        reason="the other half: fork and recomputation put the state back into the generator that dropout draws from.",
        apply=_swap(
            _RANDOM,
            "_set_cuda_rng_state",
            lambda original: lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
        ),
    ),
    CpuReplacement(
        name="torch.cuda.manual_seed",
        reason="model_parallel_cuda_manual_seed seeds the generator that dropout draws from.",
        apply=_swap("torch.cuda", "manual_seed", lambda original: _seed_default_generator),
    ),
    CpuReplacement(
        name=f"a warning of {_RANDOM}",
        reason="each fork warns that the CPU generator changed, which is the intention where it is the only generator.",
        apply=_silence_generator_warning,
    ),
)
