# SPDX-License-Identifier: Apache-2.0
"""How long a step takes on a pipeline, from the costs of its microbatches: the real schedules, bubbles included.

Shapes: N rows (data-parallel ranks, of one step or of several), K microbatches a row.

| array                   | shape  | dtype   | unit                                            |
|-------------------------|--------|---------|-------------------------------------------------|
| cost                    | [N, K] | float64 | any: forward and backward of the whole model    |
| times                   | [N]    | float64 | the cost's unit, on one pipeline stage of PP    |

Stages are equal: each of the PP x VPP chunks takes an equal share of a microbatch's cost, a third of it in the forward and two
thirds in the backward pass. A chunk starts when its rank is free and its input has arrived; ranks take their chunks in the order
of Megatron-Core's schedules. What is left out: the embedding and the output projection on the stages that have them, the
reduction of gradients and the optimizer, and anything that makes a kernel of a short microbatch less efficient.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

FORWARD_SHARE = 1.0 / 3.0
"""Of a microbatch's cost: the backward pass has two matrix products for each one of the forward pass."""


class Task(NamedTuple):
    """The forward or backward pass of one microbatch through one chunk of the model."""

    rank: int
    """Pipeline rank that computes it."""
    forward: bool
    microbatch: int
    chunk: int
    """Which of the rank's VPP chunks."""


class Span(NamedTuple):
    """A task and when it ran."""

    task: Task
    start: float
    end: float


def rank_order(rank: int, *, pipeline_parallel: int, virtual_stages: int, num_microbatches: int) -> list[Task]:
    """The tasks of one pipeline rank in the order in which it runs them.

    1F1B: PP - 1 - rank forward passes, then forward and backward in turn, then the backward passes that are left. Interleaved:
    microbatches go in groups of PP, each group through the first chunk, then the second, and so on (the backward passes through
    the last chunk first), and 2 (PP - 1 - rank) + (VPP - 1) PP forward passes come ahead. As `get_pp_rank_microbatches` and
    `get_schedule_table` of megatron-core 0.16 (`core/pipeline_parallel/schedules.py`).

    Raises:
        ValueError: interleaved, and the microbatches are no multiple of PP.
    """
    if virtual_stages > 1 and num_microbatches % pipeline_parallel:
        raise ValueError(
            f"{num_microbatches} microbatches on {pipeline_parallel} interleaved pipeline ranks: the schedule walks through them in "
            f"groups of PP; make them a multiple of {pipeline_parallel}"
        )
    group = pipeline_parallel * virtual_stages
    total = num_microbatches * virtual_stages
    ahead = pipeline_parallel - 1 - rank
    if virtual_stages > 1:
        ahead = 2 * ahead + (virtual_stages - 1) * pipeline_parallel
    ahead = min(ahead, total)

    def task(index: int, forward: bool) -> Task:
        if virtual_stages == 1:
            return Task(rank, forward, index, 0)
        chunk = index % group // pipeline_parallel
        microbatch = index // group * pipeline_parallel + index % pipeline_parallel
        return Task(rank, forward, microbatch, chunk if forward else virtual_stages - 1 - chunk)

    tasks = [task(index, True) for index in range(ahead)]
    for index in range(total - ahead):
        tasks += [task(ahead + index, True), task(index, False)]
    return tasks + [task(index, False) for index in range(total - ahead, total)]


def needs(task: Task, *, pipeline_parallel: int, virtual_stages: int) -> Task | None:
    """The task whose output a task waits for; None for the first forward pass of a microbatch."""
    rank, forward, microbatch, chunk = task
    last_rank, last_chunk = pipeline_parallel - 1, virtual_stages - 1
    if forward:
        if rank > 0:
            return Task(rank - 1, True, microbatch, chunk)
        return Task(last_rank, True, microbatch, chunk - 1) if chunk > 0 else None
    if rank < last_rank:
        return Task(rank + 1, False, microbatch, chunk)
    if chunk < last_chunk:
        return Task(0, False, microbatch, chunk + 1)
    return Task(rank, True, microbatch, chunk)


@lru_cache(maxsize=64)
def _schedule(pipeline_parallel: int, virtual_stages: int, num_microbatches: int) -> tuple[tuple[Task, int | None], ...]:
    """All tasks, each after what it waits for, with the position of the task that it needs the output of.

    Raises:
        RuntimeError: the orders of the ranks wait for each other in a circle.
    """
    shape = dict(pipeline_parallel=pipeline_parallel, virtual_stages=virtual_stages)
    orders = [rank_order(rank, num_microbatches=num_microbatches, **shape) for rank in range(pipeline_parallel)]
    position: dict[Task, int] = {}
    listed: list[tuple[Task, int | None]] = []
    reached = [0] * pipeline_parallel
    while len(listed) < sum(map(len, orders)):
        before = len(listed)
        for rank, order in enumerate(orders):
            while reached[rank] < len(order):
                task = order[reached[rank]]
                needed = needs(task, **shape)
                if needed is not None and needed not in position:
                    break
                position[task] = len(listed)
                listed.append((task, None if needed is None else position[needed]))
                reached[rank] += 1
        if len(listed) == before:
            raise RuntimeError(f"PP {pipeline_parallel}, VPP {virtual_stages}, {num_microbatches} microbatches: the schedule deadlocks")
    return tuple(listed)


def _run(cost: np.ndarray, pipeline_parallel: int, virtual_stages: int, transfer: float) -> tuple[list[Task], np.ndarray, np.ndarray]:
    """Tasks, and their starts and ends, float64 [tasks, N]."""
    listed = _schedule(pipeline_parallel, virtual_stages, cost.shape[1])
    share = cost.T / (pipeline_parallel * virtual_stages)
    duration = {True: share * FORWARD_SHARE, False: share * (1.0 - FORWARD_SHARE)}
    free = np.zeros((pipeline_parallel, cost.shape[0]))
    start, end = np.empty((len(listed), cost.shape[0])), np.empty((len(listed), cost.shape[0]))
    for position, (task, needed) in enumerate(listed):
        begins = start[position]
        begins[:] = free[task.rank]
        if needed is not None:
            way = transfer if listed[needed][0].rank != task.rank else 0.0
            np.maximum(begins, end[needed] + way, out=begins)
        np.add(begins, duration[task.forward][task.microbatch], out=end[position])
        free[task.rank] = end[position]
    return [task for task, _ in listed], start, end


def _checked(cost: np.ndarray, pipeline_parallel: int, virtual_stages: int) -> np.ndarray:
    cost = np.asarray(cost, dtype=np.float64)
    if cost.ndim != 2 or cost.shape[1] == 0:
        raise ValueError(f"costs of shape {cost.shape}: expected [rows, microbatches], with at least one microbatch")
    if pipeline_parallel < 1 or virtual_stages < 1 or (virtual_stages > 1 and pipeline_parallel == 1):
        raise ValueError(
            f"PP {pipeline_parallel} with {virtual_stages} virtual stages has no schedule: interleaving needs PP of at least 2"
        )
    return cost


def rank_times(cost: np.ndarray, *, pipeline_parallel: int = 1, virtual_stages: int = 1, transfer: float = 0.0) -> np.ndarray:
    """When the pipeline of each data-parallel rank has finished its microbatches, float64 [N].

    Args:
        cost: forward and backward cost of each microbatch, in running order, [N, K].
        pipeline_parallel: PP.
        virtual_stages: VPP; 1 is 1F1B.
        transfer: from the end of a task to the start of the one on another rank that needs its output, in the cost's unit.

    Raises:
        ValueError: the shape has no schedule.
    """
    cost = _checked(cost, pipeline_parallel, virtual_stages)
    if pipeline_parallel == 1:
        return cost.sum(axis=1)
    return _run(cost, pipeline_parallel, virtual_stages, transfer)[2].max(axis=0)


def step_time(cost: np.ndarray, **pipeline: float) -> float:
    """Time of a step: its slowest data-parallel rank decides. Arguments as `rank_times`, all rows of one step."""
    return float(rank_times(cost, **pipeline).max())


def timeline(cost: np.ndarray, *, pipeline_parallel: int = 1, virtual_stages: int = 1, transfer: float = 0.0) -> list[Span]:
    """What the pipeline of one data-parallel rank does when, for a picture.

    Args:
        cost: of its microbatches in running order, [K].
    """
    cost = _checked(np.asarray(cost, dtype=np.float64)[None, :], pipeline_parallel, virtual_stages)
    tasks, start, end = _run(cost, pipeline_parallel, virtual_stages, transfer)
    return [Span(task, float(a), float(b)) for task, a, b in zip(tasks, start[:, 0], end[:, 0])]
