# SPDX-License-Identifier: Apache-2.0
"""A tiny training run for checkpoint tests, whose every number is known without training in parallel.

Parameters and gradients are functions of a parameter's global name (and the step), sliced for tensor parallelism. Adam works
element by element, so any topology must hold the same bits, and `globals_of` puts them together without using checkpoint code.
"""

import hashlib
import random
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn import device
from megatron_dyn.training.checkpoint import CheckpointManager

VOCAB = 50


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One way to lay out the same model."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    distributed: bool = False
    bf16: bool = False
    tied: bool = False
    hidden: int = 16
    layers: int = 4
    padded_vocab: int = 56
    optimizer: str = "adam"
    loss_scale: float | None = None
    bucket_size: int | None = None  # elements after which a gradient buffer gets another bucket; None: Megatron's choice


@dataclass
class Run:
    """What one rank has."""

    shape: Shape
    models: list
    optimizer: object
    scheduler: object
    steps: int = 0
    chunks: list = field(default_factory=list)

    def __post_init__(self):
        for wrapped in self.models:
            while hasattr(wrapped, "module"):
                wrapped = wrapped.module
            self.chunks.append(wrapped)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for model, chunk in zip(self.models, self.chunks):
                model.zero_grad_buffer()
                for name, parameter in chunk.named_parameters():
                    parameter.main_grad.copy_(_slice(chunk, name, parameter, f"gradient {self.steps}", self.shape))
            self.optimizer.step()
            self.scheduler.step(increment=1)
            self.steps += 1


def start(shape: Shape) -> Run:
    device.install_cpu_replacements()
    ps.initialize_model_parallel(shape.tp, shape.pp, virtual_pipeline_model_parallel_size=shape.vpp)
    torch.manual_seed(123 + 100 * ps.get_pipeline_model_parallel_rank())
    model_parallel_cuda_manual_seed(123 + 100 * ps.get_pipeline_model_parallel_rank())
    dtype = torch.bfloat16 if shape.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24,
        add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm", use_cpu_initialization=True,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=shape.bf16, tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp, virtual_pipeline_model_parallel_size=shape.vpp,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        persist_layer_norm=False,
    )  # fmt: skip
    models = []
    for stage in range(shape.vpp or 1):
        chunk = _chunk(shape, config, stage if shape.vpp else None)
        wrapped = Float16Module(config, chunk) if shape.bf16 else chunk
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=shape.distributed, bucket_size=shape.bucket_size,
            overlap_grad_reduce=shape.bucket_size is not None,  # Megatron makes several buckets only then
        )  # fmt: skip
        models.append(DistributedDataParallel(config=config, ddp_config=ddp, module=wrapped, disable_bucketing=stage > 0))
    settings = OptimizerConfig(
        optimizer=shape.optimizer, lr=1e-2, min_lr=1e-4, weight_decay=0.1, adam_eps=1e-3, clip_grad=0.0, bf16=shape.bf16, params_dtype=dtype,
        use_distributed_optimizer=shape.distributed, sgd_momentum=0.9, loss_scale=shape.loss_scale,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, models, config_overrides=get_standard_config_overrides(settings))
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-4, lr_warmup_steps=3, lr_decay_steps=50, lr_decay_style="cosine",
        start_wd=0.1, end_wd=0.1, wd_incr_steps=50, wd_incr_style="constant", override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )  # fmt: skip
    return Run(shape, models, optimizer, scheduler)


def save(run: Run, folder, iteration: int | None = None, **manager) -> str:
    manager = CheckpointManager(save=folder, load=None, keep_last=manager.pop("keep_last", None), **manager)
    iteration = run.steps if iteration is None else iteration
    path = manager.save(
        iteration, models=run.models, optimizer=run.optimizer, scheduler=run.scheduler,
        sampler_state={"step": run.steps}, extra={"steps": run.steps},
    )  # fmt: skip
    return str(path)


def load(run: Run, folder, **manager):
    manager = CheckpointManager(save=None, load=folder, keep_last=None, **{"vocab_size": VOCAB, **manager})
    state = manager.load(models=run.models, optimizer=run.optimizer, scheduler=run.scheduler)
    if state is not None:
        run.steps = state.extra["steps"]
    return state


def damage(path, how: str) -> None:
    """Change a file as disks and people do: "cut", "flip" (one bit in the middle), "delete"."""
    content = path.read_bytes()
    if how == "delete":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-1])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def draws() -> "list[float]":
    """Numbers from torch's default, Megatron's tensor-parallel, Python's and numpy's generator (which moves them on)."""
    numbers = [float(torch.rand(()))]
    with get_cuda_rng_tracker().fork():
        numbers.append(float(torch.rand(())))
    return [*numbers, random.random(), float(np.random.rand())]


def globals_of(run: Run) -> dict:
    """"name kind" -> whole tensor, for the stages of this rank; kinds: parameter, master, exp_avg, exp_avg_sq, step."""
    whole = {}
    for chunk in run.chunks:
        for name, parameter in chunk.named_parameters():
            for kind, tensor in {"parameter": parameter.detach(), **_optimizer_state(run, parameter)}.items():
                whole[f"{_global_name(chunk, name)} {kind}"] = _without_tp(chunk, name, parameter, tensor.detach().clone(), run.shape)
    return {"lr": torch.tensor(run.optimizer.param_groups[0]["lr"]), **whole}


def everything(ranks: "list[dict]") -> dict:
    """Joins what the ranks returned; ranks that hold the same tensor must agree."""
    joined: dict = {}
    for of_rank in ranks:
        for key, value in of_rank.items():
            assert key not in joined or torch.equal(joined[key], value), f"ranks differ in {key}"
            joined[key] = value
    return joined


def assert_same(expected: dict, found: dict) -> None:
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    unequal = [key for key in expected if not torch.equal(expected[key], found[key])]
    assert not unequal, f"{len(unequal)} of {len(expected)} tensors differ, e.g. {unequal[:4]}"


def _optimizer_state(run: Run, parameter) -> dict:
    optimizer = run.optimizer.chained_optimizers[0]
    inner = optimizer.optimizer
    if not run.shape.distributed:
        master = getattr(parameter, "main_param", None)
        state = inner.state[parameter if master is None else master]
        return {"master": parameter if master is None else master, **state}
    here = next(
        (ranges["param_map"][parameter]["param"] for dtypes in optimizer.gbuf_ranges for buckets in dtypes.values()
         for ranges in buckets if parameter in ranges["param_map"]), None,
    )  # fmt: skip
    shard = {} if here is None else optimizer._get_main_param_and_optimizer_states(parameter)
    whole = {}
    for kind, name in (("master", "param"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        flat = torch.zeros(parameter.numel())
        if here is not None:
            flat[here.start : here.end] = shard[name].detach()
        dist.all_reduce(flat, group=ps.get_data_parallel_group())
        whole[kind] = flat.view(parameter.shape)
    step = shard["step"].clone() if shard else torch.tensor(0.0)
    dist.all_reduce(step, op=dist.ReduceOp.MAX, group=ps.get_data_parallel_group())
    return {**whole, "step": step}


def _chunk(shape: Shape, config, vp_stage) -> GPTModel:
    first = ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    chunk = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=shape.padded_vocab,
        max_sequence_length=32, pre_process=first, post_process=last, share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope", vp_stage=vp_stage,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            parameter.copy_(_slice(chunk, name, parameter, "weight", shape))
    return chunk


def _global_name(chunk, name: str) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    name = ".".join(parts)
    tied = chunk.share_embeddings_and_output_weights and name == "output_layer.weight"
    return "embedding.word_embeddings.weight" if tied else name


def _slice(chunk, name: str, parameter, what: str, shape: Shape) -> torch.Tensor:
    """This rank's part of the whole tensor; rows of the padded vocabulary are zero, so that any padding gives the same rows."""
    name = _global_name(chunk, name)
    size = list(parameter.shape)
    if shape.tp > 1 and getattr(parameter, "tensor_model_parallel", False):
        size[parameter.partition_dim] *= shape.tp
    vocabulary = "word_embeddings" in name or "output_layer" in name
    if vocabulary:
        size[0] = VOCAB
    seed = int(hashlib.md5(f"{name} {what}".encode()).hexdigest()[:8], 16)
    whole = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.1
    if vocabulary:
        whole = F.pad(whole, (0, 0, 0, shape.padded_vocab - VOCAB))
    if shape.tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    rank, dim = ps.get_tensor_model_parallel_rank(), parameter.partition_dim
    if "linear_fc1" in name:
        return torch.cat([half.chunk(shape.tp, dim)[rank] for half in whole.chunk(2, dim)], dim)
    return whole.chunk(shape.tp, dim)[rank]


def _without_tp(chunk, name: str, parameter, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
    name = _global_name(chunk, name)
    if shape.tp > 1 and tensor.dim() and getattr(parameter, "tensor_model_parallel", False):
        parts = [torch.empty_like(tensor) for _ in range(shape.tp)]
        dist.all_gather(parts, tensor.contiguous(), group=ps.get_tensor_model_parallel_group())
        if "linear_fc1" in name:
            parts = [part.chunk(2)[half] for half in (0, 1) for part in parts]
        tensor = torch.cat(parts, parameter.partition_dim)
    vocabulary = "word_embeddings" in name or "output_layer" in name
    return tensor[:VOCAB] if vocabulary and tensor.dim() else tensor
