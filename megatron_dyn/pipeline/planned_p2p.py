# SPDX-License-Identifier: Apache-2.0
"""Point-to-point exchange between pipeline stages with shapes from the plan.

Megatron-Core's communicator asks its neighbours for the shape of every tensor when T varies: a message of three integers, a wait, a
device synchronisation and a copy to the host for each send and receive. Here every rank holds the same plan, so the shape of the next
message in each direction is known (`messages.py`): only activations and gradients travel, and nothing waits for the device.

    activations and their gradients    [s, 1, hidden]    s = T / CP, under sequence parallelism T / (CP TP)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_dyn import device
from megatron_dyn.pipeline.messages import RECEIVES, SENDS, Message, planned_messages, posting_order
from megatron_dyn.pipeline.schedule import check_microbatches

_WORDS = {
    "recv_prev": "forward activation from the previous stage",
    "send_next": "forward activation to the next stage",
    "recv_next": "gradient from the next stage",
    "send_prev": "gradient to the previous stage",
}


class PlannedMessageError(RuntimeError):
    """What the schedule sends or asks for is not what the plan says comes next."""


class Request:
    """One call's messages in flight. Holds what is sent until it has left, although the schedule may free its own tensor before.

    Args:
        communicator: Whose request it is.
        works: From torch.distributed.
        tensors: What is sent or received.
        what: For messages: which microbatches.
    """

    def __init__(self, communicator: "PlannedP2PCommunicator", works: list, tensors: list[torch.Tensor], what: str):
        self._communicator, self._works, self._tensors, self._what = communicator, works, tensors, what

    def wait(self) -> None:
        """Wait until the messages have arrived or left (on CUDA: let the current stream wait). A second call does nothing.

        Raises:
            RuntimeError: The backend failed, such as by the loss of a neighbour; names the messages.
        """
        if not self._works:
            return
        with self._communicator.waiting_for(self._what):
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{self._what}: {error}") from error
        self._works, self._tensors = [], []
        self._communicator.done(self)


class PlannedP2PCommunicator(P2PCommunicator):
    """Megatron's `p2p_communicator` for a step whose microbatches are known. Use it inside `step`.

    Args:
        pp_group: Ranks of the pipeline.
        config: The model's configuration, as the schedule has it: sizes, dtype, and whether messages are batched or overlapped.
        measure_waits: Keep the time in which this stage waited for its neighbours (see `waited_seconds`).

    Raises:
        ValueError: Overlapped and batched messages at once, which Megatron's schedules do not have.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig, *, measure_waits: bool = False):
        super().__init__(pp_group, config)
        if config.overlap_p2p_comm and config.batch_p2p_comm:
            raise ValueError("overlapped messages between stages cannot be batched: leave overlap_p2p_comm or batch_p2p_comm out")
        if config.use_ring_exchange_p2p:
            raise ValueError("use_ring_exchange_p2p needs a special build of torch: leave it out")
        self.waiting: str | None = None
        """What this rank waits for at the moment, for whoever watches it from outside."""
        self._order = posting_order(pp_group.rank())
        # Two ranks that are each other's next and previous: each way has a communicator of its own, so that no way waits for the other.
        # Megatron-Core takes the group of all ranks for one of them, too.
        self._groups = {0: pp_group, 1: dist.group.WORLD if pp_group.size() == 2 and not config.batch_p2p_comm else pp_group}
        self._rows: list[int] | None = None
        self._planned: dict[str, tuple[Message, ...]] = {}
        self._reached = dict.fromkeys(_WORDS, 0)
        self._outstanding: list[Request] = []
        self._leaving: dict[str, Request] = {}
        self._measure_waits = measure_waits
        self._waits: list[tuple[object, object]] = []

    @contextmanager
    def step(self, T: Sequence[int], *, forward_only: bool) -> Iterator[None]:
        """Inside, Megatron's schedule runs the microbatches of one step.

        Args:
            T: Of each of this data-parallel rank's microbatches, in running order: the same on all ranks of the pipeline.
            forward_only: As the schedule is called.

        Raises:
            ValueError: The schedule does not take this number of microbatches, or a T cannot be divided over the ranks that share it.
            PlannedMessageError: The schedule ended and some planned messages were neither sent nor received.
        """
        config, stages = self.config, self.virtual_pipeline_model_parallel_size
        check_microbatches(len(T), self.pp_group.size(), stages)
        parts = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        for microbatch, length in enumerate(T):
            if length % parts:
                raise ValueError(f"microbatch {microbatch} has T = {length}, which cannot be divided over the {parts} ranks that share its rows")
        self._rows = [length // parts for length in T]
        self._planned = planned_messages(
            rank=self.pp_group.rank(),
            pipeline_parallel=self.pp_group.size(),
            virtual_stages=stages or 1,
            num_microbatches=len(T),
            group=config.microbatch_group_size_per_vp_stage,
            forward_only=forward_only,
        )
        self._reached = dict.fromkeys(_WORDS, 0)
        self._outstanding, self._leaving, self._waits = [], {}, []
        try:
            yield
            self._check_complete()
            for request in list(self._outstanding):  # the schedule does not wait for its last sends
                request.wait()
        finally:
            self._rows, self._outstanding, self._leaving, self.waiting = None, [], {}, None

    def waited_seconds(self) -> float:
        """Seconds of the last step in which this stage waited for its neighbours. On CUDA the device must have finished the step."""
        return sum(device.seconds_between(start, end) for start, end in self._waits)

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Inside, this stage waits for others: told in `waiting`, and counted if waits are measured."""
        self.waiting = what
        start = device.time_mark() if self._measure_waits else None
        yield
        if self._measure_waits:
            self._waits.append((start, device.time_mark()))
        self.waiting = None

    def wait_for_all_stages(self) -> None:
        """Meet the other stages (a collective over the pipeline's ranks), so that the wait for the last of them is measured."""
        with self.waiting_for("the other stages, at the end of the step"):
            dist.all_reduce(torch.zeros(1, device=device.compute_device()), group=self.pp_group)

    def done(self, request: Request) -> None:
        """A request has been waited for."""
        self._outstanding = [other for other in self._outstanding if other is not request]

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: object,  # the schedule's, of a constant T: not used
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Request] | None]:
        """What all of Megatron's methods come down to; returns (received from the previous, from the next stage, requests to wait for).

        Raises:
            PlannedMessageError: A tensor to be sent has another shape or dtype than planned, or nothing is planned in that direction.
        """
        given = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
        asked = {"recv_prev": recv_prev, "recv_next": recv_next}
        tensors: dict[str, torch.Tensor] = {}
        messages: dict[str, Message] = {}
        for direction in self._order:
            if asked.get(direction) or given.get(direction) is not None:
                messages[direction] = message = self._next(direction)
                tensors[direction] = self._buffer(message) if direction in RECEIVES else self._checked(direction, message, given[direction])
        received = {direction: tensors.get(direction) for direction in RECEIVES}
        requests = self._post(tensors, messages)
        if wait_on_reqs:
            self._wait(requests)
            requests = None
        return received["recv_prev"], received["recv_next"], requests

    def _wait(self, requests: dict[str, Request]) -> None:
        """Wait for what is received. A send keeps its tensor, so this stage goes on while it leaves; it waits for the send before."""
        for direction in RECEIVES:
            if direction in requests:
                requests[direction].wait()
        for direction in SENDS:
            if direction in requests:
                if (before := self._leaving.get(direction)) is not None:
                    before.wait()
                self._leaving[direction] = requests[direction]

    def _next(self, direction: str) -> Message:
        if self._rows is None:
            raise PlannedMessageError(f"a {_WORDS[direction]} outside of a step: no plan says what it is; run the schedule inside `step`")
        planned, position = self._planned[direction], self._reached[direction]
        if position == len(planned):
            raise PlannedMessageError(
                f"the schedule asks for one more {_WORDS[direction]} after the {len(planned)} that the plan holds: its neighbour would wait "
                "for ever. The schedule and the plan are of different steps or versions; this is a defect, please report it"
            )
        self._reached[direction] = position + 1
        return planned[position]

    def _shape(self, message: Message) -> tuple[int, int, int]:
        return self._rows[message.microbatch], 1, self.config.hidden_size

    def _buffer(self, message: Message) -> torch.Tensor:
        return torch.empty(
            self._shape(message), requires_grad=True, device=device.compute_device(), dtype=self.config.pipeline_dtype
        )

    def _checked(self, direction: str, message: Message, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to send, apart from the schedule's own: that one may be freed while this is on its way."""
        shape, dtype = self._shape(message), self.config.pipeline_dtype
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise PlannedMessageError(
                f"the {_WORDS[direction]} of {_named(message)} has shape {tuple(tensor.shape)} and {tensor.dtype}, planned are {shape} and "
                f"{dtype}: the neighbour waits for the planned one and would hang or read another microbatch's rows. T must come "
                "from the plan alone; this is a defect, please report it"
            )
        return tensor.detach().contiguous()

    def _post(self, tensors: dict[str, torch.Tensor], messages: dict[str, Message]) -> dict[str, Request]:
        """Hand the messages of one call to the backend, in the order of `posting_order`."""
        peers = {"recv_prev": self.prev_rank, "send_prev": self.prev_rank, "recv_next": self.next_rank, "send_next": self.next_rank}
        if not tensors:
            return {}
        if self.config.batch_p2p_comm:
            ops = [
                dist.P2POp(dist.isend if direction in SENDS else dist.irecv, tensor, peers[direction], self.pp_group)
                for direction, tensor in tensors.items()
            ]
            works = dist.batch_isend_irecv(ops)
            if len(works) != len(ops):  # NCCL: one for all of them
                what = " and ".join(f"{_WORDS[direction]} ({_named(message)})" for direction, message in messages.items())
                request = Request(self, works, list(tensors.values()), what)
                self._outstanding.append(request)
                return dict.fromkeys(tensors, request)
            return self._requests(tensors, messages, works)
        works = []
        for direction, tensor in tensors.items():
            exchange = dist.isend if direction in SENDS else dist.irecv
            # A message belongs to the communicator of the rank that sends it.
            sender = (self.pp_group.rank() + (direction in RECEIVES)) % 2
            works.append(exchange(tensor, peers[direction], group=self._groups[sender]))
        return self._requests(tensors, messages, works)

    def _requests(self, tensors: dict[str, torch.Tensor], messages: dict[str, Message], works: list) -> dict[str, Request]:
        requests = {
            direction: Request(self, [work], [tensor], f"{_WORDS[direction]} ({_named(messages[direction])})")
            for (direction, tensor), work in zip(tensors.items(), works, strict=True)
        }
        self._outstanding += requests.values()
        return requests

    def _check_complete(self) -> None:
        left = {d: planned[self._reached[d] :] for d, planned in self._planned.items() if self._reached[d] < len(planned)}
        if left:
            told = "; ".join(f"{len(messages)} x {_WORDS[direction]}, first {_named(messages[0])}" for direction, messages in left.items())
            raise PlannedMessageError(f"the schedule ended before all planned messages had travelled ({told}): a neighbour waits for them for ever")


def _named(message: Message) -> str:
    return f"microbatch {message.microbatch}, chunk {message.chunk}"
