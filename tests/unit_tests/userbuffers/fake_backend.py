# SPDX-License-Identifier: Apache-2.0
"""A backend that moves nothing and writes down what the manager asks of it."""

from megatron_dyn.userbuffers.communicator import Communicator
from megatron_dyn.userbuffers.configuration import communicator_specs

CAPACITY, TP = (64, 8), 2


class FakeBackend:
    name = "fake"

    def __init__(self, *, one_sided: bool = True, fp8: bool = False, capacity=CAPACITY, tp_size: int = TP, local_rows: int = 1):
        self.one_sided = one_sided
        self.calls: list = []
        self.communicators = [
            Communicator(spec, quantized=quantized, capacity=capacity, tp_size=tp_size, local_rows=local_rows if quantized else 1)
            for quantized in ([False, True] if fp8 else [False])
            for spec in communicator_specs(None, tp_size).values()
        ]

    def set_rows(self, rows):
        self.calls.append(("all", rows))

    def set_rows_of(self, communicator, rows):
        self.calls.append((communicator.name, rows))

    def fence(self):
        self.calls.append("fence")

    def close(self):
        self.calls.append("close")
