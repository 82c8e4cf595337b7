# SPDX-License-Identifier: Apache-2.0
"""What the active shape costs and saves beside stock Transformer Engine, and what stock Transformer Engine does without it.

    bash tests/gpu/one_card.sh 2 benchmarks/active_shape.py                     # two ranks on one GPU
    torchrun --nproc-per-node 2 benchmarks/active_shape.py                      # a GPU for each rank

The work is an MLP (norm, column layer, GELU, row layer; forward and backward), bf16, hidden 4096, capacity 8192. Stock and own layers
take turns on the same buffers, so that both sides see the same machine. Medians.
"""

import argparse
import ctypes
import importlib.metadata
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))

import stand
import torch
import torch.distributed as dist
from transformer_engine.pytorch.module import base as te_base

from megatron_dyn import userbuffers as ub


class Registrations:
    """Counts the lines that Transformer Engine prints on rank 0 when it registers a buffer, below Python's own streams."""

    def __enter__(self) -> "Registrations":
        sys.stdout.flush()
        self.file, self.saved = tempfile.TemporaryFile(), os.dup(1)
        os.dup2(self.file.fileno(), 1)
        return self

    def __exit__(self, *error: object) -> None:
        ctypes.CDLL(None).fflush(None)
        sys.stdout.flush()
        os.dup2(self.saved, 1)
        os.close(self.saved)
        self.file.seek(0)
        self.text = self.file.read().decode()
        self.count = sum("UBuf " in line for line in self.text.splitlines())


def microseconds(call, times: int = 20000) -> float:
    """Median over ten rounds of the host time of one call."""
    rounds = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(times // 10):
            call()
        rounds.append((time.perf_counter() - begin) / (times // 10) * 1e6)
    return statistics.median(rounds)


def milliseconds(steps: dict, rounds: int) -> dict:
    """Median time of each named step; the steps take turns in a random order, all ranks together, five at a time so that launching
    runs ahead as it does in training."""
    taken: dict = {name: [] for name in steps}
    together = random.Random(1)
    for turn in range(rounds + 1):
        for name in together.sample(list(steps), len(steps)):
            torch.cuda.synchronize()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(5):
                steps[name]()
            torch.cuda.synchronize()
            if turn:  # the first one warms up
                taken[name].append((time.perf_counter() - begin) * 1e3 / 5)
    return {name: statistics.median(values) for name, values in taken.items()}


def peak(step) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def taken_by(make) -> int:
    """Bytes of the card that a call takes, outside PyTorch's allocator, by all ranks on it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    before = torch.cuda.mem_get_info()[0]
    dist.barrier()
    make()
    torch.cuda.synchronize()
    dist.barrier()
    return before - torch.cuda.mem_get_info()[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    hidden, capacity = arguments.hidden, arguments.capacity
    _, tp = stand.start()
    bootstrap = dist.get_backend()
    config = stand.settings(tp, hidden, 4 * hidden, overlap=True)
    generator = torch.Generator(device="cuda").manual_seed(0)
    inputs = {T: (stand.data(generator, T, hidden), stand.data(generator, T, hidden)) for T in (capacity, capacity // 2, capacity // 4, 2 * tp)}

    stand.say(f"Transformer Engine {importlib.metadata.version('transformer-engine')}, {torch.cuda.get_device_name()}, TP {tp}, hidden {hidden}, capacity {capacity}, bf16\n")
    stand.say("Stock Transformer Engine, without this package:")

    def stock_initialize() -> None:
        mode = te_base.UserBufferQuantizationMode.NONE
        te_base.initialize_ub([capacity, hidden], tp, quantization_modes=[mode], dtype=torch.bfloat16, bootstrap_backend=bootstrap)

    stock_initialize()  # what the first one takes besides (process groups, CUDA modules) belongs to neither side
    dist.barrier()
    te_base.destroy_ub()
    stock_registers = taken_by(stock_initialize)
    stock = stand.Mlp(config, ours=False)
    stock.step(*inputs[capacity])
    stock_peak = peak(lambda: stock.step(*inputs[capacity]))
    try:
        stock.step(*inputs[capacity // 2])
        torch.cuda.synchronize()
        stand.say(f"  T = {capacity // 2}: ran, which was not expected")
    except Exception as error:
        stand.say(f"  T = {capacity // 2} with buffers for {capacity}: {type(error).__name__}: {' '.join(str(error).split())[:240]}")
    dist.barrier()
    torch.cuda.synchronize()
    del stock
    te_base.destroy_ub()

    own_registers = taken_by(lambda: ub.initialize_ub([capacity, hidden], tp, bootstrap_backend=bootstrap, backend="te"))
    manager = ub.current()
    own = stand.Mlp(config)
    own.step(*inputs[capacity])
    own_peak = peak(lambda: own.step(*inputs[capacity]))
    stock = stand.Mlp(config, ours=False)  # on the same communicators

    with Registrations() as after:
        steps = {
            "stock, T = capacity": lambda: stock.step(*inputs[capacity]),
            "own, T = capacity": lambda: own.step(*inputs[capacity]),
            "own, T = capacity/2": lambda: own.step(*inputs[capacity // 2]),
            "own, T = capacity/4": lambda: own.step(*inputs[capacity // 4]),
        }

        def stock_at_capacity() -> None:
            manager.begin((), capacity)  # stock layers set no shape: the turn before left a smaller one
            stock.step(*inputs[capacity])

        steps["stock, T = capacity"] = stock_at_capacity
        times = milliseconds(steps, arguments.rounds)
    full = times["stock, T = capacity"]
    stand.say("\nA step (median of", arguments.rounds, "turns):")
    for name, value in times.items():
        stand.say(f"  {name:24s}{value:9.2f} ms   {value / full:6.3f} of stock at capacity")

    stand.say("\nSetting the shape (host time of one call):")
    shapes = [[capacity, hidden], [capacity // 2, hidden]]
    fence, manager._fence_changes = manager._fence_changes, False

    def there_and_back() -> None:
        ub.set_ub_active_shape(shapes[1])
        ub.set_ub_active_shape(shapes[0])

    stand.say(f"  another shape, {len(manager.communicators)} communicators      {microseconds(there_and_back) / 2:8.2f} us")
    stand.say(f"  of that, the native call             {microseconds(lambda: manager.backend.set_rows(capacity)):8.2f} us")
    same = shapes[0]
    stand.say(f"  the shape that is set                {microseconds(lambda: ub.set_ub_active_shape(same)):8.2f} us")
    used = tuple(manager.get(name) for name in ("fc1_dgrad", "fc1_wgrad"))
    stand.say(f"  a layer call, shape as before        {microseconds(lambda: manager.begin(used, capacity)):8.2f} us")
    manager._fence_changes = fence
    torch.cuda.synchronize()
    dist.barrier()
    stand.say(f"  a fence, host                        {microseconds(manager.fence, 500):8.2f} us")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    for _ in range(500):
        manager.fence()
    end.record()
    torch.cuda.synchronize()
    stand.say(f"  a fence, on the stream               {start.elapsed_time(end) / 500 * 1e3:8.2f} us")

    stand.say("\nMemory and registration:")
    stand.say(f"  peak of a step at capacity           stock {stock_peak / 2**20:9.1f} MiB, own {own_peak / 2**20:9.1f} MiB")
    stand.say(f"  registered ({'all ranks on the card' if bootstrap == 'gloo' else 'this rank'})  stock {stock_registers / 2**20:9.1f} MiB, own {own_registers / 2**20:9.1f} MiB")
    stand.say(f"  registrations after initialisation   {after.count}")
    dist.barrier()
    ub.destroy_ub()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
