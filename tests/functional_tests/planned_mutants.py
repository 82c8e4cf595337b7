# SPDX-License-Identifier: Apache-2.0
"""Deliberate breaks of the planned exchange between pipeline stages. Each takes pytest's monkeypatch; forked ranks inherit it."""

from megatron_dyn.pipeline import messages, planned_p2p
from megatron_dyn.pipeline.messages import Message


def last_microbatch(monkeypatch):
    """The shape of what comes next is taken from the last microbatch that was computed."""
    change_shape(monkeypatch, lambda message: Message(max(message.microbatch - 1, 0), message.chunk))


def forward_position_for_backward(monkeypatch):
    """Gradients are taken for those of the microbatch whose forward pass is next."""
    following = planned_p2p.PlannedP2PCommunicator._next
    behind = {"recv_next": "send_next", "send_prev": "recv_prev"}

    def mixed_up(self, direction):
        message = following(self, direction)
        other = behind.get(direction)
        if other is None or not self._planned[other]:
            return message
        return self._planned[other][min(self._reached[other], len(self._planned[other]) - 1)]

    monkeypatch.setattr(planned_p2p.PlannedP2PCommunicator, "_next", mixed_up)


def chunk_ignored(monkeypatch):
    """The microbatches go through one chunk after another instead of in groups."""

    def ungrouped(num_microbatches, chunks, group):
        return [(microbatch, chunk) for chunk in range(chunks) for microbatch in range(num_microbatches)]

    monkeypatch.setattr(messages, "get_schedule_table", ungrouped)


def ends_of_the_model_ignored(monkeypatch):
    """The first rank is taken to receive everything that the last one computes."""
    monkeypatch.setattr(messages, "_up_to", lambda found, end: tuple(found))


def backward_posted_first(monkeypatch):
    """Megatron's order in a batch, on every rank: to and from the previous stage first."""
    monkeypatch.setattr(planned_p2p, "posting_order", lambda rank: ("send_prev", "recv_prev", "send_next", "recv_next"))


def sends_posted_first(monkeypatch):
    """Every rank sends before it receives: on a link that moves one message at a time both wait."""
    monkeypatch.setattr(planned_p2p, "posting_order", lambda rank: ("send_next", "send_prev", "recv_prev", "recv_next"))


def change_shape(monkeypatch, change) -> None:
    shape = planned_p2p.PlannedP2PCommunicator._shape
    monkeypatch.setattr(planned_p2p.PlannedP2PCommunicator, "_shape", lambda self, message: shape(self, change(message)))
