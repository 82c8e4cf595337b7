# SPDX-License-Identifier: Apache-2.0
"""A GPT from configuration: `ModelConfig` -> Megatron's `TransformerConfig` -> one `GPTModel` per virtual pipeline stage.

tokens, position_ids, labels   [1, T] int64
hidden states                  [T/tp, 1, hidden] under sequence parallelism, else [T, 1, hidden]
loss of each token             [1, T] fp32, from the last stage when labels are given

Initial weights are drawn per parameter, from the seed and the parameter's name in the whole model, and then divided over
the tensor-parallel ranks. So a model starts from the same weights for any TP, PP and number of virtual stages, with local and
with Transformer Engine layers (on the same kind of device). Only the rows that pad the vocabulary depend on TP, through their
number.
"""

import hashlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn import device
from megatron_dyn.layers import gpt_block_spec
from megatron_dyn.pipeline.schedule import schedule_settings
from megatron_dyn.planning import CostModel

_RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")


@dataclass(kw_only=True)
class ModelConfig:
    """Shape of a GPT. Defaults are those of Llama-like models; names are Megatron-LM's."""

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the hidden states."""

    num_attention_heads: int
    """Attention heads; a multiple of the tensor-parallel size."""

    ffn_hidden_size: int | None = None
    """Width of the MLP (none: 4 x hidden size, or with --swiglu 8/3 of it, down to a multiple of 64, as Megatron-LM)."""

    num_query_groups: int | None = None
    """Key/value heads of grouped-query attention (none: one for each attention head; 1: multi-query attention)."""

    kv_channels: int | None = None
    """Width of one attention head (none: hidden size / attention heads)."""

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Norm before attention, before the MLP and at the end."""

    norm_epsilon: float = 1e-5
    """Added to the variance in every norm."""

    swiglu: bool = True
    """SwiGLU in the MLP instead of GELU."""

    add_bias_linear: bool = False
    """Biases in all linear layers of a block."""

    add_qkv_bias: bool = False
    """Biases in the query/key/value projection only."""

    qk_layernorm: bool = False
    """Normalize queries and keys, each head for itself."""

    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    """How a token knows its position in its document."""

    rotary_base: int = 10000
    """Base of RoPE's wavelengths."""

    rotary_percent: float = 1.0
    """Share of a head's channels that RoPE rotates."""

    max_position_embeddings: int = 4096
    """Rows of the learned position table; no document piece may be longer then. Without meaning for RoPE."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output projection its own weights instead of the word embedding's."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    hidden_dropout: float = 0.0
    """Dropout of hidden states."""

    attention_dropout: float = 0.0
    """Dropout of attention probabilities. On a CPU it takes memory quadratic in a piece's length."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights; projections back into the hidden states get it divided by sqrt(2 x layers)."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or only --recompute-modules."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Which layers full recomputation takes: groups of --recompute-num-layers over all of them, or only the first that many."""

    recompute_num_layers: int | None = None
    """Layers in a group (uniform), or layers recomputed on each pipeline stage (block)."""

    recompute_modules: list[str] | None = None
    """What selective recomputation takes, of core_attn, layernorm and mlp (none: core_attn)."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "make_vocab_size_divisible_by"):
            _require(getattr(self, name) >= 1, f"{_flag(name)} is {getattr(self, name)}: it must be at least 1")
        heads = self.num_attention_heads
        if self.kv_channels is None:
            _require(
                self.hidden_size % heads == 0,
                f"hidden size {self.hidden_size} cannot be divided over {heads} attention heads: change one, or give --kv-channels",
            )
            self.kv_channels = self.hidden_size // heads
        if self.num_query_groups is None:
            self.num_query_groups = heads
        if self.ffn_hidden_size is None:
            exact = 4 * self.hidden_size * 2 / 3 / 64
            self.ffn_hidden_size = max(1, int(exact)) * 64 if self.swiglu else 4 * self.hidden_size
        _require(self.kv_channels >= 1, f"--kv-channels is {self.kv_channels}: it must be at least 1")
        _require(self.ffn_hidden_size >= 1, f"--ffn-hidden-size is {self.ffn_hidden_size}: it must be at least 1")
        _require(
            self.num_query_groups >= 1 and heads % self.num_query_groups == 0,
            f"{heads} attention heads cannot share {self.num_query_groups} query groups: --num-query-groups must divide the heads",
        )
        _one_of("normalization", self.normalization, ("RMSNorm", "LayerNorm"))
        _one_of("position_embedding_type", self.position_embedding_type, ("rope", "learned_absolute", "none"))
        _require(self.norm_epsilon > 0, f"--norm-epsilon is {self.norm_epsilon}: a norm of zeros would divide by 0; use e.g. 1e-5")
        _require(self.init_method_std > 0, f"--init-method-std is {self.init_method_std}: it must be above 0")
        for name in ("hidden_dropout", "attention_dropout"):
            _require(0 <= getattr(self, name) < 1, f"{_flag(name)} is {getattr(self, name)}: a share of at least 0 and below 1")
        if self.position_embedding_type == "rope":
            _require(0 < self.rotary_percent <= 1, f"--rotary-percent is {self.rotary_percent}: a share above 0 and at most 1")
            _require(self.rotary_base > 1, f"--rotary-base is {self.rotary_base}: it must be above 1")
            rotated = int(self.kv_channels * self.rotary_percent)
            _require(
                rotated >= 2 and rotated % 2 == 0,
                f"RoPE rotates pairs of channels, but --kv-channels {self.kv_channels} x --rotary-percent {self.rotary_percent} "
                f"gives {rotated} of them: make it even",
            )
        self._check_recompute()

    def _check_recompute(self) -> None:
        full, selective = self.recompute_granularity == "full", self.recompute_granularity == "selective"
        _one_of("recompute_granularity", self.recompute_granularity, (None, "full", "selective"))
        _one_of("recompute_method", self.recompute_method, (None, "uniform", "block"))
        _require(
            full == (self.recompute_method is not None) and full == (self.recompute_num_layers is not None),
            "--recompute-method and --recompute-num-layers belong to --recompute-granularity full, which needs both",
        )
        _require(
            self.recompute_num_layers is None or self.recompute_num_layers >= 1,
            f"--recompute-num-layers is {self.recompute_num_layers}: it must be at least 1",
        )
        _require(self.recompute_modules is None or selective, "--recompute-modules belongs to --recompute-granularity selective")
        for name in self.recompute_modules or ():
            _one_of("recompute_modules", name, _RECOMPUTE_MODULES)

    def cost_model(self, vocab_size: int = 0) -> CostModel:
        """Operations of this model per document, for the planner's balance.

        Args:
            vocab_size: padded vocabulary; 0 leaves the output projection out.
        """
        return CostModel.from_model(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            kv_channels=self.kv_channels,
            gated_linear_unit=self.swiglu,
            vocab_size=vocab_size,
        )


class ParallelSizes(Protocol):
    """What `transformer_config` reads of the parallel configuration."""

    tensor_model_parallel_size: int
    sequence_parallel: bool
    pipeline_model_parallel_size: int

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None: ...


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _one_of(name: str, value: object, allowed: tuple) -> None:
    _require(value in allowed, f"{_flag(name)} {value!r} is not known: use one of {', '.join(str(a) for a in allowed if a is not None)}")


def check_model_parallel(model: ModelConfig, parallel: ParallelSizes) -> None:
    """Refuse a model that cannot be divided as asked.

    Raises:
        ValueError: naming what does not divide.
    """
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    vp = parallel.virtual_pipeline_model_parallel_size or 1
    heads, groups = model.num_attention_heads, model.num_query_groups
    _require(heads % tp == 0, f"{heads} attention heads cannot be divided over TP {tp}: --num-attention-heads must be a multiple of it")
    _require(
        groups % tp == 0 or tp % groups == 0,
        f"{groups} query groups and TP {tp}: one must be a multiple of the other; change --num-query-groups",
    )
    _require(
        model.ffn_hidden_size % tp == 0,
        f"the MLP's width {model.ffn_hidden_size} cannot be divided over TP {tp}: change --ffn-hidden-size",
    )
    _require(not parallel.sequence_parallel or tp > 1, "sequence parallelism divides rows over tensor-parallel ranks: it needs TP above 1")
    stages = f"PP {pp}" + (f" x {vp} virtual stages" if vp > 1 else "")
    _require(
        model.num_layers % (pp * vp) == 0,
        f"{model.num_layers} layers cannot be divided over {stages}: --num-layers must be a multiple of {pp * vp}",
    )
    if model.recompute_num_layers is not None:
        here = model.num_layers // (pp * vp)
        _require(
            model.recompute_num_layers <= here and (model.recompute_method == "block" or here % model.recompute_num_layers == 0),
            f"--recompute-num-layers {model.recompute_num_layers} does not fit the {here} layers of a pipeline stage: with the "
            "uniform method it must divide them, with block it may be at most that many",
        )


def transformer_config(
    model: ModelConfig, parallel: ParallelSizes, *, precision: Literal["fp32", "bf16"]
) -> TransformerConfig:
    """Megatron's configuration: the model's shape, the parallel sizes, and settings that are right for a varying T.

    Args:
        precision: "fp32" or "bf16" (bf16 parameters and activations; the optimizer keeps fp32 masters).
    Raises:
        ValueError: fp16, or a model that cannot be divided as asked.
    """
    _require(precision != "fp16", "fp16 needs loss scaling, which is not supported: use bf16 or fp32")
    _one_of("precision", precision, ("fp32", "bf16"))
    check_model_parallel(model, parallel)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    cuda = device.compute_device().type == "cuda"
    return TransformerConfig(
        # shape
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.swiglu,
        activation_func=F.silu if model.swiglu else F.gelu,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        init_method_std=model.init_method_std,
        # recomputation
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=model.recompute_modules,
        # precision
        bf16=precision == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        # parallelism
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        **schedule_settings(parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size),
        # Without it variable lengths are refused, for dense models too.
        moe_token_dispatcher_type="alltoall",
        # Exact loss: gradients are divided by the number of loss tokens of the whole step, not per microbatch.
        calculate_per_token_loss=True,
        # The fused loss casts gradients to bf16 (1.9e-3 off).
        cross_entropy_loss_fusion=False,
        # Kernels that exist on CUDA only. The fused accumulation is an NVIDIA Apex extension, used where it is installed.
        use_cpu_initialization=not cuda,
        bias_activation_fusion=cuda and (model.swiglu or model.add_bias_linear),
        bias_dropout_fusion=cuda,
        apply_rope_fusion=cuda and importlib.util.find_spec("transformer_engine") is not None,
        gradient_accumulation_fusion=cuda and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of ``divisible_by * tensor_parallel``.

    The rule is `vocab_size_with_padding` of Megatron-LM. Padding an already padded size with the same numbers changes nothing.
    """
    _require(vocab_size >= 1, f"a vocabulary of {vocab_size} tokens: it must hold at least 1")
    multiple = divisible_by * tensor_parallel
    return math.ceil(vocab_size / multiple) * multiple


def build_model(
    config: TransformerConfig,
    model: ModelConfig,
    *,
    vocab_size: int,
    backend: Literal["local", "te"],
    seed: int = 1234,
) -> list[GPTModel]:
    """Build this rank's part of the model, on the compute device and with its initial weights.

    Needs Megatron's parallel state (and, on CUDA, its RNG tracker).

    Args:
        config: from `transformer_config`; each chunk keeps this very object as its ``.config``.
        vocab_size: the tokenizer's; padded here (see `padded_vocab_size`).
        backend: the layers, see `gpt_block_spec`.
        seed: of the initial weights.
    Returns:
        one `GPTModel` for each virtual pipeline stage of this rank.
    Raises:
        ValueError: parallel state and configuration disagree.
    """
    _check_parallel_state(config)
    padded = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, config.tensor_model_parallel_size)
    virtual = config.virtual_pipeline_model_parallel_size
    # Weights are drawn afterwards by name, so the draw during construction, whose order depends on PP, is left out.
    drawn_later = dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), torch.nn.init.zeros_)
    own = {name: getattr(config, name) for name in drawn_later}
    vars(config).update(drawn_later)
    try:
        chunks = [
            _build_chunk(config, model, padded, backend, vp_stage=None if virtual is None else stage)
            for stage in range(virtual or 1)
        ]
    finally:
        vars(config).update(own)
    for chunk in chunks:
        _place(chunk, config)
        initialize_weights(chunk, config, vocab_size=vocab_size, seed=seed)
    return chunks


def _check_parallel_state(config: TransformerConfig) -> None:
    made = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    }
    for name, size in made.items():
        _require(
            getattr(config, name) == size,
            f"the configuration has {name} {getattr(config, name)} but Megatron's process groups were made with {size}: the model "
            "would be cut in the wrong places. Pass the same sizes to initialize_model_parallel.",
        )


def _build_chunk(
    config: TransformerConfig, model: ModelConfig, padded_vocab: int, backend: Literal["local", "te"], *, vp_stage: int | None
) -> GPTModel:
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=gpt_block_spec(config, backend=backend, vp_stage=vp_stage),
        vocab_size=padded_vocab,
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        vp_stage=vp_stage,
    )
    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk


def _place(chunk: GPTModel, config: TransformerConfig) -> None:
    """Megatron makes the learned positions on the CPU in fp32, whatever the configuration says."""
    for parameter in chunk.parameters():
        parameter.data = parameter.data.to(device=device.compute_device(), dtype=config.params_dtype)


@torch.no_grad()
def initialize_weights(chunk: GPTModel, config: TransformerConfig, *, vocab_size: int, seed: int) -> None:
    """Draw every matrix of a model chunk from N(0, std), as a function of seed and name only. Vectors keep what the modules set.

    Args:
        vocab_size: rows of the embedding that are real; the padding is drawn for itself, so it shifts nothing.
    """
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in chunk.named_parameters():
        if parameter.dim() < 2:
            continue
        name = global_name(chunk, name)
        divided = parameter.tensor_model_parallel and ranks > 1
        shape = list(parameter.shape)
        if divided:
            shape[parameter.partition_dim] *= ranks
        std = _initial_std(name, config)
        whole = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        if name in (_EMBEDDING, _OUTPUT):
            _draw(whole[:vocab_size], std, f"{seed} {name}")
            _draw(whole[vocab_size:], std, f"{seed} {name} padding")
        else:
            _draw(whole, std, f"{seed} {name}")
        if divided:
            # The halves of a gated MLP are divided each for itself: a rank holds gate and value of the same channels.
            halves = 2 if config.gated_linear_unit and name.endswith("linear_fc1.weight") else 1
            dim = parameter.partition_dim
            whole = torch.cat([half.chunk(ranks, dim)[rank] for half in whole.chunk(halves, dim)], dim)
        parameter.copy_(whole)


_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def global_name(chunk: GPTModel, name: str) -> str:
    """A parameter's name in the whole model: layers counted over all pipeline stages, a tied output under the embedding's name."""
    if name == _OUTPUT and chunk.share_embeddings_and_output_weights:
        return _EMBEDDING
    head = "decoder.layers."
    if not name.startswith(head):
        return name
    local, _, rest = name.removeprefix(head).partition(".")
    return f"{head}{chunk.decoder.layers[int(local)].layer_number - 1}.{rest}"


def _initial_std(name: str, config: TransformerConfig) -> float:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    return config.embedding_init_method_std if name.startswith("embedding.") else config.init_method_std


def _draw(whole: torch.Tensor, std: float, stream: str) -> None:
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little") >> 1
    whole.normal_(0.0, std, generator=torch.Generator(device=whole.device).manual_seed(seed))
