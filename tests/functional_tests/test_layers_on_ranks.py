# SPDX-License-Identifier: Apache-2.0
"""What only several ranks can show of layers and model building: initial weights, gradients of norms, generators, recomputation.

    tokens [1, T] int64; loss [1, T] fp32; gradients are gathered whole, under their names in the whole model
"""

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from launch import launch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_dyn import device
from megatron_dyn.training import launch as launch_module
from megatron_dyn.training.initial_weights import global_name
from megatron_dyn.training.model import ModelConfig, build_model, transformer_config

VOCABULARY = 50
LLAMA = dict(num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48)
LLAMA |= dict(make_vocab_size_divisible_by=4, untie_embeddings_and_output_weights=True)
GPT2 = LLAMA | dict(normalization="LayerNorm", swiglu=False, add_bias_linear=True, num_query_groups=1, max_position_embeddings=32)
GPT2 |= dict(position_embedding_type="learned_absolute", untie_embeddings_and_output_weights=False, qk_layernorm=True)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    overlap_p2p_communication: bool = True
    overlap_p2p_communication_warmup_flush: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size


def start(sizes: Sizes) -> None:
    device.install_cpu_replacements()
    parallel_state.initialize_model_parallel(
        sizes.tensor_model_parallel_size,
        sizes.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline_model_parallel_size,
    )
    device.seed_everything(7)


def build(sizes: Sizes, shape: dict, **changes) -> list:
    model = ModelConfig(**(shape | changes))
    return build_model(transformer_config(model, sizes, precision="fp32"), model, vocab_size=VOCABULARY, backend="local")


def microbatch(lengths: tuple[int, ...], padding: int) -> tuple[dict, torch.Tensor]:
    """Arguments of the model, and the loss mask."""
    T = sum(lengths) + padding
    generator = torch.Generator().manual_seed(T)
    tokens, labels = (torch.randint(0, VOCABULARY, (1, T), generator=generator) for _ in range(2))
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding)])[None]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    cu_padded = torch.cat([cu[:-1], torch.tensor([T], dtype=torch.int32)])
    longest = max([*lengths[:-1], lengths[-1] + padding])
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    mask = (torch.arange(T) < T - padding)[None].float()
    return dict(input_ids=tokens, position_ids=positions, attention_mask=None, labels=labels, packed_seq_params=packing), mask


MICROBATCHES = [microbatch((3, 5, 2), 2), microbatch((9, 1, 1, 3), 0)]


def whole(chunk, parameter: torch.Tensor, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor shaped like the parameter, gathered over the tensor-parallel ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not parameter.tensor_model_parallel:
        return tensor.detach().clone()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    dim, gated = parameter.partition_dim, chunk.config.gated_linear_unit and "linear_fc1" in name
    halves = zip(*(part.chunk(2 if gated else 1, dim) for part in parts))
    return torch.cat([torch.cat(half, dim) for half in halves], dim)


# --- initial weights ---------------------------------------------------------------------------------------------------


def initial_weights(rank: int, world: int, sizes: Sizes, shape: dict) -> dict[str, torch.Tensor]:
    start(sizes)
    torch.manual_seed(rank)  # the generators' state plays no part
    return {
        global_name(chunk, name): whole(chunk, parameter, parameter, name)
        for chunk in build(sizes, shape)
        for name, parameter in chunk.named_parameters()
    }


@functools.lru_cache
def weights_of_one_rank(tied: bool) -> dict[str, torch.Tensor]:
    return launch(1, initial_weights, Sizes(), GPT2 if tied else LLAMA)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(tensor_model_parallel_size=2, sequence_parallel=True),
        Sizes(pipeline_model_parallel_size=2),
        Sizes(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        Sizes(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    ],
    ids=["tp2", "pp2", "pp2 vpp2", "tp2 pp2"],
)
def test_initial_weights_do_not_depend_on_the_topology(sizes, tied):
    expected, seen = weights_of_one_rank(tied), {}
    for found in launch(sizes.ranks, initial_weights, sizes, GPT2 if tied else LLAMA):
        for name, weight in found.items():
            assert torch.equal(weight, expected[name]), name  # on each rank and stage that holds it
        seen |= found
    assert seen.keys() == expected.keys()


def test_initial_weights_are_spread_as_configured():
    weights = weights_of_one_rank(tied=False)
    matrices = {name: weight for name, weight in weights.items() if weight.dim() > 1}
    for name, weight in matrices.items():
        std = 0.02 / 8**0.5 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0.02
        assert abs(weight.std() / std - 1) < 0.1 and abs(weight.mean()) < 0.1 * std, name
    assert len({round(weight.double().sum().item(), 9) for weight in matrices.values()}) == len(matrices)  # no two alike
    assert all((weight == (0 if name.endswith("bias") else 1)).all() for name, weight in weights.items() if weight.dim() == 1)


def built_against_other_groups(rank: int, world: int) -> None:
    start(Sizes(tensor_model_parallel_size=2))
    build(Sizes(), LLAMA)


def test_a_configuration_of_other_sizes_than_the_groups_is_refused():
    with pytest.raises(AssertionError, match="tensor_model_parallel_size 1 but Megatron's process groups were made with 2"):
        launch(2, built_against_other_groups)


# --- gradients under tensor and sequence parallelism -------------------------------------------------------------------


def gradients(rank: int, world: int, sizes: Sizes, shape: dict, forget: str | None = None) -> dict[str, torch.Tensor]:
    """Of the mean over all tokens, through Megatron's DDP and finalize_model_grads. `forget` takes the mark off some norms."""
    start(sizes)
    [chunk] = build(sizes, shape)
    with torch.no_grad():  # norms of exactly 1 hide some mistakes
        for name, parameter in chunk.named_parameters():
            if parameter.dim() == 1:
                whole_shape = parameter.numel() * (sizes.tensor_model_parallel_size if parameter.tensor_model_parallel else 1)
                noise = 0.3 * torch.randn(whole_shape, generator=torch.Generator().manual_seed(len(name)))
                parameter += noise.chunk(sizes.tensor_model_parallel_size)[rank] if parameter.tensor_model_parallel else noise
            if forget is not None and forget in name:
                parameter.sequence_parallel = False
    ddp = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    tokens = 0
    for arguments, mask in MICROBATCHES:
        (ddp(**arguments) * mask).sum().backward()
        tokens += int(mask.sum())
    finalize_model_grads([ddp], torch.tensor(tokens, dtype=torch.int))
    return {name: whole(chunk, p, p.main_grad, name) for name, p in chunk.named_parameters()}


@functools.lru_cache
def gradients_of_one_rank(shape: str) -> dict[str, torch.Tensor]:
    return launch(1, gradients, Sizes(), SHAPES[shape])[0]


# Weights large enough that attention is not near uniform, where gradients to queries and keys would be rounding only.
SHAPES = {"llama": LLAMA | dict(qk_layernorm=True, init_method_std=0.2), "gpt2": GPT2 | dict(init_method_std=0.2)}


def wrong_gradients(sizes: Sizes, shape: str, forget: str | None = None) -> set[str]:
    """Names whose gradient is off by more than 1e-5 of its largest entry (a bias of keys has none: the softmax ignores it)."""
    wrong, reference = set(), gradients_of_one_rank(shape)
    floor = 1e-2 * max(expected.abs().max() for expected in reference.values())
    for found in launch(sizes.ranks, gradients, sizes, SHAPES[shape], forget):
        for name, expected in reference.items():
            if (found[name] - expected).abs().max() > 1e-5 * expected.abs().max().clamp(min=floor):
                wrong.add(name)
    return wrong


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2 sp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_every_parameter_equal_those_of_one_rank(shape, sequence_parallel):
    """GPT2 has one query group for two ranks: its keys are computed on both."""
    assert wrong_gradients(Sizes(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel), shape) == set()


def test_mutant_a_norm_without_its_mark_is_caught():
    sizes = Sizes(tensor_model_parallel_size=2, sequence_parallel=True)
    wrong = wrong_gradients(sizes, "gpt2", forget="pre_mlp_layernorm")
    assert wrong == {f"decoder.layers.{i}.pre_mlp_layernorm.{what}" for i in range(4) for what in ("weight", "bias")}


def checkpoint_keys(rank: int, world: int, sizes: Sizes, shape: dict) -> dict[str, tuple[int, ...]]:
    start(sizes)
    [chunk] = build(sizes, shape)
    sharded = chunk.sharded_state_dict().values()
    return {entry.key: tuple(entry.global_shape) for entry in sharded if hasattr(entry, "global_shape")}


@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoint_entries_are_the_same_for_any_tp_and_named_as_transformer_engines(shape):
    one = launch(1, checkpoint_keys, Sizes(), SHAPES[shape])[0]
    for two in launch(2, checkpoint_keys, Sizes(tensor_model_parallel_size=2, sequence_parallel=True), SHAPES[shape]):
        assert two == one
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in one
    assert "decoder.final_layernorm.weight" in one
    assert ("decoder.layers.mlp.linear_fc1.layer_norm_bias" in one) == (shape == "gpt2")


# --- dropout, generators, recomputation --------------------------------------------------------------------------------

DROPOUT = dict(hidden_dropout=0.1, attention_dropout=0.1)
RECOMPUTE = {
    "none": {},
    "uniform 1": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "uniform 2": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "block 3": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=3),
    "core_attn": dict(recompute_granularity="selective"),
    "mlp": dict(recompute_granularity="selective", recompute_modules=["mlp"]),
    "core_attn and mlp": dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"]),
}


def dropped_out(rank: int, world: int, sizes: Sizes) -> dict[str, list[torch.Tensor]]:
    """Losses and gradients of two interleaved microbatches, for each kind of recomputation and without dropout."""
    start(sizes)
    found = {}
    for kind, settings in (RECOMPUTE | {"no dropout": {}}).items():
        device.seed_everything(11)
        [chunk] = build(sizes, LLAMA, **(settings if kind == "no dropout" else settings | DROPOUT))
        losses = [(chunk(**arguments) * mask).sum() for arguments, mask in MICROBATCHES]  # both forwards, as 1F1B may do
        for loss in losses:
            loss.backward()
        found[kind] = [loss.detach() for loss in losses] + [whole(chunk, p, p.grad, name) for name, p in chunk.named_parameters()]
        found[kind].append(torch.rand(2))  # where the generators stand afterwards
    return found


def rerun_with_other_dropout(monkeypatch):
    """Mutant: recomputation that does not bring the generators back."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_set_all_rng_states", lambda *states: None)


@pytest.mark.parametrize(
    "sizes",
    [Sizes(), Sizes(tensor_model_parallel_size=2), Sizes(tensor_model_parallel_size=2, sequence_parallel=True)],
    ids=["tp1", "tp2", "tp2 sp"],
)
def test_recomputation_repeats_dropout_bit_for_bit(sizes):
    for found in launch(sizes.ranks, dropped_out, sizes):
        plain = found.pop("none")
        without = found.pop("no dropout")
        assert not torch.equal(plain[0], without[0])  # dropout was on
        for kind, other in found.items():
            assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True)), kind


def test_mutant_recomputation_with_other_generators_is_caught(monkeypatch):
    rerun_with_other_dropout(monkeypatch)
    [found] = launch(1, dropped_out, Sizes())
    same = {kind for kind, other in found.items() if all(torch.equal(a, b) for a, b in zip(found["none"], other))}
    assert same == {"none", "mlp"}  # an MLP draws nothing


def generators_over_steps(rank: int, world: int, sizes: Sizes, disturbed: bool) -> list:
    start(sizes)
    [chunk] = build(sizes, LLAMA, **DROPOUT)
    seen = []
    for step in range(3):
        if disturbed and rank == 0:
            torch.empty((), dtype=torch.int64).random_()  # what a loader with workers does for its base seed
        loss = sum((chunk(**arguments) * mask).sum() for arguments, mask in MICROBATCHES)
        loss.backward()
        state = device.rng_state()
        seen.append((state["cpu"], state["tracker"]["model-parallel-rng"], loss.detach()))
    return seen


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2 sp"])
def test_case_28_generators_of_tensor_parallel_ranks_stay_together(sequence_parallel):
    sizes = Sizes(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    for (cpu_0, own_0, loss_0), (cpu_1, own_1, loss_1) in zip(*launch(2, generators_over_steps, sizes, False)):
        assert torch.equal(cpu_0, cpu_1)  # dropout where both ranks hold the same rows
        assert not torch.equal(own_0, own_1)  # dropout where each holds its own
        assert torch.equal(loss_0, loss_1)


def test_case_28_a_draw_on_one_rank_is_noticed():
    zero, one = launch(2, generators_over_steps, Sizes(tensor_model_parallel_size=2), True)
    assert not torch.equal(zero[0][0], one[0][0])


def counted(rank: int, world: int, sizes: Sizes, shape: dict) -> int:
    start(sizes)
    return launch_module._parameters(build(sizes, shape))


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["untied", "tied"])
def test_the_number_of_parameters_told_does_not_depend_on_the_division(shape):
    divisions = [Sizes(), Sizes(tensor_model_parallel_size=2), Sizes(pipeline_model_parallel_size=2)]
    divisions.append(Sizes(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2))
    assert len({count for sizes in divisions for count in launch(sizes.ranks, counted, sizes, shape)}) == 1
