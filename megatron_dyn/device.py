# SPDX-License-Identifier: Apache-2.0
"""The one seam between CUDA and CPU: nothing else in this package asks whether there is a GPU.

Megatron-Core names CUDA in places that have nothing to do with kernels (a counter made on ``device="cuda"``, the
generator whose state the RNG tracker forks). On a machine without CUDA those calls raise. `CPU_REPLACEMENTS` lists each of
them with its reason; `install_cpu_replacements` puts them in place when a launch asks for it, never by import, and refuses
where CUDA is available.
"""

import functools
import importlib
import logging
import os
import platform
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

BACKEND_VARIABLE = "MEGATRON_DYN_DISTRIBUTED_BACKEND"
_CPU = torch.device("cpu")


# --- which device, which backend ------------------------------------------------------------------------------------


def initialize_device(local_rank: int | None = None, *, backend: str | None = None) -> torch.device:
    """Select this process's device; call it once, before the process group is made.

    Args:
        local_rank: the rank on this host; None reads ``LOCAL_RANK`` (0 when unset).
        backend: the distributed backend that will be used; None takes `distributed_backend()`.
    Returns:
        ``cuda:i`` or ``cpu``.
    Raises:
        ValueError: more ranks than cards with NCCL, which would fail or hang at the first collective.
    """
    if not torch.cuda.is_available():
        return _CPU
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if local_rank is None else local_rank
    cards = torch.cuda.device_count()
    ranks = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # the same on all ranks of a host, so all of them refuse
    if ranks > cards and distributed_backend(backend) == "nccl":
        raise ValueError(
            f"{ranks} processes on this host have {cards} visible cards: NCCL refuses two ranks on one card. "
            f"Start at most {cards} processes on this host, or let ranks share a card with {BACKEND_VARIABLE}=gloo."
        )
    torch.cuda.set_device(local_rank % cards)
    return compute_device()


def has_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def compute_device() -> torch.device:
    """The device this process computes on: the current CUDA device, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def distributed_backend(override: str | None = None) -> str:
    """Backend for ``torch.distributed.init_process_group``: "nccl" with CUDA, else "gloo".

    Args:
        override: "nccl" or "gloo"; None reads the environment variable ``MEGATRON_DYN_DISTRIBUTED_BACKEND``, if set.
            "gloo" on CUDA is slow, and is what several ranks on one card need.
    Raises:
        ValueError: an unknown backend, or "nccl" without CUDA.
    """
    wanted = override or os.environ.get(BACKEND_VARIABLE) or None
    cuda = torch.cuda.is_available()
    if wanted is None:
        return "nccl" if cuda else "gloo"
    if wanted not in ("nccl", "gloo"):
        raise ValueError(f"distributed backend {wanted!r} is not known: use 'nccl' or 'gloo' (or set neither).")
    if wanted == "nccl" and not cuda:
        raise ValueError("distributed backend 'nccl' needs CUDA and none is available here: use 'gloo' (or set neither).")
    return wanted


def device_name() -> str:
    """A human name of the compute device, for logs: the card's name, or the CPU's architecture and thread count."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


# --- waiting, copying, memory ---------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait until the device has finished what it was given (nothing to wait for on a CPU)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in page-locked host memory where CUDA can use it, else the tensor itself."""
    return tensor.pin_memory() if torch.cuda.is_available() and tensor.device.type == "cpu" else tensor


def memory_stats(*, reset_peak: bool = False) -> dict[str, int] | None:
    """Device memory in bytes: ``allocated``, ``reserved``, ``peak_allocated``, ``peak_reserved``, ``total``; None on a CPU.

    Args:
        reset_peak: start a new peak after reading.
    """
    if not torch.cuda.is_available():
        return None
    stats = {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
        "total": torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
    }
    if reset_peak:
        torch.cuda.reset_peak_memory_stats()
    return stats


class _OneByOne:
    """Stands in for torch's coalescing manager: the operations inside run as they are called, one by one."""

    def __init__(self, group: Any = None, device: Any = None, async_ops: bool = False) -> None:
        if async_ops:
            raise ValueError("gloo cannot overlap communication with the computation of a GPU")

    def __enter__(self) -> "_OneByOne":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is outstanding."""


def share_a_card_over_gloo() -> None:
    """Let Megatron's gradient buffers work over gloo on a GPU, which coalesces no collectives of CUDA tensors.

    For several ranks on one card, as functional tests have them; without overlap, and slow.
    """
    importlib.import_module("megatron.core.distributed.param_and_grad_buffer")._coalescing_manager = _OneByOne


# --- random number generators ---------------------------------------------------------------------------------------


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch's CPU generator and Megatron's tracker (which seeds the device's); needs Megatron's parallel state.

    All ranks of a tensor-parallel group get the same default generators and their own model-parallel generator.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """State of every generator a step draws from.

    Returns:
        ``cpu``: uint8 tensor; ``cuda``: uint8 tensor or None without CUDA; ``tracker``: name -> uint8 tensor, the states of
        Megatron's tracker (empty before it is seeded). All tensors are copies on the CPU.
    """
    from megatron.core.tensor_parallel.random import convert_cuda_rng_state, get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker().get_states()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": {name: convert_cuda_rng_state(state).clone() for name, state in tracker.items()},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put back what `rng_state` returned.

    Raises:
        ValueError: the state was taken on the other kind of device, so dropout could not continue where it stopped.
    """
    from megatron.core.tensor_parallel.random import (
        convert_cuda_rng_state,
        get_cuda_rng_tracker,
        is_graph_safe_cuda_rng_tracker,
    )

    here, there = torch.cuda.is_available(), state["cuda"] is not None
    if here != there:
        kinds = {True: "a GPU", False: "a CPU"}
        raise ValueError(
            f"the random number state was saved on {kinds[there]} and this is {kinds[here]}: dropout cannot continue where it "
            "stopped. Seed anew instead (leave the saved state out)."
        )
    tracker = get_cuda_rng_tracker()
    graph_safe = is_graph_safe_cuda_rng_tracker(tracker)
    torch.set_rng_state(state["cpu"])
    if here:
        torch.cuda.set_rng_state(state["cuda"])
    tracker.set_states({name: convert_cuda_rng_state(s.clone(), to_graphable=graph_safe) for name, s in state["tracker"].items()})


# --- replacements for CPU -------------------------------------------------------------------------------------------


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
_undo: dict[str, Callable[[], None]] = {}


def install_cpu_replacements() -> list[str]:
    """Put `CPU_REPLACEMENTS` in place so that Megatron-Core runs without CUDA. A second call changes nothing.

    Returns:
        The names of what is now replaced, in the table's order, for the log.
    Raises:
        RuntimeError: CUDA is available, so replacing its functions would compute on the wrong device.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "CPU replacements were asked for on a machine with CUDA: they would move Megatron's tensors off the GPU. Leave the "
            "call out here, or hide the GPUs (CUDA_VISIBLE_DEVICES='') to run on the CPU."
        )
    for entry in CPU_REPLACEMENTS:
        if entry.name not in _undo:
            _undo[entry.name] = entry.apply()
    return [entry.name for entry in CPU_REPLACEMENTS]


def uninstall_cpu_replacements() -> None:
    """Put the originals back (for tests)."""
    for entry in reversed(CPU_REPLACEMENTS):
        if entry.name in _undo:
            _undo.pop(entry.name)()
