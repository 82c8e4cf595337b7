# SPDX-License-Identifier: Apache-2.0
"""What the scripts of this folder and the UserBuffers benchmark share: ranks, layers, data, and an fp32 reference.

x, y       [T, hidden] of all ranks; a rank has [T/tp, hidden]
w1         [ffn, hidden], column-parallel      w2         [hidden, ffn], row-parallel
y = w2 gelu(w1 layer_norm(x))
"""

import contextlib
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from megatron_dyn import device
from megatron_dyn.layers import te_overlap

RECIPES = {"bf16": None, "fp8 delayed": DelayedScaling(), "fp8 current": Float8CurrentScaling()}


def start() -> tuple[int, int]:
    """(rank, ranks), with all ranks in one tensor-parallel group."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = device.distributed_backend()
    torch.cuda.set_device(0 if backend == "gloo" else int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    if backend == "gloo":
        device.share_a_card_over_gloo()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    return rank, world


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def everywhere(good: bool) -> bool:
    """Whether all ranks find it good; they wait for each other."""
    verdicts: list = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, bool(good))
    return all(verdicts)


def settings(tp: int, hidden: int, ffn: int, *, overlap: bool, **flags: bool) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=tp, add_bias_linear=False, bf16=True,
        params_dtype=torch.bfloat16, tensor_model_parallel_size=tp, sequence_parallel=True, tp_comm_overlap=overlap,
        gradient_accumulation_fusion=False, **flags,
    )  # fmt: skip


class Mlp:
    """Column and row layer of a transformer's MLP, cut over the ranks from the same full weights.

    Args:
        norm: fuse the layer norm into the column layer (as Megatron does), or leave the norm out.
        ours: the layers of this package; otherwise Megatron's own.
    """

    def __init__(self, config: TransformerConfig, *, norm: bool = True, ours: bool = True, seed: int = 0):
        group, tp, rank = parallel_state.get_tensor_model_parallel_group(), config.tensor_model_parallel_size, dist.get_rank()
        generator = torch.Generator(device="cuda").manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, device="cuda").mul_(0.02).bfloat16()  # noqa: E731
        self.w1, self.w2, self.norm = draw(config.ffn_hidden_size, config.hidden_size), draw(config.hidden_size, config.ffn_hidden_size), norm
        prefix, room = ("Overlap", te_overlap) if ours else ("", megatron_te)
        column = getattr(room, f"{prefix}TELayerNormColumnParallelLinear" if norm else f"{prefix}TEColumnParallelLinear")
        row = getattr(room, f"{prefix}TERowParallelLinear")
        common = dict(config=config, init_method=torch.nn.init.zeros_, bias=False, skip_bias_add=False, is_expert=False, tp_group=group)
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.fc1 = column(hidden, ffn, gather_output=False, tp_comm_buffer_name="fc1", **common)
        self.fc2 = row(ffn, hidden, input_is_parallel=True, tp_comm_buffer_name="fc2", **common)
        with torch.no_grad():
            self.fc1.weight.copy_(self.w1.chunk(tp, 0)[rank])
            self.fc2.weight.copy_(self.w2.chunk(tp, 1)[rank])
        self.tp, self.rank, self.group = tp, rank, group

    def autocast(self, recipe):
        return te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=self.group) if recipe else contextlib.nullcontext()

    def forward(self, x: torch.Tensor, recipe=None) -> torch.Tensor:
        with self.autocast(recipe):
            return self.fc2(F.gelu(self.fc1(x)[0], approximate="tanh"))[0]

    def step(self, x_TH: torch.Tensor, g_TH: torch.Tensor, recipe=None, pause=lambda: None) -> list[torch.Tensor]:
        """Output, and the gradients of input, w1 and w2, of this rank."""
        self.fc1.weight.grad = self.fc2.weight.grad = None
        x = x_TH.chunk(self.tp, 0)[self.rank].clone().unsqueeze(1).requires_grad_()
        pause()
        y = self.forward(x, recipe)
        pause()
        y.backward(g_TH.chunk(self.tp, 0)[self.rank].unsqueeze(1).contiguous())
        return [y.detach().squeeze(1), x.grad.squeeze(1), self.fc1.weight.grad, self.fc2.weight.grad]

    def reference(self, x_TH: torch.Tensor, g_TH: torch.Tensor) -> list[torch.Tensor]:
        """The same in fp32 on one rank, cut as the ranks hold it."""
        x, w1, w2 = (t.float().requires_grad_() for t in (x_TH.detach(), self.w1, self.w2))
        normed = F.layer_norm(x, x.shape[-1:]) if self.norm else x
        y = F.linear(F.gelu(F.linear(normed, w1), approximate="tanh"), w2)
        y.backward(g_TH.float())
        cut = lambda t, dim: t.chunk(self.tp, dim)[self.rank]  # noqa: E731
        return [cut(y.detach(), 0), cut(x.grad, 0), cut(w1.grad, 0), cut(w2.grad, 1)]


def errors(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> torch.Tensor:
    """|found - wanted| / |wanted| of each tensor, on the device (nothing waits)."""
    return torch.stack([(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found, wanted)])


def data(generator: torch.Generator, tokens: int, hidden: int) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=generator, device="cuda").bfloat16()


def pauses(seed: int, share: float = 0.3, longest: float = 2e6):
    """A function that delays this rank's stream at random: every rank by its own."""
    mine = random.Random(seed * 1000 + dist.get_rank())

    def pause() -> None:
        if mine.random() < share:
            torch.cuda._sleep(int(mine.random() * longest))

    return pause
