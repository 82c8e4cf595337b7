# SPDX-License-Identifier: Apache-2.0
"""Initial weights as a function of seed and name.

whole        [rows, columns] fp32     the matrix of the whole model, drawn on the parameter's device
parameter    [rows/tp, columns] or [rows, columns/tp], params_dtype

Each matrix is drawn from its own stream, named by the seed and its name in the whole model, and then divided over the
tensor-parallel ranks. Megatron draws in the order of construction, so its weights depend on the pipeline's division.
"""

import hashlib
import math

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


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
