# SPDX-License-Identifier: Apache-2.0
"""Real launches in which one rank differs in one thing: every rank ends within 5 s of the meeting, with the same text."""

import contextlib
import dataclasses
import io
import os
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from launch import launch  # noqa: E402
from training_run import VOCABULARY, flags, heavy_tailed_lengths, losses, train, write_corpus  # noqa: E402

from megatron_dyn.corpus import indexed_reader  # noqa: E402
from megatron_dyn.microbatch import shared_tokens  # noqa: E402
from megatron_dyn.pipeline import plan_agreement  # noqa: E402
from megatron_dyn.planning import Planner  # noqa: E402
from megatron_dyn.training import facts  # noqa: E402
from megatron_dyn.training.arguments import parse_arguments  # noqa: E402
from megatron_dyn.training.launch import main  # noqa: E402
from megatron_dyn.training.metrics_file import read_metrics  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit_tests" / "pipeline"))
from test_handshake import free_ports  # noqa: E402
from test_plan_agreement import with_T  # noqa: E402

LENGTHS = heavy_tailed_lengths(60, longest=90)
LIMIT_SECS = 5.0
WORLD = 4
TP2_DP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
ODD = 2
"""The rank that differs: the first of the second data-parallel rank."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", LENGTHS)


def odd_rank() -> bool:
    return os.environ.get("RANK") == str(ODD)


# Before anything is built -----------------------------------------------------------------------------------------------

SETTINGS = {  # case -> (settings of the odd rank, what is told)
    "seed": (dict(seed=7), "--seed: 1234 on ranks 0-1, 3; 7 on rank 2. "),
    "budget": (dict(max_tokens_per_microbatch=94), "--max-tokens-per-microbatch: 96 on ranks 0-1, 3; 94 on rank 2. "),
    "batch, and with it K": (dict(global_batch_size=24), "--global-batch-size: 12 on ranks 0-1, 3; 24 on rank 2. "),
    "one changed length": (dict(data_path="changed"), "corpus fingerprint of the training documents: "),
    "split": (dict(split="80,20"), "--split: 90,10 on ranks 0-1, 3; 80,20 on rank 2. "),
    "tensor parallelism": (dict(tensor_model_parallel_size=1), "--tensor-model-parallel-size: 2 on ranks 0-1, 3; 1 on rank 2. "),
    "package version": (dict(), "version of numpy: "),
    "code": (dict(), "code version of megatron_dyn: "),
}


def launched_with_one_difference(rank: int, world: int, corpus: Path, folder: Path, ports: list[int], original) -> dict:
    """Every case in one job: status, what was printed, seconds."""
    told = {}
    for (name, (changes, _)), port in zip(SETTINGS.items(), ports):
        odd = rank == ODD
        changes = dict(changes) if odd else {}
        if "data_path" in changes:
            changes["data_path"] = folder / "changed"
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {key: str(value) for key, value in here.items()}
        versions = {"package version": {"version of numpy": "1.0"}, "code": {"code version of megatron_dyn": "0.0 (changed)"}}.get(name, {})
        facts.versions = lambda versions=versions, odd=odd, **named: original(**named) | (versions if odd else {})
        printed, began = io.StringIO(), time.monotonic()
        with contextlib.redirect_stderr(printed):
            status = main(flags(corpus, run_dir=folder / "run", **TP2_DP2 | changes))
        told[name] = status, printed.getvalue(), time.monotonic() - began
        assert not torch.distributed.is_initialized(), "nothing was built"
    return told


def test_each_setting_version_and_file_that_differs_on_one_rank_ends_every_rank(corpus, tmp_path):
    lengths = list(LENGTHS)
    lengths[7] += 1
    write_corpus(tmp_path / "changed", lengths)
    arguments = (corpus, tmp_path, free_ports(len(SETTINGS)), facts.versions)
    ended = launch(WORLD, launched_with_one_difference, *arguments, process_group=False, timeout=90)
    for name, (_, text) in SETTINGS.items():
        reasons, causes = set(), 0
        for rank, (status, printed, seconds) in enumerate(told[name] for told in ended):
            assert status == 2 and f"PlanDisagreement: the ranks disagree at the start, before any step: {text}" in printed, f"{name}: {printed}"
            said, reason = printed.split("PlanDisagreement: ")
            causes += said == f"[rank {rank}] "
            assert said == f"[rank {rank}] " or re.fullmatch(rf"\[rank {rank}\] leaving with all ranks, as rank [^{rank}] tells: ", said), printed
            reasons.add(reason)
            assert seconds < LIMIT_SECS, name
        assert causes == 1 and len(reasons) == 1, f"{name}: one rank tells the cause, all tell the same"
        assert reason.count(" on rank") == 2 and " on rank 2. " in reason and "Traceback" not in reason, f"{name}: the first difference, nothing else"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# Before a step ------------------------------------------------------------------------------------------------------------


def another_T_at_step_3(monkeypatch):
    plan = Planner.plan

    def changed(self, step):
        made = plan(self, step)
        return with_T(made, 0, 0, made.microbatches[0][0].T + 2) if step == 2 and odd_rank() else made

    monkeypatch.setattr(Planner, "plan", changed)


def test_another_T_in_one_microbatch_of_another_data_parallel_rank_ends_every_rank_before_the_step(corpus, tmp_path, monkeypatch):
    """The T of a microbatch that the odd rank does not even compute: a plan is compared whole."""
    another_T_at_step_3(monkeypatch)
    ranks = train(WORLD, flags(corpus, run_dir=tmp_path, eval_iters=0, **TP2_DP2), tmp_path, status=1, timeout=60)
    for rank in range(WORLD):
        output = ranks.output(rank)
        assert "PlanDisagreement: the ranks disagree on step 3: T of microbatch 0 of data-parallel rank 0: " in output, output
        assert "on ranks 0-1, 3; " in output and "on rank 2. Going on would hang" in output
    assert sorted(losses(tmp_path)) == [1, 2], "the steps before are whole"


@pytest.mark.slow
def test_mutant_a_digest_without_T_lets_the_run_go_on(corpus, tmp_path, monkeypatch):
    """T of a microbatch that the odd rank does not compute harms nobody, which is how the mutant can be seen to pass."""
    another_T_at_step_3(monkeypatch)
    monkeypatch.setattr(plan_agreement, "_lengths", lambda plan: np.zeros(1))
    train(WORLD, flags(corpus, run_dir=tmp_path, eval_iters=0, train_iters=4, **TP2_DP2), tmp_path)
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]


def one_row_group_more_at_step_3(monkeypatch):
    """A plan that is whole in itself, with two rows of padding more in the first microbatch: as another alignment rule would make it."""
    plan = Planner.plan

    def changed(self, step):
        made = plan(self, step)
        if step != 2 or os.environ.get("RANK") != "1":
            return made
        parts = [list(part) for part in made.microbatches]
        first = parts[0][0]
        padded = first.cu_seqlens_padded.copy()
        padded[-1] += 2
        longest = int(np.diff(padded).max())
        parts[0][0] = dataclasses.replace(first, T=first.T + 2, cu_seqlens_padded=padded, max_seqlen=longest)
        return dataclasses.replace(made, microbatches=tuple(map(tuple, parts)))

    monkeypatch.setattr(Planner, "plan", changed)


@pytest.mark.slow
def test_under_overlapped_communication_another_T_ends_both_ranks_before_the_exchange(corpus, tmp_path, monkeypatch):
    """On GPUs UserBuffers of two ranks with another T would wait for each other for minutes: agreement comes first."""
    one_row_group_more_at_step_3(monkeypatch)
    settings = dict(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True, eval_iters=0)
    ranks = train(2, flags(corpus, run_dir=tmp_path, **settings), tmp_path, status=1, timeout=60)
    for rank in range(2):
        output = ranks.output(rank)
        assert "PlanDisagreement: the ranks disagree on step 3: T of microbatch 0 of data-parallel rank 0: " in output, output
        assert "on rank 0, " in output and "on rank 1. " in output
    assert sorted(losses(tmp_path)) == [1, 2]


# Tokens -------------------------------------------------------------------------------------------------------------------


def copy_of(corpus: Path, folder: Path, *, tokens: bool = True) -> Path:
    folder.mkdir()
    for ending in (".idx", ".bin") if tokens else (".idx",):
        shutil.copyfile(f"{corpus}{ending}", folder / f"documents{ending}")
    return folder / "documents"


@pytest.mark.parametrize("checks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_file_with_other_tokens_of_the_same_lengths_on_one_node_is_found(corpus, tmp_path, monkeypatch, checks):
    """As a corpus too large to be fingerprinted whole would let it pass: the fingerprint looks at samples there."""
    for name, value in (("SCAN_AT_OPEN_BYTES", 0), ("SAMPLE_BYTES", 2), ("NUM_SAMPLES", 2)):
        monkeypatch.setattr(indexed_reader, name, value)
    other = copy_of(corpus, tmp_path / "node")
    plan = Planner(np.array(LENGTHS[:54]), _plan_config(corpus, tmp_path), fingerprint="").plan(0)
    last = len(plan.microbatches[1]) - 1
    document = plan.microbatches[1][last].pieces[0].document
    tokens = np.memmap(f"{other}.bin", dtype=indexed_reader.IndexedReader(other).dtype, mode="r+")
    tokens[sum(LENGTHS[:document])] ^= 1
    tokens.flush()
    assert indexed_reader.IndexedReader(other).fingerprint == indexed_reader.IndexedReader(corpus).fingerprint

    def argv(rank: int) -> list[str]:
        settings = TP2_DP2 | dict(document_order="sequential", eval_iters=0, train_iters=4, check_batch_content=checks)
        return flags(other if rank == ODD else corpus, run_dir=tmp_path / "run", **settings)

    ranks = train(WORLD, argv, tmp_path, status=1 if checks else 0, timeout=60)
    if not checks:
        assert len(losses(tmp_path / "run")) == 4, "without the check nobody notices"
        return
    for rank in range(WORLD):
        output = ranks.output(rank)
        assert f"PlanDisagreement: the ranks disagree on step 1: tokens of microbatch {last} of data-parallel rank 1: checksum" in output
        assert "on rank 2, " in output and "on rank 3. " in output


def _plan_config(corpus: Path, folder: Path):
    run = parse_arguments(flags(corpus, run_dir=folder, document_order="sequential", **TP2_DP2), world_size=WORLD)
    return run.plan_config(data_parallel_size=2, cost=run.cost_model(VOCABULARY))


BROADCAST = TP2_DP2 | dict(train_iters=4, eval_interval=2, max_tokens_per_microbatch=60)  # documents of up to 90 tokens are split


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_rank_reads_for_its_tensor_parallel_peers_which_have_no_bin_file(corpus, tmp_path, world):
    """Same losses to the bit, in training and evaluation, although the .bin does not exist where the others look."""
    without = copy_of(corpus, tmp_path / "node", tokens=False)
    train(world, flags(corpus, run_dir=tmp_path / "all", **BROADCAST), tmp_path / "all")

    def argv(rank: int) -> list[str]:
        return flags(without if rank % 2 else corpus, run_dir=tmp_path / "one", data_broadcast=True, check_batch_content=True, **BROADCAST)

    train(world, argv, tmp_path / "one")
    assert losses(tmp_path / "one") == losses(tmp_path / "all") and len(losses(tmp_path / "one")) == 4
    evaluated = [[record["validation lm loss"] for record in read_metrics(tmp_path / name).validations] for name in ("one", "all")]
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 2


@pytest.mark.slow
def test_without_the_flag_the_missing_file_is_refused(corpus, tmp_path):
    without = copy_of(corpus, tmp_path / "node", tokens=False)
    output = train(1, flags(without, run_dir=tmp_path / "one", train_iters=1), tmp_path / "one", status=2).output()
    assert "documents.bin: cannot be opened" in output


@pytest.mark.slow
def test_mutant_tokens_sent_in_another_order_change_the_losses(corpus, tmp_path, monkeypatch):
    train(2, flags(corpus, run_dir=tmp_path / "all", **BROADCAST), tmp_path / "all")
    ids_of = shared_tokens._ids_of
    monkeypatch.setattr(shared_tokens, "_ids_of", lambda *arguments: list(ids_of(*arguments))[::-1])
    train(2, flags(corpus, run_dir=tmp_path / "one", data_broadcast=True, **BROADCAST), tmp_path / "one")
    assert losses(tmp_path / "one") != losses(tmp_path / "all")
