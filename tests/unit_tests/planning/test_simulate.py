# SPDX-License-Identifier: Apache-2.0
"""The simulated pipeline: against closed forms, against an event queue, and by what no schedule can beat."""

import heapq
import itertools

import numpy as np
import pytest

from megatron_dyn.planning import simulate
from megatron_dyn.planning.simulate import Task, rank_order, rank_times, step_time, timeline

SHAPES = [(1, 1, 5), (2, 1, 1), (2, 1, 4), (4, 1, 2), (4, 1, 9), (8, 1, 3), (2, 2, 4), (4, 2, 4), (4, 3, 8), (8, 4, 16), (3, 2, 6)]


def event_queue(costs, pp, vpp, transfer=0.0):
    """Time of a step, by a queue of events over the model's chunks in a row: written without the simulator's recurrence."""
    K, chunks = len(costs), pp * vpp
    queues = [list(rank_order(rank, pipeline_parallel=pp, virtual_stages=vpp, num_microbatches=K)) for rank in range(pp)]
    busy, arrived, events, number, now = [False] * pp, set(), [], itertools.count(), 0.0
    arrived.update((True, m, 0) for m in range(K))  # (forward, microbatch, position of the chunk among all)
    while True:
        for rank, queue in enumerate(queues):
            if not busy[rank] and queue:
                _, forward, m, chunk = queue[0]
                if (forward, m, chunk * pp + rank) in arrived:
                    queue.pop(0)
                    busy[rank] = True
                    length = costs[m] / chunks * (1 / 3 if forward else 2 / 3)
                    heapq.heappush(events, (now + length, next(number), "done", rank, (forward, m, chunk * pp + rank)))
        if not events:
            assert not any(queues), "a rank waits for ever"
            return now
        now, _, kind, rank, (forward, m, place) = heapq.heappop(events)
        if kind == "arrives":
            arrived.add((forward, m, place))
            continue
        busy[rank] = False
        if forward and place == chunks - 1:
            arrived.add((False, m, place))
        elif forward or place > 0:
            following = place + 1 if forward else place - 1
            heapq.heappush(events, (now + transfer, next(number), "arrives", None, (forward, m, following)))


@pytest.mark.parametrize("pp,vpp,K", SHAPES)
def test_equal_costs_take_what_the_closed_form_says(pp, vpp, K):
    """(m + (p - 1) / v) (f + b), with f + b the cost of a microbatch on one rank (Narayanan et al. 2021, arXiv 2104.04473)."""
    found = rank_times(np.full((2, K), 6.0), pipeline_parallel=pp, virtual_stages=vpp)
    assert found == pytest.approx((K + (pp - 1) / vpp) * 6.0 / pp)


@pytest.mark.parametrize("pp,vpp,K", SHAPES)
@pytest.mark.parametrize("transfer", [0.0, 0.07])
def test_unequal_costs_take_what_an_event_queue_says(pp, vpp, K, transfer):
    costs = np.random.default_rng(pp * 100 + K).lognormal(0.0, 0.8, size=(3, K))
    found = rank_times(costs, pipeline_parallel=pp, virtual_stages=vpp, transfer=transfer)
    assert found == pytest.approx([event_queue(row, pp, vpp, transfer) for row in costs])
    assert step_time(costs, pipeline_parallel=pp, virtual_stages=vpp, transfer=transfer) == found.max()


def test_the_order_of_a_rank_written_out():
    def short(tasks):
        return " ".join(f"{'F' if task.forward else 'B'}{task.microbatch}.{task.chunk}" for task in tasks)

    assert short(rank_order(0, pipeline_parallel=2, virtual_stages=1, num_microbatches=3)) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert short(rank_order(1, pipeline_parallel=2, virtual_stages=1, num_microbatches=2)) == "F0.0 B0.0 F1.0 B1.0"
    assert (
        short(rank_order(1, pipeline_parallel=2, virtual_stages=2, num_microbatches=4))
        == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )


@pytest.mark.parametrize("pp,vpp,K", [shape for shape in SHAPES if shape[0] > 1])
def test_a_timeline_overlaps_nowhere_and_waits_for_every_input(pp, vpp, K):
    spans = timeline(np.random.default_rng(K).uniform(1, 3, K), pipeline_parallel=pp, virtual_stages=vpp)
    assert len({span.task for span in spans}) == len(spans) == 2 * pp * vpp * K
    end = {span.task: span.end for span in spans}
    for span in spans:
        needed = simulate.needs(span.task, pipeline_parallel=pp, virtual_stages=vpp)
        assert needed is None or end[needed] <= span.start + 1e-12
    for rank in range(pp):
        mine = sorted((span for span in spans if span.task.rank == rank), key=lambda span: span.start)
        assert all(a.end <= b.start + 1e-12 for a, b in zip(mine, mine[1:]))


def test_megatron_core_agrees_about_the_warmup_and_the_table():
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(8, 3, 4)
    forward = [
        (task.microbatch, task.chunk) for task in rank_order(2, pipeline_parallel=4, virtual_stages=3, num_microbatches=8) if task.forward
    ]
    backward = [
        (task.microbatch, 2 - task.chunk)
        for task in rank_order(2, pipeline_parallel=4, virtual_stages=3, num_microbatches=8)
        if not task.forward
    ]
    assert forward == backward == table


def test_mutant_a_rank_that_runs_all_forward_passes_first_is_noticed(monkeypatch):
    """Such a schedule takes as long for equal costs (GPipe): only unequal ones tell it apart."""
    costs = np.random.default_rng(3).lognormal(0, 0.8, size=(1, 9))
    right = rank_times(costs, pipeline_parallel=4)

    def all_forward_first(rank, *, pipeline_parallel, virtual_stages, num_microbatches):
        return [Task(rank, forward, m, 0) for forward in (True, False) for m in range(num_microbatches)]

    monkeypatch.setattr(simulate, "rank_order", all_forward_first)
    simulate._schedule.cache_clear()
    try:
        assert rank_times(costs, pipeline_parallel=4) != pytest.approx(right)
    finally:
        simulate._schedule.cache_clear()


def test_refusals():
    with pytest.raises(ValueError, match="multiple of 4"):
        rank_times(np.ones((1, 6)), pipeline_parallel=4, virtual_stages=2)
    with pytest.raises(ValueError, match="PP of at least 2"):
        rank_times(np.ones((1, 6)), pipeline_parallel=1, virtual_stages=2)
    with pytest.raises(ValueError, match="at least one microbatch"):
        rank_times(np.ones((3, 0)))
