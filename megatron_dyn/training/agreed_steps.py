# SPDX-License-Identifier: Apache-2.0
"""Steps that all ranks have agreed on: planned, built and compared while the step before is computed.

    main thread         next() hands out step n ......... computes step n ......... next() hands out step n + 1
    this thread              waits for the data of n + 1, meets all ranks, shares its tokens
    builder thread           plans and builds n + 2, n + 3 (`StepStream`)

Ranks may meet for a step only if all of them will: a rank that had gone ahead alone would leave a collective behind that nobody joins.
So the meeting of step n + 1 begins when the ranks have agreed to compute step n and know that they want another, never earlier.
The group of the meetings belongs to this thread: collectives of two threads in one group would meet in another order on each rank.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from megatron.core import parallel_state

from megatron_dyn.corpus import Corpus
from megatron_dyn.microbatch import PackedMicrobatch, StepStream
from megatron_dyn.microbatch.packed import content_checksum
from megatron_dyn.microbatch.shared_tokens import TokenBroadcast
from megatron_dyn.pipeline.agreement import losing_a_rank_during, new_cpu_group
from megatron_dyn.pipeline.handshake import code_version
from megatron_dyn.pipeline.plan_agreement import Held, PlanAgreement, plan_constants
from megatron_dyn.planning import Planner, StepPlan
from megatron_dyn.training.distributed import tensor_parallel_cpu_group
from megatron_dyn.training.facts import schedule_facts
from megatron_dyn.training.plan_from_settings import name_of_plan_setting
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.training.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True)
class _Met:
    """How the meeting for a step ended."""

    microbatches: list[PackedMicrobatch] | None = None
    """On the CPU; only where another rank read them."""
    stop: bool = False
    error: BaseException | None = None
    data_ready: float = 0.0
    """Time at which this rank had its data (or knew that it has none)."""


class AgreedSteps:
    """Takes steps from a stream and hands them out once all ranks hold the same ones.

    Args:
        stream: Of this rank; closed by its owner, after this.
        agreement: Meets all ranks.
        name: Number of a step (counted from `first`) -> its name in messages.
        first: Number of the next step.
        stop: Whether this rank was asked to stop; it is looked at when a meeting begins.
        tokens: Shares what one rank reads; None where every rank reads.
    """

    def __init__(
        self,
        stream: StepStream,
        agreement: PlanAgreement,
        *,
        name: Callable[[int], str],
        first: int = 1,
        stop: StopRequest | None = None,
        tokens: TokenBroadcast | None = None,
    ):
        self._stream = stream
        self._agreement = agreement
        self._name = name
        self._next = first
        self._stop = stop
        self._tokens = tokens
        self._begun = False
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._met: queue.SimpleQueue[_Met] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.last_data_wait_secs = 0.0
        """Seconds that the last `next()` waited for this rank's own data."""
        self.last_agreement_wait_secs = 0.0
        """Seconds that it waited for the other ranks, beyond that."""

    def next(self, *, more: bool) -> tuple[StepPlan, list[PackedMicrobatch]] | None:
        """The next step; returns when all ranks hold it.

        Args:
            more: All ranks want another step after this one (they must know that alike): its meeting begins now.

        Returns:
            The plan and this rank's microbatches on the device; None where any rank was asked to stop (the step is given up).

        Raises:
            AgreementError: On every rank: plans differ, or a rank failed.
        """
        began = time.monotonic()
        ahead = self._stream.prefetch_steps > 0
        if not ahead:
            met = self._meet(self._next)
        else:
            if not self._begun:
                self._begin(self._next)
            met = self._met.get()
            self._begun = False
        waited = time.monotonic() - began
        self.last_data_wait_secs = min(waited, max(0.0, met.data_ready - began))
        self.last_agreement_wait_secs = waited - self.last_data_wait_secs
        self._next += 1
        if met.error is not None:
            raise met.error
        if met.stop:
            return None
        plan, microbatches = self._stream.next()
        if met.microbatches is not None:
            microbatches = self._stream.to_device(met.microbatches)
        if more and ahead:
            self._begin(self._next)
        return plan, microbatches

    def close(self) -> None:
        """End the meeting that was begun (all ranks have begun it), and the thread."""
        if self._begun:
            self._met.get()
            self._begun = False
        self._wanted.put(None)

    def __enter__(self) -> "AgreedSteps":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            self.close()
        else:
            self._wanted.put(None)  # whether the others still come is not known: do not wait for them

    def _begin(self, number: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="plan-agreement", daemon=True)
            self._thread.start()
        self._begun = True
        self._wanted.put(number)

    def _work(self) -> None:
        while (number := self._wanted.get()) is not None:
            self._met.put(self._meet(number))

    def _meet(self, number: int) -> _Met:
        ready = time.monotonic()
        try:
            held, microbatches, failure = None, [], None
            try:
                plan, microbatches = self._stream.peek()
                held = Held(plan=plan, contents=self._checksums(microbatches))
            except Exception as error:  # whatever it is, the other ranks must hear of it before anybody raises
                failure = error
                planned = getattr(error, "plan", None)
                held = None if planned is None else Held(plan=planned)
            ready = time.monotonic()
            requested = self._stop is not None and self._stop.requested
            agreed = self._agreement.check(self._name(number), held, error=failure, stop_requested=requested)
            if agreed.stop_requested:
                return _Met(stop=True, data_ready=ready)
            shared = None
            if self._tokens is not None:
                with losing_a_rank_during(f"the broadcast of the tokens of {self._name(number)}"):
                    shared = self._tokens.share(held.plan, microbatches)
            return _Met(microbatches=shared, data_ready=ready)
        except BaseException as error:  # the main thread's to raise
            return _Met(error=error, data_ready=ready)

    def _checksums(self, microbatches: list[PackedMicrobatch]) -> list[int] | None:
        if not self._agreement.check_contents or (self._tokens is not None and not self._tokens.reads):
            return None
        return [content_checksum(microbatch) for microbatch in microbatches]


def step_meetings(run: RunConfig, planner: Planner, corpus: Corpus, pad_token_id: int) -> dict:
    """How the ranks agree on the steps of one stream, and share tokens, in groups of its own. A collective of all ranks.

    Returns:
        Arguments of `Trainer` and `Evaluator`: "agreement" and "tokens".
    """
    timeout = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    rank = parallel_state.get_data_parallel_rank()
    agreement = PlanAgreement(
        plan_constants(planner, code_version=code_version(), schedule=schedule_facts(run), called=name_of_plan_setting),
        data_parallel_rank=rank,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        check_contents=run.data.check_batch_content,
        group=new_cpu_group(timeout),
    )
    tokens = None
    if run.data.data_broadcast and run.parallel.tensor_model_parallel_size > 1:
        group = tensor_parallel_cpu_group(timeout)
        tokens = TokenBroadcast(group, corpus, data_parallel_rank=rank, pad_token_id=pad_token_id)
    return {"agreement": agreement, "tokens": tokens}
