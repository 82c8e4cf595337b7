# SPDX-License-Identifier: Apache-2.0
"""What a piece of a document costs: the measure by which microbatches and ranks are balanced."""

import math
from dataclasses import dataclass

import numpy as np

MOST = 1e200
"""Of a coefficient, and 1 / MOST the least that both may be: sums over any step, squared lengths among them, stay finite and above 0."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a piece of L tokens: `linear * L + quadratic * attended(L)`, in any unit (only ratios matter to balancing).

    attended(L) is L^2, and under a sliding window of w tokens 2 w L - w^2 for L > w: what of the L x L scores lies in the band.

    The default is the causal transformer of hidden size 4096 without grouped queries: per layer and forward pass
    24 h^2 L operations in matrix products and 2 h L^2 in causal attention, so the ratio is 1 / (12 h).
    """

    linear: float = 1.0
    """Cost per token: matrix products, norms, the vocabulary projection."""

    quadratic: float = 1.0 / 49152.0
    """Cost per token and token attended to: attention scores and their product with the values."""

    window: int | None = None
    """Tokens that a token attends to, itself among them, at most (sliding window); None: all before it."""

    def __post_init__(self):
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ValueError(f"CostModel.window must be a whole number of at least 1, or None, got {self.window!r}")
        for name in ("linear", "quadratic"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(
                    f"CostModel.{name} must be a finite number of at least 0, got {value!r}: a longer document would look "
                    "cheaper than a shorter one and balancing would be meaningless"
                )
            object.__setattr__(self, name, float(value))
        if self.linear + self.quadratic == 0:
            raise ValueError("CostModel(linear=0, quadratic=0) makes every microbatch cost nothing: give one coefficient")
        if not 1 / MOST <= max(self.linear, self.quadratic) <= MOST:
            raise ValueError(
                f"CostModel(linear={self.linear:g}, quadratic={self.quadratic:g}) cannot be summed in floating point: only ratios matter, so give "
                "both in another unit, the larger one near 1"
            )

    def of(self, length):
        """Cost of one piece of `length` tokens (an int, or an integer array, element by element)."""
        return self.of_sums(length, self.attended(length))

    def attended(self, length):
        """What attention of a piece grows with: an integer where `length` is one (see the class), element by element."""
        if self.window is None:
            return length * length
        beyond = np.maximum(length - self.window, 0)
        return length * length - beyond * beyond

    def of_sums(self, tokens, attended):
        """Cost of a microbatch from the sums of its pieces' lengths and of their `attended` (both exact integers)."""
        return self.linear * tokens + self.quadratic * attended

    @classmethod
    def from_model(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int | None = None,
        kv_channels: int | None = None,
        gated_linear_unit: bool = False,
        vocab_size: int = 0,
        window: int | None = None,
    ) -> "CostModel":
        """Forward and backward floating-point operations of a GPT, per document.

        With q = heads * kv_channels, k = query groups * kv_channels, h hidden, f ffn hidden, V vocabulary, N layers and
        m = 3 for gated linear units, else 2:

            linear    = 3 * (N * (2 h (q + 2 k) + 2 q h + 2 m h f) + 2 h V)
            quadratic = 3 * N * 2 q

        2 operations for each multiply-add; 3 because the backward pass costs twice the forward; causal attention does
        half of the 4 q L^2 of two full L x L products. The same count as `num_floating_point_operations` in
        Megatron-LM's `megatron/training/training.py`, taken per document instead of per fixed sequence length.

        Args:
            num_query_groups: key/value heads (GQA); the number of heads when None.
            kv_channels: width of one head; `hidden_size // num_attention_heads` when None.
            vocab_size: padded vocabulary; 0 leaves the output projection out.
            window: of sliding-window attention in every layer, in tokens.
        """
        kv_channels = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        num_query_groups = num_attention_heads if num_query_groups is None else num_query_groups
        query = num_attention_heads * kv_channels
        key = num_query_groups * kv_channels
        attention = 2 * hidden_size * (query + 2 * key) + 2 * query * hidden_size
        mlp = 2 * hidden_size * ffn_hidden_size * (3 if gated_linear_unit else 2)
        return cls(
            linear=3 * (num_layers * (attention + mlp) + 2 * hidden_size * vocab_size),
            quadratic=3 * num_layers * 2 * query,
            window=window,
        )
