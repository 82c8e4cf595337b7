# SPDX-License-Identifier: Apache-2.0
"""What a rank's memory holds, by formula: the one estimate of `plan --recommend`, of the out-of-memory message and of `auto` budgets' checks.

Pure functions of settings, for Transformer Engine's layers as `layers.gpt_block_spec` builds them. A rank is fullest at one of a few
moments; each takes so many bytes whatever T is, and so many a token. e is the size of a value: 2 in bf16, 4 in fp32.

| per parameter of a rank                     | bytes, bf16          | bytes, fp32 |
|---------------------------------------------|----------------------|-------------|
| weight, and its gradient in fp32            | 2 + 4                | 4 + 4       |
| fp32 weight (bf16 only), Adam's two moments | 12 (/ DP)            | 8 (/ DP)    |
| FP8: both layouts of a block's matrices     | 2                    | -           |

(/ DP) with the distributed optimizer, as `compute_weight_and_optimizer_memory` of Megatron-LM's `megatron/training/theoretical_memory_usage.py`.

| kept per token and layer until the backward pass            | bytes                | divided by       |
|-------------------------------------------------------------|----------------------|------------------|
| inputs of both norms, which the linear layers contain       | 2 h e                | TP, only with SP |
| their outputs (FP8: quantized)                              | 2 h e (2 h)          | TP, only with SP |
| dropout masks                                               | 2 h, or 0            | TP, only with SP |
| queries, keys (rotated), values; output of attention        | (2 q + 2 k) e        | TP               |
| ... its softmax statistics                                  | 4 a head             | TP               |
| ... FP8, delayed scaling: the projection's quantized input  | q                    | TP               |
| ... attention recomputed: the projection of q, k and v stays, of which the values are a view | (q + k) e | TP |
| ... --qk-layernorm: inputs of these norms                   | (q + k) e            | TP               |
| MLP before its activation (SwiGLU: twice f)                 | f e                  | TP               |
| MLP behind it (FP8: quantized)                              | f e (f)              | TP               |

With q = k = h, f = 4 h, GELU, dropout and e = 2 this is the 34 h of table 2 in Korthikanti et al. 2022 (arXiv 2205.05198) without its term in the
square of the length, which flash attention does not keep. A layer that is recomputed whole keeps its input alone, h e. Recomputing the
MLP also spares the norm's output before it; recomputing "layernorm" spares nothing, as the norms are part of the linear layers.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_dyn.planning.simulate import rank_order
from megatron_dyn.training.config import ParallelConfig
from megatron_dyn.training.model_config import ModelConfig

if TYPE_CHECKING:
    from megatron_dyn.training.run_config import RunConfig

GIB = 2**30
MARGIN = 0.10
"""Share of the device's memory that is left alone: fragments, buffers of collectives, what the formulas leave out."""
CONTEXT_BYTES = 2 * GIB
"""Of the device's context and of communicators: memory that PyTorch's allocator does not see."""
WORKSPACE_BYTES = 2 * 32 * 2**20
"""Of matrix products on Hopper: PyTorch's and Transformer Engine's cuBLAS workspace, 32 MiB each."""
ROPE_TABLES = 32
"""Tables that Megatron-Core's `RotaryEmbedding.forward` remembers (`lru_cache`), each as long as a microbatch's longest piece."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What decides what a rank holds."""

    model: ModelConfig
    parallel: ParallelConfig
    vocab_size: int
    """Rows of the embedding."""
    bf16: bool
    data_parallel_size: int = 1
    fp8_recipe: str | None = None
    """Where FP8's scales come from; None without FP8."""
    overlap_table: dict | None = None
    """UserBuffers' table of communicators; None without overlap."""
    fused_gradients: bool = True
    """Weight gradients of the blocks are added up inside the matrix products."""
    optimizer: str = "adam"

    @property
    def value(self) -> float:
        """Bytes of a value of the activations."""
        return 2.0 if self.bf16 else 4.0

    @property
    def rows(self) -> int:
        """By which what has the hidden size is divided."""
        return self.parallel.tensor_model_parallel_size if self.parallel.sequence_parallel else 1


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a rank may be fullest."""

    name: str
    fixed_bytes: float
    """Held then, whatever the microbatch."""
    token_bytes: float
    """... and per token of a microbatch, of all that are in flight."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Of one pipeline rank."""

    pipeline_rank: int
    parameters: float
    """On this rank."""
    state_bytes: float
    """Weights, gradients and optimizer."""
    workspace_bytes: float
    """Workspaces, FP8 copies of the weights, and the gradients that stand in for fused ones."""
    layer_bytes: float
    """Kept per token and layer, where the layer is not recomputed."""
    layers_in_flight: float
    """Layers whose activations are kept at once, counted for each microbatch that they are kept of."""
    buffer_bytes: float
    """UserBuffers, per token of the capacity; outside PyTorch's allocator."""
    table_bytes: float
    """One table of RoPE, per token of the piece it was made for."""
    output_bytes: float
    """Logits and their softmax or gradient per token, on the last rank."""
    moments: tuple[Moment, ...]

    def allocated(self, budget: int, *, tables: float = ROPE_TABLES / 2) -> float:
        """Most bytes of PyTorch's allocator when every microbatch in flight has `budget` tokens.

        Args:
            budget: T.
            tables: RoPE tables of `budget` rows; of 32 microbatches whose longest pieces are anything up to the budget, half as many.
        """
        most = max(moment.fixed_bytes + moment.token_bytes * budget for moment in self.moments)
        return self.state_bytes + self.workspace_bytes + tables * self.table_bytes * budget + most

    def total(self, budget: int) -> float:
        """`allocated`, and the UserBuffers of that capacity."""
        return self.allocated(budget) + self.buffer_bytes * budget

    @property
    def fixed_bytes(self) -> float:
        """Held before there is a token."""
        return self.total(0)

    @property
    def token_bytes(self) -> float:
        """What one more token of B takes, where B is large."""
        return max(moment.token_bytes for moment in self.moments) + self._everywhere

    @property
    def _everywhere(self) -> float:
        return self.buffer_bytes + ROPE_TABLES / 2 * self.table_bytes

    def largest(self, room: float) -> int:
        """Most tokens of a microbatch with which the rank stays within `room` bytes; 0 or less: none."""
        left = room - self.state_bytes - self.workspace_bytes
        return int(min((left - moment.fixed_bytes) // (moment.token_bytes + self._everywhere) for moment in self.moments))


def memory_settings(run: "RunConfig", *, vocab_size: int, data_parallel_size: int) -> MemorySettings:
    """Of a run.

    Args:
        vocab_size: rows of the embedding.
    """
    return MemorySettings(
        model=run.model,
        parallel=run.parallel,
        vocab_size=vocab_size,
        bf16=run.training.bf16,
        data_parallel_size=data_parallel_size,
        fp8_recipe=run.fp8.fp8_recipe if run.fp8.fp8 else None,
        overlap_table=run.overlap.table if run.overlap.tp_comm_overlap else None,
        fused_gradients=run.training.gradient_accumulation_fusion,
        optimizer=run.optimizer.optimizer,
    )


def usable_bytes(device_bytes: float) -> float:
    """What a device leaves for a run when the margin and the context are taken off."""
    return device_bytes * (1 - MARGIN) - CONTEXT_BYTES


def rounded_down(budget: int, alignment: int) -> int:
    """A budget that capacity does not exceed: a multiple of the alignment, and of 256 where it is that large; 0 where there is none."""
    unit = math.lcm(alignment, 256)
    return max(budget - budget % (unit if budget >= unit else alignment), 0)


def parameters(model: ModelConfig, vocab_size: int) -> tuple[float, float]:
    """Parameters of (all layers, one embedding), biases left out."""
    norms = 2 * model.hidden_size * (1 if model.normalization == "RMSNorm" else 2)
    return float(model.num_layers * (sum(_matrices(model)) + norms)), float(vocab_size * model.hidden_size)


def state_bytes_per_parameter(settings: MemorySettings) -> float:
    """Weight, gradient and the optimizer's state."""
    moments = 8.0 if settings.optimizer == "adam" else 4.0
    kept, divided = (6.0, 4.0 + moments) if settings.bf16 else (8.0, moments)
    return kept + divided / (settings.data_parallel_size if settings.parallel.use_distributed_optimizer else 1)


def layer_bytes_per_token(settings: MemorySettings) -> float:
    """Kept for the backward pass per token and layer, with selective recomputation if there is any."""
    model, e, tp = settings.model, settings.value, settings.parallel.tensor_model_parallel_size
    h, q, k, f, gate = _widths(model)
    fp8 = settings.fp8_recipe is not None
    quantized = 1.0 if fp8 else e
    recomputed = (model.recompute_modules or ("core_attn",)) if model.recompute_granularity == "selective" else ()
    norms = h * (2 * e + (1 if "mlp" in recomputed else 2) * quantized + (2 if model.hidden_dropout else 0))
    attention = (2 * q + 2 * k) * e + (q if settings.fp8_recipe == "delayed" else 0) + (q + k) * e * model.qk_layernorm
    attention += (q + k) * e if "core_attn" in recomputed else 4 * model.num_attention_heads
    mlp = 0.0 if "mlp" in recomputed else gate * f * e + f * quantized
    return norms / settings.rows + (attention + mlp) / tp


def userbuffer_bytes_per_token(settings: MemorySettings) -> float:
    """Of all communicators, per row of the capacity: each holds [capacity, hidden]; a ring that reduce-scatters has 2 TP - 1 chunks instead of TP."""
    if settings.overlap_table is None:
        return 0.0
    from megatron_dyn.userbuffers.configuration import communicator_specs  # takes torch's import time

    tp, columns = settings.parallel.tensor_model_parallel_size, 0.0
    for spec in communicator_specs(settings.overlap_table, tp, hidden=settings.model.hidden_size).values():
        size = settings.value if spec.is_reduce_scatter or settings.fp8_recipe is None else 1.0
        columns += size * ((2 * tp - 1) / tp if spec.is_reduce_scatter and spec.method == "ring_exchange" else 1.0)
    return columns * settings.model.hidden_size


def most_in_flight(rank: int, *, pipeline_parallel: int, virtual_stages: int) -> int:
    """Most forward passes of a chunk whose backward pass is still to come, on one pipeline rank, with as many microbatches as it takes."""
    order = rank_order(rank, pipeline_parallel=pipeline_parallel, virtual_stages=virtual_stages, num_microbatches=4 * pipeline_parallel)
    here = most = 0
    for task in order:
        here += 1 if task.forward else -1
        most = max(most, here)
    return most


def rank_memory(settings: MemorySettings, rank: int) -> RankMemory:
    """What pipeline rank `rank` holds."""
    model, parallel, e = settings.model, settings.parallel, settings.value
    pp, vp, tp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1, parallel.tensor_model_parallel_size
    first, last = rank == 0, rank == pp - 1
    h, q, k, f, gate = _widths(model)
    layers, embedding = parameters(model, settings.vocab_size)
    tables = first + (last and (pp > 1 or model.untie_embeddings_and_output_weights))
    here = (layers / pp + tables * embedding) / tp
    matrices = sum(_matrices(model)) / tp

    hidden = h * e / settings.rows
    kept = layer_bytes_per_token(settings)
    chunks = most_in_flight(rank, pipeline_parallel=pp, virtual_stages=vp)
    per_chunk = model.num_layers / (pp * vp)
    retained, again = per_chunk * kept, 0.0
    if model.recompute_granularity == "full":
        group = model.recompute_num_layers
        if model.recompute_method == "uniform":
            retained, again = per_chunk / group * hidden, group * kept - hidden
        else:
            retained, again = group * hidden + (per_chunk - group) * kept, kept - hidden
    elif model.recompute_granularity == "selective" and "mlp" in (model.recompute_modules or ()):
        quantized = 1.0 if settings.fp8_recipe else e
        again = h * quantized / settings.rows + (gate * f * e + f * quantized) / tp
    if not last:
        retained += hidden  # a chunk's output: what was sent is kept until its gradient is there
    retained *= chunks

    # In a layer's backward pass, beyond what was kept: the gradient of its output, and that of the activation behind or before it, whichever
    # needs more once what they replace is gone; under SP the gathered gradient of the output as well.
    gradients = max(gate * f * e / tp, f * e / tp + (h * e if parallel.sequence_parallel else 0.0)) + hidden
    largest_matrix = 0.0 if settings.fused_gradients else max(_matrices(model)) * e / tp
    moments = [Moment(name="the backward pass of a layer", fixed_bytes=largest_matrix, token_bytes=retained + again + gradients)]
    output = 0.0
    if last:
        width = settings.vocab_size / tp
        # In fp32 the softmax takes the logits' place. In bf16 it is made beside them, and its gradient in bf16 beside it.
        output = width * (4.0 + e if settings.bf16 else 4.0)
        norm = 2 * hidden + (h * e if parallel.sequence_parallel else 0.0)  # its input and output; the gathered output
        moments.append(Moment(name="the loss", fixed_bytes=0.0, token_bytes=retained + norm + output))
        of_weight = Moment(
            name="the gradient of the output layer's weight",
            fixed_bytes=embedding * e / tp,
            token_bytes=retained + norm + hidden + width * e,
        )
        moments.append(of_weight)
    if first:
        token = retained * (chunks - 1) / chunks + hidden
        moments.append(Moment(name="the gradient of the embedding", fixed_bytes=embedding * e / tp, token_bytes=token))
    stand_ins = matrices * e if settings.fused_gradients else 0.0  # one of each shape, which autograd is given
    rope = 4.0 * int(model.kv_channels * model.rotary_percent) if model.position_embedding_type == "rope" else 0.0
    return RankMemory(
        pipeline_rank=rank,
        parameters=here,
        state_bytes=here * state_bytes_per_parameter(settings),
        workspace_bytes=WORKSPACE_BYTES + stand_ins + (2.0 * matrices * model.num_layers / pp if settings.fp8_recipe else 0.0),
        layer_bytes=kept,
        layers_in_flight=chunks * per_chunk,
        buffer_bytes=userbuffer_bytes_per_token(settings),
        table_bytes=rope,
        output_bytes=output,
        moments=tuple(moments),
    )


def fullest_rank(settings: MemorySettings, *, budget: int = 8192) -> RankMemory:
    """The first or the last pipeline rank, whichever needs more at this budget: the first keeps most microbatches, the last the logits.

    Args:
        budget: tokens of a microbatch at which the two are compared.
    """
    ends = sorted({0, settings.parallel.pipeline_model_parallel_size - 1})
    return max(map(partial(rank_memory, settings), ends), key=lambda memory: memory.total(budget))


def tightest_rank(settings: MemorySettings, room: float) -> RankMemory:
    """The first or the last pipeline rank, whichever lets fewer tokens fit into `room` bytes."""
    ends = sorted({0, settings.parallel.pipeline_model_parallel_size - 1})
    return min(map(partial(rank_memory, settings), ends), key=lambda memory: (memory.largest(room), -memory.fixed_bytes))


def _widths(model: ModelConfig) -> tuple[int, int, int, int, int]:
    """Hidden size, queries, keys, MLP, and how often the MLP's width comes out of its first matrix."""
    return (
        model.hidden_size,
        model.num_attention_heads * model.kv_channels,
        model.num_query_groups * model.kv_channels,
        model.ffn_hidden_size,
        2 if model.swiglu else 1,
    )


def _matrices(model: ModelConfig) -> tuple[int, int, int, int]:
    """Parameters of a layer's four matrices."""
    h, q, k, f, gate = _widths(model)
    return h * (q + 2 * k), q * h, h * gate * f, f * h
