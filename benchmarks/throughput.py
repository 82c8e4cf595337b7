# SPDX-License-Identifier: Apache-2.0
"""Real tokens a second of the ways of making microbatches, on one model, with the training loop of a run; one table.

    python benchmarks/throughput.py --data-path mix=PREFIX gsm8k=PREFIX@2 --vocab-size 32000 --model 0.6b --output runs/throughput
    torchrun --nproc-per-node 8 benchmarks/throughput.py ... --run-flags "--tensor-model-parallel-size 8 --sequence-parallel --tp-comm-overlap"

The model is built once; for each recomputation, corpus and budget, all ways then train the same documents, a few steps each in turn,
with `training.loop.Trainer`: planning, prefetch, agreement, update and record are all in the time. The first step of a turn is left
out. "/ dynamic" compares with the first way step by step (the same documents), and is the median of the steps. "pad-to-max" would
take minutes a step on a heavy tail: it runs the first documents of each step only, about as many rows as the others, and its rows a
second, which do not depend on the documents, times the share of real tokens in the whole steps are its real tokens a second.

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
from models import MODELS, PRECISIONS

import megatron_dyn
from megatron_dyn import device, userbuffers
from megatron_dyn.corpus import open_corpus
from megatron_dyn.planning import Planner, TokenBudgetBatchSampler
from megatron_dyn.planning.config import MICROBATCHINGS
from megatron_dyn.training.agreed_steps import step_meetings
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.build import run_model
from megatron_dyn.training.config import DataConfig
from megatron_dyn.training.distributed import initialize, world_size_from_environment
from megatron_dyn.training.inputs import prepare_device
from megatron_dyn.training.loop import Trainer
from megatron_dyn.training.model import padded_vocab_size
from megatron_dyn.training.optimizer import build_optimizer, wrap_models
from megatron_dyn.training.run_config import RunConfig
from megatron_dyn.training.step import Stepper
from megatron_dyn.training.stop_request import StopRequest

RECOMPUTE = {
    "none": dict(recompute_granularity=None, recompute_method=None, recompute_num_layers=None, recompute_modules=None),
    "mlp": dict(recompute_granularity="selective", recompute_method=None, recompute_num_layers=None, recompute_modules=["mlp"]),
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, recompute_modules=None),
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


def settings_of_way(run: RunConfig, corpus, *, budget: int, documents: int, way: str, ranks: int) -> tuple[RunConfig, Planner]:
    """Of one way of making microbatches; "dynamic/256" has that token bucket."""
    way, _, bucket = way.partition("/")
    changes = dict(max_tokens_per_microbatch=budget, microbatching=way, token_bucket=int(bucket or 1), global_batch_size=documents)
    if way != "fixed-count":
        changes["documents_per_microbatch"] = DataConfig.documents_per_microbatch
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, **changes))
    return run, Planner(corpus.lengths, run.plan_config(data_parallel_size=ranks), fingerprint=corpus.fingerprint)


class Harness:
    """One model, and cells that train it."""

    def __init__(self, run: RunConfig, vocab_size: int, steps: int, warmup: int):
        self.run, self.vocab_size, self.count, self.warmup = run, vocab_size, steps, warmup
        backend, layers = prepare_device(run)
        initialize(run.parallel, backend=backend, seed=run.training.seed)
        self.config, chunks, _ = run_model(run, vocab_size=vocab_size, layers=layers, process_group_backend=backend)
        self.parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        self.models = wrap_models(chunks, self.config, run.parallel)
        self.optimizer, self.scheduler = build_optimizer(run, self.models)
        padded = padded_vocab_size(vocab_size, run.model.make_vocab_size_divisible_by, run.parallel.tensor_model_parallel_size)
        self.operations = run.model.cost_model(padded)
        self.rate = matrix_rate()
        self.ranks = run.parallel.data_parallel_size(world_size_from_environment())

    def recompute(self, what: str) -> None:
        """From now on recompute this in the backward pass (a key of `RECOMPUTE`); the layers look it up in each forward pass."""
        for module in (module for model in self.models for module in model.modules()):
            if hasattr(module, "recompute_mlp"):
                module.recompute_mlp = what == "mlp"
        vars(self.config).update(RECOMPUTE[what])

    def settings(self, corpus, *, budget: int, documents: int, way: str = "dynamic") -> tuple[RunConfig, Planner]:
        """As `settings_of_way`, of this model and its ranks."""
        return settings_of_way(self.run, corpus, budget=budget, documents=documents, way=way, ranks=self.ranks)

    def trainer(self, corpus, run: RunConfig, planner: Planner, *, begin: int, steps: int) -> tuple[Trainer, Records]:
        """A training loop of `steps` steps from step `begin` of the documents on, and where its records go."""
        run = dataclasses.replace(run, training=dataclasses.replace(run.training, train_iters=begin + steps))
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

    def cells(self, corpus, *, budget: int, ways: list[str], documents: int, rounds: int, until: float):
        """Each way trains `steps` steps a round, in turn, so that a disturbance of the machine meets all of them; rows of the table."""
        made, taken = {}, {way: {"steps": [], "wall": 0.0, "memory": {}, "retries": 0} for way in ways}
        for way in ways:
            run, planner = self.settings(corpus, budget=budget, documents=documents, way=way)
            whole = [planner.plan(step).stats for step in range(self.warmup, self.warmup + self.count)]
            computed = documents
            if way == "pad-to-max":
                rows = planner.longest_piece
                computed = min(documents, max(4, round(sum(of.tokens for of in whole) / len(whole) / rows)))
                run, planner = self.settings(corpus, budget=budget, documents=computed, way=way)
            made[way] = run, planner, computed, whole
        for number in range(rounds):
            for way in ways:
                if time.perf_counter() < until:
                    self._train(corpus, *made[way][:2], begin=number * (self.warmup + self.count), into=taken[way])
        rows = []
        for way in ways:
            if not taken[way]["steps"]:
                continue
            _, _, computed, whole = made[way]
            found = {"way": way, "documents": computed} | self._measured(**taken[way])
            if computed != documents:
                share = sum(of.tokens for of in whole) / sum(of.slots for of in whole)
                factor = share * found["slot_tokens_per_second"] / found["tokens_per_second"]
                found |= {"tokens_per_second": found["tokens_per_second"] * factor, "spread": [value * factor for value in found["spread"]]}
                found["mfu"] = None  # of other documents
            rows.append(found | {"against_dynamic": against(rows[0] if rows else found, found)})
        return rows

    def _train(self, corpus, run: RunConfig, planner: Planner, *, begin: int, into: dict) -> None:
        trainer, records = self.trainer(corpus, run, planner, begin=begin, steps=self.warmup + self.count)
        if device.has_gpu():
            torch.cuda.empty_cache()
        device.memory_stats(reset_peak=True)
        retries, stop, began = _retries(), StopRequest(), time.perf_counter()
        trainer.train(stop)
        device.synchronize()
        into["wall"] += time.perf_counter() - began
        stop.close()
        into["steps"] += records.steps[self.warmup :]
        into["retries"] += _retries() - retries
        for name, value in (device.memory_stats() or {}).items():
            into["memory"][name] = max(value, into["memory"].get(name, 0))

    def _measured(self, *, steps: list, wall: float, memory: dict, retries: int) -> dict:
        seconds = [record.step_time for record, _ in steps]
        speeds = [record.num_tokens / record.step_time for record, _ in steps]
        total, tokens = sum(seconds), sum(record.num_tokens for record, _ in steps)
        slots = sum(plan.stats.slots for _, plan in steps)
        operations = sum(self.operations.of_sums(plan.stats.tokens, plan.stats.squared_tokens) for _, plan in steps)
        return {
            "steps": len(steps),
            "seconds": seconds,
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
            "allocator_retries": retries,
            "last_loss": steps[-1][0].lm_loss,
            "wall_seconds": wall,
        }


def _retries() -> int:
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if device.has_gpu() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-path", nargs="+", required=True, metavar="NAME=PREFIX[@N]", help="corpora; @N: N times as many documents a step")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=["none"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--documents", nargs="+", type=int, default=[128, 256], help="in a step, of each budget")
    parser.add_argument("--ways", nargs="+", default=["dynamic", "dynamic/256", *MICROBATCHINGS[1:]], help="a number behind / is a --token-bucket")
    parser.add_argument("--documents-per-microbatch", type=int, default=8, help="of fixed-count")
    parser.add_argument("--rounds", type=int, default=2, help="all ways take turns so often")
    parser.add_argument("--steps", type=int, default=4, help="measured in a round")
    parser.add_argument("--warmup", type=int, default=1, help="steps of a round that are left out")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing more after so long")
    parser.add_argument("--run-flags", default="", help="more flags of pretrain_gpt_thd.py")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    own = parser.parse_args()
    if len(own.documents) != len(own.budgets):
        parser.error(f"{len(own.documents)} numbers of --documents for {len(own.budgets)} --budgets: give one for each")
    began = time.perf_counter()
    flags = (
        f"{MODELS[own.model]} {PRECISIONS[own.precision]} --swiglu --untie-embeddings-and-output-weights "
        f"--data-path none --vocab-size {own.vocab_size} --max-tokens-per-microbatch {max(own.budgets)} --global-batch-size {max(own.documents)} "
        f"--microbatching fixed-count --documents-per-microbatch {own.documents_per_microbatch} --lr 1e-4 --train-iters 100000 "
        f"--eval-iters 0 {own.run_flags}"
    )
    harness = Harness(parse_arguments(flags.split(), world_size=world_size_from_environment()), own.vocab_size, own.steps, own.warmup)
    first = dist.get_rank() == 0
    rows = []
    if first:
        own.output.mkdir(parents=True, exist_ok=True)
        rate = f", {harness.rate / 1e12:.0f} TFLOP/s in a bf16 product" if harness.rate else ""
        print(f"{own.model}: {harness.parameters / 1e6:.0f}M parameters, {own.precision}; {device.device_name()}{rate}")
        print(
            f"{'recompute':<10}{'corpus':<9}{'B':>6} {'way':<14}{'tokens/s':>9}{'(min, max)':>17}{'slots/s':>9}{'/ dynamic':>10}{'step s':>8}{'mb':>5}"
            f"{'T':>5}"
            f"{'MFU':>7}{'data':>7}{'peak':>7}{'GiB':>7}{'retries':>8}"
        )
    for recompute in own.recompute:
        harness.recompute(recompute)
        for word in own.data_path:
            name, prefix = word.split("=", 1)
            prefix, _, times = prefix.partition("@")
            corpus = open_corpus([prefix], split="100", seed=1, vocab_size=own.vocab_size).train
            for budget, documents in zip(own.budgets, own.documents):
                count = documents * int(times or 1)
                for row in harness.cells(corpus, budget=budget, ways=own.ways, documents=count, rounds=own.rounds, until=began + own.seconds):
                    rows.append({"recompute": recompute, "corpus": name, "budget": budget} | row)
                    if first:
                        print(line(rows[-1]), flush=True)
                        write(own, harness, rows)
    dist.barrier()
    userbuffers.destroy_ub()
    dist.destroy_process_group()


def against(dynamic: dict, row: dict) -> float:
    """Real tokens a second as a multiple of the first way's: the median over steps with the same documents, else the ratio of the totals."""
    if row["documents"] != dynamic["documents"]:
        return row["tokens_per_second"] / dynamic["tokens_per_second"]
    return statistics.median(ours / theirs for ours, theirs in zip(dynamic["seconds"], row["seconds"]))


def line(row: dict) -> str:
    low, high = (round(value) for value in row["spread"])
    mfu, ratio = f"{row['mfu']:.1%}" if row["mfu"] else "-", f"{row['against_dynamic']:.3f}"
    return (
        f"{row['recompute']:<10}{row['corpus']:<9}{row['budget']:>6} {row['way']:<14}{row['tokens_per_second']:>9.0f}{f'({low}, {high})':>17}"
        f"{row['slot_tokens_per_second']:>9.0f}{ratio:>10}{row['step_seconds']:>8.3f}{row['microbatches']:>5.0f}{row['distinct_T']:>5}{mfu:>7}"
        f"{row['data_share']:>7.1%}{row['peak_allocated_gib']:>7.1f}{row['peak_reserved_gib']:>7.1f}{row['allocator_retries']:>8}"
    )


def write(own: argparse.Namespace, harness: Harness, rows: list[dict]) -> None:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(own).items() if name not in ("output", "seconds")}
    settings["data_path"] = [word.split("=", 1)[0] for word in own.data_path]  # paths are of no interest
    about = {
        "device": device.device_name(), "parameters": harness.parameters, "bf16_product_flops": harness.rate, "ranks": dist.get_world_size(),
        "torch": torch.__version__, "megatron_dyn": megatron_dyn.__version__, "settings": settings,
    }  # fmt: skip
    path = own.output / f"{own.model}-{own.precision}.json"
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
