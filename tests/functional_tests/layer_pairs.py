# SPDX-License-Identifier: Apache-2.0
"""A layer with overlap beside Megatron's own of the same weights, and buffers full of NaN before each of their calls."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_dyn import device, userbuffers
from megatron_dyn.layers.overlap import OverlapColumnParallelLinear, OverlapRowParallelLinear
from megatron_dyn.userbuffers.manager import UserBuffers

HIDDEN, CAPACITY = 8, 24
TOLERANCE = 1e-6  # largest difference / largest value
OVERLAPPED = {"column": OverlapColumnParallelLinear, "row": OverlapRowParallelLinear}
MEGATRON = {"column": ColumnParallelLinear, "row": RowParallelLinear}
KINDS = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}
RING = {"fc1_dgrad": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}, "proj_fprop": {"num_splits": 2}}
PIPELINE = {"fc1_dgrad": {"method": "pipeline", "num_splits": 8}}
RS_DGRAD = dict(tp_comm_overlap_rs_dgrad=True)


def configuration(**changes) -> ModelParallelConfig:
    sizes = dict(tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=True, tp_comm_overlap=True)
    return ModelParallelConfig(**(sizes | dict(use_cpu_initialization=True, params_dtype=torch.float32) | changes))


def start(table: dict | None = None, capacity: int = CAPACITY, **options) -> UserBuffers:
    device.install_cpu_replacements()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())
    options = dict(dtype=torch.float32, backend="reference") | options
    return userbuffers.initialize_ub([capacity, HIDDEN], dist.get_world_size(), ub_cfgs=table, **options)


class Pair:
    """A layer with overlap and Megatron's, of the same weights, run on the same inputs."""

    def __init__(self, name: str, *, seed: int = 0, bias: bool = True, skip_bias_add: bool = False, frozen=(), **flags):
        self.name, self.kind, self.skip_bias_add = name, KINDS[name], skip_bias_add
        tp, self.generator = dist.get_world_size(), torch.Generator().manual_seed(seed)
        column = self.kind == "column"
        sizes = (HIDDEN, 3 * HIDDEN) if column else (3 * HIDDEN, HIDDEN)
        arguments = dict(init_method=torch.nn.init.normal_, bias=bias, skip_bias_add=skip_bias_add, tp_comm_buffer_name=name)
        arguments |= dict(gather_output=False) if column else dict(input_is_parallel=True)
        self.layers = [
            classes[self.kind](*sizes, config=configuration(tp_comm_overlap=overlap, **(flags if overlap else {})), **arguments)
            for classes, overlap in ((OVERLAPPED, True), (MEGATRON, False))
        ]
        for parameter, same in zip(*(layer.parameters() for layer in self.layers), strict=True):
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=self.generator))
                same.copy_(parameter)
        for layer in self.layers:
            for what in frozen:
                if what != "input":
                    getattr(layer, what).requires_grad_(False)
        self.input_needs_grad = "input" not in frozen
        self.rows_in, self.rows_out = (tp, 1) if column else (1, tp)  # T is divided by these
        self.columns_in, self.columns_out = sizes[0] // (1 if column else tp), sizes[1] // (tp if column else 1)

    def forward(self, T: int) -> tuple:
        """(inputs, outputs, gradient of the outputs)."""
        x = torch.randn(T // self.rows_in, 1, self.columns_in, generator=self.generator)
        inputs = [x.clone().requires_grad_(self.input_needs_grad) for _ in self.layers]
        outputs = [layer(own) for layer, own in zip(self.layers, inputs)]
        for _, bias in outputs:
            assert (bias is not None) == self.skip_bias_add
        outputs = [y + bias if self.skip_bias_add else y for y, bias in outputs]
        return inputs, outputs, torch.randn(T // self.rows_out, 1, self.columns_out, generator=self.generator)

    def backward(self, inputs, outputs, gradient) -> None:
        """Compares what the forward gave, then everything the backward gives."""
        check(f"{self.name} output", *outputs)
        for output in outputs:
            output.backward(gradient)
        if self.input_needs_grad:
            check(f"{self.name} input gradient", *(own.grad for own in inputs))
        for (name, parameter), (_, same) in zip(*(layer.named_parameters() for layer in self.layers), strict=True):
            assert (parameter.grad is None) == (same.grad is None) == (not parameter.requires_grad)
            if parameter.requires_grad:
                check(f"{self.name} {name} gradient", parameter.grad, same.grad)
                parameter.grad = same.grad = None


def check(what: str, value: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert value.shape == expected.shape, what
    off = float((value - expected).abs().max() / expected.abs().max())
    assert off <= tolerance, f"{what} is {off:.1e} off Megatron's"  # also where it is NaN


class Poison:
    """Fills every buffer with NaN before every forward and backward, and sees to it that no buffer moves or is made."""

    def __init__(self, manager: UserBuffers) -> None:
        self.backend, self.calls, begin = manager.backend, 0, manager.begin
        self.made, self.addresses = self.backend.allocations, self.where()

        def poisoned_begin(used, rows):
            self.calls += 1
            for communicator in self.backend.communicators:
                communicator.buffer.fill_(float("nan"))
            begin(used, rows)

        manager.begin = poisoned_begin

    def where(self) -> list[int]:
        return [communicator.buffer.data_ptr() for communicator in self.backend.communicators]

    def check(self) -> None:
        assert self.where() == self.addresses
        assert self.backend.allocations == self.made
