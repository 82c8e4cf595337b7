# SPDX-License-Identifier: Apache-2.0
"""What a rank's memory holds, by formula: an estimate without any device. Pure functions of settings.

| per parameter of a rank                  | bytes, bf16  | bytes, fp32 |
|------------------------------------------|--------------|-------------|
| weight                                   | 2            | 4           |
| gradient (fp32)                          | 4            | 4           |
| Adam: fp32 weight (bf16 only), 2 moments | 12 (/ DP)    | 8 (/ DP)    |

(/ DP) with the distributed optimizer: 18, or 6 + 12 / DP in bf16, as `compute_weight_and_optimizer_memory` of Megatron-LM's
`megatron/training/theoretical_memory_usage.py`.

| kept per token and layer for the backward pass           | bytes (e a value) | divided by      |
|----------------------------------------------------------|-------------------|-----------------|
| inputs and outputs of both norms                         | 4 h e             | TP, only with SP |
| dropout masks                                            | 2 h, or 0         | TP, only with SP |
| queries, keys, values; output of attention               | (2 q + 2 k) e     | TP              |
| MLP: before and after its activation                     | 2 f e (SwiGLU 3 f e) | TP           |

With q = k = h, f = 4 h, GELU, dropout and e = 2 this is the 34 h of table 2 in Korthikanti et al. 2022 (arXiv 2205.05198) without its term
in the square of the length, which flash attention does not keep: 10 h + 24 h / TP, with SP 34 h / TP. A layer that is
recomputed whole keeps its input alone, h e.
"""

from dataclasses import dataclass

from megatron_dyn.planning.simulate import rank_order
from megatron_dyn.training.config import ParallelConfig
from megatron_dyn.training.model_config import ModelConfig

LOGITS_VALUES = 2
"""Values of the vocabulary's width that are in the precision of the model: the logits and their gradient."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Of the fullest pipeline rank."""

    pipeline_rank: int
    parameters: float
    """On this rank."""
    state_bytes: float
    """Weights, gradients and optimizer."""
    layer_bytes: float
    """Kept per token and layer, where the layer is not recomputed."""
    layers_in_flight: float
    """Layers whose activations are kept at once, counted for each microbatch that they are kept of."""
    token_bytes: float
    """Activations of all microbatches in flight, output layer included, per token of B."""
    output_bytes: float
    """Of these: logits and their softmax, on the last rank."""

    def total(self, budget: int) -> float:
        """Bytes when every microbatch in flight has `budget` tokens."""
        return self.state_bytes + self.token_bytes * budget


def parameters(model: ModelConfig, vocab_size: int) -> tuple[float, float]:
    """Parameters of (all layers, one embedding), biases left out."""
    query, key = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    attention = model.hidden_size * (2 * query + 2 * key)
    mlp = (3 if model.swiglu else 2) * model.hidden_size * model.ffn_hidden_size
    norms = 2 * model.hidden_size * (1 if model.normalization == "RMSNorm" else 2)
    return float(model.num_layers * (attention + mlp + norms)), float(vocab_size * model.hidden_size)


def state_bytes_per_parameter(parallel: ParallelConfig, *, bf16: bool, data_parallel_size: int) -> float:
    """Weight, gradient and Adam's state."""
    kept, divided = (6.0, 12.0) if bf16 else (8.0, 8.0)
    return kept + divided / (data_parallel_size if parallel.use_distributed_optimizer else 1)


def layer_bytes_per_token(model: ModelConfig, parallel: ParallelConfig, *, bf16: bool) -> tuple[float, float]:
    """Kept for the backward pass per token and layer: (as it is with selective recomputation, if any; recomputed whole)."""
    value, tp = (2.0 if bf16 else 4.0), parallel.tensor_model_parallel_size
    rows = tp if parallel.sequence_parallel else 1
    recomputed = (model.recompute_modules or ("core_attn",)) if model.recompute_granularity == "selective" else ()
    norm_outputs = 0.0 if "layernorm" in recomputed else 2.0
    whole_rows = model.hidden_size * ((2.0 + norm_outputs) * value + (2.0 if model.hidden_dropout else 0.0))
    query, key = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
    mlp = 0.0 if "mlp" in recomputed else (3 if model.swiglu else 2) * model.ffn_hidden_size * value
    return whole_rows / rows + ((2 * query + 2 * key) * value + mlp) / tp, model.hidden_size * value / rows


def most_in_flight(rank: int, *, pipeline_parallel: int, virtual_stages: int) -> int:
    """Most forward passes of a chunk whose backward pass is still to come, on one pipeline rank, with as many microbatches as it takes."""
    order = rank_order(rank, pipeline_parallel=pipeline_parallel, virtual_stages=virtual_stages, num_microbatches=4 * pipeline_parallel)
    here = most = 0
    for task in order:
        here += 1 if task.forward else -1
        most = max(most, here)
    return most


def fullest_rank(
    model: ModelConfig, parallel: ParallelConfig, *, vocab_size: int, bf16: bool, data_parallel_size: int, budget: int = 8192
) -> RankMemory:
    """The first or the last pipeline rank, whichever needs more at this budget: the first keeps most microbatches, the last the logits.

    Args:
        vocab_size: rows of the embedding.
        budget: tokens of a microbatch at which the two are compared.
    """
    pp, vp, tp = (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size or 1,
        parallel.tensor_model_parallel_size,
    )
    value = 2.0 if bf16 else 4.0
    layers, embedding = parameters(model, vocab_size)
    kept, recomputed = layer_bytes_per_token(model, parallel, bf16=bf16)
    chunk = model.num_layers / (pp * vp)
    found = []
    for rank in sorted({0, pp - 1}):
        chunks = most_in_flight(rank, pipeline_parallel=pp, virtual_stages=vp)
        tables = (rank == 0) + (rank == pp - 1 and (pp > 1 or model.untie_embeddings_and_output_weights))
        here = (layers / pp + tables * embedding) / tp
        in_flight = chunks * chunk
        activations = in_flight * kept
        if model.recompute_granularity == "full":
            group = model.recompute_num_layers
            if model.recompute_method == "uniform":
                activations = in_flight / group * recomputed + group * kept  # inputs of groups, and one group computed again
            else:
                activations = chunks * (group * recomputed + (chunk - group) * kept) + kept
        output = 0.0
        if rank == pp - 1:
            rows = tp if parallel.sequence_parallel else 1
            output = vocab_size / tp * (LOGITS_VALUES * value + 4.0) + 2 * model.hidden_size * value / rows
        found.append(
            RankMemory(
                pipeline_rank=rank,
                parameters=here,
                state_bytes=here * state_bytes_per_parameter(parallel, bf16=bf16, data_parallel_size=data_parallel_size),
                layer_bytes=kept,
                layers_in_flight=in_flight,
                token_bytes=activations + output,
                output_bytes=output,
            )
        )
    return max(found, key=lambda memory: memory.total(budget))
