# SPDX-License-Identifier: Apache-2.0
"""Megatron's schedules run on one rank after the other, in this process, with the planned communicator; what they post and wait for is noted.

`programs_of` runs the real schedule code of each rank over a toy model whose tensors carry their identity: the value of an activation
or gradient is `tag(microbatch, chunk)` of the chunk on this rank that makes or takes it, so the toy notices at once when the plan and
the schedule mean different microbatches. `play` then lets the noted programs of all ranks run against each other under the rules of a
backend, and finds a deadlock or a message that reaches the wrong receive.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules, utils
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_dyn.pipeline import planned_p2p
from megatron_dyn.pipeline.messages import SENDS, Message
from megatron_dyn.pipeline.schedule import schedule_settings

HIDDEN = 2


@dataclass(frozen=True)
class Case:
    """One schedule."""

    pp: int
    vpp: int
    k: int
    overlap: bool = False
    flush: bool = False
    batched: bool = True
    free_outputs: bool = True
    forward_only: bool = False

    def __str__(self) -> str:
        flags = [name for name in ("overlap", "flush", "batched", "forward_only") if getattr(self, name)]
        return "-".join([f"PP{self.pp}", f"VPP{self.vpp}", f"K{self.k}", *flags])


@dataclass(frozen=True)
class Op:
    """One message of one rank."""

    rank: int
    direction: str
    peer: int
    message: Message
    channel: int
    """Messages of one channel between two ranks are matched in the order of their posting."""
    call: int
    """Ops that are posted together and waited for together."""


class Group:
    """Stands in for a process group."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def tag(message: Message) -> float:
    return float(message.microbatch + 100 * message.chunk)


class _Noting(planned_p2p.PlannedP2PCommunicator):
    """Notes ("post", ops) and ("wait", call) instead of exchanging anything."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.program: list[tuple[str, object]] = []
        self.one_request = False  # for all messages of a call: batched ones of NCCL
        self._calls = 0

    def _buffer(self, message: Message) -> torch.Tensor:
        with torch.no_grad():
            return torch.full(self._shape(message), tag(message)).requires_grad_()

    def _checked(self, direction, message, tensor):
        assert float(tensor.detach().flatten()[0]) == tag(message), f"{direction}: {float(tensor.detach().flatten()[0])} is sent as {message}"
        return super()._checked(direction, message, tensor)

    def _post(self, tensors, messages):
        rank, size = self.pp_group.rank(), self.pp_group.size()
        requests = {}
        for direction, message in messages.items():
            peer = (rank + (1 if direction.endswith("next") else -1)) % size
            sender = rank if direction in SENDS else peer
            channel = sender % 2 if size == 2 and not self.config.batch_p2p_comm else 0
            op = Op(rank, direction, peer, message, channel, self._calls)
            if self.one_request and requests:
                self.program[-1][1].append(op)
                requests[direction] = next(iter(requests.values()))
                continue
            self.program.append(("post", [op]))
            request = planned_p2p.Request(self, [_Work(self.program, self._calls)], [], direction)
            requests[direction] = request
            self._outstanding.append(request)
            self._calls += not self.one_request
        self._calls += self.one_request
        return requests


@dataclass
class _Work:
    program: list
    call: int

    def wait(self) -> None:
        self.program.append(("wait", self.call))


class _Chunk(torch.nn.Module):
    """A model chunk: output and gradient of the input carry its tag; it looks at the tags it gets."""

    def __init__(self, config, number: int, first: bool, last: bool):
        super().__init__()
        self.config, self.number, self.first, self.last = config, number, first, last
        self.model_type = ModelType.encoder_or_decoder
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.input = None

    def set_input_tensor(self, tensors) -> None:
        [self.input] = tensors

    def forward(self, microbatch: int, T: int) -> torch.Tensor:
        message = Message(microbatch, self.number)
        assert (self.input is None) == self.first
        if self.input is not None:
            assert self.input.shape == (T, 1, HIDDEN), f"{message}: input of shape {tuple(self.input.shape)}, T = {T}"
            found = float(self.input.detach()[0, 0, 0])
            assert found == tag(message), f"{message} computes {found}"
        inputs = self.weight.expand(T, 1, HIDDEN) if self.input is None else self.input * self.weight
        output = _Tagged.apply(inputs, tag(message), self.last)
        return output.sum() if self.last else output


class _Tagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, value, last):
        ctx.value, ctx.last = value, last
        return torch.full_like(inputs, value)

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.last or float(gradient.flatten()[0]) == ctx.value, f"{ctx.value}: gradient of {float(gradient.flatten()[0])}"
        return torch.full_like(gradient, ctx.value), None, None


def programs_of(case: Case, monkeypatch, *, rules: str) -> list[list[tuple[str, object]]]:
    """What each rank posts and waits for, in order. NCCL gives one request for a batch, gloo one for each message."""
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(utils, "get_pg_rank", lambda group: group.rank())
    monkeypatch.setattr(utils, "get_pg_size", lambda group: group.size())
    vpp = case.vpp if case.vpp > 1 else None
    settings = schedule_settings(case.pp, vpp, overlap=case.overlap, warmup_flush=case.flush)
    settings |= {"batch_p2p_comm": case.batched, "deallocate_pipeline_outputs": case.free_outputs}
    T = [3 * number + 4 for number in range(case.k)]
    schedule = schedules.get_forward_backward_func(case.pp, vpp)
    found = []
    for rank in range(case.pp):
        config = ModelParallelConfig(pipeline_dtype=torch.float32, **settings)
        config.hidden_size, config.calculate_per_token_loss, config.fine_grained_activation_offloading = HIDDEN, True, False
        chunks = [
            _Chunk(config, number, rank == 0 and number == 0, rank == case.pp - 1 and number == case.vpp - 1) for number in range(case.vpp)
        ]
        groups = ProcessGroupCollection()
        groups.tp = groups.cp = groups.embd = groups.pos_embd = groups.dp_cp = Group(0, 1)
        groups.pp = Group(rank, case.pp)
        communicator = _Noting(groups.pp, config)
        communicator.one_request = case.batched and rules == "nccl"

        def forward_step(iterator, chunk):
            return chunk(*next(iterator)), lambda output: (output, torch.tensor(1, dtype=torch.int), {})

        iterators = [iter(enumerate(T)) for _ in chunks]
        with communicator.step(T, forward_only=case.forward_only):
            schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if vpp else iterators[0],
                model=chunks,
                num_microbatches=case.k,
                seq_length=1,
                micro_batch_size=1,
                forward_only=case.forward_only,
                p2p_communicator=communicator,
                pg_collection=groups,
            )
        found.append(communicator.program)
    return found


class Stuck(AssertionError):
    """No rank can go on; the message says where each stands."""


def play(programs: list[list[tuple[str, object]]], case: Case, *, rules: str) -> int:
    """Run the programs against each other; returns the number of messages.

    Args:
        rules: "gloo": a posted message moves as soon as its counterpart is posted. "nccl": messages between two ranks (batched ones: of
            a rank) are moved one call after the other, and a call is done when all its messages are.

    Raises:
        Stuck: A deadlock.
        AssertionError: A send met the receive of another message.
    """
    at = [0] * len(programs)
    ready: dict[tuple, deque[Op]] = {}
    streams: dict[tuple, deque[tuple[int, int]]] = {}
    left: dict[tuple[int, int], set[str]] = {}
    ops: dict[tuple[int, int, str], Op] = {}
    moved = 0

    def stream(op: Op) -> tuple:
        if rules == "gloo":
            return op.rank, op.call
        return (op.rank,) if case.batched else (op.rank, op.peer, op.channel)

    def activate(key: tuple) -> None:
        rank, call = streams[key][0]
        for direction in left[rank, call]:
            op = ops[rank, call, direction]
            sends = op.direction in SENDS
            link = (rank, op.peer, op.channel) if sends else (op.peer, rank, op.channel)
            ready.setdefault((link, sends), deque()).append(op)

    progress = True
    while progress:
        progress = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                kind, what = program[at[rank]]
                if kind == "wait" and left[rank, what]:
                    break
                if kind == "post":
                    call = (rank, what[0].call)
                    left[call] = dict.fromkeys(op.direction for op in what)
                    for op in what:
                        ops[rank, op.call, op.direction] = op
                    key = stream(what[0])
                    queue = streams.setdefault(key, deque())
                    queue.append(call)
                    if len(queue) == 1:
                        activate(key)
                at[rank] += 1
                progress = True
        for (link, sends), queue in list(ready.items()):
            others = ready.get((link, False)) if sends else None
            while others and queue:
                send, receive = queue.popleft(), others.popleft()
                assert _expected(send, case.pp) == receive.message and send.direction[5:] != receive.direction[5:], f"{send} met {receive}"
                moved, progress = moved + 1, True
                for op in (send, receive):
                    left[op.rank, op.call].pop(op.direction)
        for key, queue in streams.items():
            while queue and not left[queue[0]]:
                queue.popleft()
                progress = True
                if queue:
                    activate(key)
    if any(at[rank] < len(program) for rank, program in enumerate(programs)) or any(queue for queue in streams.values()):
        stand = [f"rank {rank}: {program[at[rank]] if at[rank] < len(program) else 'done'}" for rank, program in enumerate(programs)]
        raise Stuck("deadlock: " + "; ".join(stand))
    return moved


def _expected(send: Op, pp: int) -> Message:
    """Under which chunk the receiver takes what is sent."""
    microbatch, chunk = send.message
    if send.direction == "send_next":
        return Message(microbatch, chunk + (send.rank == pp - 1))
    return Message(microbatch, chunk - (send.rank == 0))
