# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents -> the plan of any step.

What takes how long, with N documents in the corpus (lengths may be a memory map; nothing of N entries is made):

| call                                                | time                                | memory                |
|-----------------------------------------------------|-------------------------------------|-----------------------|
| Planner(...)                                        | one pass over the lengths           | 16 MiB at most        |
| plan(step), `global_batch_size`                     | the step ("length-window": the window, once) | the same     |
| plan(step), `global_batch_tokens`, step known or next | the same                          | the same              |
| plan(step), `global_batch_tokens`, any other step   | a scan from the nearest known step  | the same              |
| steps_per_epoch, first_step_of, `global_batch_tokens` | a scan up to there                | the same              |

Known are a restored position, the steps after planned ones, and marks that scans leave behind.
"""

import bisect
import dataclasses
import hashlib
import json
import operator
import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from megatron_dyn.corpus.computed_lengths import ComputedLengths
from megatron_dyn.planning.assemble import assemble
from megatron_dyn.planning.config import PlanConfig, PlanError
from megatron_dyn.planning.pieces import cut_documents
from megatron_dyn.planning.plan import StepPlan
from megatron_dyn.planning.survey import EpochCounts, count_epoch, survey
from megatron_dyn.planning.windows import SCANNED_TOGETHER, Window, Windows

KEPT_WINDOWS = 2
"""Prefetching crosses from one window into the next, and no plan needs more."""
MOST_MARKS = 4096
"""Known positions of steps; above it every second one is forgotten."""


class StepPosition(NamedTuple):
    """Where a step begins: everything that is needed to plan it and all after it."""

    epoch: int
    epoch_first_step: int
    documents: int
    """Documents of the epoch that the steps before took (empty ones are not counted)."""
    window: int
    """The same where the step's window begins; equal to `documents` unless documents are ordered by "length-window"."""


class Planner:
    """Makes the plan of any step: a pure function of (lengths, configuration, step), equal on every rank.

    Steps never cross epochs: the last step of an epoch is short (or dropped, counted, with `drop_last`).
    May be called from several threads.

    Args:
        lengths: tokens per document, integer [num_documents], read in place (an array, a memory map, or the computed lengths of a
            `Corpus`); 0 is allowed (skipped, counted).
        config: see PlanConfig.
        fingerprint: hex digest of the corpus (`Corpus.fingerprint`); by default a digest of the lengths.

    Raises:
        PlanError: no usable document, an oversize document under the "error" policy, a step that could never be filled.
    """

    def __init__(self, lengths: np.ndarray | ComputedLengths, config: PlanConfig, fingerprint: str | None = None):
        if not isinstance(lengths, ComputedLengths):
            lengths = np.asarray(lengths)
        if lengths.ndim != 1 or (lengths.dtype.kind not in "iu" and len(lengths)):
            raise PlanError(f"lengths must be a flat array of integers, got shape {lengths.shape} of {lengths.dtype}")
        self.lengths = lengths
        self.config = config
        found = survey(lengths, budget=config.longest_piece, fingerprint=fingerprint is None)
        self.num_documents = found.documents - found.empty
        """Documents that are not empty: what one epoch goes through."""
        self.fingerprint = found.fingerprint if fingerprint is None else fingerprint
        self.counts: EpochCounts = count_epoch(found, lengths, config)
        self._digest_seed = hashlib.sha256(
            json.dumps({"corpus": self.fingerprint, "plan": config.to_dict()}, sort_keys=True).encode()
        ).digest()
        self.longest_document = found.longest
        """Tokens of the longest document."""
        self._longest = min(found.longest, config.longest_piece)
        self._dynamic = dataclasses.replace(config, microbatching="dynamic")
        self._windows = Windows(lengths, found, config)
        self._kept: OrderedDict[tuple[int, int], Window] = OrderedDict()
        self._marks: list[tuple[int, StepPosition]] = [(0, StepPosition(0, 0, 0, 0))]  # rising
        self._epoch_starts = {0: 0}
        self._lock = threading.RLock()

    @property
    def longest_piece(self) -> int:
        """Most tokens in a piece of any step: of the longest document, as far as the caps leave it whole; B where documents are joined."""
        return self.config.max_tokens_per_microbatch if self.config.microbatching == "concat-chunk" else self._longest

    def __reduce__(self) -> tuple:
        """Pickled as what it was made from (a lock cannot be); lengths that are a memory map are copied."""
        return Planner, (self.lengths, self.config, self.fingerprint)

    # ---- where steps lie -----------------------------------------------------------------------------------

    def steps_per_epoch(self, epoch: int = 0, *, at_most: int | None = None) -> int:
        """Steps of an epoch: O(1) with `global_batch_size`; with `global_batch_tokens` the documents before its end are scanned, chunk
        by chunk in O(1) memory, from the nearest known step on.

        Args:
            epoch: only `global_batch_tokens` with shuffling makes a difference between epochs.
            at_most: stop counting there.
        """
        size = self.config.global_batch_size
        if size is not None:
            steps = self.num_documents // size if self.config.drop_last else -(-self.num_documents // size)
            return steps if at_most is None else min(steps, at_most)
        first = self.first_step_of(epoch)
        step, _ = self._walk(epoch=epoch + 1, step=None if at_most is None else first + at_most)
        return step - first

    def epoch_of(self, step: int) -> int:
        """Epoch that a step belongs to."""
        return self.position_of(step).epoch

    def first_step_of(self, epoch: int) -> int:
        """First step of an epoch (scans like `steps_per_epoch` unless it is known)."""
        if self.config.global_batch_size is not None:
            return epoch * self.steps_per_epoch()
        with self._lock:
            return self._epoch_starts[epoch] if epoch in self._epoch_starts else self._walk(epoch=epoch)[0]

    def position_of(self, step: int) -> StepPosition:
        """Where a step begins.

        With `global_batch_tokens`, a step that is neither known nor next is found by scanning the documents from the nearest known step
        before it, chunk by chunk in O(1) memory; a restored position spares that.

        Raises:
            PlanError: the step is negative, or no integer.
        """
        step = self._step_number(step)
        size = self.config.global_batch_size
        if size is None:
            return self._walk(step=step)[1]
        epoch, number = divmod(step, self.steps_per_epoch())
        return StepPosition(epoch, step - number, number * size, self._windows.begin_of(number * size))

    def remember(self, step: int, position: StepPosition) -> None:
        """Note where a step begins (from a saved state), so that nothing before it is looked at again.

        Raises:
            PlanError: no step can begin there.
        """
        epoch, first_step, documents, window = position
        with self._lock:
            by_size = self.config.global_batch_size is not None
            start = epoch * self.steps_per_epoch() if by_size else self._epoch_starts.get(epoch, first_step)
            if first_step != start:
                raise self._damaged(f"epoch {epoch} starts at step {start}, not {first_step}")
            known = self.position_of(step) if by_size else self._known(step)
            if known is not None and known != position:
                raise self._damaged(f"step {step} begins at {tuple(known)}, not {tuple(position)}")
            number = step - first_step
            possible = 0 <= number <= documents < self.num_documents and (number == 0) == (documents == 0)
            if not possible or not 0 <= window <= documents or not (self._windows.sorts or window == documents):
                raise self._damaged(
                    f"step {step}, {number} after the first of its epoch, cannot begin after {documents} of {self.num_documents} documents"
                )
            if self._windows.sorts and self._window(epoch, window).step_at(documents) is None:
                raise self._damaged(f"no step begins after {documents} documents in the window that begins after {window}")
            if not by_size:
                self._epoch_starts[epoch] = first_step
                self._mark(step, position)

    @staticmethod
    def _damaged(what: str) -> PlanError:
        return PlanError(f"the saved position is damaged: {what}; take an older checkpoint")

    # ---- plans ---------------------------------------------------------------------------------------------

    def plan(self, step: int) -> StepPlan:
        """The plan of a step (random access; see `position_of` for what a far step costs).

        Raises:
            PlanError: the step is negative.
        """
        step = self._step_number(step)
        position, following, documents, end = self._step(step)
        is_last = following.epoch != position.epoch

        def divided(config: PlanConfig, *, even: bool) -> StepPlan:
            pieces = cut_documents(
                documents,
                self.lengths[documents].astype(np.int64),
                budget=self.config.longest_piece,
                oversize=self.config.oversize,
                even=even,
            )
            return assemble(
                step=step,
                epoch=position.epoch,
                documents=documents,
                pieces=pieces,
                config=config,
                longest=self._longest,
                digest_seed=self._digest_seed,
                empty_documents=self.counts.empty_documents if step == position.epoch_first_step else 0,
                drop_last_documents=self.num_documents - end if is_last else 0,
            )

        fixed = self.config.microbatching != "dynamic"
        if fixed and (self.config.microbatching == "concat-chunk" or self._longest < self.config.longest_piece):
            return divided(self.config, even=True)  # nothing is cut, or not here
        plan, even = divided(self._dynamic, even=True), True
        if plan.stats.split_documents and plan.stats.microbatches > self._fewest_microbatches(plan.stats.tokens):
            full = divided(self._dynamic, even=False)
            if full.num_microbatches < plan.num_microbatches:
                plan, even = full, False
        return divided(self.config, even=even) if fixed else plan  # whatever the grouping, the pieces are the same

    def documents(self, step: int) -> np.ndarray:
        """Ids of a step's documents in the order of the epoch, int64 [n], without dividing them: `plan(step).documents`.

        Raises:
            PlanError: the step is negative.
        """
        return self._step(self._step_number(step))[2]

    @staticmethod
    def _step_number(step: int) -> int:
        try:
            number = operator.index(step)  # numpy's integers too: theirs would overflow in the arithmetic of orders
        except TypeError as error:
            raise PlanError(f"step {step!r} is no integer: steps are numbered 0, 1, 2, ...") from error
        if number < 0:
            raise PlanError(f"step {number} does not exist: steps count from 0")
        return number

    def _step(self, step: int) -> tuple[StepPosition, StepPosition, np.ndarray, int]:
        """Where a step and the next one begin, its documents, and how many of its epoch are taken after it."""
        with self._lock:
            position = self.position_of(step)
            window = self._window(position.epoch, position.window)
            index = window.step_at(position.documents)
            following = self._after(step, position, window, index + 1)
        return position, following, window.documents_of_step(index), window.bounds(index)[1]

    def _fewest_microbatches(self, tokens: int) -> int:
        """No step of so many tokens has fewer microbatches over all ranks."""
        group = self.config.data_parallel_size * self.config.microbatch_multiple
        return -(-tokens // (self.config.max_tokens_per_microbatch * group)) * group

    # ---- walking -------------------------------------------------------------------------------------------

    def _window(self, epoch: int, begin: int, at_least: int = 0) -> Window:
        with self._lock:
            key = (epoch, begin)
            if key not in self._kept:
                self._kept[key] = self._windows.read(epoch, begin, at_least=at_least)
                while len(self._kept) > KEPT_WINDOWS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def _after(self, step: int, position: StepPosition, window: Window, count: int, at_least: int = 0) -> StepPosition:
        """Position after the first `count` steps of a window; `step` begins at `position`, which lies in it."""
        passed = step + count - window.step_at(position.documents)
        end = window.bounds(count - 1)[1]
        inside = count < len(window.ends)
        # With drop_last the rest may be too little for a step: then it is the next epoch that follows.
        ended = end == self.num_documents
        if not ended and not inside and self.config.drop_last:
            ended = not len(self._window(position.epoch, end, at_least).ends)
        if ended:
            following = StepPosition(position.epoch + 1, passed, 0, 0)
        else:
            begin = position.window if inside and self._windows.sorts else end
            following = StepPosition(position.epoch, position.epoch_first_step, end, begin)
        if self.config.global_batch_size is None:
            self._epoch_starts.setdefault(following.epoch, following.epoch_first_step)
            if len(self._epoch_starts) > MOST_MARKS:  # of a tiny corpus: marks find the others
                known = sorted(self._epoch_starts.items())
                self._epoch_starts = dict(known[:-1:2] + known[-1:])
            self._mark(passed, following)
        return following

    def _walk(self, *, step: int | None = None, epoch: int | None = None) -> tuple[int, StepPosition]:
        """Go on from the nearest mark to a step or to the begin of an epoch, whichever comes first."""
        with self._lock:
            at = len(self._marks)
            if step is not None:
                at = bisect.bisect_right(self._marks, step, key=lambda mark: mark[0])
            if epoch is not None:
                at = min(at, bisect.bisect_left(self._marks, (epoch, 1), key=lambda mark: (mark[1].epoch, mark[1].documents)))
            here, position = self._marks[at - 1]
            while here != step and (epoch is None or position.epoch < epoch):
                at_least = SCANNED_TOGETHER if step is None or step - here > 1 else 0
                window = self._window(position.epoch, position.window, at_least)
                index = window.step_at(position.documents)
                count = len(window.ends) if step is None else min(len(window.ends), index + step - here)
                following = self._after(here, position, window, count, at_least)
                here, position = here + count - index, following
            return here, position

    def _known(self, step: int) -> StepPosition | None:
        at = bisect.bisect_left(self._marks, step, key=lambda mark: mark[0])
        return self._marks[at][1] if at < len(self._marks) and self._marks[at][0] == step else None

    def _mark(self, step: int, position: StepPosition) -> None:
        at = bisect.bisect_left(self._marks, step, key=lambda mark: mark[0])
        if at == len(self._marks) or self._marks[at][0] != step:
            self._marks.insert(at, (step, position))
        if len(self._marks) > MOST_MARKS:
            del self._marks[1:-1:2]
