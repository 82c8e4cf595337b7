# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's linear layers, which tell the UserBuffers how many tokens run: from their own input, forward and backward.

column input     [T/tp, 1, hidden]      row input     [T, 1, ffn/tp]
column output    [T, 1, out/tp]         row output    [T/tp, 1, hidden]

T is taken from the input of each call and bound to its backward, never kept for "the microbatch that runs": pipelines interleave
microbatches, recomputation replays an old one, evaluation comes between training steps. Importing this module imports Transformer Engine.
"""

import dataclasses

from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from megatron_dyn import userbuffers
from megatron_dyn.userbuffers.configuration import EXTERNAL

# The GEMM of a communicator's name -> the attributes of a TE module any of which makes it exchange there (TE 2.11 to 2.20).
_FORWARD = {"fprop": ("ub_overlap_ag_fprop", "ub_overlap_rs_fprop")}
_BACKWARD = {
    "dgrad": ("ub_overlap_ag_dgrad", "ub_overlap_rs_dgrad", "ub_bulk_dgrad"),
    # In MXFP8 a row-parallel layer gathers the output gradient a second time, through the "external" communicator.
    "wgrad": ("ub_bulk_wgrad", "ub_overlap_ag_dgrad"),
}


class _SetsActiveShape:
    """Before each forward and each backward: the active shape of what it is about to do.

    Communicators are looked up when they are used, so layers outlive `destroy_ub` and a new `initialize_ub`.
    """

    _known_communicators: tuple | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = x.numel() // x.size(-1)
        if self.parallel_mode == "column":
            rows *= self.tp_size
        fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self._begin(0, fp8, rows)
        out, bias = super().forward(x)
        if out.requires_grad:
            # Runs when the gradient of `out` is complete, on the stream of this layer's backward and right before it.
            out.register_hook(lambda grad: self._begin(1, fp8, rows))
        return out, bias

    def _begin(self, backward: int, fp8: bool, rows: int) -> None:
        manager = userbuffers.current()
        manager.begin(self._communicators(manager, fp8)[backward], rows)

    def _communicators(self, manager: userbuffers.UserBuffers, fp8: bool) -> tuple[tuple, tuple]:
        """What a forward and a backward of this layer exchange through, in bf16 or FP8."""
        known = self._known_communicators
        if known is None or known[0] is not manager or known[1] != fp8:
            used = (self._used(manager, fp8, _FORWARD), self._used(manager, fp8, _BACKWARD))
            known = self._known_communicators = (manager, fp8, used)
        return known[2]

    def _used(self, manager: userbuffers.UserBuffers, fp8: bool, table: dict) -> tuple:
        names = [f"{self.ub_name}_{gemm}" for gemm, flags in table.items() if any(getattr(self, flag, False) for flag in flags)]
        # cuBLASMp makes no external communicators.
        return tuple(manager.get(name, fp8) for name in names if name not in EXTERNAL or (name, fp8) in manager.communicators)


class OverlapTELayerNormColumnParallelLinear(_SetsActiveShape, TELayerNormColumnParallelLinear):
    """Norm and column-parallel linear (qkv, fc1)."""


class OverlapTEColumnParallelLinear(_SetsActiveShape, TEColumnParallelLinear):
    """Column-parallel linear."""


class OverlapTERowParallelLinear(_SetsActiveShape, TERowParallelLinear):
    """Row-parallel linear (proj, fc2)."""


_REPLACEMENTS = {
    TELayerNormColumnParallelLinear: OverlapTELayerNormColumnParallelLinear,
    TEColumnParallelLinear: OverlapTEColumnParallelLinear,
    TERowParallelLinear: OverlapTERowParallelLinear,
}


def with_active_shape(spec: object) -> object:
    """The same specification with every tensor-parallel linear of Transformer Engine replaced by the one above.

    Args:
        spec: a `ModuleSpec`, a dataclass of submodules, a list of specs, or a module class.
    """
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(spec, module=with_active_shape(spec.module), submodules=with_active_shape(spec.submodules))
    if isinstance(spec, list):
        return [with_active_shape(item) for item in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return dataclasses.replace(spec, **{f.name: with_active_shape(getattr(spec, f.name)) for f in dataclasses.fields(spec)})
    return _REPLACEMENTS.get(spec, spec) if isinstance(spec, type) else spec
