# SPDX-License-Identifier: Apache-2.0
"""What only one rank can see is refused on every rank, in time: wrongly gathered states, step counts and groups that differ."""

import contextlib
import os
import time

import pytest
import torch
from checkpoint_job import Shape, assert_same, globals_of, load, save, start
from launch import launch

from megatron_dyn.training import checkpoint_optimizer
from megatron_dyn.training.checkpoint import CheckpointError


def refused_by_every_rank(world, job) -> "list[str]":
    """The messages of the CheckpointErrors that `job` must raise on every rank, without a rank waiting for another in vain."""

    def timed(rank, world):
        begin = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            job(rank, world)
        return str(caught.value), time.monotonic() - begin

    answers = launch(world, timed)
    assert all(seconds < 20 for _, seconds in answers)
    return [message for message, _ in answers]


@pytest.mark.parametrize(
    "world, shape",
    [
        (2, Shape(tied=True, pp=2, distributed=True, padded_vocab=51)),
        (2, Shape(tied=True, pp=2, distributed=True, padded_vocab=51, bf16=True)),
        (3, Shape(distributed=True, bucket_size=700)),
    ],
    ids=["tied pp2", "bf16 tied pp2", "dp3"],
)
def test_without_the_padding_of_buckets_nothing_is_saved(tmp_path, monkeypatch, world, shape):
    """Mutant: the gathered state as Megatron-Core 0.16.1 returns it, of which it only warns that data may be corrupt."""
    monkeypatch.setattr(checkpoint_optimizer, "_padding_kept", contextlib.nullcontext)

    def job(rank, world):
        run = start(shape)
        run.train(2)
        save(run, tmp_path)

    for message in refused_by_every_rank(world, job):
        assert "optimizer.state." in message and "not gathered as its shards hold it" in message and "nothing was saved" in message
    assert os.listdir(tmp_path) == []


def test_one_wrong_number_on_one_rank_is_seen(tmp_path, monkeypatch):
    """Mutant: one bit of one moment is gathered wrongly, in the shard of rank 1 alone."""
    gather = checkpoint_optimizer.DistributedOptimizer.get_parameter_state_dp_zero

    def flipped(self, **options):
        state = gather(self, **options)
        moment = next(iter(state[0].values()))["exp_avg_sq"]
        moment.view(torch.int32)[len(moment) * 3 // 4] ^= 1
        return state

    monkeypatch.setattr(checkpoint_optimizer.DistributedOptimizer, "get_parameter_state_dp_zero", flipped)

    def job(rank, world):
        run = start(Shape(distributed=True))
        run.train(2)
        save(run, tmp_path)

    for message in refused_by_every_rank(2, job):
        assert "could not gather the optimizer's state: rank 1: optimizer.state.exp_avg_sq." in message


def test_a_moment_that_is_not_a_number_is_saved_as_it_is(tmp_path):
    def job(rank, world):
        run = start(Shape(distributed=True))
        run.train(2)
        for state in run.optimizer.chained_optimizers[0].optimizer.state.values():
            state["exp_avg"].fill_(float("nan"))
        save(run, tmp_path)
        run.train(1)
        load(run, tmp_path)
        return all(s["exp_avg"].isnan().all() for s in run.optimizer.chained_optimizers[0].optimizer.state.values())

    assert launch(2, job) == [True, True]


@pytest.mark.parametrize("distributed", [False, True])
def test_step_counts_that_differ_between_ranks_are_refused(tmp_path, distributed):
    def job(rank, world):
        run = start(Shape(tp=2, distributed=distributed))
        run.train(2)
        if rank == 1:
            for state in run.optimizer.chained_optimizers[0].optimizer.state.values():
                state["step"] += 1
        save(run, tmp_path)

    assert all("different step counts ([2, 3])" in message for message in refused_by_every_rank(2, job))
    assert os.listdir(tmp_path) == []


def test_a_parameter_group_that_one_rank_misses_is_refused_before_anything_changes(tmp_path):
    def job(rank, world):
        run = start(Shape(tp=2))
        run.train(1)
        save(run, tmp_path)
        run.train(1)
        if rank == 1:
            run.optimizer.param_groups[0]["wd_mult"] = 0.25
        before = globals_of(run)
        try:
            load(run, tmp_path)
        finally:
            assert_same(before, globals_of(run))

    for message in refused_by_every_rank(2, job):
        assert "rank 1: the checkpoint has no parameter group with" in message and "'wd_mult': 0.25" in message
