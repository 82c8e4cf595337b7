# SPDX-License-Identifier: Apache-2.0
"""The local norms against their definition in fp64, and which class a configuration gets.

What sequence parallelism asks of them is shown on two ranks in functional_tests/test_layers_on_ranks.py.
"""

import importlib.util

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn.layers import SequenceParallelLayerNorm, SequenceParallelRMSNorm, gpt_block_spec
from megatron_dyn.layers.specs import norm_class

HIDDEN, EPS = 48, 1e-5
NORMS = [SequenceParallelRMSNorm, SequenceParallelLayerNorm]


def config(**more) -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=HIDDEN, num_attention_heads=4, use_cpu_initialization=True, **more)


def built(norm, *, dtype=torch.float32, zero_centered=False):
    module = norm(config(params_dtype=dtype, layernorm_zero_centered_gamma=zero_centered), HIDDEN, EPS)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    return module


def by_definition(module, x, grad):
    x, weight = x.detach().double().requires_grad_(), module.weight.detach().double().requires_grad_()
    wanted = [x, weight]
    centred = x
    if module.bias is not None:
        centred = x - x.mean(-1, keepdim=True)
    y = centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * (weight + module.zero_centered_gamma)
    if module.bias is not None:
        wanted.append(module.bias.detach().double().requires_grad_())
        y = y + wanted[-1]
    return [y.detach(), *torch.autograd.grad(y, wanted, grad.double())]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("norm", NORMS)
def test_equals_its_definition(norm, dtype, tolerance, zero_centered):
    """A large offset shows statistics that were not taken in fp32: in bf16, 30 +- 1 leaves two digits."""
    module = built(norm, dtype=dtype, zero_centered=zero_centered)
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(7, 1, HIDDEN, generator=generator) + 30).to(dtype).requires_grad_()
    grad = torch.randn(7, 1, HIDDEN, generator=generator).to(dtype)
    y = module(x)
    assert y.dtype == dtype
    found = [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad)]
    for a, b in zip(found, by_definition(module, x, grad), strict=True):
        assert ((a.double() - b).abs().max() / b.abs().max()) < tolerance * (30 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_starts_as_the_identity(norm, zero_centered):
    module = norm(config(layernorm_zero_centered_gamma=zero_centered), HIDDEN, EPS)
    assert torch.equal(module.gamma(), torch.ones(HIDDEN))
    assert (module.weight == (0 if zero_centered else 1)).all()
    assert (module.bias is not None) == (norm is SequenceParallelLayerNorm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_parameter_says_whether_its_gradient_is_partial(norm, sequence_parallel):
    module = norm(config(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel), HIDDEN, EPS)
    assert all(parameter.sequence_parallel is sequence_parallel for parameter in module.parameters())


def test_the_configuration_chooses_the_norm():
    assert norm_class(config(normalization="RMSNorm")) is SequenceParallelRMSNorm
    assert norm_class(config(normalization="LayerNorm")) is SequenceParallelLayerNorm
    with pytest.raises(ValueError, match="'L2Norm' has no local norm"):
        norm_class(config(normalization="L2Norm"))



def test_backends_are_named_and_transformer_engine_is_asked_for_only_by_te(monkeypatch):
    with pytest.raises(ValueError, match="'torch' is not known"):
        gpt_block_spec(config(), backend="torch")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformer_engine" else find(name))
    with pytest.raises(ValueError, match="not installed"):
        gpt_block_spec(config(), backend="te")
