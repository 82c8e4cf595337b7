# SPDX-License-Identifier: Apache-2.0
"""A checkpoint holds the run, not the topology: saved and loaded under any two, training goes on with the same bits.

The numbers do not depend on the topology (see `checkpoint_job`), so every pair is compared with one unbroken run on one rank.
"""

import pytest
import torch
from checkpoint_job import Shape, assert_same, draws, everything, globals_of, load, save, start
from launch import launch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

STEPS_BEFORE, STEPS_AFTER = 3, 2
SHAPES = {
    "tp1": (1, Shape()),
    "tp2": (2, Shape(tp=2)),
    "tp2 padded to 64": (2, Shape(tp=2, padded_vocab=64)),
    "pp2": (2, Shape(pp=2)),
    "pp2 vpp2": (2, Shape(pp=2, vpp=2)),
    "dp1 distributed": (1, Shape(distributed=True)),
    "dp2 distributed": (2, Shape(distributed=True)),
    "tp2 dp2 distributed": (4, Shape(tp=2, distributed=True)),
    "tp2 pp2": (4, Shape(tp=2, pp=2)),
    "dp2": (2, Shape()),
    "bf16": (1, Shape(bf16=True)),
    "bf16 tp2": (2, Shape(tp=2, bf16=True)),
    "bf16 dp2 distributed": (2, Shape(bf16=True, distributed=True)),
    "tied": (1, Shape(tied=True)),
    "tied pp2": (2, Shape(tied=True, pp=2)),
    "tied tp2 padded to 64": (2, Shape(tied=True, tp=2, padded_vocab=64)),
    "dp2 buckets": (2, Shape(distributed=True, bucket_size=700)),
    "dp3 buckets": (3, Shape(distributed=True, bucket_size=700)),
    "bf16 dp2 buckets": (2, Shape(bf16=True, distributed=True, bucket_size=700)),
    "bf16 dp3 buckets": (3, Shape(bf16=True, distributed=True, bucket_size=700)),
    "tp2 dp2 buckets": (4, Shape(tp=2, distributed=True, bucket_size=300)),
    "tied pp2 distributed": (2, Shape(tied=True, pp=2, distributed=True, padded_vocab=51)),
    "tied pp2 dp2 distributed": (4, Shape(tied=True, pp=2, distributed=True, padded_vocab=51)),
    "bf16 tied": (1, Shape(bf16=True, tied=True)),
    "bf16 tied pp2 distributed": (2, Shape(bf16=True, tied=True, pp=2, distributed=True, padded_vocab=51)),
    "sgd": (1, Shape(optimizer="sgd")),
    "sgd tp2": (2, Shape(optimizer="sgd", tp=2)),
}
PAIRS = [
    ("tp2", "tp1"), ("tp1", "tp2"), ("tp2 padded to 64", "tp1"), ("tp1", "tp2 padded to 64"),
    ("pp2", "tp1"), ("tp1", "pp2"), ("pp2 vpp2", "tp1"), ("pp2 vpp2", "pp2"), ("tp2", "pp2 vpp2"),
    ("dp1 distributed", "dp2 distributed"), ("dp2 distributed", "dp1 distributed"), ("tp2 dp2 distributed", "dp1 distributed"),
    ("dp2 distributed", "tp2"), ("tp2", "dp2 distributed"), ("tp2 pp2", "pp2 vpp2"),
    ("bf16 tp2", "bf16"), ("bf16 dp2 distributed", "bf16"), ("bf16 tp2", "bf16 dp2 distributed"),
    ("dp2 buckets", "tp1"), ("tp1", "dp2 buckets"), ("dp3 buckets", "dp2 buckets"), ("tp2 dp2 buckets", "dp3 buckets"),
    ("bf16 dp2 buckets", "bf16"), ("bf16", "bf16 dp2 buckets"), ("bf16 dp3 buckets", "bf16 dp2 buckets"),
    ("tied pp2 distributed", "tied"), ("tied", "tied pp2 distributed"), ("tied pp2 dp2 distributed", "tied pp2 distributed"),
    ("bf16 tied pp2 distributed", "bf16 tied"), ("bf16 tied", "bf16 tied pp2 distributed"),
    ("tied pp2", "tied"), ("tied tp2 padded to 64", "tied pp2"), ("sgd tp2", "sgd"),
]  # fmt: skip


def unbroken(rank, world, shape):
    run = start(shape)
    run.train(STEPS_BEFORE)
    middle = globals_of(run)
    run.train(STEPS_AFTER)
    return middle, globals_of(run)


def save_once(rank, world, shape, folder):
    run = start(shape)
    run.train(STEPS_BEFORE)
    save(run, folder)
    early = [bucket for model in run.models for buffer in model.buffers for bucket in buffer.buckets[:-1]]
    return any(bucket.grad_data.numel() > bucket.numel_unpadded for bucket in early)


def resumed(rank, world, shape, folder):
    run = start(shape)
    state = load(run, folder)
    middle = globals_of(run)
    run.train(STEPS_AFTER)
    return middle, globals_of(run), state


@pytest.fixture(scope="module")
def reference():
    known = {}

    def of(shape):
        alone = Shape(bf16=shape.bf16, tied=shape.tied, optimizer=shape.optimizer)
        if alone not in known:
            known[alone] = launch(1, unbroken, alone)[0]
        return known[alone]

    return of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    known = {}

    def of(name):
        if name not in known:
            known[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
            world, shape = SHAPES[name]
            padded_between_buckets = any(launch(world, save_once, shape, known[name]))
            assert padded_between_buckets == (shape.distributed and (shape.bucket_size is not None or shape.tied)), "what it is here for"
        return known[name]

    return of


@pytest.mark.parametrize("source, target", PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_training_goes_on_with_the_same_bits_under_another_topology(source, target, saved, reference):
    world, shape = SHAPES[target]
    ranks = launch(world, resumed, shape, saved(source))
    middle, end = reference(shape)
    assert_same(middle, everything([r[0] for r in ranks]))
    assert_same(end, everything([r[1] for r in ranks]))
    assert all((r[2].iteration, r[2].rng_restored) == (STEPS_BEFORE, False) for r in ranks)


def unbroken_with_draws(rank, world, shape, folder):
    run = start(shape)
    run.train(STEPS_BEFORE)
    draws()
    save(run, folder)
    drawn = draws()
    run.train(STEPS_AFTER)
    return globals_of(run), drawn


def resumed_with_draws(rank, world, shape, folder):
    run = start(shape)
    state = load(run, folder)
    drawn = draws()
    run.train(STEPS_AFTER)
    return globals_of(run), drawn, state.rng_restored


@pytest.mark.parametrize("name", ["tp2", "pp2 vpp2", "bf16 dp2 distributed"])
def test_the_same_topology_continues_bit_for_bit_with_every_ranks_generators(name, tmp_path):
    world, shape = SHAPES[name]
    before = launch(world, unbroken_with_draws, shape, tmp_path)
    after = launch(world, resumed_with_draws, shape, tmp_path)
    assert_same(everything([r[0] for r in before]), everything([r[0] for r in after]))
    assert [r[1] for r in before] == [r[1] for r in after]
    assert all(r[2] for r in after)
    if shape.tp > 1:
        assert before[0][1][0] == before[1][1][0] and before[0][1][1] != before[1][1][1]  # the generators are the right ones


def test_another_topology_draws_new_numbers_and_says_so(saved):
    folder = saved("tp2")

    def job(rank, world):
        run = start(Shape())
        fresh = draws()
        load(run, folder)
        return fresh, draws(), draws()

    fresh, first, second = launch(1, job)[0]
    assert len({*fresh, *first, *second}) == 12
    assert launch(1, job)[0][1] == first  # and they are a function of seed and iteration
    tp1 = saved("tp1")

    def on_two_tensor_parallel_ranks(rank, world):
        load(start(Shape(tp=2)), tp1)
        return draws()

    (default_0, parallel_0, *_), (default_1, parallel_1, *_) = launch(2, on_two_tensor_parallel_ranks)
    assert default_0 == default_1 and parallel_0 != parallel_1  # as Megatron wants the generators of a tensor-parallel group


def test_a_step_counter_shared_by_all_parameters_is_caught(tmp_path, saved, reference, monkeypatch):
    """Mutant: Megatron's loader gives every parameter one step tensor; without the copies it counts up once a parameter."""
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, **kwargs: self if self.dim() == 0 else torch.empty_like(self).copy_(self))
    ranks = launch(1, resumed, Shape(distributed=True), saved("dp2 distributed"))
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_same(reference(Shape())[1], ranks[0][1])


def test_swapped_moments_are_caught(saved, reference, monkeypatch):
    """Mutant: the comparison sees the moments, not only the parameters."""
    loader = DistributedOptimizer.load_parameter_state_from_fully_reshardable

    def swapped(self, state):
        return loader(self, {i: {**s, "exp_avg": s["exp_avg_sq"], "exp_avg_sq": s["exp_avg"]} for i, s in state.items()})

    monkeypatch.setattr(DistributedOptimizer, "load_parameter_state_from_fully_reshardable", swapped)
    ranks = launch(1, resumed, Shape(distributed=True), saved("dp2 distributed"))
    with pytest.raises(AssertionError, match="exp_avg"):
        assert_same(reference(Shape())[0], ranks[0][0])
