# SPDX-License-Identifier: Apache-2.0
"""Time that a training step's main thread spends on agreeing on its plan: at the start of the step, and begun a step ahead.

    python benchmarks/agreement.py --ranks 2 4 8

Each rank (a forked process, gloo on this machine) plans and builds real steps, computes for a while, and meets the others in an
all-reduce, as the reduction of gradients does. Taken are the time between asking for the next step and having it, less the wait for
the rank's own data, and the time of the whole step beyond its computing. "at the start" meets in the main thread when the step is asked
for; "a step ahead" is what training does. The ways take turns, round by round. On fewer cores than ranks, or on a busy machine, a
meeting at the start waits for whichever process is not running: a wait that the all-reduce has otherwise.
"""

import argparse
import multiprocessing
import os
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist

from megatron_dyn.microbatch import StepStream
from megatron_dyn.pipeline.agreement import new_cpu_group
from megatron_dyn.pipeline.plan_agreement import Held, PlanAgreement, plan_constants
from megatron_dyn.planning import PlanConfig, Planner, TokenBudgetBatchSampler
from megatron_dyn.training.agreed_steps import AgreedSteps

WARMUP = 5
ROUNDS = 4
WAYS = ("at the start", "a step ahead", "a step ahead, contents too")


class RandomCorpus:
    """Documents of given lengths; a token is the number of its document."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths

    def tokens(self, document: int, start: int, length: int) -> np.ndarray:
        return np.full(length, document, dtype=np.int64)

    def describe(self, document: int) -> str:
        return f"document {document}"


def measure(rank: int, ranks: int, folder: str, arguments: argparse.Namespace, answers: multiprocessing.Queue) -> None:
    """One rank: every way in turn; rank 0 answers with the seconds of each step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    lengths = np.clip(np.random.default_rng(1).lognormal(5.5, 1.0, 20000).astype(np.int64), 1, 4096)
    config = PlanConfig(max_tokens_per_microbatch=4096, global_batch_size=arguments.documents, data_parallel_size=ranks)
    planner = Planner(lengths, config)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            found[way] += one_way(way, rank, planner, RandomCorpus(lengths), arguments)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def one_way(way: str, rank: int, planner: Planner, corpus: RandomCorpus, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Of each step: seconds from asking to having, less the wait for data; seconds beyond computing."""
    ranks = planner.config.data_parallel_size
    constants = plan_constants(planner, code_version="benchmark", schedule={})
    agreement = PlanAgreement(
        constants, data_parallel_rank=rank, data_parallel_size=ranks, check_contents="contents" in way, group=new_cpu_group()
    )
    stream = StepStream(TokenBudgetBatchSampler(planner, data_parallel_rank=rank), corpus, data_parallel_rank=rank, device="cpu")
    steps = AgreedSteps(stream, agreement, name=lambda number: f"step {number}")
    count, seconds, computing = WARMUP + arguments.steps // ROUNDS, [], arguments.compute_ms / 1e3
    with stream, steps:
        for number in range(count):
            began = time.perf_counter()
            if way == "at the start":
                plan, _ = stream.next()
                agreement.check(f"step {number}", Held(plan=plan))
                waited_for_data = stream.last_wait_secs
            else:
                steps.next(more=number + 1 < count)
                waited_for_data = steps.last_data_wait_secs
            agreed = time.perf_counter() - began - waited_for_data
            compute(computing)
            dist.all_reduce(torch.zeros(1))
            seconds.append((agreed, time.perf_counter() - began - waited_for_data - computing))
    return seconds[WARMUP:]


def compute(seconds: float) -> None:
    """Matrix products for so long: the interpreter is free for other threads, as it is while a device computes."""
    matrix, end = torch.ones(192, 192), time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes of each run (default: 2 4)")
    parser.add_argument("--steps", type=int, default=200, help="steps that count (default: 200)")
    parser.add_argument("--compute-ms", type=float, default=20.0, help="computing in a step (default: 20)")
    parser.add_argument("--documents", type=int, default=64, help="documents of a step (default: 64)")
    arguments = parser.parse_args()
    print("| ranks | way | agreeing: median us | 90 % below us | step beyond computing: median us |\n|---|---|---|---|---|")
    context = multiprocessing.get_context("fork")
    for ranks in arguments.ranks:
        answers = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            processes = [context.Process(target=measure, args=(rank, ranks, folder, arguments, answers)) for rank in range(ranks)]
            for process in processes:
                process.start()
            found = answers.get(timeout=600)
            for process in processes:
                process.join()
        for way, seconds in found.items():
            agreeing, beyond = np.array(seconds).T * 1e6
            print(f"| {ranks} | {way} | {np.median(agreeing):.0f} | {np.quantile(agreeing, 0.9):.0f} | {np.median(beyond):.0f} |", flush=True)


if __name__ == "__main__":
    main()
