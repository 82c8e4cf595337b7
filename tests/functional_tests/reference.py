# SPDX-License-Identifier: Apache-2.0
"""What a training step must give: one unpadded document per forward, one rank, fp32, Megatron's stock layers.

    document                 [n] integers
    inputs, labels           [1, n - 1]         all but the last token, all but the first
    hidden (mask)            [1, 1, n - 1, n - 1] bool, True where a token must not look
    token losses             [n - 1] fp32

Nothing is packed, planned, padded, split over ranks or averaged here, and nothing of megatron_dyn takes part but the list of
CPU replacements, without which Megatron-Core does not run on a machine without CUDA. The last token of a document has no label
and nobody looks at it, so it is left out altogether. Loss = sum of token losses / their number; AdamW is PyTorch's, after
clipping by the norm of the whole gradient; matrices are decayed, vectors are not.

Weights are a function of a parameter's name in the whole model (`weight_of`), so that every topology can be given the same ones.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from launch import launch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

Document = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TinyGPT:
    """Shape of a model small enough to be trained hundreds of times in a minute."""

    layers: int = 4
    hidden: int = 32
    heads: int = 4
    groups: int = 2
    ffn: int = 48
    vocabulary: int = 96
    norm: str = "RMSNorm"
    positions: str = "rope"
    swiglu: bool = True
    biases: bool = False
    tied: bool = False
    qk_layernorm: bool = False
    max_positions: int = 32


LLAMA = TinyGPT()
GPT2 = TinyGPT(groups=4, norm="LayerNorm", positions="learned_absolute", swiglu=False, biases=True, tied=True)


@dataclass(frozen=True, kw_only=True)
class Update:
    """AdamW. The large eps keeps its first steps from turning rounding into a sign (a gradient of 1e-9 is no information)."""

    lr: float = 1e-2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-3
    clip: float = 0.5


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """One step: names are those of the whole model, tensors are whole."""

    token_losses: list[torch.Tensor]
    """One [n - 1] tensor a document."""
    loss: float
    loss_tokens: int
    gradients: dict[str, torch.Tensor]
    """Of the mean over the step's loss tokens, before clipping."""
    grad_norm: float
    parameters: dict[str, torch.Tensor]
    """After the update."""


def make_documents(lengths: Sequence[int], *, seed: int = 1, vocabulary: int = LLAMA.vocabulary) -> tuple[Document, ...]:
    """Documents of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist()) for length in lengths)


def weight_of(name: str, shape: Sequence[int]) -> torch.Tensor:
    """The weights of a parameter of the whole model, fp32: norm weights about 1, all else about 0, none exactly."""
    seed = int(hashlib.md5(name.encode()).hexdigest()[:8], 16)
    drawn = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    if len(shape) > 1:
        return drawn * (0.3 if name.startswith("embedding.") else 0.12)
    return drawn * 0.1 + (0.0 if name.endswith(".bias") else 1.0)


@functools.lru_cache(maxsize=None)
def reference_steps(
    gpt: TinyGPT, steps: tuple[tuple[Document, ...], ...], *, update: Update = Update(), rounded_to_bf16: bool = False
) -> tuple[ReferenceStep, ...]:
    """Train on `steps` (the documents of each), one after the other, in a process of its own.

    Args:
        gpt: the model.
        steps: documents of each step; a step needs at least one loss token.
        update: settings of the optimizer.
        rounded_to_bf16: start from weights that bf16 can hold.
    """
    [results] = launch(1, _train, gpt, steps, update, rounded_to_bf16)
    return results


def _train(rank: int, world: int, gpt: TinyGPT, steps, update: Update, rounded_to_bf16: bool) -> tuple[ReferenceStep, ...]:
    model = _stock_model(gpt)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = weight_of(name, parameter.shape)
            parameter.copy_(weight.bfloat16() if rounded_to_bf16 else weight)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": update.weight_decay},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=update.lr, betas=update.betas, eps=update.eps)
    return tuple(_step(model, named, documents, optimizer, update) for documents in steps)


def _step(model, named: dict, documents, optimizer, update: Update) -> ReferenceStep:
    optimizer.zero_grad()
    token_losses = [_document_losses(model, document) for document in documents if len(document) > 1]
    loss_tokens = sum(losses.numel() for losses in token_losses)
    total = sum(losses.double().sum() for losses in token_losses)
    (total / loss_tokens).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
    grad_norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in gradients.values()))
    shrink = min(1.0, update.clip / (float(grad_norm) + 1e-6)) if update.clip else 1.0
    for parameter in named.values():
        parameter.grad.mul_(shrink)
    optimizer.step()
    return ReferenceStep(
        token_losses=[losses.detach() for losses in token_losses],
        loss=float(total.detach()) / loss_tokens,
        loss_tokens=loss_tokens,
        gradients=gradients,
        grad_norm=float(grad_norm),
        parameters={name: parameter.detach().clone() for name, parameter in named.items()},
    )


def _document_losses(model, document: Document) -> torch.Tensor:
    ids = torch.tensor(document)[None]
    inputs, labels = ids[:, :-1], ids[:, 1:]
    n = inputs.size(1)
    hidden = torch.ones(1, 1, n, n, dtype=torch.bool).triu(1)
    return model(inputs, torch.arange(n)[None], hidden, labels=labels).reshape(-1)


def _stock_model(gpt: TinyGPT) -> GPTModel:
    from megatron_dyn.device import install_cpu_replacements

    install_cpu_replacements()
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=gpt.layers,
        hidden_size=gpt.hidden,
        num_attention_heads=gpt.heads,
        num_query_groups=gpt.groups,
        ffn_hidden_size=gpt.ffn,
        normalization=gpt.norm,
        gated_linear_unit=gpt.swiglu,
        activation_func=F.silu if gpt.swiglu else F.gelu,
        add_bias_linear=gpt.biases,
        qk_layernorm=gpt.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=gpt.norm, qk_layernorm=gpt.qk_layernorm),
        vocab_size=gpt.vocabulary,
        max_sequence_length=gpt.max_positions,
        share_embeddings_and_output_weights=gpt.tied,
        position_embedding_type=gpt.positions,
        rotary_base=10000,
    )


LOSS_TOLERANCE = 1e-6  # relative
GRADIENT_TOLERANCE = 1e-5  # largest difference / largest value, in each parameter
PARAMETER_TOLERANCE = 1e-6  # absolute; one update moves a weight by about 1e-2, weight decay alone by 1e-4


def check_losses(ranks: list, expected: ReferenceStep, tolerance: float = LOSS_TOLERANCE) -> None:
    """Every rank, of every stage, knows the loss of the whole step."""
    for number, rank in enumerate(ranks):
        assert rank.loss_tokens == expected.loss_tokens, f"rank {number} counts {rank.loss_tokens} loss tokens, not {expected.loss_tokens}"
        off = abs(rank.loss - expected.loss) / expected.loss
        assert off <= tolerance, f"rank {number}: loss {rank.loss} is {off:.1e} off the reference {expected.loss}"


def check_gradients(ranks: list, expected: ReferenceStep, tolerance: float = GRADIENT_TOLERANCE) -> None:
    """Each rank's gradients, and together they are those of the whole model."""
    found = set()
    for number, rank in enumerate(ranks):
        for name, gradient in rank.gradients.items():
            off = largest_difference(gradient, expected.gradients[name])
            assert off <= tolerance, f"rank {number}: gradient of {name} is {off:.1e} off the reference"
            found.add(name)
    assert found == set(expected.gradients), f"no rank holds {sorted(set(expected.gradients) ^ found)}"


def check_grad_norm(ranks: list, expected: ReferenceStep, tolerance: float = GRADIENT_TOLERANCE) -> None:
    """One norm, over the whole model, on every rank."""
    for number, rank in enumerate(ranks):
        off = abs(rank.grad_norm - expected.grad_norm) / expected.grad_norm
        assert off <= tolerance, f"rank {number}: gradient norm {rank.grad_norm} is {off:.1e} off the reference {expected.grad_norm}"


def check_parameters(ranks: list, expected: ReferenceStep, tolerance: float = PARAMETER_TOLERANCE) -> None:
    """After the update: clipping, AdamW, weight decay on matrices only."""
    for number, rank in enumerate(ranks):
        assert rank.updated, f"rank {number} did not update"
        for name, parameter in rank.parameters.items():
            off = float((parameter.float() - expected.parameters[name]).abs().max())
            assert off <= tolerance, f"rank {number}: {name} is {off:.1e} off the reference after the update"


def check_step(ranks: list, expected: ReferenceStep) -> None:
    """Loss, gradients, norm and updated parameters."""
    check_losses(ranks, expected)
    check_gradients(ranks, expected)
    check_grad_norm(ranks, expected)
    check_parameters(ranks, expected)


def largest_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """max |difference| / max |expected|; infinite where a value is not finite."""
    off = float((value.double() - expected.double()).abs().max() / expected.double().abs().max())
    return off if off == off else float("inf")
