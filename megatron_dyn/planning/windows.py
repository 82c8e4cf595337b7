# SPDX-License-Identifier: Apache-2.0
"""A stretch of an epoch: which documents its steps hold, and where they end.

Shapes: w documents of a window, s steps.

| array     | shape | dtype | meaning                                                              |
|-----------|-------|-------|----------------------------------------------------------------------|
| documents | [w]   | int64 | ids in the order in which steps take them                            |
| ends      | [s]   | int64 | places of the epoch where the steps end; the last is the window's end |

Places of an epoch count the documents already taken. With "length-window" a window is a part of the data order: its documents are
sorted by length, cut into steps, and the steps are put into a keyed random order. Otherwise a window is only what was read together.
"""

from dataclasses import dataclass

import numpy as np

from megatron_dyn.corpus.computed_lengths import ComputedLengths
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.order import order_of_runs, ranks_at
from megatron_dyn.planning.survey import Survey, documents_of

SCANNED_TOGETHER = 1 << 16
"""Documents read together when steps are only counted."""
NO_STEPS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Some consecutive steps of an epoch."""

    begin: int
    documents: np.ndarray
    ends: np.ndarray

    def bounds(self, index: int) -> tuple[int, int]:
        """Places where a step begins and ends."""
        return (int(self.ends[index - 1]) if index else self.begin), int(self.ends[index])

    def documents_of_step(self, index: int) -> np.ndarray:
        """Ids of a step, int64 [n]."""
        begin, end = self.bounds(index)
        return self.documents[begin - self.begin : end - self.begin]

    def step_at(self, place: int) -> int | None:
        """Number (in the window) of the step that begins at a place; None when none does."""
        if place == self.begin:
            return 0
        index = int(np.searchsorted(self.ends, place)) + 1
        return index if index < len(self.ends) and int(self.ends[index - 1]) == place else None


class Windows:
    """Reads windows of any epoch, each in time and memory of its own size.

    Args:
        lengths: integer [num_documents], may be a memory map.
        found: their survey.
        config: see PlanConfig.
    """

    def __init__(self, lengths: np.ndarray | ComputedLengths, found: Survey, config: PlanConfig):
        self._lengths = lengths
        self._found = found
        self._config = config
        self.size = found.documents - found.empty
        """Places of an epoch: documents that are not empty."""
        self.sorts = config.document_order == "length-window"
        if config.global_batch_size is not None:
            size = config.global_batch_size
            self._whole = self.size // size * size  # the short last step is as random as the others: it is left out of the sorting
            self._window = -(-config.length_window // size) * size if self.sorts else size

    def begin_of(self, place: int) -> int:
        """With `global_batch_size`: where the window of a place begins. O(1)."""
        return self._whole if place >= self._whole else place // self._window * self._window

    def read(self, epoch: int, begin: int, *, at_least: int = 0) -> Window:
        """The window that begins at a place.

        Args:
            epoch: counts from 0.
            begin: a place where a window (with "length-window") or a step begins.
            at_least: documents to read where a window is only a matter of reading.

        Returns:
            A window of at least one step; without any step where only the short last step is left and `drop_last` drops it.
        """
        if self._config.global_batch_size is not None:
            return self._by_documents(epoch, begin)
        return self._by_tokens_sorted(epoch, begin) if self.sorts else self._by_tokens(epoch, begin, at_least)

    def _documents(self, epoch: int, begin: int, end: int) -> np.ndarray:
        config = self._config
        ranks = ranks_at(begin, end, size=self.size, document_order=config.document_order, seed=config.seed, epoch=epoch)
        return documents_of(ranks, self._lengths, self._found)

    def _by_documents(self, epoch: int, begin: int) -> Window:
        size = self._config.global_batch_size
        end = min(begin + self._window, self._whole) if begin < self._whole else self.size
        if begin == self._whole and self._config.drop_last:
            return Window(begin=begin, documents=NO_STEPS, ends=NO_STEPS)
        documents = self._documents(epoch, begin, end)
        if self.sorts and begin < self._whole:
            documents = documents[np.argsort(self._lengths[documents], kind="stable")]
            order = order_of_runs(len(documents) // size, seed=self._config.seed, epoch=epoch, window=begin)
            documents = documents.reshape(-1, size)[order].reshape(-1)
        return Window(begin=begin, documents=documents, ends=np.minimum(np.arange(begin + size, end + size, size), end))

    def _by_tokens(self, epoch: int, begin: int, at_least: int) -> Window:
        """Steps that end as soon as they hold the target; at least one of them."""
        target = self._config.global_batch_tokens
        documents, total = self._reaching(epoch, begin, max(at_least, self._documents_for(target)))
        ends, reached = [], 0
        while True:
            end = int(np.searchsorted(total, reached + target)) + 1
            if end > len(total):
                break
            reached = int(total[end - 1])
            ends.append(end)
        left = len(total) - (ends[-1] if ends else 0)
        if left and begin + len(documents) == self.size and not self._config.drop_last:
            ends.append(len(total))
        return Window(begin=begin, documents=documents[: ends[-1] if ends else 0], ends=begin + np.asarray(ends, dtype=np.int64))

    def _by_tokens_sorted(self, epoch: int, begin: int) -> Window:
        """`length_window` documents, more where they do not reach the target, cut into as many steps as all reach it."""
        target = self._config.global_batch_tokens
        documents, total = self._reaching(epoch, begin, self._config.length_window)
        needed = max(int(np.searchsorted(total, target)) + 1, self._config.length_window)
        documents, total = documents[:needed], total[:needed]
        if total[-1] < target and self._config.drop_last:
            return Window(begin=begin, documents=NO_STEPS, ends=NO_STEPS)
        documents = documents[np.argsort(self._lengths[documents], kind="stable")]
        ends = even_ends(np.cumsum(self._lengths[documents], dtype=np.int64), target)
        runs = np.split(documents, ends[:-1])
        order = order_of_runs(len(runs), seed=self._config.seed, epoch=epoch, window=begin)
        runs = [runs[number] for number in order.tolist()]
        return Window(begin=begin, documents=np.concatenate(runs), ends=begin + np.cumsum([len(run) for run in runs]))

    def _documents_for(self, tokens: int) -> int:
        mean = self._found.tokens / self.size
        return int(1.25 * tokens / mean) + 16

    def _reaching(self, epoch: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """At least `count` documents from a place on, more until they reach the token target, fewer at the end; and their running sum."""
        parts, sums, end, reached = [], [], begin, 0
        while end < self.size and (end - begin < count or reached < self._config.global_batch_tokens):
            upto = min(end + max(count if not parts else end - begin, 1), self.size)
            parts.append(self._documents(epoch, end, upto))
            sums.append(reached + np.cumsum(self._lengths[parts[-1]], dtype=np.int64))
            reached, end = int(sums[-1][-1]), upto
        return np.concatenate(parts), np.concatenate(sums)


def even_ends(total: np.ndarray, target: int) -> list[int]:
    """Cut sorted documents into as many runs as can all reach the target, none left over, near-equal in tokens.

    Args:
        total: running sum of the lengths, int64 [w].
        target: tokens.

    Returns:
        Where the runs end; one run where all together do not reach the target.
    """
    latest = [len(total)]  # from behind: where a run must end at the latest, so that all after it can reach the target
    while True:
        above = int(total[latest[-1] - 1])
        begin = int(np.searchsorted(total, above - target, side="right"))  # documents before a run that just reaches it
        if begin <= 0 or int(total[begin - 1]) < target:
            break
        latest.append(begin)
    latest.reverse()
    ends, reached = [], 0
    for number, last in enumerate(latest, start=1):
        earliest = int(np.searchsorted(total, reached + target)) + 1
        even = int(np.searchsorted(total, int(total[-1]) * number // len(latest))) + 1
        ends.append(min(last, max(earliest, even)))
        reached = int(total[ends[-1] - 1])
    return ends
