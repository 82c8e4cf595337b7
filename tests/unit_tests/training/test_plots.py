# SPDX-License-Identifier: Apache-2.0
"""The pictures show the run's numbers: what is drawn is read back from the figures."""

import json

import numpy as np
import pytest
from matplotlib.image import imread
from metrics_samples import BUDGET, planner, records

from megatron_dyn.training import plots
from megatron_dyn.training.metrics import Metrics, ValidationRecord
from megatron_dyn.training.metrics_file import strict_json


@pytest.fixture
def figures(monkeypatch):
    """The figures made in the test, before they are written."""
    made = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: (made.append(figure), save(figure, path)))
    return made


def metrics_of(steps, validations=()):
    return Metrics(
        steps=[json.loads(strict_json(record.as_json())) for record in steps],
        validations=[json.loads(strict_json(record.as_json())) for record in validations],
    )


def line(axes, label):
    return next(line for line in axes.get_lines() if line.get_label().startswith(label))


def test_curves_hold_every_number(tmp_path, figures):
    steps = records(20)
    steps[5].lm_loss, steps[5].skipped = None, True
    validations = [ValidationRecord(iteration=i, loss=5.0 - i / 10, tokens=1, documents=1, seconds=1) for i in (10, 20)]
    plots.plot_run(metrics_of(steps, validations), tmp_path / "plot.png", title="Run x")
    loss_axes, length_axes, fill_axes = figures[0].axes
    drawn = line(loss_axes, "training").get_ydata()
    assert np.isnan(drawn[5]) and np.allclose(np.delete(drawn, 5), [record.lm_loss for record in steps if not record.skipped])
    assert np.allclose(line(loss_axes, "held-out").get_xydata(), [[10, 4.0], [20, 3.0]])
    assert line(loss_axes, "skipped").get_xdata() == [6, 6]
    points = length_axes.collections[0].get_offsets()
    assert np.array_equal(points, [(record.iteration, T) for record in steps for T in record.T])
    assert set(line(length_axes, "capacity").get_ydata()) == {104}
    assert np.allclose(line(fill_axes, "fill").get_ydata(), [record.fill for record in steps])
    assert all(axes.get_ylabel() and axes.get_title(loc="left") for axes in figures[0].axes) and fill_axes.get_xlabel()
    assert min(imread(tmp_path / "plot.png").shape[:2]) >= 800


@pytest.mark.parametrize("count", [1, 2, 700])
def test_short_and_long_runs_are_drawn(tmp_path, count):
    steps = records(min(count, 19)) * (count // 19 + 1)
    many = metrics_of(steps[:count])
    for iteration, step in enumerate(many.steps, start=1):
        step["iteration"] = iteration
    plots.plot_run(many, tmp_path / "plot.png", title="Run x")
    assert imread(tmp_path / "plot.png").std() > 0.05


def test_a_scatter_is_thinned_when_it_would_be_too_many_points(tmp_path, figures, monkeypatch):
    monkeypatch.setattr(plots, "MOST_POINTS", 10)
    plots.plot_run(metrics_of(records(19)), tmp_path / "plot.png", title="Run x")
    points = figures[0].axes[1].collections[0]
    assert 5 <= len(points.get_offsets()) <= 10 and "one in" in points.get_label()


def test_a_run_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no step"):
        plots.plot_run(metrics_of([]), tmp_path / "plot.png", title="Run x")


def test_smoothing_is_a_mean_of_the_last_values():
    values = np.array([1.0, 2.0, np.nan, 4.0, 6.0])
    assert np.allclose(plots._smooth(values, 2), [1.0, 1.5, 2.0, 4.0, 5.0])
    assert np.isnan(plots._smooth(np.array([np.nan, 1.0]), 2)[0])


@pytest.mark.parametrize("document_alignment", [1, 4])
def test_packing_shows_every_piece_where_it_lies(tmp_path, figures, document_alignment):
    plans = planner(document_alignment=document_alignment)
    plan, (record,) = plans.plan(0), records(1, plans=plans)
    packing = json.loads(strict_json(plots.describe_packing(plan, record)))
    microbatches = [microbatch for rank in plan.microbatches for microbatch in rank]
    plots.plot_packing(packing, tmp_path / "packing.png")
    axes = figures[0].axes[0]
    spans = [path.get_extents() for path in axes.collections[0].get_paths()]
    expected = [
        (start, start + piece.length)
        for microbatch in microbatches
        for start, piece in zip(microbatch.cu_seqlens_padded[:-1], microbatch.pieces, strict=True)
    ]
    assert [(span.x0, span.x1) for span in spans] == expected
    assert [text.get_text().split(",")[0] for text in axes.texts] == [f"T {microbatch.T}" for microbatch in microbatches]
    assert sorted(patch.get_width() for patch in axes.patches) == sorted([104] * len(microbatches) + [microbatch.T for microbatch in microbatches])
    assert f"documents: {plan.num_documents}   |   microbatches: {len(microbatches)} " in axes.get_title() and f"{record.fill:.1%}" in axes.get_title()
    assert BUDGET == packing["max_tokens_per_microbatch"]


def test_packing_of_many_microbatches_shows_some_of_each_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "MOST_BARS", 20)
    plans = planner(data_parallel_size=3, documents=100)
    plan, (record,) = plans.plan(0), records(1, plans=plans)
    packing = plots.describe_packing(plan, record)
    assert record.microbatches > plots.MOST_BARS
    assert [len(rank) for rank in packing["ranks"]] == [plots.MOST_BARS // 3] * 3
    plots.plot_packing(packing, tmp_path / "packing.png")


def test_packing_of_fillers_alone_is_drawn(tmp_path):
    bars = [[{"T": 8, "tokens": 0, "pieces": []}], [{"T": 8, "tokens": 1, "pieces": [[0, 1]]}]]
    packing = {"iteration": 1, "documents": 1, "microbatches": 2, "data_parallel_size": 2, "fill": 0.005, "slot_fill": 0.06,
               "max_tokens_per_microbatch": 100, "capacity": 104, "ranks": bars}  # fmt: skip
    plots.plot_packing(packing, tmp_path / "packing.png")
    assert imread(tmp_path / "packing.png").std() > 0.05


def test_a_failing_figure_leaves_the_old_picture(tmp_path, monkeypatch):
    target = tmp_path / "plot.png"
    target.write_bytes(b"old")
    monkeypatch.setattr(plots.Figure, "savefig", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plots.plot_run(metrics_of(records(2)), target, title="Run x")
    assert target.read_bytes() == b"old"
