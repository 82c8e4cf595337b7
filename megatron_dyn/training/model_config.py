# SPDX-License-Identifier: Apache-2.0
"""The shape of a GPT, and whether it can be divided over the ranks: pure functions of settings, checked before any rank starts."""

import importlib.util
from dataclasses import dataclass
from typing import Literal, Protocol

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
    """The vocabulary is padded to a multiple of this (and of the tensor-parallel size, if that does not divide it)."""

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
    """What selective recomputation takes, of core_attn, mlp and (with Transformer Engine) layernorm (none: core_attn)."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "make_vocab_size_divisible_by"):
            require(getattr(self, name) >= 1, f"{_flag(name)} is {getattr(self, name)}: it must be at least 1")
        heads = self.num_attention_heads
        if self.kv_channels is None:
            require(
                self.hidden_size % heads == 0,
                f"hidden size {self.hidden_size} cannot be divided over {heads} attention heads: change one, or give --kv-channels",
            )
            self.kv_channels = self.hidden_size // heads
        if self.num_query_groups is None:
            self.num_query_groups = heads
        if self.ffn_hidden_size is None:
            exact = 4 * self.hidden_size * 2 / 3 / 64
            self.ffn_hidden_size = max(1, int(exact)) * 64 if self.swiglu else 4 * self.hidden_size
        require(self.kv_channels >= 1, f"--kv-channels is {self.kv_channels}: it must be at least 1")
        require(self.ffn_hidden_size >= 1, f"--ffn-hidden-size is {self.ffn_hidden_size}: it must be at least 1")
        require(
            self.num_query_groups >= 1 and heads % self.num_query_groups == 0,
            f"{heads} attention heads cannot share {self.num_query_groups} query groups: --num-query-groups must divide the heads",
        )
        one_of("normalization", self.normalization, ("RMSNorm", "LayerNorm"))
        one_of("position_embedding_type", self.position_embedding_type, ("rope", "learned_absolute", "none"))
        require(self.norm_epsilon > 0, f"--norm-epsilon is {self.norm_epsilon}: a norm of zeros would divide by 0; use e.g. 1e-5")
        require(self.init_method_std > 0, f"--init-method-std is {self.init_method_std}: it must be above 0")
        for name in ("hidden_dropout", "attention_dropout"):
            require(0 <= getattr(self, name) < 1, f"{_flag(name)} is {getattr(self, name)}: a share of at least 0 and below 1")
        if self.position_embedding_type == "rope":
            require(0 < self.rotary_percent <= 1, f"--rotary-percent is {self.rotary_percent}: a share above 0 and at most 1")
            require(self.rotary_base > 1, f"--rotary-base is {self.rotary_base}: it must be above 1")
            rotated = int(self.kv_channels * self.rotary_percent)
            require(
                rotated >= 2 and rotated % 2 == 0,
                f"RoPE rotates pairs of channels, but --kv-channels {self.kv_channels} x --rotary-percent {self.rotary_percent} "
                f"gives {rotated} of them: make it even",
            )
        self._check_recompute()

    def _check_recompute(self) -> None:
        full, selective = self.recompute_granularity == "full", self.recompute_granularity == "selective"
        one_of("recompute_granularity", self.recompute_granularity, (None, "full", "selective"))
        one_of("recompute_method", self.recompute_method, (None, "uniform", "block"))
        require(
            full == (self.recompute_method is not None) and full == (self.recompute_num_layers is not None),
            "--recompute-method and --recompute-num-layers belong to --recompute-granularity full, which needs both",
        )
        require(
            self.recompute_num_layers is None or self.recompute_num_layers >= 1,
            f"--recompute-num-layers is {self.recompute_num_layers}: it must be at least 1",
        )
        require(self.recompute_modules is None or selective, "--recompute-modules belongs to --recompute-granularity selective")
        for name in self.recompute_modules or ():
            one_of("recompute_modules", name, _RECOMPUTE_MODULES)
        # Its MLP returns the bias beside its output, for the addition that follows. As an output of the recomputed function the parameter
        # itself gets that function as its history, so recomputing the MLP leads back to recomputing it, for ever.
        require(
            not self.add_bias_linear or "mlp" not in (self.recompute_modules or ()),
            "--recompute-modules mlp with --add-bias-linear: the backward of Megatron-Core 0.16 would recompute the MLP again and again "
            "and never end; leave one of the two out, or use --recompute-granularity full",
        )
        require(
            "layernorm" not in (self.recompute_modules or ()) or importlib.util.find_spec("transformer_engine") is not None,
            "--recompute-modules layernorm: Megatron-Core 0.16 recomputes norms with a function of Transformer Engine, which is not "
            "installed; leave it out",
        )

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
    overlap_p2p_communication: bool
    overlap_p2p_communication_warmup_flush: bool

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None: ...


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def one_of(name: str, value: object, allowed: tuple) -> None:
    require(value in allowed, f"{_flag(name)} {value!r} is not known: use one of {', '.join(str(a) for a in allowed if a is not None)}")


def check_positions(model: ModelConfig, longest_piece: int, *, joined: bool) -> None:
    """Refuse documents that learned positions do not reach: their positions count from 0 in each piece.

    Args:
        longest_piece: most tokens in a piece of any step (`Planner.longest_piece`).
        joined: documents are joined and cut every B tokens (concat-chunk), so that only B makes pieces shorter.

    Raises:
        ValueError: the table is too short.
    """
    table = model.max_position_embeddings
    shorter = f"--max-tokens-per-microbatch {table}" if joined else f"--max-sum-squares-per-microbatch {table**2}"
    require(
        model.position_embedding_type != "learned_absolute" or table >= longest_piece,
        f"learned positions end at --max-position-embeddings {table}, but there are pieces of {longest_piece} tokens: their "
        f"positions would run past the table; raise it, use rope, or cut pieces shorter with {shorter}",
    )


def check_model_parallel(model: ModelConfig, parallel: ParallelSizes) -> None:
    """Refuse a model that cannot be divided as asked.

    Raises:
        ValueError: naming what does not divide.
    """
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    vp = parallel.virtual_pipeline_model_parallel_size or 1
    heads, groups = model.num_attention_heads, model.num_query_groups
    require(heads % tp == 0, f"{heads} attention heads cannot be divided over TP {tp}: --num-attention-heads must be a multiple of it")
    require(
        groups % tp == 0 or tp % groups == 0,
        f"{groups} query groups and TP {tp}: one must be a multiple of the other; change --num-query-groups",
    )
    require(
        model.ffn_hidden_size % tp == 0,
        f"the MLP's width {model.ffn_hidden_size} cannot be divided over TP {tp}: change --ffn-hidden-size",
    )
    require(not parallel.sequence_parallel or tp > 1, "sequence parallelism divides rows over tensor-parallel ranks: it needs TP above 1")
    stages = f"PP {pp}" + (f" x {vp} virtual stages" if vp > 1 else "")
    require(
        model.num_layers % (pp * vp) == 0,
        f"{model.num_layers} layers cannot be divided over {stages}: --num-layers must be a multiple of {pp * vp}",
    )
    if model.recompute_num_layers is not None:
        here = model.num_layers // (pp * vp)
        require(
            model.recompute_num_layers <= here and (model.recompute_method == "block" or here % model.recompute_num_layers == 0),
            f"--recompute-num-layers {model.recompute_num_layers} does not fit the {here} layers of a pipeline stage: with the "
            "uniform method it must divide them, with block it may be at most that many",
        )
