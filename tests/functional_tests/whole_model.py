# SPDX-License-Identifier: Apache-2.0
"""Weights into the parts of a divided model, parameters and gradients out of them: whole, under their names in the whole model."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from reference import weight_of

from megatron_dyn.training.evaluate import parameters_gathered



def set_weights(chunks: list) -> None:
    """Give each chunk its part of the weights that `weight_of` defines for the whole model."""
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            divided = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
            shape = list(parameter.shape)
            if divided:
                shape[parameter.partition_dim] *= tp
            whole = weight_of(_global_name(chunk, name), shape)
            if divided:
                parts = [half.chunk(tp, parameter.partition_dim)[rank] for half in _halves(chunk, name, whole, parameter.partition_dim)]
                whole = torch.cat(parts, parameter.partition_dim)
            with torch.no_grad():
                parameter.copy_(whole)


def gather_parameters(models: list) -> dict[str, torch.Tensor]:
    """Whole parameters, those included that the next forward pass would gather."""
    with parameters_gathered(models):
        return _gather(models, lambda parameter: parameter.detach())


def gather_gradients(models: list) -> dict[str, torch.Tensor]:
    """Whole gradients; the distributed optimizer's shards are put together from the data-parallel ranks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for model in models:
        if model.ddp_config.use_distributed_optimizer and group.size() > 1:
            for buffer in model.buffers:
                for bucket in buffer.buckets:
                    shards = list(bucket.grad_data.chunk(group.size()))
                    dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    return _gather(models, lambda parameter: parameter.main_grad)


def _gather(models: list, value_of) -> dict[str, torch.Tensor]:
    tp, group = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_group()
    whole = {}
    for model in models:
        chunk = model.module
        for name, parameter in chunk.named_parameters():
            value = value_of(parameter).clone().contiguous()
            if tp > 1 and getattr(parameter, "tensor_model_parallel", False):
                parts = [torch.empty_like(value) for _ in range(tp)]
                dist.all_gather(parts, value, group=group)
                dim = parameter.partition_dim
                halves = zip(*(_halves(chunk, name, part, dim) for part in parts))
                value = torch.cat([torch.cat(half, dim) for half in halves], dim)
            whole[_global_name(chunk, name)] = value
    return whole


def _halves(chunk, name: str, tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """A gated MLP stacks gate and value, and each is divided for itself."""
    return tensor.chunk(2, dim) if chunk.config.gated_linear_unit and "linear_fc1" in name else (tensor,)


def _global_name(chunk, name: str) -> str:
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    return ".".join(parts)
