# SPDX-License-Identifier: Apache-2.0
"""Norms for Megatron's local spec that are right under sequence parallelism.

x          [T/tp, 1, hidden] (or [T, 1, heads/tp, channels] for the norms of queries and keys)  fp32 or bf16
weight     [hidden]   the same on each tensor-parallel rank; its gradient there is only a part of the sum
bias       [hidden]   (LayerNorm)
output     as x; statistics and scaling in fp32

Under sequence parallelism a rank sees T/tp of the rows, so the gradients of weight and bias have to be summed over the
tensor-parallel ranks. Megatron does that in `finalize_model_grads` for every parameter with `.sequence_parallel = True`;
its own local norm refuses sequence parallelism, and a norm without the attribute trains wrongly in silence.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dyn import device


class _SequenceParallelNorm(torch.nn.Module):
    """What both norms share: parameters, their attributes, and fp32 arithmetic.

    Args:
        config: read for ``params_dtype``, ``sequence_parallel``, ``layernorm_zero_centered_gamma`` and where to allocate.
        hidden_size: length of the last dimension.
        eps: added to the variance (mean square) before the root.
        persist_layer_norm, zero_centered_gamma, normalization: accepted because Megatron's builders pass them; the
            configuration decides.
    """

    has_bias: bool

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.normalized_shape = (hidden_size,)
        place = {"dtype": config.params_dtype}
        if not config.use_cpu_initialization:
            place["device"] = device.compute_device()
        start = torch.zeros if self.zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, **place))
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(hidden_size, **place)) if self.has_bias else None)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def gamma(self) -> Tensor:
        """The factor that is applied, in fp32: weight, or 1 + weight when it is stored zero-centred."""
        weight = self.weight.float()
        return weight + 1.0 if self.zero_centered_gamma else weight

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class SequenceParallelRMSNorm(_SequenceParallelNorm):
    """x / sqrt(mean(x^2) + eps) * gamma."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.gamma(), self.eps).to(x.dtype)


class SequenceParallelLayerNorm(_SequenceParallelNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * gamma + bias."""

    has_bias = True

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.gamma(), self.bias.float(), self.eps).to(x.dtype)
