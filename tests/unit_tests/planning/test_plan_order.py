# SPDX-License-Identifier: Apache-2.0
"""The data order is pinned: by golden values, by a reference in plain integers, and over processes; and it looks random."""

import math
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from megatron_dyn.planning import PlanConfig, Planner
from megatron_dyn.planning import order as order_module
from megatron_dyn.planning.order import GOLDEN_GAMMA, Permutation, epoch_key, mix64, order_of_runs, ranks_at


def test_mix64_is_splitmix64():
    # First outputs of the published generator for seed 1234567.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [mix64(1234567 + (i + 1) * GOLDEN_GAMMA) for i in range(5)] == known


def plain_permutation(place: int, size: int, key: int) -> int:
    """The same network in Python's integers, digit by digit."""
    rows = next(r for r in range(max(math.isqrt(size) - 1, 0), size + 1) if r * r >= size)
    columns = math.ceil(size / rows)
    while True:
        high, low = divmod(place, columns)
        for number in range(1, (24 if size < 65536 else 10) + 1):
            word = mix64(key + number * GOLDEN_GAMMA)
            if number % 2 == 1:
                high = (high + (mix64(low * GOLDEN_GAMMA + word) // 2**32) * rows // 2**32) % rows
            else:
                low = (low + (mix64(high * GOLDEN_GAMMA + word) // 2**32) * columns // 2**32) % columns
        place = high * columns + low
        if place < size:
            return place


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 65535, 65536, 10**9, 2**40 + 1])
@pytest.mark.parametrize("seed, epoch", [(1234, 0), (2**63 - 1, 10**9)])
def test_permutation_equals_plain_integer_arithmetic(size, seed, epoch):
    key = epoch_key(seed, epoch)
    assert key == mix64(mix64(seed + GOLDEN_GAMMA) + (epoch + 1) * GOLDEN_GAMMA)
    places = sorted({0, size - 1, size // 2, *(mix64(i) % size for i in range(40))})
    ranks = Permutation(size, key)(np.array(places))
    assert ranks.dtype == np.int64 and ranks.tolist() == [plain_permutation(place, size, key) for place in places]


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 65535, 65536, 100_003])
def test_every_rank_comes_once(size):
    ranks = Permutation(size, epoch_key(5, size))(np.arange(size))
    assert (np.bincount(ranks, minlength=size) == 1).all() and len(ranks) == size


def test_golden_epoch_orders():
    """Changing these values changes the data order of every run that is under way: do not."""

    def order(size, epoch, seed=1234, count=12):
        return ranks_at(0, count, size=size, document_order="shuffle", seed=seed, epoch=epoch).tolist()

    assert order(12, 0) == GOLDEN[0]
    assert order(12, 1) == GOLDEN[1]
    assert order(12, 0, seed=7) == GOLDEN[2]
    assert order(10**9, 3, count=5) == GOLDEN[3]
    assert order_of_runs(8, seed=1234, epoch=1, window=64).tolist() == GOLDEN[4]
    assert ranks_at(3, 7, size=9, document_order="sequential", seed=1, epoch=3).tolist() == [3, 4, 5, 6]


GOLDEN = (
    [7, 5, 6, 9, 10, 3, 11, 0, 4, 2, 8, 1],
    [5, 3, 2, 9, 8, 4, 0, 7, 1, 11, 6, 10],
    [11, 5, 6, 2, 8, 1, 4, 10, 0, 9, 7, 3],
    [253148118, 16328092, 357635622, 793219666, 796351835],
    [1, 3, 7, 6, 2, 5, 0, 4],
)


def excess(counts: np.ndarray, expected: float) -> float:
    """Chi-square of counts in standard deviations above its mean (degrees of freedom: one less than there are counts)."""
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def test_all_permutations_of_four_documents_are_about_as_likely():
    seen = Counter(tuple(Permutation(4, epoch_key(3, epoch))(np.arange(4)).tolist()) for epoch in range(1200))
    assert len(seen) == 24 and abs(excess(np.array(list(seen.values())), 50)) < 4


def check_looks_random(orders: list[np.ndarray]) -> None:
    """Several epochs of one corpus: even everywhere, neighbours unrelated, epochs unrelated."""
    size = len(orders[0])
    parts = np.arange(size) * 32 // size
    for order in orders:
        where = order * 32 // size
        assert abs(excess(np.bincount(parts * 32 + where, minlength=1024), size / 1024)) < 5, "a part of the corpus comes early or late"
        apart = (np.diff(order) % size) * 256 // size
        assert abs(excess(np.bincount(apart, minlength=256), (size - 1) / 256)) < 5, "documents in sequence are related"
        assert np.count_nonzero(np.diff(order) == 1) < 12 and np.count_nonzero(order == np.arange(size)) < 12
    for one, other in zip(orders, orders[1:]):
        assert abs(excess(np.bincount((one * 32 // size) * 32 + other * 32 // size, minlength=1024), size / 1024)) < 5, "epochs are related"
        assert len(set(one[:1000].tolist()) & set(other[:1000].tolist())) < 30 + 1000 * 1000 / size


@pytest.fixture(autouse=True)
def nothing_kept_of_or_for_other_tests():
    yield
    forget()


def forget() -> None:
    order_module.epoch_permutation.cache_clear()
    order_module._whole_epoch.cache_clear()


def epochs_of(size: int, document_order: str = "shuffle") -> list[np.ndarray]:
    forget()
    return [ranks_at(0, size, size=size, document_order=document_order, seed=11, epoch=epoch) for epoch in range(4)]


@pytest.mark.parametrize("size", [65_000, 100_003, 2**17])
def test_epochs_look_random_and_unrelated(size):
    check_looks_random(epochs_of(size))


def test_a_sequence_does_not_look_random():
    with pytest.raises(AssertionError, match="early or late"):
        check_looks_random(epochs_of(65_000, "sequential"))


def test_mutant_epoch_ignored_in_the_key_is_noticed(monkeypatch):
    real = order_module.epoch_key
    monkeypatch.setattr(order_module, "epoch_key", lambda seed, epoch: real(seed, 0))
    with pytest.raises(AssertionError, match="epochs are related"):
        check_looks_random(epochs_of(65_000))


def test_mutant_too_few_rounds_is_noticed(monkeypatch):
    monkeypatch.setattr(order_module, "ROUNDS", 2)
    with pytest.raises(AssertionError):
        check_looks_random(epochs_of(100_003))


def test_seeds_are_unrelated():
    by_seed = [Permutation(65_000, epoch_key(seed, 0))(np.arange(65_000)) for seed in range(4)]
    check_looks_random(by_seed)


PROGRAM = """
import sys
import numpy as np
from megatron_dyn.planning import PlanConfig, Planner
lengths = np.arange(400) * 7919 % 600
for order in ("shuffle", "length-window"):
    for batch in (dict(global_batch_size=64), dict(global_batch_tokens=20000)):
        config = PlanConfig(max_tokens_per_microbatch=512, data_parallel_size=3, document_order=order, length_window=150, **batch)
        planner = Planner(lengths, config)
        print(" ".join(planner.plan(step).digest for step in range(8)))
assert "torch" not in sys.modules, "planning must not need torch"
"""


def test_digests_are_equal_in_other_processes():
    def run(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True).stdout

    first = run("0")
    assert first == run("4242") and len(set(first.split())) == 32


def test_digests_are_equal_for_all_ranks_and_kinds_of_lengths(tmp_path):
    lengths = np.arange(1, 3000) * 7919 % 600
    config = PlanConfig(max_tokens_per_microbatch=512, global_batch_tokens=9000)
    on_disk = np.memmap(tmp_path / "lengths", dtype=np.uint16, mode="w+", shape=lengths.shape)
    on_disk[:] = lengths
    kinds = [lengths, lengths.astype(np.int32), lengths.astype(">i8"), np.repeat(lengths, 2)[::2], on_disk]
    digests = {tuple(Planner(kind, config).plan(step).digest for step in (0, 5)) for kind in kinds}
    assert len(digests) == 1
