# SPDX-License-Identifier: Apache-2.0
"""Peak memory of the run's own model against the memory model (`training.memory`), for models, precisions and recomputation; one table.

    python benchmarks/memory.py --output docs/data/memory_h200.json               # one GPU, about 90 s
    python benchmarks/memory.py --models tiny --tokens 256 512 --precisions fp32  # on a CPU, to see that it runs

Every model is built in this process as a run builds it, and thrown away; what is recomputed changes in between. Each T is run twice through
forward, backward and the update, one document a microbatch; the peak of the second counts. The formula's RoPE tables are those that were
made: one for each T.

With --auto GIB, also what `--max-tokens-per-microbatch auto` finds for each model on a device of so much memory (--auto 0: all there is), the
time that took, and what it left behind in the allocator.
"""

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from models import MODELS, PRECISIONS

import megatron_dyn
from megatron_dyn import device
from megatron_dyn.corpus import CorpusSplits
from megatron_dyn.pipeline.agreement import Agreement
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.budget_probe import ModelProbe, measured_budget
from megatron_dyn.training.calibrate import microbatch_of
from megatron_dyn.training.distributed import initialize, world_size_from_environment
from megatron_dyn.training.inputs import prepare_device
from megatron_dyn.training.memory import GIB, memory_settings, rank_memory
from megatron_dyn.training.model import padded_vocab_size
from megatron_dyn.training.run_config import RunConfig

NOTHING = dict(recompute_granularity=None, recompute_method=None, recompute_num_layers=None, recompute_modules=None)
RECOMPUTE = {
    "none": NOTHING,
    "core_attn": NOTHING | dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "mlp": NOTHING | dict(recompute_granularity="selective", recompute_modules=["mlp"]),
    "full": NOTHING | dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


class Documents:
    """In the place of `Inputs`: documents of one length, and what the model is built of."""

    def __init__(self, run: RunConfig, *, longest: int, backend: str, layers: str):
        self.vocab_size, self.layers, self.process_group_backend = run.data.vocab_size, layers, backend
        self.data_parallel_size = run.parallel.data_parallel_size(world_size_from_environment())
        self.splits = CorpusSplits(train=_Lengths(np.full(64, longest)), valid=None, report=[])
        self.plan_config = dataclasses.replace(run, data=dataclasses.replace(run.data, max_tokens_per_microbatch=longest)).plan_config(
            data_parallel_size=self.data_parallel_size
        )


class _Lengths:
    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths


def peaks(run: RunConfig, documents: Documents, tokens: list[int], recompute: list[str]) -> Iterator[dict]:
    """Measured and computed peak for each kind of recomputation at each T."""
    rows = padded_vocab_size(run.data.vocab_size, run.model.make_vocab_size_divisible_by, run.parallel.tensor_model_parallel_size)
    settings = memory_settings(run, vocab_size=rows, data_parallel_size=documents.data_parallel_size)
    made: set[int] = set()
    with device.MemoryMeter() as meter:
        probe = ModelProbe(run, documents, meter, longest=max(tokens))
        for what in recompute:
            _recompute_from_now_on(probe.stepper.models, what)
            of_model = dataclasses.replace(settings, model=dataclasses.replace(run.model, **RECOMPUTE[what]))
            memory = rank_memory(of_model, parallel_state.get_pipeline_model_parallel_rank())
            for T in tokens:
                microbatches = [microbatch_of([T], run.with_budget(T), run.data.vocab_size)]
                for _ in range(2):
                    meter.restart()
                    probe.stepper.train(microbatches, loss_tokens=T - 1)
                    measured = meter.peak()
                made.add(T)
                yield {"recompute": what, "T": T, "measured_gib": measured / GIB, "model_gib": memory.allocated(T, tables=sum(made) / T) / GIB}
        del microbatches
        probe.close()


def _recompute_from_now_on(models: list[torch.nn.Module], what: str) -> None:
    """The layers look it up in each forward pass."""
    for module in (module for model in models for module in model.modules()):
        if hasattr(module, "recompute_mlp"):
            module.recompute_mlp = what == "mlp"
        if hasattr(module, "checkpoint_core_attention"):
            module.checkpoint_core_attention = what == "core_attn"
    vars(models[0].config).update(RECOMPUTE[what])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.6b", "3b"])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8"])
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=[*RECOMPUTE])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 16384])
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--seconds", type=float, default=95.0, help="begin no further model after so long")
    parser.add_argument("--auto", type=float, metavar="GIB", help="also find the budget of each model on a device of so much memory; 0: all there is")
    parser.add_argument("--run-flags", default="", help="more flags of pretrain_gpt_thd.py")
    parser.add_argument("--output", type=Path, metavar="JSON")
    own = parser.parse_args()
    began, ready, rows = time.perf_counter(), None, []
    print(f"{'model':<6}{'precision':<10}{'recompute':<11}{'T':>7}{'measured':>10}{'model':>9}{'ratio':>8}{'seconds':>9}", flush=True)
    for name, precision in ((m, p) for m in own.models for p in own.precisions):
        if time.perf_counter() - began > own.seconds:
            print(f"{name} {precision}: left out, no time left")
            continue
        flags = (
            f"{MODELS[name]} {PRECISIONS[precision]} --swiglu --untie-embeddings-and-output-weights --data-path none "
            f"--vocab-size {own.vocab_size} --max-tokens-per-microbatch {max(own.tokens)} --global-batch-size 1024 --lr 1e-4 --train-iters 100 "
            f"{own.run_flags}"
        )
        run = parse_arguments(flags.split(), world_size=world_size_from_environment())
        if ready is None:
            ready = prepare_device(run)
            group = initialize(run.parallel, backend=ready[0], seed=run.training.seed)
        documents = Documents(run, longest=max(own.tokens), backend=ready[0], layers=ready[1])
        start = time.perf_counter()
        before = (device.memory_stats() or {}).get("allocated", 0)
        for row in peaks(run, documents, own.tokens, own.recompute):
            print(
                f"{name:<6}{precision:<10}{row['recompute']:<11}{row['T']:>7}{row['measured_gib']:>10.3f}{row['model_gib']:>9.3f}"
                f"{row['measured_gib'] / row['model_gib']:>8.3f}{time.perf_counter() - start:>9.1f}",
                flush=True,
            )
            rows.append({"model": name, "precision": precision, **row})
        if own.auto is not None:
            _auto(run, documents, Agreement(group), own.auto or None)
        gc.collect()
        left = (device.memory_stats() or {}).get("allocated", 0) - before
        if left > GIB / 4:
            print(f"  left behind in the allocator: {left / GIB:.2f} GiB")
    if own.output and dist.get_rank() == 0:
        about = {"device": device.device_name(), "torch": torch.__version__, "megatron_dyn": megatron_dyn.__version__, "vocab_size": own.vocab_size}
        own.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _auto(run: RunConfig, documents: Documents, agreement: Agreement, gib: float | None) -> None:
    data = dataclasses.replace(run.data, max_tokens_per_microbatch="auto", device_memory_gib=gib)
    start, before = time.perf_counter(), (device.memory_stats() or {}).get("allocated", 0)
    found = measured_budget(dataclasses.replace(run, data=data), documents, agreement)
    after = (device.memory_stats() or {}).get("allocated", 0)
    print(f"  {found}; {time.perf_counter() - start:.1f} s, left behind {(after - before) / GIB:.2f} GiB; measured {found.measured_gib}", flush=True)


if __name__ == "__main__":
    main()
