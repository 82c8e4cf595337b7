# SPDX-License-Identifier: Apache-2.0
"""Steps with their tensors, planned and built ahead of time by one background thread.

A thread and not worker processes: reading slices of a memory map and concatenating them is a millisecond a step, so processes would cost
more in copies, forks and ways to die than they give. The thread draws no random number of torch's, numpy's or Python's global generators:
a loader that did so on some ranks only would let the dropout of tensor-parallel ranks part.
"""

from __future__ import annotations

import atexit
import copy
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator

import torch

from megatron_dyn.device import compute_device, pin
from megatron_dyn.microbatch.builder import MicrobatchError, build_microbatch, check_pad_token_id
from megatron_dyn.microbatch.packed import PackedMicrobatch

if TYPE_CHECKING:
    from megatron_dyn.corpus import Corpus
    from megatron_dyn.planning import StepPlan, TokenBudgetBatchSampler

_LIVENESS_SECS = 0.5  # how long a wait lasts before asking whether the thread still lives
_JOIN_SECS = 5.0


class StreamError(RuntimeError):
    """The background thread failed, died or stands still; the message names it and the step it was at.

    Attributes:
        plan: the plan of the step that could not be built; None where not even that could be made.
    """

    plan: StepPlan | None = None


@dataclass(kw_only=True)
class _Ready:
    """A step that is planned and perhaps not yet built to its end."""

    plan: StepPlan
    state_after: dict[str, Any]
    microbatches: list[PackedMicrobatch]
    complete: bool = False


class StepStream:
    """Hands out ``(StepPlan, microbatches of this rank)`` in step order.

    The stream owns ``sampler`` from construction to ``close()``: load the sampler's state before, and save ``stream.state_dict()``,
    which knows nothing of what was read ahead.

    Args:
        sampler: yields StepPlans and has ``state_dict()``; its state counts the steps yielded.
        corpus: the documents that the plans number.
        data_parallel_rank: which part of each StepPlan to build.
        pad_token_id: token id of padding rows, at least 0.
        device: where the tensors are handed out; None is this process's compute device. They are built, and pinned where that means
            something, in the background; the asynchronous copy is issued by the caller's thread on its current stream, so that it is
            ordered before the kernels that read it.
        prefetch_steps: steps that may be ready or in the making beyond the one handed out. 0 builds in the caller's thread.
        prefetch_microbatches: microbatches that may wait; the next step is always built to its end, whatever its size.
        timeout_secs: longest wait for one step before the thread is declared stuck.
        plans_only: hand out plans without microbatches: another rank reads the tokens.
    """

    def __init__(
        self,
        sampler: TokenBudgetBatchSampler,
        corpus: Corpus,
        *,
        data_parallel_rank: int,
        pad_token_id: int = 0,
        device: torch.device | str | None = None,
        prefetch_steps: int = 2,
        prefetch_microbatches: int = 64,
        timeout_secs: float = 600.0,
        plans_only: bool = False,
    ) -> None:
        if data_parallel_rank < 0:
            raise ValueError(f"data_parallel_rank is {data_parallel_rank}: it would take another rank's part of the step")
        if prefetch_steps < 0 or prefetch_microbatches < 1:
            raise ValueError(
                f"prefetch_steps is {prefetch_steps} (at least 0), prefetch_microbatches is {prefetch_microbatches} (at least 1): "
                "nothing could ever be built"
            )
        if not timeout_secs > 0:
            raise ValueError(f"timeout_secs is {timeout_secs}: the first step would be declared stuck before it is built")
        self._sampler = sampler
        self._corpus = corpus
        self._rank = data_parallel_rank
        self._pad_token_id = check_pad_token_id(pad_token_id)
        self._device = compute_device() if device is None else torch.device(device)
        self.prefetch_steps = prefetch_steps
        self._prefetch_microbatches = prefetch_microbatches
        self._timeout_secs = timeout_secs
        self._plans_only = plans_only

        self.last_wait_secs = 0.0
        """Seconds that the last ``next()`` waited for the thread; near 0 when reading ahead keeps up."""
        self._state = copy.deepcopy(sampler.state_dict())
        self._steps: Iterator[StepPlan] | None = None
        self._ready: deque[_Ready] = deque()
        self._doing = "starting"
        self._error: BaseException | None = None
        self._exhausted = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.worker_name = f"microbatch-builder-dp{data_parallel_rank}"

    # The caller's side

    def next(self) -> tuple[StepPlan, list[PackedMicrobatch]]:
        """Returns the next step's plan and this rank's microbatches on the device.

        Raises:
            StopIteration: the sampler has no more steps.
            StreamError: building failed (the cause is chained), or the background thread died or is stuck. Every later call raises
                it again: a step is never skipped.
            RuntimeError: the stream is closed.
        """
        began = time.monotonic()
        step = self._take(hand_out=True)
        self.last_wait_secs = time.monotonic() - began
        self._state = step.state_after
        return step.plan, self.to_device(step.microbatches)

    def to_device(self, microbatches: list[PackedMicrobatch]) -> list[PackedMicrobatch]:
        """Copies built microbatches to where this stream hands them out, on the caller's current stream."""
        return [microbatch.to(self._device, non_blocking=True) for microbatch in microbatches]

    def peek(self) -> tuple[StepPlan, list[PackedMicrobatch]]:
        """Waits for the step that ``next()`` will hand out, and returns it as it lies ready: on the CPU.

        May be called from another thread than ``next()``, not at the same time.

        Raises:
            As ``next()``.
        """
        step = self._take(hand_out=False)
        return step.plan, step.microbatches

    def __iter__(self) -> StepStream:
        return self

    __next__ = next

    def state_dict(self) -> dict[str, Any]:
        """Returns the sampler's state as of the last step handed out: where a resumed run must go on."""
        return copy.deepcopy(self._state)

    def close(self) -> None:
        """Stops the thread and drops what was read ahead. Safe to call twice; ``state_dict()`` still answers."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_SECS)  # a daemon: one stuck in a read does not hold up the exit

    def __enter__(self) -> StepStream:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _take(self, *, hand_out: bool) -> _Ready:
        if self._closed:
            raise RuntimeError("this StepStream is closed; make a new one from a sampler with the saved state")
        if self.prefetch_steps == 0:
            if not self._ready:
                self._build_in_the_foreground()
        elif self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self.worker_name, daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread that is cut off inside torch at the interpreter's end can abort the process
        deadline = time.monotonic() + self._timeout_secs
        with self._changed:
            while not (self._ready and self._ready[0].complete):
                if self._error is not None:
                    raise self._failure(f"failed while {self._doing}: {type(self._error).__name__}: {self._error}") from self._error
                if self._exhausted:
                    raise StopIteration
                if self._thread is None or not self._thread.is_alive():
                    raise self._failure(f"died without a word while {self._doing}")
                if time.monotonic() > deadline:
                    raise self._failure(f"has made nothing for {self._timeout_secs:g} s while {self._doing}; it stands at {self._whereabouts()}")
                self._changed.wait(min(_LIVENESS_SECS, self._timeout_secs))
            if not hand_out:
                return self._ready[0]
            step = self._ready.popleft()
            self._changed.notify_all()
            return step

    def _failure(self, what: str) -> StreamError:
        error = StreamError(
            f"{self.worker_name} (data-parallel rank {self._rank}) {what}. This rank has no next step and stops, rather than leave the "
            "others waiting in a collective; resume from the last checkpoint once the cause is gone"
        )
        error.plan = self._ready[0].plan if self._ready else None
        return error

    def _whereabouts(self) -> str:
        frame = sys._current_frames().get(self._thread.ident)
        return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "an unknown place"

    # The builder's side

    def _work(self) -> None:
        try:
            while self._wait_for_room(new_step=True) and self._build_one_step():
                pass
        except BaseException as error:  # whatever ends this thread is the caller's to see: also SystemExit and MemoryError
            self._carry(error)

    def _build_in_the_foreground(self) -> None:
        if self._error is None and not self._exhausted:
            try:
                self._build_one_step()
            except Exception as error:
                self._carry(error)

    def _carry(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _build_one_step(self) -> bool:
        """Plans and builds one step into the queue. Returns False when there is none or the stream was closed."""
        if self._steps is None:
            self._doing = "planning the first step"
            self._steps = iter(self._sampler)
        getattr(self._corpus, "look", lambda: None)()  # before its lengths are read: its files may have changed
        plan = next(self._steps, None)
        if plan is None:
            with self._changed:
                self._exhausted = True
                self._changed.notify_all()
            return False
        step = _Ready(plan=plan, state_after=copy.deepcopy(self._sampler.state_dict()), microbatches=[])
        with self._changed:
            self._ready.append(step)
        if self._rank >= len(plan.microbatches):
            raise MicrobatchError(
                f"step {plan.step} is planned for {len(plan.microbatches)} data-parallel ranks, this is rank {self._rank}: "
                "set PlanConfig.data_parallel_size to the size of the group"
            )
        mine = () if self._plans_only else plan.microbatches[self._rank]
        for index, planned in enumerate(mine):
            self._doing = f"building step {plan.step}, microbatch {index + 1} of {len(mine)}"
            if not self._wait_for_room(new_step=False):
                return False
            built = build_microbatch(planned, self._corpus, pad_token_id=self._pad_token_id, step=plan.step, index=index)
            step.microbatches.append(built.in_one_buffer(pin))
        with self._changed:
            step.complete = True
            self._changed.notify_all()
        self._doing = f"planning the step after step {plan.step}"
        return True

    def _wait_for_room(self, *, new_step: bool) -> bool:
        """Waits until building may go on; returns False once the stream is closed."""
        with self._changed:
            while not self._closed and not self._has_room(new_step):
                self._changed.wait()
            return not self._closed

    def _has_room(self, new_step: bool) -> bool:
        if self.prefetch_steps == 0:
            return True
        if new_step and len(self._ready) >= self.prefetch_steps:
            return False
        next_is_complete = bool(self._ready) and self._ready[0].complete
        return not next_is_complete or sum(len(step.microbatches) for step in self._ready) < self._prefetch_microbatches
