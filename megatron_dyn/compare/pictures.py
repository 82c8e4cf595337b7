# SPDX-License-Identifier: Apache-2.0
"""Pictures of a comparison: the loss over tokens and over time, the differences with the noise band, T and fill, throughput."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from megatron_dyn.compare.arms import Arm
from megatron_dyn.compare.runs import Run
from megatron_dyn.compare.noise import deviation
from megatron_dyn.compare.verdicts import final_loss
from megatron_dyn.figures import BLUE, GREEN, GREY, ORANGE, RED, legend_above, new_figure, thousands, tidy

LINES = ("-", (0, (6, 3)), (0, (2, 2)), "-.", (0, (1, 3)), "-", "-")
"""Arms that train alike lie on each other: dashes let each be seen."""
COLOURS = (BLUE, ORANGE, GREEN, RED, "#7a4fa3", "#b08900", GREY)


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of a fortieth of the steps, shorter at the ends. [n] -> [n]"""
    window = max(1, len(values) // 40)
    weight, filled = np.ones(window), np.nan_to_num(values)
    return np.convolve(filled, weight, "same") / np.maximum(np.convolve(np.isfinite(values).astype(float), weight, "same"), 1)


def draw_losses(arms: Sequence[Arm]) -> Figure:
    """Loss over real tokens, and over wall time; dots are held-out losses. Every seed is a line."""
    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    for arm, colour, line in zip(arms, COLOURS, LINES):
        for number, run in enumerate(arm.runs.values()):
            label = arm.name if number == 0 else None
            for axes, over in ((left, np.cumsum(run.tokens)), (right, np.cumsum(run.seconds))):
                axes.plot(over, smooth(run.loss), color=colour, linestyle=line, linewidth=1.5, alpha=0.85, label=label)
                known = np.isin(run.iteration, run.held_out_iteration)
                axes.plot(over[known], run.held_out_loss[np.isin(run.held_out_iteration, run.iteration)], "o", color=colour, markersize=3.5)
    left.set(xlabel="real tokens", ylabel="loss (nats a token); dots: held out")
    right.set(xlabel="seconds")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(FuncFormatter(thousands))
        axes.xaxis.get_major_locator().set_params(nbins=5)
        tidy(axes)
    legend_above(right, columns=len(arms))
    return figure


def draw_differences(arms: Sequence[Arm]) -> Figure:
    """Relative difference of each step's loss from the reference with the same seed; the band is the spread of the reference's seeds."""
    figure = new_figure(10, 3.6)
    axes = figure.subplots()
    reference = arms[0]
    floor = deviation([final_loss(run) for run in reference.runs.values()])
    if floor is not None:
        level = float(np.mean([final_loss(run) for run in reference.runs.values()]))
        axes.axhspan(-floor / level, floor / level, color=GREY, alpha=0.18, label="standard deviation over seeds", linewidth=0)
    smallest = 1e-9
    for arm, colour in zip(arms[1:], COLOURS[1:]):
        label = arm.name
        for seed, run in arm.runs.items():
            if seed not in reference.runs:
                continue
            other = reference.runs[seed]
            steps = min(len(run.loss), len(other.loss))
            with np.errstate(invalid="ignore", divide="ignore"):
                difference = run.loss[:steps] / other.loss[:steps] - 1
            smallest = max(smallest, float(np.nanmax(np.abs(difference), initial=0.0)))
            axes.plot(run.iteration[:steps], difference, color=colour, linewidth=1.0, alpha=0.8, label=label)
            label = None
    axes.axhline(0, color=GREY, linewidth=0.8)
    band = (floor / level) if floor is not None else 0.0
    bound = 1.15 * max(smallest, band)
    if smallest < band / 20:  # a straight line at 0 would say nothing of how far apart they are
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(smallest)))
    axes.set(xlabel="step", ylabel=f"loss / loss of {reference.name} - 1", ylim=(-bound, bound))
    tidy(axes)
    legend_above(axes, columns=4)
    return figure


def draw_shapes(arms: Sequence[Arm]) -> Figure:
    """T of the microbatches of each arm (of one seed), and the share of real tokens among the rows computed."""
    figure = new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    runs = [next(iter(arm.runs.values())) for arm in arms]
    left.violinplot([[length for step in run.lengths for length in step] for run in runs], showmedians=True, widths=0.85)
    left.set_xticks(range(1, len(arms) + 1), [arm.name for arm in arms], rotation=15 if len(arms) > 3 else 0)
    left.set(ylabel="T of a microbatch (rows)", ylim=(0, None))
    left.yaxis.set_major_formatter(FuncFormatter(thousands))
    fill = [run.tokens.sum() / run.slots.sum() for run in runs]
    bars = right.bar([arm.name for arm in arms], fill, color=COLOURS[: len(arms)], width=0.6)
    right.bar_label(bars, [f"{value:.1%}" for value in fill], padding=2, fontsize=9)
    right.set(ylabel="real tokens / rows computed", ylim=(0, 1.1))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.tick_params(axis="x", rotation=15 if len(arms) > 3 else 0)
    for axes in (left, right):
        tidy(axes)
    return figure


def draw_speed(arms: Sequence[Arm]) -> Figure:
    """Real tokens and rows a second, medians over steady steps; whiskers are the seeds."""
    figure = new_figure(10, 3.4)
    axes = figure.subplots()
    at = np.arange(len(arms))
    for name, colour, shift, label in (("tokens", BLUE, -0.2, "real tokens a second"), ("slots", "#b9c4d0", 0.2, "rows computed a second")):
        rates = [[_rate(run, name) for run in arm.runs.values()] for arm in arms]
        middle = np.array([np.median(values) for values in rates])
        spread = [middle - [min(values) for values in rates], np.array([max(values) for values in rates]) - middle]
        bars = axes.bar(at + shift, middle, 0.38, color=colour, label=label, yerr=spread, ecolor=GREY, capsize=2)
        axes.bar_label(bars, [f"{value:,.0f}" for value in middle], padding=2, fontsize=8)
    axes.set_xticks(at, [arm.name for arm in arms])
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.margins(y=0.15)
    tidy(axes)
    legend_above(axes)
    return figure


def _rate(run: Run, name: str) -> float:
    return run.rate(getattr(run, name))
