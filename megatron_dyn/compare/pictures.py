# SPDX-License-Identifier: Apache-2.0
"""Pictures of a comparison: the loss over tokens and over time, the differences with what they are judged by, T and fill, throughput."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from megatron_dyn.compare.arms import Arm
from megatron_dyn.compare.checks import EXACT_LOSS, has_other_data, is_exact, noise_of_windows
from megatron_dyn.compare.comparison import Comparison
from megatron_dyn.compare.pairs import Pairs, window_differences, window_ends, window_of
from megatron_dyn.compare.runs import Run
from megatron_dyn.figures import BLUE, GREEN, GREY, ORANGE, RED, as_label, legend_above, legend_over, new_figure, thousands, tidy

LINES = ("-", (0, (6, 3)), (0, (2, 2)), "-.", (0, (1, 3)))
"""Arms that train alike lie on each other: dashes let each be seen."""
COLOURS = (BLUE, ORANGE, GREEN, RED, "#7a4fa3", "#b08900", GREY)


def colour_of(number: int) -> str:
    """Of an arm by its place; the reference is 0."""
    return COLOURS[number % len(COLOURS)]


def line_of(number: int) -> str | tuple:
    """With `colour_of`, another look for each of 35 arms: 5 lines and 7 colours have no common divisor."""
    return LINES[number % len(LINES)]


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of a fortieth of the steps, shorter at the ends; NaN where nothing in it is finite. [n] -> [n]"""
    weight, known = np.ones(max(1, len(values) // 40)), np.isfinite(values)
    counted = np.convolve(known.astype(float), weight, "same")
    return np.where(counted > 0, np.convolve(np.where(known, values, 0.0), weight, "same") / np.maximum(counted, 1), np.nan)


def draw_losses(arms: Sequence[Arm], *, with_time: bool = True) -> Figure:
    """Loss over real tokens, and over wall time; dots are held-out losses. Every seed is a line."""
    figure = new_figure(10, 4.4)
    panels = figure.subplots(1, 2 if with_time else 1, sharey=True, squeeze=False)[0]
    for place, arm in enumerate(arms):
        colour, line = colour_of(place), line_of(place)
        for number, run in enumerate(arm.runs.values()):
            label = as_label(arm.name) if number == 0 else None
            for axes, over in zip(panels, (np.cumsum(run.tokens), np.cumsum(run.seconds))):
                axes.plot(over, smooth(run.loss), color=colour, linestyle=line, linewidth=1.5, alpha=0.85, label=label)
                known = np.isin(run.iteration, run.held_out_iteration)
                axes.plot(over[known], run.held_out_loss[np.isin(run.held_out_iteration, run.iteration)], "o", color=colour, markersize=3.5)
    panels[0].set(ylabel="loss (nats a token); dots: held out")
    for axes, over in zip(panels, ("real tokens", "seconds")):
        axes.set(xlabel=over)
        axes.xaxis.set_major_formatter(FuncFormatter(thousands))
        axes.xaxis.get_major_locator().set_params(nbins=5)
        tidy(axes)
    legend_over(figure, panels[0])
    return figure


def draw_differences(found: Comparison) -> tuple[str, Figure]:
    """Difference of the loss from the reference, drawn as it is judged.

    Exact arms: each step relative to the reference's, every seed, and the limit of a step. Others: bold, the difference averaged over the seeds and a
    tenth of the steps, and its limit; pale behind it each step of each seed.

    Returns:
        A caption, and the figure.
    """
    figure = new_figure(10, 4.0)
    axes = figure.subplots()
    exact = all(is_exact(pairs) for pairs in found.pairs)
    limits = [_limit(pairs, exact) for pairs in found.pairs]
    shown = [_draw_difference(axes, place, pairs, exact) for place, pairs in enumerate(found.pairs, start=1)]
    _draw_limits(axes, found.pairs, limits)
    axes.axhline(0, color=GREY, linewidth=0.8)
    known = [limit for limit in limits if limit is not None and math.isfinite(limit)]
    bound = max([*shown, *known, 1e-9])
    if exact and max([*shown, 1e-9]) < EXACT_LOSS / 20:  # a straight line at 0 would say nothing of how far apart they are
        axes.set_yscale("symlog", linthresh=10.0 ** math.floor(math.log10(max([*shown, 1e-9]))))
    name = as_label(found.arms[0].name)
    axes.set(xlabel="step", ylabel=f"loss / loss of {name} - 1" if exact else f"loss - loss of {name} (nats)", ylim=(-1.15 * bound, 1.15 * bound))
    tidy(axes)
    legend_over(figure, axes)
    reference = found.arms[0].name
    if exact:
        return f"Difference of each step's loss from {reference}, relative; every seed is a line, the band is the limit of every step", figure
    limit = "grey or dotted: the limit that they are judged by" if known else "there is no limit to judge them by"
    return f"Difference of the loss from {reference}; bold: averaged over the seeds and a tenth of the steps, {limit}; pale: single steps", figure


def _limit(pairs: Pairs, exact: bool) -> float | None:
    """That the drawn differences of an arm are judged by; None where they are not: other data, too few seeds, an exact arm beside others."""
    if exact:
        return EXACT_LOSS
    return None if has_other_data(pairs) or is_exact(pairs) else noise_of_windows(pairs)


def _draw_difference(axes, place: int, pairs: Pairs, exact: bool) -> float:
    """Draws one arm.

    Returns:
        The largest size that must be seen.
    """
    colour, largest = colour_of(place), 0.0
    for number, pair in enumerate(pairs.all if exact else pairs.whole):
        mine, theirs = pair.reference.loss[: pair.steps], pair.other.loss[: pair.steps]
        with np.errstate(invalid="ignore", divide="ignore"):
            difference = theirs / mine - 1 if exact else theirs - mine
        look = {"linewidth": 1.0, "alpha": 0.8} if exact else {"linewidth": 0.7, "alpha": 0.22}
        label = as_label(pairs.arm.name) if exact and number == 0 else None
        axes.plot(pair.other.iteration[: pair.steps], difference, color=colour, **look, label=label)
        sizes = np.abs(difference[np.isfinite(difference)])
        if len(sizes):
            largest = max(largest, float(sizes.max() if exact else np.quantile(sizes, 0.9)))
    if not exact:
        means, middle = window_differences(pairs), np.array(window_ends(pairs.steps)) - (window_of(pairs.steps) - 1) / 2
        axes.plot(middle, means, marker="o", color=colour, linestyle=line_of(place), linewidth=2.2, markersize=4, label=as_label(pairs.arm.name))
        largest = max([largest, *np.abs(means[np.isfinite(means)]).tolist()])
    return largest


def _draw_limits(axes, pairs: Sequence[Pairs], limits: Sequence[float | None]) -> None:
    """A band for the limit of most arms, dotted lines in an arm's colour where it has another."""
    counted = Counter(limit for limit in limits if limit is not None and math.isfinite(limit))
    if not counted:
        return
    [(most, _)] = counted.most_common(1)
    axes.axhspan(-most, most, color=GREY, alpha=0.18, label=f"limit {most:.2g}", linewidth=0)
    for place, limit in enumerate(limits, start=1):
        if limit in counted and limit != most:
            for height, label in ((limit, f"limit of {as_label(pairs[place - 1].arm.name)}: {limit:.2g}"), (-limit, None)):
                axes.axhline(height, color=colour_of(place), linestyle=":", linewidth=1.2, label=label)


def draw_shapes(arms: Sequence[Arm]) -> Figure:
    """T of the microbatches of each arm (of one seed), and the share of real tokens among the rows computed."""
    figure = new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    runs = [next(iter(arm.runs.values())) for arm in arms]
    left.violinplot([[length for step in run.lengths for length in step] for run in runs], showmedians=True, widths=0.85)
    left.set(ylabel="T of a microbatch (rows)", ylim=(0, None))
    left.yaxis.set_major_formatter(FuncFormatter(thousands))
    fill = [run.tokens.sum() / run.slots.sum() for run in runs]
    bars = right.bar(range(1, len(arms) + 1), fill, color=[colour_of(place) for place in range(len(arms))], width=0.6)
    right.bar_label(bars, [f"{value:.1%}" for value in fill], padding=2, fontsize=9 if len(arms) <= 7 else 6)
    right.set(ylabel="real tokens / rows computed", ylim=(0, 1.1))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (left, right):
        _name_arms(axes, range(1, len(arms) + 1), arms, few=3)
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
        axes.bar_label(bars, [f"{value:,.0f}" for value in middle], padding=2, fontsize=8 if len(arms) <= 7 else 6)
    _name_arms(axes, at, arms, few=6)
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.margins(y=0.15)
    tidy(axes)
    legend_above(axes)
    return figure


def _name_arms(axes, at: Sequence[int] | np.ndarray, arms: Sequence[Arm], *, few: int) -> None:
    axes.set_xticks(at, [as_label(arm.name) for arm in arms])
    if len(arms) > few or any(len(arm.name) > 60 // len(arms) for arm in arms):
        axes.set_xticks(at, [as_label(arm.name) for arm in arms], rotation=20, ha="right")


def _rate(run: Run, name: str) -> float:
    return run.rate(getattr(run, name))
