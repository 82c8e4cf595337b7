# SPDX-License-Identifier: Apache-2.0
"""Which message travels when between the stages of a pipeline: a function of the schedule alone, known before the step starts.

With s = rows of a microbatch on one rank (T, divided by CP and, under sequence parallelism, by TP):

    activation forward, its gradient backward     [s, 1, hidden]

On each link and in each direction messages follow one another in the order of the schedule's table (Megatron-Core's
`get_schedule_table`). The next rank of the last one is the first: what a chunk of the last rank makes is the input of the following
chunk on the first.

    direction    on rank r                   order                        left out
    recv_prev    input of a chunk            forward table                on the first rank: inputs of the first chunk
    send_next    output of a chunk           forward table                on the last rank: outputs of the last chunk
    recv_next    gradient of an output       table, last chunk first      on the last rank: those of the last chunk
    send_prev    gradient of an input        table, last chunk first      on the first rank: those of the first chunk
"""

from functools import lru_cache
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedules import get_schedule_table

SENDS = ("send_next", "send_prev")
RECEIVES = ("recv_prev", "recv_next")


class Message(NamedTuple):
    """What is sent or received: an activation or its gradient."""

    microbatch: int
    """Its place among the microbatches of this data-parallel rank in the step."""
    chunk: int
    """This rank's model chunk that made it (a send) or takes it (a receive)."""


def posting_order(rank: int) -> tuple[str, ...]:
    """The order in which a rank posts the messages of one call.

    Backends match messages of two ranks by the order in which they are posted, not by a name. Where two ranks are each other's next
    and previous (PP = 2, interleaved), two messages of one call go the same way: both ranks post what belongs to the forward pass
    first. Even ranks send first and odd ranks receive first, so that on each link a send meets its receive even where one waits for the
    other (the order of Megatron-Core's `_p2p_ops`).
    """
    return ("send_next", "recv_prev", "send_prev", "recv_next") if rank % 2 == 0 else ("recv_prev", "send_next", "recv_next", "send_prev")


@lru_cache(maxsize=64)
def planned_messages(
    *, rank: int, pipeline_parallel: int, virtual_stages: int, num_microbatches: int, group: int, forward_only: bool
) -> dict[str, tuple[Message, ...]]:
    """The messages of one step on one pipeline rank, for each direction in the order in which the schedule asks for them.

    Args:
        rank: Pipeline rank.
        pipeline_parallel: PP.
        virtual_stages: Model chunks on each rank; 1 without interleaving.
        num_microbatches: K of this step.
        group: Microbatches that go through a chunk one after another (`microbatch_group_size_per_vp_stage`).
        forward_only: No gradients travel.
    """
    table = get_schedule_table(num_microbatches, virtual_stages, group if virtual_stages > 1 else num_microbatches)
    first, last, last_chunk = rank == 0, rank == pipeline_parallel - 1, virtual_stages - 1
    forward = [Message(microbatch, chunk) for microbatch, chunk in table]
    backward = [] if forward_only else [Message(microbatch, last_chunk - chunk) for microbatch, chunk in table]
    return {
        "recv_prev": _following(forward, +1, last_chunk) if first else tuple(forward),
        "send_next": _up_to(forward, last_chunk) if last else tuple(forward),
        "recv_next": _following(backward, -1, 0) if last else tuple(backward),
        "send_prev": _up_to(backward, 0) if first else tuple(backward),
    }


def _up_to(messages: list[Message], end: int) -> tuple[Message, ...]:
    """Without those of the chunk at the end of the model: nobody takes its output."""
    return tuple(message for message in messages if message.chunk != end)


def _following(messages: list[Message], way: int, end: int) -> tuple[Message, ...]:
    """What the rank at the other end of the ring has made, under the chunk that takes it here."""
    return tuple(Message(microbatch, chunk + way) for microbatch, chunk in _up_to(messages, end))
