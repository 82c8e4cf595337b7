# SPDX-License-Identifier: Apache-2.0
"""Megatron's schedules with its own exchange of variable shapes and with the planned exchange: messages, synchronisations, time of a step.

    python benchmarks/pipeline.py [--pp 4] [--vpp 1 2] [--microbatches 8] [--tokens 8 16] [--pairs 40] [--output FILE.md]

The ranks run on gloo on this machine. Both ways run in the same processes on the same model and microbatches, in turn (which of the two goes
first alternates), so that whatever else the machine does meets both; a pair gives one ratio. Milliseconds are medians over the pairs, of
forward and backward between two barriers. Counts are of one step, over all ranks, by wrapping the functions that are called.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore", module="megatron.core")  # of packages that are not installed

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication

from megatron_dyn import device
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.calibrate import microbatch_of
from megatron_dyn.training.model import build_model, transformer_config
from megatron_dyn.training.optimizer import wrap_models
from megatron_dyn.training.step import Stepper

VOCABULARY = 128


class StockSchedule:
    """Megatron's schedule with its own communicator, as it must be set for variable T: outputs are kept, since its sends do not keep them."""

    communicator = None

    def __init__(self, config):
        self._config, self._schedule = config, get_forward_backward_func()

    def run(self, forward_step, models, iterators, *, T, forward_only):
        freed, self._config.deallocate_pipeline_outputs = self._config.deallocate_pipeline_outputs, False
        try:
            return self._schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=models,
                num_microbatches=len(T),
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        finally:
            self._config.deallocate_pipeline_outputs = freed


@contextmanager
def counted(counts: Counter):
    """Inside, counts messages by kind, synchronisations of the device and shapes copied to the host."""
    originals = c10d.isend, c10d.irecv, dist.isend, dist.irecv, torch.cuda.synchronize, torch.Tensor.tolist

    def sending(function, way):
        def wrapped(tensor, *args, **kwargs):
            counts[f"shape messages {way}" if tensor.dtype == torch.int64 and tensor.numel() == 3 else f"tensors {way}"] += 1
            return function(tensor, *args, **kwargs)

        return wrapped

    def synchronize(*args):
        counts["device synchronisations"] += sys._getframe(1).f_globals["__name__"] == p2p_communication.__name__
        return originals[4](*args)

    def tolist(self):
        counts["shapes copied to the host"] += sys._getframe(1).f_globals["__name__"] == p2p_communication.__name__
        return originals[5](self)

    c10d.isend = dist.isend = sending(originals[0], "sent")  # both names: P2POp compares them
    c10d.irecv = dist.irecv = sending(originals[1], "received")
    torch.cuda.synchronize, torch.Tensor.tolist = synchronize, tolist
    try:
        yield
    finally:
        c10d.isend, c10d.irecv, dist.isend, dist.irecv, torch.cuda.synchronize, torch.Tensor.tolist = originals


COUNTED = (
    "tensors sent", "tensors received", "shape messages sent", "shape messages received", "device synchronisations", "shapes copied to the host",
)  # fmt: skip


def worker(rank: int, wanted: argparse.Namespace, vpp: int, rendezvous: str, answers) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=wanted.pp)
    device.install_cpu_replacements()
    parallel_state.initialize_model_parallel(1, wanted.pp, vpp if vpp > 1 else None)
    device.seed_everything(1)
    stepper, microbatches = parts(wanted, vpp)
    config = stepper.models[0].config
    ways = {"stock": StockSchedule(config), "planned": stepper.schedule}

    def step(way: str) -> tuple[float, float]:
        stepper.schedule = ways[way]
        for model in stepper.models:
            model.zero_grad_buffer()
        dist.barrier()
        began = time.perf_counter()
        loss, _ = stepper.forward_backward(microbatches, forward_only=False)
        dist.barrier()
        return time.perf_counter() - began, loss.mean

    found = {}
    for way in ways:
        counts = Counter()
        with counted(counts):
            _, loss = step(way)
        total = torch.tensor([counts[name] for name in COUNTED])
        dist.all_reduce(total)
        gradients = torch.cat([parameter.main_grad.flatten() for model in stepper.models for parameter in model.parameters()]).clone()
        found[way] = dict(zip(COUNTED, total.tolist())) | {"loss": loss, "gradients": gradients}
    equal = torch.tensor(torch.equal(found["stock"].pop("gradients"), found["planned"].pop("gradients")))
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    pairs = []
    for number in range(wanted.warmup + wanted.pairs):
        order = ("stock", "planned") if number % 2 else ("planned", "stock")
        taken = {way: step(way)[0] for way in order}
        if number >= wanted.warmup:
            pairs.append((taken["stock"], taken["planned"]))
    if rank == 0:
        answers.put({"counts": found, "pairs": pairs, "equal": bool(equal)})
    dist.barrier()
    dist.destroy_process_group()


def parts(wanted: argparse.Namespace, vpp: int):
    """Model and microbatches: lengths alternate between the wanted ones."""
    settings = {
        "num-layers": wanted.pp * vpp * wanted.layers, "hidden-size": wanted.hidden, "num-attention-heads": 4, "vocab-size": VOCABULARY,
        "max-tokens-per-microbatch": max(wanted.tokens), "make-vocab-size-divisible-by": 8, "data-path": "none", "global-batch-size": 1,
        "lr": 1, "train-iters": 1,
        "pipeline-model-parallel-size": wanted.pp, **({"num-virtual-stages-per-pipeline-rank": vpp} if vpp > 1 else {}),
    }  # fmt: skip
    run = parse_arguments([word for flag, value in settings.items() for word in (f"--{flag}", str(value))], world_size=wanted.pp)
    config = transformer_config(run.model, run.parallel, precision=run.precision)
    chunks = build_model(config, run.model, vocab_size=VOCABULARY, backend="local")
    stepper = Stepper(wrap_models(chunks, config, run.parallel))
    lengths = [wanted.tokens[number % len(wanted.tokens)] for number in range(wanted.microbatches)]
    return stepper, [microbatch_of([length], run, VOCABULARY) for length in lengths]


def measured(wanted: argparse.Namespace, vpp: int) -> dict:
    """Results of one schedule, from rank 0."""
    answers = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (wanted, vpp, str(Path(folder) / "rendezvous"), answers), nprocs=wanted.pp)
        return answers.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--vpp", type=int, nargs="+", default=[1, 2], help="chunks on each rank: one table row for each number")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (a multiple of --pp)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16], help="T of the microbatches, in turn")
    parser.add_argument("--layers", type=int, default=1, help="layers of a chunk")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=40, help="steps of each way")
    parser.add_argument("--warmup", type=int, default=4, help="pairs that do not count")
    parser.add_argument("--output", type=Path, help="write the tables there, too")
    wanted = parser.parse_args()
    named = {vpp: "1F1B" if vpp == 1 else f"interleaved, VPP {vpp}, overlapped" for vpp in wanted.vpp}
    results = {vpp: measured(wanted, vpp) for vpp in wanted.vpp}
    T = ", ".join(map(str, wanted.tokens))
    lines = [f"PP {wanted.pp}, {wanted.microbatches} microbatches of T = {T} in turn, hidden {wanted.hidden}; counts of one step over all ranks"]
    heads = [f"{named[vpp]}: {way}" for vpp in results for way in ("stock", "planned")]
    lines += ["", "| counted | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in COUNTED:
        numbers = [str(result["counts"][way][name]) for result in results.values() for way in ("stock", "planned")]
        lines.append(f"| {name} | " + " | ".join(numbers) + " |")
    lines += ["", "| schedule | stock ms | planned ms | planned / stock, median of pairs | quartiles | gradients |", "|---|---|---|---|---|---|"]
    for vpp, result in results.items():
        ratios = sorted(planned / stock for stock, planned in result["pairs"])
        first, middle, third = statistics.quantiles(ratios, n=4)
        stock, planned = (1e3 * statistics.median(column) for column in zip(*result["pairs"]))
        equal = "equal bits" if result["equal"] else "DIFFERENT"
        lines.append(f"| {named[vpp]} | {stock:.1f} | {planned:.1f} | {middle:.3f} | {first:.3f} - {third:.3f} | {equal} |")
    print("\n".join(lines))
    if wanted.output:
        wanted.output.write_text("\n".join(lines) + "\n")
    return 0 if all(result["equal"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
