# SPDX-License-Identifier: Apache-2.0
"""Real tokens a second of the ways of making microbatches, on one model, with the training loop of a run; one table.

    python benchmarks/throughput.py --data-path mix=PREFIX gsm8k=PREFIX --vocab-size 32000 --model 0.6b --output runs/throughput
    torchrun --nproc-per-node 8 benchmarks/throughput.py ... --run-flags "--tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap"

The model is built once; each cell (corpus, budget, way) then trains some steps of the same documents with `training.loop.Trainer`:
planning, prefetch, agreement, update and record are all in the time. The first steps of a cell are left out.
"pad-to-max" would take minutes a step on a heavy tail: it runs the first documents of each step only, and its rows a second, which do
not depend on the documents, times the share of real tokens in the whole steps are its real tokens a second.

MFU counts the operations of the real tokens (attention by the squared lengths that it spans, no recomputation) against the rate of a bf16
product of 8192 x 8192 x 8192 measured in the same process. Writes throughput.json, and the table to standard output.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import megatron_dyn
from megatron_dyn import device
from megatron_dyn.corpus import open_corpus
from megatron_dyn.planning import Planner, TokenBudgetBatchSampler
from megatron_dyn.planning.config import MICROBATCHINGS
from megatron_dyn.training.agreed_steps import step_meetings
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.distributed import initialize, world_size_from_environment
from megatron_dyn.training.inputs import prepare_device
from megatron_dyn.training.launch import run_model
from megatron_dyn.training.loop import Trainer
from megatron_dyn.training.model import padded_vocab_size
from megatron_dyn.training.optimizer import build_optimizer, wrap_models
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.training.step import Stepper
from megatron_dyn.training.stop_request import StopRequest

MODELS = {
    "tiny": "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4",
    "0.6b": "--num-layers 10 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --num-query-groups 8",
    "3b": "--num-layers 27 --hidden-size 3072 --ffn-hidden-size 8192 --num-attention-heads 24 --num-query-groups 8",
}
PRECISIONS = {"fp32": "", "bf16": "--bf16", "fp8": "--bf16 --fp8 hybrid"}
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


class Records:
    """Takes the place of the run's log: keeps the records of steps."""

    enabled = False

    def __init__(self) -> None:
        self.steps: list = []

    def step(self, record, plan) -> None:
        self.steps.append((record, plan))

    def notice(self, text: str) -> None:
        print(text, file=sys.stderr)

    warning = notice


def matrix_rate(size: int = 8192, rounds: int = 20) -> float | None:
    """Operations a second of a square bf16 product; None without a GPU."""
    if not device.has_gpu():
        return None
    a, b = (torch.randn(size, size, device=device.compute_device(), dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(rounds):
        begin = device.time_mark()
        a @ b
        end = device.time_mark()
        device.synchronize()
        seconds.append(device.seconds_between(begin, end))
    return 2 * size**3 / statistics.median(seconds)


class Harness:
    """One model, and cells that train it."""

    def __init__(self, run: RunConfig, vocab_size: int, steps: int, warmup: int):
        self.run, self.vocab_size, self.count, self.warmup = run, vocab_size, steps, warmup
        backend, layers = prepare_device(run)
        initialize(run.parallel, backend=backend, seed=run.training.seed)
        config, chunks, _ = run_model(run, vocab_size=vocab_size, layers=layers, process_group_backend=backend)
        self.parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        self.models = wrap_models(chunks, config, run.parallel)
        self.optimizer, self.scheduler = build_optimizer(run, self.models)
        padded = padded_vocab_size(vocab_size, run.model.make_vocab_size_divisible_by, run.parallel.tensor_model_parallel_size)
        self.operations = run.model.cost_model(padded)
        self.rate = matrix_rate()
        self.ranks = run.parallel.data_parallel_size(world_size_from_environment())

    def trainer(
        self, corpus, *, budget: int, documents: int, steps: int, way: str = "dynamic", bucket: int = 1, begin: int = 0
    ) -> tuple[Trainer, Records]:
        """A training loop of `steps` steps from step `begin` of the documents on, and where its records go."""
        data = dataclasses.replace(
            self.run.data, max_tokens_per_microbatch=budget, microbatching=way, token_bucket=bucket, global_batch_size=documents
        )
        run = dataclasses.replace(self.run, data=data, training=dataclasses.replace(self.run.training, train_iters=begin + steps))
        planner = Planner(corpus.lengths, run.plan_config(data_parallel_size=self.ranks), fingerprint=corpus.fingerprint)
        rank, records = parallel_state.get_data_parallel_rank(), Records()
        sampler = TokenBudgetBatchSampler(planner, data_parallel_rank=rank)
        sampler.step = begin
        made = Trainer(
            run,
            stepper=Stepper(self.models, self.optimizer, self.scheduler),
            corpus=corpus,
            planner=planner,
            sampler=sampler,
            evaluator=None,
            checkpoints=None,
            **step_meetings(run, planner, corpus, 0),
            log=records,
            data_parallel_rank=rank,
            pad_token_id=0,
            progress={"iteration": begin, "consumed_tokens": 0, "consumed_documents": 0},
        )
        return made, records

    def cell(self, corpus, *, budget: int, way: str, bucket: int, documents: int, profile: Path | None = None) -> dict:
        """Train some steps in one way; what was measured."""
        trainer, records = self.trainer(corpus, budget=budget, documents=documents, steps=self.warmup + self.count, way=way, bucket=bucket)
        run = trainer.run
        if device.has_gpu():
            torch.cuda.empty_cache()
        device.memory_stats(reset_peak=True)
        retries = _retries()
        stop = StopRequest()
        began = time.perf_counter()
        if profile is None:
            trainer.train(stop)
        else:
            _profiled(trainer, stop, profile)
        wall = time.perf_counter() - began
        stop.close()
        found = self._measured(records.steps[self.warmup :], wall, retries)
        if documents != self.run.data.global_batch_size:
            whole = dataclasses.replace(run, data=dataclasses.replace(run.data, global_batch_size=self.run.data.global_batch_size))
            planner = Planner(corpus.lengths, whole.plan_config(data_parallel_size=self.ranks), fingerprint=corpus.fingerprint)
            stats = [planner.plan(step).stats for step in range(self.warmup, self.warmup + self.count)]
            share = sum(of.tokens for of in stats) / sum(of.slots for of in stats)
            factor = share * found["slot_tokens_per_second"] / found["tokens_per_second"]
            found |= {"tokens_per_second": found["tokens_per_second"] * factor, "spread": [value * factor for value in found["spread"]]}
            found["mfu"] = None  # of other documents
        return found

    def _measured(self, steps: list, wall: float, retries: int) -> dict:
        seconds = [record.step_time for record, _ in steps]
        speeds = [record.num_tokens / record.step_time for record, _ in steps]
        total, tokens = sum(seconds), sum(record.num_tokens for record, _ in steps)
        slots = sum(plan.stats.slots for _, plan in steps)
        operations = sum(self.operations.of_sums(plan.stats.tokens, plan.stats.squared_tokens) for _, plan in steps)
        memory = device.memory_stats() or {}
        return {
            "steps": len(steps),
            "tokens_per_second": tokens / total,
            "spread": [min(speeds), max(speeds)],
            "slot_tokens_per_second": slots / total,
            "step_seconds": statistics.median(seconds),
            "microbatches": statistics.mean(len(record.T) for record, _ in steps),
            "distinct_T": len({length for record, _ in steps for length in record.T}),
            "mfu": operations / total / dist.get_world_size() / self.rate if self.rate else None,
            "data_share": sum(record.data_time for record, _ in steps) / total,
            "peak_allocated_gib": memory.get("peak_allocated", 0) / 2**30,
            "peak_reserved_gib": memory.get("peak_reserved", 0) / 2**30,
            "allocator_retries": _retries() - retries,
            "last_loss": steps[-1][0].lm_loss,
            "wall_seconds": wall,
        }


def _retries() -> int:
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if device.has_gpu() else 0


def _profiled(trainer: Trainer, stop: StopRequest, path: Path) -> None:
    """Train under torch's profiler; the trace, and a table of kernels and of the host's waits, of all steps."""
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if device.has_gpu() else [])
    with torch.profiler.profile(activities=activities) as found:
        trainer.train(stop)
    if dist.get_rank() == 0:
        found.export_chrome_trace(str(path.with_suffix(".trace.json")))
        key = "self_device_time_total" if device.has_gpu() else "self_cpu_time_total"
        path.with_suffix(".profile.txt").write_text(found.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=90))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-path", nargs="+", required=True, metavar="NAME=PREFIX", help=".bin/.idx corpora")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--budgets", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--ways", nargs="+", default=[*MICROBATCHINGS, "dynamic/256"], help="a number behind / is a --token-bucket")
    parser.add_argument("--documents", type=int, default=512, help="in a step")
    parser.add_argument("--documents-padded", type=int, default=32, help="in a step of pad-to-max")
    parser.add_argument("--documents-per-microbatch", type=int, default=8, help="of fixed-count")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further cell after so long")
    parser.add_argument("--profile", action="store_true", help="one more round of dynamic steps under torch's profiler")
    parser.add_argument("--run-flags", default="", help="more flags of pretrain_gpt_thd.py")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    own = parser.parse_args()
    began = time.perf_counter()
    flags = (
        f"{MODELS[own.model]} {PRECISIONS[own.precision]} {RECOMPUTE[own.recompute]} --swiglu --untie-embeddings-and-output-weights "
        f"--data-path none --vocab-size {own.vocab_size} --max-tokens-per-microbatch {max(own.budgets)} --global-batch-size {own.documents} "
        f"--documents-per-microbatch {own.documents_per_microbatch} --lr 1e-4 --train-iters 100000 --eval-iters 0 {own.run_flags}"
    )
    harness = Harness(parse_arguments(flags.split(), world_size=world_size_from_environment()), own.vocab_size, own.steps, own.warmup)
    first = dist.get_rank() == 0
    rows = []
    if first:
        own.output.mkdir(parents=True, exist_ok=True)
        rate = f", {harness.rate / 1e12:.0f} TFLOP/s in a bf16 product" if harness.rate else ""
        print(f"{own.model}: {harness.parameters / 1e6:.0f}M parameters, {own.precision}, recompute {own.recompute}; {device.device_name()}{rate}")
        print(f"{'corpus':<10}{'B':>7} {'way':<14}{'tokens/s':>10}{'(min, max)':>18}{'slots/s':>10}{'step s':>8}{'mb':>6}{'T':>5}{'MFU':>7}{'data':>7}{'GiB':>7}{'retries':>8}")
    for name, prefix in (word.split("=", 1) for word in own.data_path):
        corpus = open_corpus([prefix], split="100", seed=1, vocab_size=own.vocab_size).train
        for budget in own.budgets:
            for word in own.ways:
                if time.perf_counter() - began > own.seconds:
                    continue
                way, _, bucket = word.partition("/")
                documents = own.documents_padded if way == "pad-to-max" else own.documents
                found = harness.cell(corpus, budget=budget, way=way, bucket=int(bucket or 1), documents=documents)
                rows.append({"corpus": name, "budget": budget, "way": word, "documents": documents, **found})
                if first:
                    print(line(rows[-1]), flush=True)
                    write(own, harness, rows)
    if own.profile:
        harness.cell(corpus, budget=own.budgets[-1], way="dynamic", bucket=1, documents=own.documents, profile=own.output / f"{own.model}-{own.precision}")
    dist.barrier()
    dist.destroy_process_group()


def line(row: dict) -> str:
    low, high = (round(value) for value in row["spread"])
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
    return (
        f"{row['corpus']:<10}{row['budget']:>7} {row['way']:<14}{row['tokens_per_second']:>10.0f}{f'({low}, {high})':>18}{row['slot_tokens_per_second']:>10.0f}"
        f"{row['step_seconds']:>8.3f}{row['microbatches']:>6.0f}{row['distinct_T']:>5}{mfu:>7}{row['data_share']:>7.1%}{row['peak_reserved_gib']:>7.1f}"
        f"{row['allocator_retries']:>8}"
    )


def write(own: argparse.Namespace, harness: Harness, rows: list[dict]) -> None:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(own).items() if name not in ("output", "seconds")}
    settings["data_path"] = [word.split("=", 1)[0] for word in own.data_path]
    about = {
        "device": device.device_name(), "parameters": harness.parameters, "bf16_product_flops": harness.rate, "ranks": dist.get_world_size(),
        "torch": torch.__version__, "megatron_dyn": megatron_dyn.__version__, "settings": settings,
    }  # fmt: skip
    path = own.output / f"{own.model}-{own.precision}-{own.recompute}.json"
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
