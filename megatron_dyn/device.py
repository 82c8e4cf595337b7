# SPDX-License-Identifier: Apache-2.0
"""The one seam between CUDA and CPU: nothing else in this package asks whether there is a GPU.

Megatron-Core names CUDA in places that have nothing to do with kernels (a counter made on ``device="cuda"``, the
generator whose state the RNG tracker forks). On a machine without CUDA those calls raise. `cpu_replacements.py` lists each of
them with its reason; `install_cpu_replacements` puts them in place when a launch asks for it, never by import, and refuses
where CUDA is available.
"""

import importlib
import os
import platform
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_dyn.cpu_memory import TensorBytes
from megatron_dyn.cpu_replacements import CPU_REPLACEMENTS

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


def card_names() -> list[str]:
    """The names of all visible cards, in the order of their indices; empty on a CPU."""
    return [torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


# --- waiting, copying, memory ---------------------------------------------------------------------------------------


def synchronize() -> None:
    """Wait until the device has finished what it was given (nothing to wait for on a CPU)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_mark() -> "torch.cuda.Event | float":
    """Now, for `seconds_between`: on CUDA when the current stream has done what it was given so far; nobody waits."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    """Seconds from one `time_mark` to a later one. On CUDA the device must have reached both (see `synchronize`)."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000.0


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in page-locked host memory where CUDA can use it, else the tensor itself."""
    return tensor.pin_memory() if torch.cuda.is_available() and tensor.device.type == "cpu" else tensor


class HostCopy:
    """A copy of a tensor on its way to the host: started now, read later.

    Args:
        tensor: on the compute device; may be overwritten afterwards by work of the same stream.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event = None
        self._copy = tensor.detach().clone() if tensor.device.type == "cpu" else None
        if self._copy is None:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> torch.Tensor:
        """The copy; waits for the device only if it has not come that far."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._copy


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


class MemoryMeter:
    """Most bytes of tensors at once: of PyTorch's allocator on a GPU; on a CPU of what is made inside `with`."""

    def __init__(self) -> None:
        self._tensors = None if torch.cuda.is_available() else TensorBytes()

    def __enter__(self) -> "MemoryMeter":
        if self._tensors is not None:
            self._tensors.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._tensors is not None:
            self._tensors.__exit__(*error)

    def restart(self) -> None:
        """Begin a new peak; on a GPU memory that is only kept for later goes back first."""
        if self._tensors is not None:
            self._tensors.restart()
        else:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Most bytes since `restart`; waits for the device."""
        synchronize()
        return self._tensors.peak if self._tensors is not None else torch.cuda.max_memory_allocated()


def release_memory() -> None:
    """Give back what PyTorch's allocator only keeps for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_outside() -> int:
    """Bytes of the device that neither are free nor PyTorch's: contexts, communicators, other programs; 0 on a CPU.

    Where several ranks of this host share the card, a rank counts on its share of what is free.
    """
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    sharing = -(-int(os.environ.get("LOCAL_WORLD_SIZE", 1)) // torch.cuda.device_count())
    return total - free // sharing - torch.cuda.memory_reserved()


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


def replace_what_is_missing(process_group_backend: str) -> None:
    """Let Megatron-Core run where it assumes more than there is: no CUDA, or a card shared over gloo."""
    if not torch.cuda.is_available():
        install_cpu_replacements()
    elif process_group_backend == "gloo":
        share_a_card_over_gloo()


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
