# SPDX-License-Identifier: Apache-2.0
"""The other ways to divide a step that `plan` compares with, and the figures that are taken of every way."""

import itertools

import numpy as np
import pytest

from megatron_dyn.planning import CostModel, PlanConfig, Planner
from megatron_dyn.planning import report as reports
from megatron_dyn.planning.baselines import DIVISIONS, Concatenation, in_order, karmarkar_karp, largest_differencing, padded
from megatron_dyn.planning.division import OrderedPieces, division_of, measure, pieces_in_order
from megatron_dyn.planning.report import report_on

LENGTHS = np.clip(np.random.default_rng(5).lognormal(5.0, 1.2, 900), 1, None).astype(np.int64)


def config(**changes):
    return PlanConfig(**(dict(max_tokens_per_microbatch=1024, global_batch_size=300, data_parallel_size=4, alignment=2) | changes))


def pieces(*lengths):
    return OrderedPieces(length=np.array(lengths, dtype=np.int64), document=np.arange(len(lengths)))


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("name", DIVISIONS)
def test_every_way_divides_every_token_over_equally_many_microbatches(name, multiple):
    planner = Planner(LENGTHS, config(microbatch_multiple=multiple))
    for step in range(3):
        plan = planner.plan(step)
        division = DIVISIONS[name](pieces_in_order(plan), planner.config, int(LENGTHS.max()))
        assert division.tokens.sum() == plan.stats.tokens and division.tokens.shape[0] == 4
        assert division.num_microbatches % multiple == 0
        assert (division.rows >= division.tokens).all() and (division.rows % 2 == 0).all()
        empty = division.tokens == 0
        assert (division.cost[empty] == planner.config.cost.linear * division.rows[empty]).all()
        if name in ("in_order", "karmarkar_karp"):  # they cut nothing: each piece costs what it costs alone, each row of padding its share
            alone = sum(planner.config.cost.of(piece) for piece in pieces_in_order(plan).length.tolist())
            padding = int((division.rows - division.tokens).sum())
            assert division.cost.sum() == pytest.approx(alone + planner.config.cost.linear * padding)
        if name != "karmarkar_karp":
            assert division.tokens.max() <= 1024


def test_pieces_come_back_in_the_order_of_the_step():
    planner = Planner(LENGTHS, config())
    plan = planner.plan(1)
    found = pieces_in_order(plan)
    assert np.bincount(found.document, weights=found.length).tolist() == LENGTHS[plan.documents].tolist()
    assert (np.diff(found.document) >= 0).all() and found.cut_documents == plan.stats.split_documents > 0


def test_filling_in_order_by_hand():
    division = in_order(pieces(600, 300, 200, 900, 100, 24, 500), config(data_parallel_size=2), 900)
    # [600 300] [200] [900 100 24] [500]: dealt in turn
    assert division.tokens.tolist() == [[900, 1024], [200, 500]]
    assert in_order(pieces(600, 300, 200), config(data_parallel_size=3), 900).tokens.tolist() == [[600], [200], [300]]


def test_differencing_by_hand_and_against_all_divisions():
    # Karmarkar and Karp's own example for two parts: 8, 7, 6, 5, 4 are left with a difference of 2.
    parts = largest_differencing([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]
    random = np.random.default_rng(7)
    for _ in range(40):
        values = random.integers(1, 50, 6).tolist()
        even = largest_differencing(values, 3, equal_size=True)
        assert sorted(i for part in even for i in part) == list(range(6)) and {len(part) for part in even} == {2}
        best = min(
            max(sum(v for v, c in zip(values, choice) if c == part) for part in range(3))
            for choice in itertools.product(range(3), repeat=6)
        )
        assert max(sum(values[i] for i in part) for part in largest_differencing(values, 3)) <= 4 / 3 * best


def test_karmarkar_karp_may_pass_the_budget_and_puts_the_costliest_in_the_middle():
    three = karmarkar_karp(pieces(600, 600, 600), config(data_parallel_size=1), 0)
    assert sorted(three.tokens[0].tolist()) == [600, 1200]  # the rule's own weakness, not ours to mend
    planner = Planner(LENGTHS, config(alignment=1))  # the rule knows no padding
    division = karmarkar_karp(pieces_in_order(planner.plan(0)), planner.config, 0)
    middle = division.num_microbatches // 2
    assert (division.cost[:, middle - 1 : middle + 1].max(axis=1) == division.cost.max(axis=1)).all()
    assert division.cost.sum(axis=1).max() <= 1.02 * division.cost.sum(axis=1).mean()


def test_what_is_computed_is_what_is_charged():
    """The planned way's own padding too: T at capacity, buckets, fillers; attention over real tokens."""
    cost = CostModel(linear=2.0, quadratic=0.25)
    lengths = np.array([10, 3])
    for changes, rows in ((dict(), 10 + 3 + 1 + 1), (dict(alignment=8), 16 + 8 + 8 + 8), (dict(microbatching="packed-fixed"), 4 * 16)):
        settings = dict(max_tokens_per_microbatch=16, global_batch_size=2, data_parallel_size=4, cost=cost, document_order="sequential")
        division = division_of(Planner(lengths, PlanConfig(**(settings | changes))).plan(0), cost)
        assert division.rows.sum() == rows
        assert division.cost.sum() == 2.0 * rows + 0.25 * (10**2 + 3**2), "each row, and attention of each document alone"


def test_a_plan_that_computes_more_takes_longer():
    """Against a plan of the same documents without padding, and against another way in the same table."""
    found = {}
    for name, changes in dict(dynamic=dict(), bucket=dict(alignment=384), full=dict(microbatching="packed-fixed")).items():
        ways = report_on(Planner(LENGTHS, config(**changes)), steps=2, pipeline_parallel=2).report.ways
        found[name] = (ways["padded"].cost, ways["padded"].time)
    for at in (0, 1):
        assert found["dynamic"][at] > 1.005 * found["bucket"][at] > 1.005 * found["full"][at]


def test_documents_are_joined_from_step_to_step_and_cut_where_a_sequence_ends():
    stream = Concatenation(config(data_parallel_size=2))
    assert stream.divide(pieces(1000, 100)) is None, "no round of two sequences has come together"
    found = stream.divide(pieces(948, 3000))  # 0 to 1000, to 1100, to 2048, to 5048
    assert found.tokens.tolist() == found.rows.tolist() == [[1024, 1024], [1024, 1024]]
    assert found.cost == pytest.approx(config().cost.of(1024.0))
    assert stream.tokens == 5048 and stream.cut_documents == 2
    assert stream.divide(pieces(1096)).num_microbatches == 1 and stream.tokens == 6144 == 6 * 1024
    assert stream.divide(pieces()) is None


@pytest.mark.parametrize("lengths,batch,budget", [([7], 1, 1024), (LENGTHS, 8, 1024), (LENGTHS, 8, 65536), (LENGTHS, 40, 64)])
def test_cutting_at_the_budget_is_charged_for_its_tokens_alone(lengths, batch, budget):
    """Neither a small batch nor a large budget makes it pay for rows that nobody computes: by hand, tokens / B sequences of B tokens."""
    settings = config(max_tokens_per_microbatch=budget, global_batch_size=batch, data_parallel_size=2, alignment=1)
    planner = Planner(np.array(lengths), settings)
    steps = min(3, planner.steps_per_epoch())
    report = report_on(planner, steps=steps).report
    own = sum(float(division_of(planner.plan(step), settings.cost).cost.sum()) for step in range(steps))
    assert report.ways["fixed_length"].cost == pytest.approx(report.tokens / budget * settings.cost.of(budget) / own)
    assert report.ways["fixed_length"].microbatches_per_rank == pytest.approx(report.tokens / budget / 2 / steps)
    assert report.ways["fixed_length"].fill == 1.0


def test_differencing_is_left_out_where_it_would_take_too_long(monkeypatch):
    planner = Planner(LENGTHS, config())
    work = len(pieces_in_order(planner.plan(0)).length) * (planner.plan(0).num_microbatches + 1)
    for allowed, skipped in ((3 * work, []), (work, ["karmarkar_karp"])):
        monkeypatch.setattr(reports, "MOST_DIFFERENCING", allowed)
        report = report_on(planner, steps=2).report
        assert report.skipped_ways == skipped and set(report.ways) == set(reports.TITLES) - set(skipped)
    told = []
    report_on(planner, steps=2, progress=told.append)
    assert told == [1, 2]


def test_ranks_without_documents_are_counted():
    report = report_on(Planner(np.array([5, 6, 7, 8]), config(global_batch_size=2, data_parallel_size=8)), steps=2).report
    assert report.idle_ranks == 6.0 and report.fillers == 12


def test_padding_takes_the_longest_of_the_corpus():
    cost = CostModel(linear=1.0, quadratic=0.5)
    division = padded(pieces(500, 10, 20), config(data_parallel_size=1, cost=cost), 511)
    assert division.rows.tolist() == [[1024, 512]] and division.tokens.tolist() == [[510, 20]]
    assert division.cost.tolist() == [[2 * cost.of(512), cost.of(512)]]
    fillers = padded(pieces(500), config(data_parallel_size=3, cost=cost), 511)
    assert fillers.rows.tolist() == [[512], [2], [2]] and fillers.cost.tolist() == [[cost.of(512)], [2.0], [2.0]]


def test_measures_are_those_of_the_plan():
    planner = Planner(LENGTHS, config(alignment=1, global_batch_size=200))
    plan = planner.plan(0)
    found = measure(division_of(plan, planner.config.cost), 1024)
    stats = plan.stats
    assert (found.tokens, found.rows, found.microbatches) == (stats.tokens, stats.slots, stats.microbatches)
    assert stats.padding == 0, "so that what is computed is what is real"
    assert found.microbatch_cost == pytest.approx(stats.imbalance) and found.rank_cost == pytest.approx(stats.rank_imbalance)
    assert found.tokens / found.room == pytest.approx(stats.fill) and found.over_budget == 0


def test_a_report_sums_its_steps():
    planner = Planner(LENGTHS, config())
    report = report_on(planner, first_step=1, steps=2, pipeline_parallel=2).report
    stats = [planner.plan(step).stats for step in (1, 2)]
    assert report.tokens == sum(found.tokens for found in stats) and report.padding == sum(found.padding for found in stats)
    T = {mb.T for step in (1, 2) for rank in planner.plan(step).microbatches for mb in rank}
    assert (report.distinct_T, report.T_min, report.T_max) == (len(T), min(T), max(T))
    planned = report.ways["planned"]
    assert planned.cost == planned.time == 1.0 and planned.rank_cost.mean == pytest.approx(
        np.mean([found.rank_imbalance for found in stats]), rel=1e-3
    )  # padding to the alignment is all that differs
    assert report.ways["padded"].time > report.ways["in_order"].time > 1.0
    with pytest.raises(ValueError, match="at least one step"):
        report_on(planner, steps=0)
