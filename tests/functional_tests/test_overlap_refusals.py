# SPDX-License-Identifier: Apache-2.0
"""A shape that cannot be is refused on every rank, before anything is sent, and everything stays as it was.

Two gloo ranks go through the same drawn steps. Every call of torch.distributed that moves data is counted: a refused step makes none, so
no rank waits for one that refused, and a step that is taken makes some and gives what it should.
"""

import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from launch import RanksFailed, launch
from layer_pairs import KINDS, OVERLAPPED, configuration, start

from megatron_dyn import userbuffers
from megatron_dyn.userbuffers import reference_exchanges
from megatron_dyn.userbuffers.manager import UserBuffers

HIDDEN, CAPACITY, STEPS = 8, 24, 1200
# Single messages go through the first of them.
MOVES_DATA = ("batch_isend_irecv", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "reduce_scatter",
              "send", "recv", "broadcast", "all_to_all_single", "barrier")  # fmt: skip
RING = {"method": "ring_exchange"}
# A table, and the flags of the layers that go with it.
CASES = {
    "defaults": ({}, {}),
    "rings": (
        {"proj_fprop": RING, "fc2_fprop": {"num_splits": 2}, "qkv_dgrad": RING, "fc1_dgrad": RING},
        dict(tp_comm_overlap_rs_dgrad=True),
    ),
}
ODD_SIZES = (0, -2, True, 8.5, float("nan"), "8", None, 10**12)


class Moved:
    """Counts what moves data, below everything in this package."""

    def __init__(self):
        self.count = 0
        for module, names in ((dist, MOVES_DATA), (reference_exchanges, ("all_gather_single", "reduce_scatter_single"))):
            for name in names:
                setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, call):
        def counted(*arguments, **options):
            self.count += 1
            return call(*arguments, **options)

        return counted


@dataclass
class Step:
    """What every rank does: set a shape by hand, run a layer, or use a communicator that is active for another shape."""

    what: str
    name: str
    shape: object  # [T, hidden] asked for; of a layer, the shape of its input
    fits: bool


def drawn_steps(tp: int, names: list[str], seed: int) -> list[Step]:
    draw, steps = random.Random(seed), []
    for _ in range(STEPS):
        what = draw.choice(("all", "one", "layer", "layer", "exchange"))
        if what in ("all", "one"):
            shape = [draw.choice((draw.randint(-3, 2 * CAPACITY), tp * draw.randint(1, CAPACITY // tp), draw.choice(ODD_SIZES))), HIDDEN]
            shape = draw.choice((shape, shape, shape, shape[:1], [*shape, 1], [shape[0], draw.choice((4, 9, 0, None))], 8, None))
            whole = isinstance(shape, list) and len(shape) == 2 and all(type(size) is int for size in shape)
            fits = whole and 0 < shape[0] <= CAPACITY and shape[0] % tp == 0 and shape[1] == HIDDEN
            steps.append(Step(what, draw.choice(names), shape, fits))
        elif what == "layer":
            name = draw.choice(list(KINDS))
            rows = draw.randint(0, CAPACITY + tp)
            T = rows * tp if KINDS[name] == "column" else rows
            steps.append(Step(what, name, [rows], 0 < T <= CAPACITY and T % tp == 0))
        else:
            steps.append(Step(what, "fc2_fprop", [draw.randint(0, CAPACITY), draw.choice((HIDDEN, HIDDEN, 5))], False))
    return steps


def go_through(rank: int, world: int, case: str, seed: int) -> dict:
    table, flags = CASES[case]
    manager, layers = start(table, CAPACITY), {}
    for name, kind in KINDS.items():
        options = dict(input_is_parallel=True) if kind == "row" else dict(gather_output=False)
        layers[name] = OVERLAPPED[kind](
            HIDDEN, HIDDEN, config=configuration(**flags), init_method=torch.nn.init.ones_, bias=False, skip_bias_add=False,
            tp_comm_buffer_name=name, **options,
        )  # fmt: skip
    moved, counts = Moved(), {"refused": 0, "taken": 0}
    for number, step in enumerate(drawn_steps(world, [name for name, _ in manager.communicators], seed)):
        before, sent = state(manager), moved.count
        try:
            ran(manager, layers, step, world)
            outcome = "taken"
        except userbuffers.ActiveShapeError as refusal:
            assert str(refusal), "a refusal says something"
            outcome = "refused"
        assert (outcome == "taken") == step.fits, f"step {number} {step} was {outcome}"
        counts[outcome] += 1
        if outcome == "refused":
            assert moved.count == sent, f"step {number} {step} was refused after something had been sent"
            assert state(manager) == before, f"step {number} {step} was refused and changed the shape"
        else:
            assert (moved.count > sent) == (step.what == "layer"), f"step {number} {step} made {moved.count - sent} exchanges"
    return counts | {"moved": moved.count, "shape": manager.active_shape}


def ran(manager: UserBuffers, layers: dict, step: Step, tp: int) -> None:
    """Raises ActiveShapeError where the step is refused; checks what the others give."""
    if step.what == "all":
        userbuffers.set_ub_active_shape(step.shape)
        assert {tuple(c.get_buffer_active_shape()) for c in manager.communicators.values()} == {tuple(step.shape)}
    elif step.what == "one":
        userbuffers.get_ub(step.name).set_buffer_active_shape(step.shape)
        assert userbuffers.get_ub(step.name).get_buffer_active_shape() == step.shape
    elif step.what == "layer":
        column = KINDS[step.name] == "column"
        x = torch.ones(step.shape[0], 1, HIDDEN if column else HIDDEN // tp, requires_grad=True)
        y, _ = layers[step.name](x)
        rows = step.shape[0] * tp if column else step.shape[0]
        assert manager.active_shape == [rows, HIDDEN]
        assert y.shape == (rows if column else rows // tp, 1, HIDDEN // tp if column else HIDDEN) and set(y.flatten().tolist()) == {HIDDEN}
        y.sum().backward()
        assert set(x.grad.flatten().tolist()) == {HIDDEN}
    else:
        communicator, (rows, hidden) = userbuffers.get_ub(step.name), step.shape
        rows += [rows, hidden] == [communicator.rows // tp, HIDDEN]  # which would fit
        communicator.gemm_reduce_scatter(torch.ones(communicator.rows, 3), torch.ones(3, HIDDEN), torch.empty(rows, hidden))


def state(manager: UserBuffers) -> tuple:
    """Everything that a refusal has to leave alone."""
    shapes = {key: communicator.get_buffer_active_shape() for key, communicator in manager.communicators.items()}
    own = {key: communicator.own_rows for key, communicator in manager.communicators.items()}
    return shapes, own, manager.active_shape, manager._active, manager.fences, [c.buffer.data_ptr() for c in manager.backend.communicators]


@pytest.mark.parametrize("case", CASES)
def test_every_refusal_is_on_every_rank_before_anything_is_sent_and_leaves_the_old_shape(case):
    found = launch(2, go_through, case, 11)
    assert found[0] == found[1]
    assert min(found[0]["refused"], found[0]["taken"]) > STEPS // 5


def change_before_the_check(patch):
    def begin(self, used, rows):
        self.rows, self._active = rows, [rows, self.capacity[1]]
        self._checked([rows, self.capacity[1]])

    patch.setattr(UserBuffers, "begin", begin)


def checked_after_sending(patch):
    whole = UserBuffers.begin

    def begin(self, used, rows):
        dist.all_reduce(torch.zeros(1))
        whole(self, used, rows)

    patch.setattr(UserBuffers, "begin", begin)


def beyond_the_capacity(patch):
    patch.setattr(UserBuffers, "_checked", lambda self, shape: shape[0])


def operands_unchecked(patch):
    patch.setattr(reference_exchanges.ReferenceCommunicator, "_check", lambda self, what, tensor, rows, columns: None)


MUTANTS = {
    change_before_the_check: "was refused and changed the shape",
    checked_after_sending: "was refused after something had been sent",
    beyond_the_capacity: "was taken",
    operands_unchecked: "size of tensor|was taken",
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(RanksFailed, match=MUTANTS[mutant]):
        launch(2, go_through, "defaults", 11, timeout=30)


def different_arguments(rank, world):
    found = []
    for odd in (dict(shape=[16 + 8 * rank, HIDDEN]), dict(dtype=(torch.float32, torch.bfloat16)[rank]), dict(ub_cfgs=({}, {"proj_fprop": RING})[rank])):
        arguments = dict(shape=[16, HIDDEN], tp_size=world, dtype=torch.float32, backend="reference") | odd
        with pytest.raises(ValueError) as refused:
            userbuffers.initialize_ub(**arguments)
        found.append((str(refused.value), userbuffers.is_ub_initialized()))
    return found


def test_ranks_that_ask_for_different_buffers_are_refused_on_all_of_them_by_name():
    for messages in launch(2, different_arguments):
        assert [left for _, left in messages] == [False] * 3
        for (message, _), says in zip(messages, ("shape: rank 0 [16, 8], rank 1 [24, 8]", "dtype: rank 0 'torch.float32', rank 1", "ub_cfgs: rank 0 [{}]")):
            assert says in message and "on every rank" in message
