# SPDX-License-Identifier: Apache-2.0
"""A whole GPT with overlap, T changing every step: under skew the same gradients as calm, and the losses of the model without overlap.

    TURNS=1 bash tests/gpu/one_card.sh 2 tests/gpu/whole_model.py
    NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 bash tests/gpu/one_card.sh 2 tests/gpu/whole_model.py    # attention's backward without atomics

Attention's backward adds up in any order unless it is told not to, so gradients repeat to the bit only with the second form; what differs
without is printed for the model with and without overlap. No fence may have been needed. Exit status 1 when something is wrong.
"""

import argparse
import os
import random

import stand
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn import userbuffers as ub
from megatron_dyn.layers import gpt_block_spec

VOCABULARY = 1024


def model(tp: int, hidden: int, layers: int, *, overlap: bool, recompute: bool) -> GPTModel:
    again = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1) if recompute else {}
    config = TransformerConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=hidden // 128, num_query_groups=tp, ffn_hidden_size=2 * hidden,
        add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, tensor_model_parallel_size=tp, sequence_parallel=True,
        tp_comm_overlap=overlap, gradient_accumulation_fusion=False, bias_dropout_fusion=False, **again,
    )  # fmt: skip
    made = GPTModel(
        config=config, transformer_layer_spec=gpt_block_spec(config, backend="te"), vocab_size=VOCABULARY, max_sequence_length=4096,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return made.cuda().bfloat16()


def microbatch(T: int) -> tuple:
    generator = torch.Generator().manual_seed(T)
    lengths, left = [], T
    while left:
        lengths.append(min(left, int(torch.randint(16, 500, (1,), generator=generator))))
        left -= lengths[-1]
    ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    tokens = torch.randint(0, VOCABULARY, (1, T), generator=generator).cuda()
    positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    longest = max(lengths)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    return tokens, positions, packed


def step(gpt: GPTModel, T: int, pause=lambda: None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tokens, positions, packed = microbatch(T)
    for parameter in gpt.parameters():
        parameter.grad = None
    pause()
    loss = gpt(tokens, positions, None, labels=tokens.roll(-1, 1), packed_seq_params=packed).float().mean()
    pause()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in gpt.parameters()]


def worst(pairs: list) -> float:
    return max(float(((a.float() - b.float()).norm() / (b.float().norm() + 1e-12)).item()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--capacity", type=int, default=2048)
    arguments = parser.parse_args()
    _, tp = stand.start()
    deterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    manager = ub.initialize_ub([arguments.capacity, arguments.hidden], tp, bootstrap_backend=dist.get_backend(), backend="te")
    good = True
    lengths = [tp * n for n in (4, 65, 130, 257, 500)] + [arguments.capacity]
    for layers, recompute in ((1, False), (2, False), (2, True)):
        gpt = model(tp, arguments.hidden, layers, overlap=True, recompute=recompute)
        bare = model(tp, arguments.hidden, layers, overlap=False, recompute=recompute)
        bare.load_state_dict(gpt.state_dict())
        calm, plain, plain_again = {}, {}, {}
        for T in lengths:
            torch.cuda.synchronize()
            dist.barrier()
            calm[T], plain[T], plain_again[T] = step(gpt, T), step(bare, T), step(bare, T)
        together, pause = random.Random(3), stand.pauses(50, share=0.5, longest=5e6)
        drawn = [together.choice(lengths) for _ in range(arguments.steps)]
        skewed = [(T, step(gpt, T, pause)) for T in drawn]
        torch.cuda.synchronize()
        apart = max(worst(list(zip(gradients, calm[T][1]))) for T, (_, gradients) in skewed)
        plain_apart = max(worst(list(zip(plain[T][1], plain_again[T][1]))) for T in lengths)
        losses = max(abs(float(calm[T][0] / plain[T][0]) - 1) for T in lengths)
        repeats = all(torch.equal(loss, calm[T][0]) for T, (loss, _) in skewed)
        right = repeats and losses < 1e-3 and (apart == 0.0 if deterministic else apart < 1e-2) and manager.fences == 0
        right = stand.everywhere(right)
        good &= right
        stand.say(
            f"{layers} layers{', recomputed' if recompute else '':12s} {arguments.steps} skewed steps: losses repeat {repeats}, gradients apart {apart:.1e} "
            f"(without overlap, the same step twice: {plain_apart:.1e}); loss against no overlap {losses:.1e}; fences {manager.fences}; "
            f"{'ok' if right else 'WRONG'}"
        )
        del gpt, bare, calm, plain, plain_again, skewed
    dist.barrier()
    ub.destroy_ub()
    stand.say("all right" if good else "SOMETHING IS WRONG")
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
