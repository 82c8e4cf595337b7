# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents -> the plan of any step."""

import bisect
import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from megatron_dyn.planning.assemble import assemble
from megatron_dyn.planning.config import PlanConfig, PlanError
from megatron_dyn.planning.order import epoch_order, token_step_ends
from megatron_dyn.planning.pieces import cut_documents
from megatron_dyn.planning.plan import StepPlan

CACHED_EPOCHS = 2
"""Orders kept: prefetching crosses from one epoch into the next, and no plan needs more."""


@dataclass(frozen=True, kw_only=True)
class EpochCounts:
    """What one epoch does with the corpus, before `drop_last`. Equal for all epochs."""

    documents: int
    """All documents of the corpus, empty ones included."""
    empty_documents: int
    tokens: int
    split_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    order: np.ndarray  # int64 [usable documents]
    ends: np.ndarray | None  # int64 [steps] positions in order; None when every step has global_batch_size documents


class Planner:
    """Makes the plan of any step: a pure function of (lengths, configuration, step), equal on every rank.

    Steps never cross epochs: the last step of an epoch is short (or dropped, counted, with `drop_last`).
    May be called from several threads.

    Args:
        lengths: tokens per document, integer [num_documents]; 0 is allowed (skipped, counted).
        config: see PlanConfig.
        fingerprint: hex digest of the corpus (`Corpus.fingerprint`); by default a digest of the lengths.

    Raises:
        PlanError: no usable document, an oversize document under the "error" policy, a step that could never be filled.
    """

    def __init__(self, lengths: np.ndarray, config: PlanConfig, fingerprint: str | None = None):
        lengths = np.asarray(lengths)
        if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and lengths.size):
            raise PlanError(f"lengths must be a flat array of integers, got shape {lengths.shape} of {lengths.dtype}")
        self.lengths = lengths
        self.config = config
        self._usable = np.flatnonzero(lengths > 0)
        if lengths.size and int(lengths.min()) < 0:
            document = int(np.argmin(lengths))
            raise PlanError(f"document {document} has a negative length ({int(lengths[document])}): the index is damaged; rebuild it")
        self.fingerprint = fingerprint if fingerprint is not None else _fingerprint_of(lengths)
        self.counts = self._count()
        self._digest_seed = hashlib.sha256(
            json.dumps({"corpus": self.fingerprint, "plan": config.to_dict()}, sort_keys=True).encode()
        ).digest()
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._starts: list[tuple[int, int]] = [(0, 0)]  # (first step, epoch), rising
        self._lock = threading.RLock()

    @property
    def num_documents(self) -> int:
        """Documents that are not empty: what one epoch goes through."""
        return len(self._usable)

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Steps of an epoch. Only `global_batch_tokens` with shuffling makes it differ between epochs."""
        size = self.config.global_batch_size
        if size is not None:
            return self.num_documents // size if self.config.drop_last else -(-self.num_documents // size)
        return len(self._epoch(epoch).ends)

    def epoch_of(self, step: int) -> int:
        """Epoch that a step belongs to."""
        return self._locate(step)[0]

    def first_step_of(self, epoch: int) -> int:
        """First step of an epoch."""
        if self.config.global_batch_size is not None:
            return epoch * self.steps_per_epoch()
        with self._lock:
            start, number = max(entry for entry in self._starts if entry[1] <= epoch)
            while number < epoch:
                start, number = start + self.steps_per_epoch(number), number + 1
                self.remember_epoch(number, start)
            return start

    def remember_epoch(self, epoch: int, first_step: int) -> None:
        """Note where an epoch starts (from a saved state), so that nothing before it is computed again.

        Raises:
            PlanError: it is known to start elsewhere.
        """
        with self._lock:
            size = self.config.global_batch_size
            known = {number: start for start, number in self._starts}
            expected = known.get(epoch, first_step) if size is None else epoch * self.steps_per_epoch()
            if first_step != expected:
                raise PlanError(
                    f"epoch {epoch} starts at step {expected}, not {first_step}: the saved position is damaged; take an older "
                    "checkpoint"
                )
            if epoch not in known:
                bisect.insort(self._starts, (first_step, epoch))

    def plan(self, step: int) -> StepPlan:
        """The plan of a step (random access).

        Raises:
            PlanError: the step is negative.
        """
        epoch, first_step = self._locate(step)
        ordered = self._epoch(epoch)
        number, steps = step - first_step, self.steps_per_epoch(epoch)
        begin, end = self._bounds(number, ordered.ends)
        documents = ordered.order[begin:end]

        def divided(*, even: bool) -> StepPlan:
            pieces = cut_documents(
                documents,
                self.lengths[documents].astype(np.int64),
                budget=self.config.max_tokens_per_microbatch,
                oversize=self.config.oversize,
                even=even,
            )
            return assemble(
                step=step,
                epoch=epoch,
                documents=documents,
                pieces=pieces,
                config=self.config,
                digest_seed=self._digest_seed,
                empty_documents=self.counts.empty_documents if number == 0 else 0,
                drop_last_documents=self.num_documents - end if number == steps - 1 else 0,
            )

        plan = divided(even=True)
        if plan.stats.split_documents and plan.stats.microbatches > self._fewest_microbatches(plan.stats.tokens):
            full = divided(even=False)
            if full.num_microbatches < plan.num_microbatches:
                return full
        return plan

    def _fewest_microbatches(self, tokens: int) -> int:
        """No step of so many tokens has fewer microbatches over all ranks."""
        group = self.config.data_parallel_size * self.config.microbatch_multiple
        return -(-tokens // (self.config.max_tokens_per_microbatch * group)) * group

    def _bounds(self, number: int, ends: np.ndarray | None) -> tuple[int, int]:
        if ends is None:
            size = self.config.global_batch_size
            return number * size, min((number + 1) * size, self.num_documents)
        return (int(ends[number - 1]) if number else 0), int(ends[number])

    def _locate(self, step: int) -> tuple[int, int]:
        """(epoch, its first step) of a step."""
        if step < 0:
            raise PlanError(f"step {step} does not exist: steps count from 0")
        if self.config.global_batch_size is not None:
            steps = self.steps_per_epoch()
            return step // steps, step // steps * steps
        with self._lock:
            start, epoch = self._starts[bisect.bisect_right(self._starts, step, key=lambda entry: entry[0]) - 1]
            while step >= start + self.steps_per_epoch(epoch):
                start, epoch = start + self.steps_per_epoch(epoch), epoch + 1
                self.remember_epoch(epoch, start)
            return epoch, start

    def _epoch(self, epoch: int) -> _Epoch:
        with self._lock:
            if epoch in self._epochs:
                self._epochs.move_to_end(epoch)
                return self._epochs[epoch]
            order = epoch_order(
                self._usable, document_order=self.config.document_order, seed=self.config.seed, epoch=epoch
            )
            ends = None
            if self.config.global_batch_tokens is not None:
                lengths = self.lengths[order].astype(np.int64)
                ends = token_step_ends(lengths, self.config.global_batch_tokens)
                last = int(lengths[ends[-2] if len(ends) > 1 else 0 :].sum())
                if self.config.drop_last and last < self.config.global_batch_tokens:
                    ends = ends[:-1]
            self._epochs[epoch] = _Epoch(order=order, ends=ends)
            while len(self._epochs) > CACHED_EPOCHS:
                self._epochs.popitem(last=False)
            return self._epochs[epoch]

    def _count(self) -> EpochCounts:
        config, budget = self.config, self.config.max_tokens_per_microbatch
        total = int(self.lengths.sum(dtype=np.int64))
        oversize = np.flatnonzero(self.lengths > budget)
        oversize_tokens = int(self.lengths[oversize].sum(dtype=np.int64))
        counts = {"documents": len(self.lengths), "empty_documents": len(self.lengths) - self.num_documents, "tokens": total}
        if config.oversize == "error" and len(oversize):
            first = int(oversize[0])
            raise PlanError(
                f"document {first} has {int(self.lengths[first])} tokens, above the budget of {budget} tokens a microbatch "
                f"({len(oversize)} such documents): oversize='error' refuses them; raise max_tokens_per_microbatch or choose "
                "oversize='split', 'truncate' or 'drop'"
            )
        if config.oversize == "split":
            counts.update(split_documents=len(oversize))
        elif config.oversize == "truncate":
            counts.update(truncated_documents=len(oversize), truncated_tokens=oversize_tokens - len(oversize) * budget)
        elif config.oversize == "drop":
            counts.update(dropped_documents=len(oversize), dropped_tokens=oversize_tokens)
        usable = self.num_documents - counts.get("dropped_documents", 0)
        if usable == 0:
            raise PlanError(
                f"no usable documents: of {len(self.lengths)}, {counts['empty_documents']} are empty and "
                f"{counts.get('dropped_documents', 0)} are dropped for having more than {budget} tokens; there is nothing to "
                "train on; check the corpus, or choose another oversize policy or budget"
            )
        short = (
            self.num_documents < config.global_batch_size
            if config.global_batch_size is not None
            else total < config.global_batch_tokens
        )
        if config.drop_last and short:
            raise PlanError(
                f"an epoch ({self.num_documents} documents, {total} tokens) is smaller than one global batch and drop_last "
                "drops it: no step would ever run; lower the global batch or keep the last step"
            )
        return EpochCounts(**counts)


def _fingerprint_of(lengths: np.ndarray) -> str:
    return hashlib.sha256(b"lengths:" + np.ascontiguousarray(lengths, dtype="<i8").tobytes()).hexdigest()
