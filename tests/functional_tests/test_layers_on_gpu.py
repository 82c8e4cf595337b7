# SPDX-License-Identifier: Apache-2.0
"""The same model on a GPU: Transformer Engine layers against the local ones, and the CUDA side of device.py."""

import dataclasses
import importlib.util

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from test_layers_on_ranks import LLAMA, MICROBATCHES, VOCABULARY, Sizes, microbatch

from megatron_dyn import device
from megatron_dyn.training.model import ModelConfig, build_model, transformer_config

pytestmark = pytest.mark.gpu
needs_te = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine, which is not installed")
SHAPE = LLAMA | dict(hidden_size=256, ffn_hidden_size=512, init_method_std=0.05)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    device.initialize_device(0)
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    device.seed_everything(3)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(backend: str, precision: str, **changes):
    model = ModelConfig(**(SHAPE | changes))
    [chunk] = build_model(transformer_config(model, Sizes(), precision=precision), model, vocab_size=VOCABULARY, backend=backend)
    return chunk


def losses_and_gradients(chunk) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    here, losses = device.compute_device(), []
    for arguments, mask in MICROBATCHES:  # two values of T, one with padding
        token_losses = chunk(**moved_to(here, arguments)) * mask.to(here)
        token_losses.sum().backward()
        losses.append(token_losses.detach().cpu())
    return losses, {to_local_name(name): p.grad.float().cpu() for name, p in chunk.named_parameters()}


def moved_to(here: torch.device, arguments: dict) -> dict:
    move = lambda value: value.to(here) if isinstance(value, torch.Tensor) else value  # noqa: E731
    moved = {name: move(value) for name, value in arguments.items()}
    packing = arguments["packed_seq_params"]
    moved["packed_seq_params"] = PackedSeqParams(**{f.name: move(getattr(packing, f.name)) for f in dataclasses.fields(packing)})
    return moved


def to_local_name(name: str) -> str:
    """Transformer Engine keeps a norm's weight in the linear layer behind it."""
    for linear, norm in (("self_attention.linear_qkv.layer_norm_", "input_layernorm."), ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")):
        name = name.replace(linear, norm)
    return name


@needs_te
def test_both_kinds_of_layers_start_from_the_same_weights(one_rank):
    local, te = (dict((to_local_name(n), p) for n, p in build(b, "fp32").named_parameters()) for b in ("local", "te"))
    assert local.keys() == te.keys()
    for name, parameter in local.items():
        assert parameter.device == device.compute_device() and torch.equal(parameter, te[name]), name


@needs_te
@pytest.mark.parametrize("changes", [{}, dict(normalization="LayerNorm", swiglu=False, add_bias_linear=True, qk_layernorm=True)], ids=["llama", "gpt2"])
def test_te_in_bf16_is_near_the_local_layers_in_fp32(one_rank, changes):
    (losses, gradients), (expected, expected_gradients) = (
        losses_and_gradients(build(backend, precision, **changes)) for backend, precision in (("te", "bf16"), ("local", "fp32"))
    )
    for a, b in zip(losses, expected):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    for name, expected_gradient in expected_gradients.items():
        cosine = torch.nn.functional.cosine_similarity(gradients[name].flatten(), expected_gradient.flatten(), dim=0)
        assert cosine > 0.98 or expected_gradient.norm() < 1e-4, f"{name}: {cosine}"


@needs_te
@pytest.mark.parametrize("T", [2, 77, 4096])
def test_the_swiglu_kernel_against_fp32(one_rank, T):
    from megatron_dyn.layers.te_swiglu import SwiGLUMLP, _SwiGLU

    assert type(build("te", "bf16").decoder.layers[0].mlp) is SwiGLUMLP
    assert type(build("te", "bf16", swiglu=False).decoder.layers[0].mlp) is not SwiGLUMLP
    generator = torch.Generator(device=device.compute_device()).manual_seed(T)
    x, gradient = (torch.randn(T, 1, size, generator=generator, device=generator.device) for size in (512, 256))
    x_low = x.bfloat16().requires_grad_()
    _SwiGLU.apply(x_low).backward(gradient.bfloat16())
    exact = x_low.detach().double().requires_grad_()
    gate, linear = exact.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * linear
    expected.backward(gradient.bfloat16().double())
    torch.testing.assert_close(_SwiGLU.apply(x_low).double(), expected, rtol=8e-3, atol=1e-6)  # one rounding to bf16
    torch.testing.assert_close(x_low.grad.double(), exact.grad, rtol=8e-3, atol=1e-6)


def test_local_attention_equals_one_document_at_a_time(one_rank):
    packed = build("local", "fp32")
    losses, _ = losses_and_gradients(packed)
    here = device.compute_device()
    for (arguments, _), found in zip(MICROBATCHES, losses):
        offsets = arguments["packed_seq_params"].cu_seqlens_q.tolist()
        for start, end in zip(offsets, offsets[1:]):
            alone, _ = microbatch((end - start,), 0)
            alone |= {name: arguments[name][:, start:end] for name in ("input_ids", "position_ids", "labels")}
            with torch.no_grad():
                expected = packed(**moved_to(here, alone)).cpu()
            torch.testing.assert_close(found[:, start:end], expected, rtol=1e-4, atol=1e-4)


def test_generators_are_saved_and_restored(one_rank):
    def draw() -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            own = torch.rand(4, device=device.compute_device())
        return torch.cat([own, torch.rand(4, device=device.compute_device())]).cpu()

    state = device.rng_state()
    expected = draw()
    assert not torch.equal(draw(), expected)
    device.set_rng_state(state)
    assert torch.equal(draw(), expected)
    assert state["cuda"].device.type == "cpu"
    with pytest.raises(ValueError, match="saved on a CPU and this is a GPU"):
        device.set_rng_state(state | {"cuda": None})


@pytest.mark.parametrize("backend", ["local", pytest.param("te", marks=needs_te)])
def test_recomputation_repeats_dropout_for_many_values_of_T(one_rank, backend):
    """More values of T than torch.compile compiles for: a fused dropout drew other numbers once it gave up."""
    here = device.compute_device()
    dropout = dict(hidden_dropout=0.1, attention_dropout=0.1 if backend == "local" else 0.0)
    found = []
    for settings in ({}, dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)):
        device.seed_everything(3)
        chunk = build(backend, "bf16" if backend == "te" else "fp32", **dropout, **settings)
        losses = []
        for T in (8, 24, 40, 2, 64, 72, 96, 104, 120, 136, 200, 232):
            arguments, mask = microbatch((T // 2, T - T // 2), 0)
            losses.append((chunk(**moved_to(here, arguments)) * mask.to(here)).sum())
            losses[-1].backward()
        found.append((torch.stack(losses).detach(), {name: p.grad.float() for name, p in chunk.named_parameters()}))
    (losses, gradients), (again, gradients_again) = found
    assert torch.equal(losses, again)
    for name, gradient in gradients.items():
        assert (gradient - gradients_again[name]).abs().max() <= 1e-2 * gradient.abs().max(), name


def test_replacements_are_refused_and_the_device_is_named(one_rank):
    before = torch.zeros, torch.cuda.current_device, torch.Tensor.type
    with pytest.raises(RuntimeError, match="machine with CUDA"):
        device.install_cpu_replacements()
    assert before == (torch.zeros, torch.cuda.current_device, torch.Tensor.type)
    stats = device.memory_stats(reset_peak=True)
    assert 0 < stats["allocated"] <= stats["peak_allocated"] <= stats["total"]
    assert device.device_name() and not device.device_name().startswith("CPU")
    pinned = device.pin(torch.arange(4))
    assert pinned.is_pinned()
