# SPDX-License-Identifier: Apache-2.0
"""Pictures show every arm and what is judged; the page tells what was compared."""

import json

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from written_run import three_seeds, write_run

from megatron_dyn.compare import arms_of, compare_arms, read_run
from megatron_dyn.compare.command import main
from megatron_dyn.compare.pictures import colour_of, draw_differences, draw_losses, draw_shapes, line_of
from megatron_dyn.compare.report import number
from megatron_dyn.figures import thousands
from megatron_dyn.web_page import picture, table


def named(tmp_path, count):
    return arms_of([read_run(write_run(tmp_path / str(number)), arm=f"arm {number}") for number in range(count)])


@pytest.mark.filterwarnings("error")
def test_names_with_dollars_and_underscores_are_drawn(tmp_path):
    arms = arms_of([read_run(write_run(tmp_path / str(number)), arm=name) for number, name in enumerate([r"$\frac$ a$b", "_hidden"])])
    for figure in (draw_losses(arms), draw_shapes(arms)):
        figure.draw_without_rendering()
    assert [text.get_text() for text in draw_losses(arms).legends[0].get_texts()] == [r"\$\frac\$ a\$b", " _hidden"]


def test_every_arm_is_drawn_with_a_look_of_its_own(tmp_path):
    arms = named(tmp_path, 9)
    losses, (_, differences), shapes = draw_losses(arms), draw_differences(compare_arms(arms)), draw_shapes(arms)
    assert [text.get_text() for text in losses.legends[0].get_texts()] == [arm.name for arm in arms]
    assert {arm.name for arm in arms[1:]} <= {text.get_text() for text in differences.legends[0].get_texts()}
    assert len(shapes.axes[1].patches) == 9
    assert len({(colour_of(place), line_of(place)) for place in range(35)}) == 35


def test_a_legend_of_many_arms_takes_no_width_from_a_panel(tmp_path):
    figure = draw_losses(named(tmp_path, 6))
    figure.draw_without_rendering()
    left, right = (axes.get_position().width for axes in figure.axes)
    assert left == pytest.approx(right, rel=0.02) and left > 0.35


def test_ticks_between_integers_have_their_digits():
    assert [thousands(value) for value in (0, 0.5, 1.0, 1.5, 0.1 + 0.2, 12345.0, 2e6)] == ["0", "0.5", "1", "1.5", "0.3", "12,345", "2,000,000"]


def test_what_is_drawn_bold_and_its_band_are_what_is_judged(tmp_path):
    runs = three_seeds(tmp_path, "a") + three_seeds(tmp_path, "b", way="packed-fixed", change=lambda loss: loss + 0.03 * np.linspace(0, 1, len(loss)))
    found = compare_arms(arms_of([read_run(folder) for folder in runs]))
    [verdict] = [verdict for verdict in found.verdicts if verdict.name == "every loss"]
    caption, figure = draw_differences(found)
    axes = figure.axes[0]
    [bold] = [line for line in axes.lines if line.get_linewidth() > 2]
    assert max(bold.get_ydata(), key=abs) == pytest.approx(verdict.value) and "averaged over the seeds" in caption
    assert bold.get_xdata().tolist() == [3.5 + 6 * window for window in range(10)], "the middle of each tenth of 60 steps"
    [band] = axes.patches
    assert abs(band.get_bbox().y0) == pytest.approx(verdict.threshold) and band.get_bbox().y1 == pytest.approx(verdict.threshold)
    pale = [line for line in axes.lines if line.get_alpha() and line.get_alpha() < 0.5]
    assert len(pale) == 3 and {to_rgba(line.get_color()) for line in pale} == {to_rgba(bold.get_color())}


def test_an_arm_that_is_not_judged_so_gets_no_band(tmp_path):
    ways = ("dynamic", "packed-fixed", "concat-chunk")
    runs = [write_run(tmp_path / f"{way}{seed}", seed=seed, way=way) for way in ways for seed in (1, 2, 3)]
    _, figure = draw_differences(compare_arms(arms_of([read_run(folder) for folder in runs])))
    assert not figure.axes[0].patches, "one is exact, one has other data"


def test_without_enough_seeds_no_band_is_drawn(tmp_path):
    runs = three_seeds(tmp_path, "a")[:2] + three_seeds(tmp_path, "b", way="packed-fixed")[:2]
    caption, figure = draw_differences(compare_arms(arms_of([read_run(folder) for folder in runs])))
    assert not figure.axes[0].patches and "no limit" in caption


def test_numbers_near_one_keep_their_digits():
    assert [number(value) for value in (-0.9996, 0.9996, 1.0058, 0.5, -0.0179, 1.0, 3, None)] == ["-0.9996", "0.9996", "1.0058", "0.5", "-0.0179", "1", "3", "-"]


def test_the_page_tells_the_layout_of_each_arm_the_corpus_and_the_day(tmp_path, unrendered):
    a, two = write_run(tmp_path / "a", data_path=["books/en"]), write_run(tmp_path / "two", tp=2, ranks=2, data_path=["books/en"])
    assert main([f"one={a}", f"two={two}", "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "compare.html").read_text()
    assert "one: one rank; two: TP 2" in page and "books/en" in page and "Recorded 20" in page
    found = json.loads((tmp_path / "report" / "compare.json").read_text())
    assert found["holds"] is True and found["headline"][0].startswith("two trains as one does")


def test_what_is_not_decided_is_neither_green_nor_grey_on_the_page(tmp_path, unrendered):
    a, b = write_run(tmp_path / "a", bf16=True), write_run(tmp_path / "b", bf16=True, way="packed-fixed")
    assert main([str(a), str(b), "--output", str(tmp_path / "report")]) == 3
    page = (tmp_path / "report" / "compare.html").read_text()
    assert '<p class="headline undecided">packed-fixed: not decided' in page and '<tr class="undecided">' in page and ".undecided {" in page


def test_a_phone_gets_names_beside_numbers_and_pictures_in_full_size():
    text = table(("", "check", "value", "limit", "what"), [("holds", "x", "1", "2", "a < b")], kind="checks")
    assert '<td data-name="value">1</td><td data-name="limit">2</td><td>a &lt; b</td>' in text
    shown = picture("losses", b"png", "A caption")
    assert '<figure id="losses"><a href="#losses"><img' in shown and "http" not in shown
