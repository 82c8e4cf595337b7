# SPDX-License-Identifier: Apache-2.0
"""The search for the largest budget: ranks with different memory, lines that bend, memory that runs out."""

import threading

import numpy as np
import pytest

from megatron_dyn.planning.survey import survey
from megatron_dyn.training.arguments import parse_arguments
from megatron_dyn.training.budget import NEAR, Room, find_budget
from megatron_dyn.training.budget_probe import longest_piece, most_useful
from megatron_dyn.training.config import ConfigError

RUN = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --vocab-size 64 --data-path none --max-tokens-per-microbatch auto --lr 1 --train-iters 1"


class Ranks:
    """Threads as ranks; `least` is their collective."""

    def __init__(self, count: int):
        self._barrier = threading.Barrier(count)
        self._numbers = {}

    def least(self, rank: int, number: int) -> int:
        self._numbers[rank] = number
        self._barrier.wait(10)
        least = min(self._numbers.values())
        self._barrier.wait(10)
        return least

    def search(self, peaks: list, rooms: list[Room], *, agree: bool = True) -> list:
        found, asked = [None] * len(peaks), [[] for _ in peaks]

        def run(rank: int) -> None:
            def peak(tokens: int):
                asked[rank].append(tokens)
                return peaks[rank](tokens)

            try:
                found[rank] = find_budget(peak, rooms[rank], least_of_all=lambda number: self.least(rank, number) if agree else int(number))
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(peaks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        self.asked = asked
        return found


def search(*peaks, rooms=None, memory=80e9, unit=2, most=10**7, buffer_bytes=0.0, **named):
    rooms = rooms or [Room(memory=memory, unit=unit, most=most, buffer_bytes=buffer_bytes)] * len(peaks)
    ranks = Ranks(len(peaks))
    found = ranks.search(list(peaks), rooms, **named)
    return found, ranks.asked


def line(fixed: float, per_token: float):
    return lambda tokens: int(fixed + per_token * tokens)


def bent(fixed: float, per_token: float, later_fixed: float, later_per_token: float):
    return lambda tokens: int(max(fixed + per_token * tokens, later_fixed + later_per_token * tokens))


def out_above(tokens_that_fit: int, of):
    return lambda tokens: None if tokens > tokens_that_fit else of(tokens)


def test_the_budget_is_the_least_of_what_fits_on_each_rank():
    first, last = line(20e9, 1.0e6), line(30e9, 2.5e6)
    found, asked = search(first, last)
    assert asked[0] == asked[1] and found[0].tokens == found[1].tokens == 19968, "(80e9 - 30e9) / 2.5e6 = 20000, down to a multiple of 256"
    assert found[0].measured_gib[19968] == pytest.approx((20e9 + 19968e6) / 2**30)
    # The mutant: without agreement each rank goes its own way.
    alone, _ = search(first, last, agree=False)
    assert alone[0].tokens > 2 * alone[1].tokens


def test_a_rank_with_less_memory_or_userbuffers_decides():
    rooms = [Room(memory=80e9, unit=2, most=10**7), Room(memory=50e9, unit=2, most=10**7)]
    assert {found.tokens for found in search(line(30e9, 1e6), line(30e9, 1e6), rooms=rooms)[0]} == {19968}
    assert search(line(30e9, 1e6), buffer_bytes=1e6)[0][0].tokens == 24832


@pytest.mark.parametrize("per_token", [1e5, 3e5])
@pytest.mark.parametrize("bend", [1500, 3000, 50_000])
def test_a_peak_that_bends_upwards_is_measured_and_not_believed(per_token, bend):
    """A gentle line before the bend promises too much: what it says is measured, and the line between two measured T takes over."""
    peak = bent(20e9 + 3 * per_token * bend, per_token, 20e9, 4 * per_token)
    found, asked = search(peak, memory=80e9)
    exact = 60e9 / (4 * per_token)
    assert peak(found[0].tokens) <= 80e9 and found[0].tokens >= min(exact, 10**7) * (1 - NEAR) - 256
    assert found[0].tokens in asked[0] and len(asked[0]) <= 8


def test_memory_that_runs_out_is_tried_again_with_less():
    found, asked = search(out_above(9000, line(20e9, 1e6)), line(20e9, 1e6))
    assert found[0].tokens == found[1].tokens and 0.93 * 9000 <= found[0].tokens <= 9000
    assert found[0].measured_gib[asked[0][2]] is None and found[1].measured_gib[asked[0][2]] is not None


def test_no_more_than_a_step_can_fill():
    (found,), asked = search(line(1e9, 1e3), most=5001)
    assert found.tokens == 5000 and asked[0] == [1024, 2048, 5000] and "all that a step can fill" in str(found)
    assert search(line(1e9, 1e3), most=300)[0][0].tokens == 300
    assert search(line(1e9, 1e3), most=1, unit=32)[0][0].tokens == 32, "one unit is always planned"


def test_the_alignment_is_kept_and_small_memory_gives_small_budgets():
    (found,), _ = search(line(1e6, 1e4), memory=2.5e6, unit=16)
    assert found.tokens % 16 == 0 and 144 - 16 <= found.tokens <= 150


@pytest.mark.parametrize("peak", [line(90e9, 1e6), out_above(0, line(1, 1))], ids=["too large", "runs out"])
def test_nothing_fits_is_said_on_every_rank_with_the_way_out(peak):
    found, _ = search(peak, line(1e9, 1e3))
    assert all(isinstance(error, ConfigError) and "no budget fits" in str(error) and "--recompute-granularity full" in str(error) for error in found)


@pytest.mark.parametrize(
    "flags,ranks,expected",
    [
        ("--global-batch-tokens 100000", 4, 25_000),
        ("--global-batch-size 100", 4, 12_500),  # of 500 tokens on average, empty documents left out
        ("--global-batch-tokens 100000 --pipeline-model-parallel-size 2", 4, 12_500),
        ("--global-batch-tokens 100", 1, 900),  # the longest document is not cut
        ("--global-batch-tokens 100000 --position-embedding-type learned_absolute --max-position-embeddings 512", 4, 512),
    ],
)
def test_what_a_microbatch_can_be_filled_with(flags, ranks, expected):
    run = parse_arguments(f"{RUN} {flags}".split(), world_size=8)
    documents = survey(np.array([100, 900, 500, 0]), budget=10**9, fingerprint=False)
    assert most_useful(run, documents, data_parallel_size=ranks, unit=1) == expected
    assert longest_piece(run, documents) == (512 if "learned" in flags else 900)


def test_a_run_with_an_open_budget_plans_nothing_and_a_found_one_does():
    run = parse_arguments(f"{RUN} --global-batch-size 8".split(), world_size=1)
    assert run.data.finds_budget
    with pytest.raises(ConfigError, match="auto is measured when a run starts"):
        run.plan_config(data_parallel_size=1)
    found = run.with_budget(777)
    assert found.plan_config(data_parallel_size=1).capacity == 777 and not found.data.finds_budget and run.data.finds_budget


@pytest.mark.parametrize("word", ["most", "12.5"])
def test_a_budget_is_a_number_or_auto(word):
    with pytest.raises(ConfigError, match=f"invalid int or auto value: '{word}'"):
        parse_arguments(f"{RUN} --global-batch-size 8 --max-tokens-per-microbatch {word}".split(), world_size=1)
