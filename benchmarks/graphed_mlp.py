# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs, one for each T, would gain and cost: the MLPs of a model, forward and backward, with and without them.

    python benchmarks/graphed_mlp.py --layers 10 --hidden-size 2048 --ffn-hidden-size 5504

Attention cannot be captured: what it does depends on where documents begin. The MLPs are the largest part that can be. Each length is
captured for itself (`transformer_engine.pytorch.make_graphed_callables`), as buckets of T would be. Printed: milliseconds a microbatch
until the host is free again and until the device is done, without and with graphs, and the memory that the graphs of one T keep.
"""

import argparse
import gc
import statistics
import time

import torch
import transformer_engine.pytorch as te

from megatron_dyn.layers.te_swiglu import _SwiGLU


class Block(torch.nn.Module):
    """Norm, linear, SwiGLU, linear, residual."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        settings = dict(bias=False, params_dtype=torch.bfloat16)
        self.fc1 = te.LayerNormLinear(hidden, 2 * ffn, normalization="RMSNorm", **settings)
        self.fc2 = te.Linear(ffn, hidden, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(_SwiGLU.apply(self.fc1(x)))


def timed(layers: list, x: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Median milliseconds until the host, and until the device is through one forward and backward."""
    host, device = [], []
    gradient = torch.randn_like(x)
    for turn in range(rounds + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        out = x
        for layer in layers:
            out = layer(out)
        out.backward(gradient)
        through = time.perf_counter()
        torch.cuda.synchronize()
        if turn >= 3:
            host.append((through - began) * 1e3)
            device.append((time.perf_counter() - began) * 1e3)
    return statistics.median(host), statistics.median(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--ffn-hidden-size", type=int, default=5504)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=20)
    own = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {own.layers} MLPs of {own.hidden_size} x {own.ffn_hidden_size}, bf16")
    print(f"{'T':>6}{'host ms':>10}{'device ms':>11}{'graphs: host':>14}{'device':>9}{'GiB kept':>10}")
    for T in own.lengths:
        layers = [Block(own.hidden_size, own.ffn_hidden_size).cuda() for _ in range(own.layers)]
        x = torch.randn(T, 1, own.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        plain = timed(layers, x, own.rounds)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graphed = te.make_graphed_callables(tuple(layers), tuple((x.detach().clone().requires_grad_(),) for _ in layers), num_warmup_iters=3)
        with_graphs = timed(list(graphed), x, own.rounds)
        gc.collect()
        torch.cuda.empty_cache()
        kept = (torch.cuda.memory_reserved() - before) / 2**30
        print(f"{T:>6}{plain[0]:>10.2f}{plain[1]:>11.2f}{with_graphs[0]:>14.2f}{with_graphs[1]:>9.2f}{kept:>10.2f}", flush=True)
        del layers, graphed, x
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
