# SPDX-License-Identifier: Apache-2.0
"""Training runs with communication overlap: the same losses as without, buffers sized by the token budget, resume, evaluation."""

import os

import pytest
from training_run import flags, heavy_tailed_lengths, losses, train, write_corpus

from megatron_dyn.training import overlap
from megatron_dyn.training.metrics_file import read_metrics

TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", heavy_tailed_lengths(90, longest=120))


def records(corpus, folder, **settings):
    train(2, flags(corpus, run_dir=folder / "run", **TP2, **settings), folder)
    return losses(folder / "run")


@pytest.fixture(scope="module")
def without(corpus, tmp_path_factory):
    return records(corpus, tmp_path_factory.mktemp("without"))


def test_the_losses_are_those_of_the_run_without_overlap(corpus, without, tmp_path):
    found = records(corpus, tmp_path, tp_comm_overlap=True)
    assert found == pytest.approx(without, rel=1e-5)
    assert len({round(value, 6) for value in without.values()}) == len(without)


def test_a_table_of_megatron_changes_the_methods_and_not_the_losses(corpus, without, tmp_path):
    table = tmp_path / "overlap.yaml"
    table.write_text("proj_fprop: {method: ring_exchange}\nfc2_fprop: {method: pipeline, num_splits: 2}\nqkv_dgrad: {method: pipeline}\n")
    settings = dict(tp_comm_overlap_cfg=table, tp_comm_overlap_rs_dgrad=True)
    assert records(corpus, tmp_path, tp_comm_overlap=True, **settings) == pytest.approx(without, rel=1e-5)


def test_case_02_the_capacity_is_the_token_budget_rounded_up_and_the_log_says_it(tmp_path):
    """Documents of 8 tokens, B = 31: capacity 32, not seq_length x micro_batch_size; four of them fill a microbatch."""
    documents = write_corpus(tmp_path / "eights", [8] * 40)
    budget = dict(max_tokens_per_microbatch=31, global_batch_size=8, train_iters=2)
    run = train(2, flags(documents, run_dir=tmp_path / "run", **TP2, tp_comm_overlap=True, **budget), tmp_path)
    assert "registered once for [32, 32]" in run.output()


def test_a_run_padded_to_the_capacity_and_resumed_without_padding_goes_on_as_if_nothing_had_happened(corpus, without, tmp_path):
    settings = dict(**TP2, tp_comm_overlap=True, save=tmp_path / "checkpoints", load=tmp_path / "checkpoints")
    for more in ({"exit_interval": 5, "microbatching": "packed-fixed"}, {}):
        train(2, flags(corpus, run_dir=tmp_path / "run", **settings, **more), tmp_path)
    assert losses(tmp_path / "run") == pytest.approx(without, rel=1e-5)
    shapes = {record["iteration"]: set(record["T"]) for record in read_metrics(tmp_path / "run").steps}
    assert set.union(*(shapes[step] for step in range(1, 6))) == {96}
    assert len(set.union(*(shapes[step] for step in range(6, 13)))) > 3


def test_tables_that_differ_between_ranks_are_refused_before_anything_is_exchanged(corpus, tmp_path):
    """The same path on both ranks, as on nodes without a common file system; what the file says is compared."""
    table = tmp_path / "overlap.yaml"
    table.write_text("proj_fprop: {num_splits: 2}\n")
    argv = flags(corpus, run_dir=tmp_path / "run", **TP2, tp_comm_overlap=True, tp_comm_overlap_cfg=table)
    original = overlap.userbuffers.read_overlap_config
    try:
        overlap.userbuffers.read_overlap_config = lambda path: {"proj_fprop": {"num_splits": 2 + 2 * int(os.environ["RANK"])}}
        ranks = train(2, argv, tmp_path, status=2)
    finally:
        overlap.userbuffers.read_overlap_config = original
    assert all("--tp-comm-overlap-cfg, proj_fprop: " in ranks.output(rank) for rank in (0, 1))
