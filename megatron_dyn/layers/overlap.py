# SPDX-License-Identifier: Apache-2.0
"""Megatron's local tensor-parallel linear layers with the exchange beside the GEMM, on the reference backend of `userbuffers`.

                forward                                     backward
column   x      [T / tp, 1, hidden], gathered               dx   [T / tp, 1, hidden], reduce-scattered
         y      [T, 1, out / tp]                            dy   [T, 1, out / tp]
row      x      [T, 1, in / tp]                             dx   [T, 1, in / tp]
         y      [T / tp, 1, hidden], reduce-scattered       dy   [T / tp, 1, hidden], gathered

Constructor, parameters, names and checkpoints are those of Megatron's classes; chosen through ModuleSpecs. Flags mean what
they mean to Transformer Engine's layers in Megatron (`megatron/core/extensions/transformer_engine.py` and TE's `linear.py`):

flag of the configuration                       column                                            row
tp_comm_overlap_ag                              gather x round a ring, beside the forward GEMM    the same with dy, beside the dx GEMM
tp_comm_overlap_rs                                                                                reduce-scatter y beside its GEMM
tp_comm_overlap_rs_dgrad                        reduce-scatter dx beside its GEMM
tp_comm_bulk_dgrad (without the one above)      gather x beside the dx GEMM
tp_comm_bulk_wgrad (without the one above)      reduce-scatter dx beside the weight gradient's
tp_comm_overlap_disable_qkv, _fc1               that layer: neither the first nor the third

What does not overlap is a plain collective. **Each forward and each backward sets the active shape first, from its own
input**: 1F1B runs other microbatches in between, recomputation replays old ones, and several models may share the buffers.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_dyn import userbuffers
from megatron_dyn.userbuffers.configuration import OverlapConfigError
from megatron_dyn.userbuffers.manager import UserBuffers
from megatron_dyn.userbuffers.reference_exchanges import Pending, ReferenceCommunicator, start_all_gather, start_reduce_scatter

BUFFER_NAMES = ("qkv", "proj", "fc1", "fc2")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What of one layer overlaps.

    Attributes:
        name: of the layer's communicators, one of `BUFFER_NAMES`.
        group: the tensor-parallel group.
        tp_size: its ranks.
        fprop: the exchange of the forward, beside the forward GEMM.
        dgrad: the exchange of the backward (column: of dx, row: of dy), beside the GEMM of dx.
        bulk_dgrad, bulk_wgrad: of a column layer, see the table of the module.
    """

    name: str
    group: ProcessGroup
    tp_size: int
    fprop: bool
    dgrad: bool
    bulk_dgrad: bool = False
    bulk_wgrad: bool = False


class _Layer(Protocol):
    config: ModelParallelConfig
    sequence_parallel: bool
    is_expert: bool
    tp_group: ProcessGroup


def column_overlap(layer: _Layer, name: str | None) -> Overlap | None:
    """What overlaps in a column-parallel layer; None where Megatron's own code runs."""
    if not _overlaps(layer, name):
        return None
    config = layer.config
    kept = not ((name == "qkv" and config.tp_comm_overlap_disable_qkv) or (name == "fc1" and config.tp_comm_overlap_disable_fc1))
    dgrad = config.tp_comm_overlap_rs_dgrad and kept
    return Overlap(
        name=name,
        group=layer.tp_group,
        tp_size=layer.tp_group.size(),
        fprop=config.tp_comm_overlap_ag and kept,
        dgrad=dgrad,
        bulk_dgrad=config.tp_comm_bulk_dgrad and not dgrad,
        bulk_wgrad=config.tp_comm_bulk_wgrad and not dgrad,
    )


def row_overlap(layer: _Layer, name: str | None) -> Overlap | None:
    """What overlaps in a row-parallel layer; None where Megatron's own code runs."""
    if not _overlaps(layer, name):
        return None
    config = layer.config
    return Overlap(
        name=name, group=layer.tp_group, tp_size=layer.tp_group.size(), fprop=config.tp_comm_overlap_rs, dgrad=config.tp_comm_overlap_ag
    )


def _overlaps(layer: _Layer, name: str | None) -> bool:
    config = layer.config
    if not config.tp_comm_overlap or not layer.sequence_parallel or layer.is_expert or name not in BUFFER_NAMES:
        return False
    if layer.tp_group.size() == 1:
        return False
    refused = {
        "gradient_accumulation_fusion": "Apex's kernel makes and adds up the weight gradient, and these layers make it with PyTorch's",
        "cpu_offloading": "the activations that the layers with overlap keep are not handed to the offloading",
        "enable_autocast": "the buffers hold one dtype, and autocast would bring another",
    }
    for setting, why in refused.items():
        if getattr(config, setting, False):
            raise ValueError(f"{setting} does not work with tp_comm_overlap in the local layer {name!r}: {why}. Turn one of the two off.")
    return True


class OverlapColumnParallelLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` that gathers its input, and reduce-scatters the input's gradient, beside GEMMs.

    Without ``config.tp_comm_overlap``, without sequence parallelism, in experts and under names that have no communicator it is
    Megatron's layer.

    Args:
        As Megatron's; ``tp_comm_buffer_name`` chooses the communicators.
    Raises:
        ValueError: at construction, for settings that do not go with overlap.
    """

    def __init__(self, *args: Any, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.overlap = column_overlap(self, tp_comm_buffer_name)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, bias: Tensor | None = None, **kwargs: Any) -> Tensor:
        if self.overlap is None:
            return super()._forward_impl(input, weight, *args, bias=bias, **kwargs)
        return _Column.apply(input, weight, bias, self.overlap)


class OverlapRowParallelLinear(RowParallelLinear):
    """`RowParallelLinear` that reduce-scatters its output, and gathers the output's gradient, beside GEMMs.

    Megatron's layer where `OverlapColumnParallelLinear` would be.

    Args:
        As Megatron's; ``tp_comm_buffer_name`` chooses the communicators.
    Raises:
        ValueError: at construction, for settings that do not go with overlap.
    """

    def __init__(self, *args: Any, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)
        self.overlap = row_overlap(self, tp_comm_buffer_name)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, 1, in / tp] -> [T / tp, 1, out], and the bias where it is left to the caller."""
        if self.overlap is None:
            return super().forward(input_)
        bias = None if self.skip_bias_add else self.bias
        return _Row.apply(input_, self.weight, bias, self.overlap), self.bias if self.skip_bias_add else None


class _Column(torch.autograd.Function):
    """Unlike Megatron's, it gives the bias its gradient beside a frozen weight too."""

    @staticmethod
    def forward(ctx, x, weight, bias, overlap):  # type: ignore[override]
        _check_dgrad(overlap)
        communicators = _begin(overlap, rows := _rows(x) * overlap.tp_size, fprop=overlap.fprop)
        ctx.overlap, ctx.rows, ctx.has_bias = overlap, rows, bias is not None
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        y = x.new_empty(x.size(0) * overlap.tp_size, *x.shape[1:-1], weight.size(0))
        if overlap.fprop:
            communicators["fprop"].all_gather_gemm(_flat(x), weight.t(), _flat(y))
        else:
            torch.mm(_plain_all_gather(x, rows, overlap).wait(), weight.t(), out=_flat(y))
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        overlap, dy_TN = ctx.overlap, _flat(dy)
        communicators = _begin(
            overlap,
            ctx.rows,
            dgrad=(needs_dx and overlap.dgrad) or (needs_dw and overlap.bulk_dgrad),
            wgrad=needs_dx and overlap.bulk_wgrad,
        )
        if needs_dw:
            if overlap.bulk_dgrad:
                gathering = communicators["dgrad"].start_all_gather(_flat(x))
            else:
                gathering = _plain_all_gather(x, ctx.rows, overlap)
        dx = reducing = None
        if needs_dx:
            dx = dy.new_empty(dy.size(0) // overlap.tp_size, *dy.shape[1:-1], weight.size(1))
            if overlap.dgrad:
                communicators["dgrad"].gemm_reduce_scatter(dy_TN, weight, _flat(dx))
            elif overlap.bulk_wgrad:
                torch.mm(dy_TN, weight, out=communicators["wgrad"].matrix)
                reducing = communicators["wgrad"].start_reduce_scatter(_flat(dx))
            else:
                reducing = start_reduce_scatter(dy_TN.mm(weight), _flat(dx), overlap.group)
        # Gathered beside the GEMM above; reduced beside the one below.
        dw = dy_TN.t().mm(gathering.wait()) if needs_dw else None
        db = dy_TN.sum(0) if needs_db else None
        if reducing is not None:
            reducing.wait()
        return dx, dw, db, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, overlap):  # type: ignore[override]
        communicators = _begin(overlap, rows := _rows(x), fprop=overlap.fprop)
        ctx.overlap, ctx.rows = overlap, rows
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        y = x.new_empty(x.size(0) // overlap.tp_size, *x.shape[1:-1], weight.size(0))
        if overlap.fprop:
            communicators["fprop"].gemm_reduce_scatter(_flat(x), weight.t(), _flat(y))
        else:
            start_reduce_scatter(_flat(x).mm(weight.t()), _flat(y), overlap.group).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        overlap, dx = ctx.overlap, None
        communicators = _begin(overlap, ctx.rows, dgrad=overlap.dgrad and needs_dx)
        if needs_dx:
            dx = dy.new_empty(dy.size(0) * overlap.tp_size, *dy.shape[1:-1], weight.size(1))
        if needs_dx and overlap.dgrad:
            gathered_dy = communicators["dgrad"].all_gather_gemm(_flat(dy), weight, _flat(dx))
        elif needs_dx or needs_dw:
            gathered_dy = _plain_all_gather(dy, ctx.rows, overlap).wait()
            if needs_dx:
                torch.mm(gathered_dy, weight, out=_flat(dx))
        dw = gathered_dy.t().mm(_flat(x)) if needs_dw else None
        # The bias is added after the reduce-scatter, so its gradient is of the local rows; Megatron sums it over the ranks later.
        db = _flat(dy).sum(0) if needs_db else None
        return dx, dw, db, None


def _begin(overlap: Overlap, rows: int, **used: bool) -> dict[str, ReferenceCommunicator]:
    """Set the active shape for this call, and find its communicators, of those that are initialised now.

    Args:
        rows: T, of the input that the call has at hand.
        used: which of "fprop", "dgrad" and "wgrad" it uses.
    """
    manager = _manager()
    communicators = {what: manager.get(f"{overlap.name}_{what}") for what, is_used in used.items() if is_used}
    manager.begin(communicators.values(), rows)
    return communicators


def _manager() -> UserBuffers:
    manager = userbuffers.current()
    if manager.backend.name != "reference":
        raise ValueError(
            f"the buffers belong to the {manager.backend.name!r} backend, but local layers exchange through the 'reference' one: use "
            "Transformer Engine's layers, or initialize_ub(..., backend='reference')."
        )
    return manager


def _check_dgrad(overlap: Overlap) -> None:
    """Flags of the layer and table of the communicators must agree on what is exchanged beside the input gradient's GEMM."""
    if not (overlap.dgrad or overlap.bulk_dgrad or overlap.bulk_wgrad):
        return
    spec = _manager().get(f"{overlap.name}_dgrad").spec
    if spec.is_reduce_scatter != overlap.dgrad:
        flag = "set" if overlap.dgrad else f"not set for {overlap.name!r}"
        raise OverlapConfigError(
            f"tp_comm_overlap_rs_dgrad is {flag}, but the table of communicators makes {spec.name} {spec.method!r}: its buffer would serve "
            f"another exchange than the layer does. With the flag, make {spec.name} 'pipeline' or 'ring_exchange'; without, 'bulk'."
        )


def _plain_all_gather(local: Tensor, rows: int, overlap: Overlap) -> Pending:
    return start_all_gather(_flat(local), local.new_empty(rows, local.size(-1)), overlap.group)


def _flat(tensor: Tensor) -> Tensor:
    """[rows, columns]: sequence and batch are one."""
    return tensor.contiguous().view(-1, tensor.size(-1))


def _rows(tensor: Tensor) -> int:
    return tensor.numel() // tensor.size(-1)
