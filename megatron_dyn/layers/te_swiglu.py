# SPDX-License-Identifier: Apache-2.0
"""SwiGLU by Transformer Engine's kernels. Importing this module imports Transformer Engine.

Megatron's fused SwiGLU is compiled by torch.compile; finding the compiled code again takes the host about 0.3 ms a call, forward and
backward, as long as the rest of an MLP (docs/performance.md). Here a call is one kernel. The values are the same up to rounding:
both compute in fp32 and keep only the input for the backward pass.

    input [..., 2 f] (gate, then linear part), output [..., f]
"""

import dataclasses

import torch.nn.functional as F
import transformer_engine_torch as tex
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd import Function


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return tex.swiglu(x, None)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tex.dswiglu(gradient, x, None)


class SwiGLUMLP(MLP):
    """Megatron's MLP, without bias, with SwiGLU by one kernel: for `uses_swiglu_kernel` configurations of dense layers."""

    def forward(self, hidden_states: Tensor, per_token_scale: None = None, **kwargs: object) -> tuple[Tensor, None]:
        """[T, 1, hidden] -> [T, 1, hidden], and no bias."""
        intermediate, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(_SwiGLU.apply(intermediate))


def uses_swiglu_kernel(config: TransformerConfig) -> bool:
    """Whether a dense MLP of this configuration is linear, SwiGLU, linear, and nothing else."""
    plain = config.glu_linear_offset == 0.0 and config.activation_func_clamp_value is None and not config.activation_func_fp8_input_store
    return config.gated_linear_unit and config.activation_func is F.silu and not config.add_bias_linear and plain


def with_swiglu_kernel(layer: ModuleSpec) -> ModuleSpec:
    """The same layer with `SwiGLUMLP` in the place of Megatron's MLP."""
    mlp = layer.submodules.mlp
    if mlp.module is not MLP:
        return layer
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mlp=dataclasses.replace(mlp, module=SwiGLUMLP)))
