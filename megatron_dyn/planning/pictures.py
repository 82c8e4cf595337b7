# SPDX-License-Identifier: Apache-2.0
"""Pictures of plans: lengths and T, fill and imbalance over the steps, one step on its ranks, one rank's pipeline."""

from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from megatron_dyn.figures import BLUE, GREEN, GREY, LENGTH_COLOURS, ORANGE, RED, TEXT, legend_above, new_figure, thousands, tidy
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.cost import CostModel
from megatron_dyn.planning.division import division_of, measure
from megatron_dyn.planning.plan import StepPlan
from megatron_dyn.planning.report import Planned
from megatron_dyn.planning.simulate import rank_times, timeline

MOST_RANKS = 32
"""Data-parallel ranks drawn of one step; more cannot be told apart."""
BARS = 50


def bars_of_T(T: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Microbatches by T: counts [n], and edges [n + 1]. A bar holds its right edge and not its left one, so none reaches above the capacity."""
    width = -(-capacity // BARS)
    edges = capacity - np.arange(-(-capacity // width), -1, -1) * width
    counts = np.bincount((capacity - T) // width, minlength=len(edges) - 1)[::-1]
    return counts, np.maximum(edges, 0)


def draw_lengths(planned: Planned) -> Figure:
    """Histograms of the documents' lengths (how many, and where the tokens are) and of T."""
    figure = new_figure(10.5, 3.9)
    left, right = figure.subplots(1, 2)
    lengths, counts = planned.lengths.lengths.astype(np.float64), planned.lengths.counts
    budget = planned.report.settings["max_tokens_per_microbatch"]
    edges = np.geomspace(1, max(lengths.max(), budget) * 1.3, 46)
    tidy(left)
    left.hist(lengths, bins=edges, weights=counts / counts.sum(), color=BLUE, alpha=0.75, label="documents")
    left.hist(lengths, bins=edges, weights=lengths * counts / (lengths * counts).sum(), histtype="step", color=ORANGE, linewidth=1.8, label="their tokens")
    left.axvline(budget, color=RED, linewidth=1.3, label=f"B {budget:,}")
    left.set_xscale("log")
    left.xaxis.set_major_locator(LogLocator(base=10, subs=(1,) if edges[-1] > 300 else (1, 3)))
    left.xaxis.set_major_formatter(FuncFormatter(thousands))
    left.xaxis.set_minor_formatter(NullFormatter())
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.set_xlabel("length of a document (tokens)")
    left.set_ylabel("share")
    left.set_title("Lengths", loc="left", fontsize=11)
    legend_above(left, 3)
    tidy(right)
    capacity = planned.report.capacity
    counts, bins = bars_of_T(planned.T, capacity)
    right.bar(bins[:-1], counts, width=np.diff(bins), align="edge", color=GREEN, alpha=0.85)
    right.axvline(capacity, color=RED, linewidth=1.3, label=f"capacity {capacity:,}")
    right.set_xlim(0, capacity * 1.03)
    right.xaxis.set_major_formatter(FuncFormatter(thousands))
    right.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("T (tokens)")
    right.set_ylabel("microbatches")
    right.set_title(f"T ({planned.report.distinct_T:,} different)", loc="left", fontsize=11)
    legend_above(right)
    return figure


def draw_steps(planned: Planned) -> Figure:
    """Fill and imbalance over the steps, beside filling in order."""
    report = planned.report
    figure = new_figure(10.5, 5.6)
    fill_axes, cost_axes = figure.subplots(2, 1, sharex=True)
    steps = np.arange(report.first_step, report.first_step + report.steps)
    marker = dict(marker="o", markersize=3) if report.steps <= 80 else {}
    tidy(fill_axes)
    fill_axes.plot(steps, report.per_step["slot_fill"], color=GREY, label="slot fill: real tokens / sum of T", **marker)
    fill_axes.plot(steps, report.per_step["fill"], color=GREEN, label="fill: real tokens / (microbatches x B)", **marker)
    fill_axes.set_ylim(0, 1.05)
    fill_axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    fill_axes.set_ylabel("share of tokens")
    fill_axes.set_title("Fill", loc="left", fontsize=11)
    legend_above(fill_axes, 2)
    tidy(cost_axes)
    cost_axes.plot(steps, report.per_step["microbatch_cost"], color=BLUE, label="microbatches", **marker)
    cost_axes.plot(steps, report.per_step["rank_cost"], color=ORANGE, label="ranks", **marker)
    if planned.in_order_per_step is not None:
        faint = dict(linewidth=1.2, alpha=0.7, linestyle="--")
        cost_axes.plot(steps, planned.in_order_per_step["microbatch_cost"], color=BLUE, label="microbatches, filled in order", **faint)
        cost_axes.plot(steps, planned.in_order_per_step["rank_cost"], color=ORANGE, label="ranks, filled in order", **faint)
    cost_axes.axhline(1.0, color=GREY, linewidth=0.8)
    cost_axes.set_ylabel("largest / mean cost")
    cost_axes.set_xlabel("step")
    cost_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    cost_axes.set_title("Imbalance", loc="left", fontsize=11)
    legend_above(cost_axes)
    figure.align_ylabels()
    return figure


def draw_step(plan: StepPlan, config: PlanConfig) -> Figure:
    """One step: a row a data-parallel rank, its microbatches in running order, their width what they cost, made of their pieces."""
    ranks = plan.microbatches[:MOST_RANKS]
    lengths = [piece.length for rank in ranks for microbatch in rank for piece in microbatch.pieces] or [1]
    norm = LogNorm(vmin=min(lengths), vmax=max(max(lengths), min(lengths) + 1))
    division = division_of(plan, config.cost)
    sums = division.cost.sum(axis=1).tolist()
    mean = sum(sums) / len(sums) or 1.0
    figure = new_figure(11.0, min(12.0, 1.9 + 0.42 * len(ranks)))
    axes = figure.subplots()
    height = 0.78
    patches: list[Rectangle] = []
    outlines: list[Rectangle] = []
    for row, rank in enumerate(ranks):
        end = 0.0
        for microbatch, computed in zip(rank, division.cost[row].tolist()):
            at = end
            end += computed / mean
            outlines.append(Rectangle((at, row), computed / mean, height))
            for piece in sorted(
                microbatch.pieces, key=lambda piece: -piece.length
            ):  # their order says nothing, and so they can be told apart
                width = float(config.cost.of(piece.length)) / mean
                patches.append(Rectangle((at, row), width, height, facecolor=LENGTH_COLOURS(norm(piece.length))))
                at += width
    thin = 0.4 if len(patches) <= 1500 else 0.1
    axes.add_collection(PatchCollection(patches, match_original=True, edgecolor="white", linewidth=thin))
    axes.add_collection(PatchCollection(outlines, facecolor="none", edgecolor="#14181f", linewidth=1.3))
    axes.axvline(1.0, color=RED, linewidth=1.2, linestyle="--")
    axes.set_xlim(0, max(max(sums) / mean, 1.0) * 1.015)
    axes.set_ylim(len(ranks) - 1 + height + 0.25, -0.25)
    axes.set_yticks([row + height / 2 for row in range(len(ranks))], [f"DP {row}" for row in range(len(ranks))])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("cost, as a share of the mean rank's")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.tick_params(axis="y", length=0)
    shown = "" if len(ranks) == len(plan.microbatches) else f" ({len(ranks)} of {len(plan.microbatches)} are shown)"
    balance = measure(division, config.max_tokens_per_microbatch)
    axes.set_title(
        f"Step {plan.step}: {plan.stats.documents:,} documents on {len(plan.microbatches):,} ranks{shown}, "
        f"{plan.num_microbatches} microbatches each   |   "
        f"costliest / mean: microbatch {balance.microbatch_cost:.3f}, rank {balance.rank_cost:.4f}",
        loc="left", fontsize=10,
    )  # fmt: skip
    legend = [
        Patch(facecolor=LENGTH_COLOURS(0.5), label="a piece"),
        Patch(facecolor="none", edgecolor="#14181f", linewidth=1.3, label="a microbatch (white: padding)"),
        Line2D([], [], color=RED, linewidth=1.2, linestyle="--", label="mean of the ranks"),
    ]
    figure.legend(handles=legend, frameon=False, fontsize=9, ncols=3, loc="outside lower center")
    _length_bar(figure, axes, norm)
    return figure


def _length_bar(figure: Figure, axes: Any, norm: LogNorm) -> None:
    bar = figure.colorbar(ScalarMappable(norm=norm, cmap=LENGTH_COLOURS), ax=axes, pad=0.015, fraction=0.03, aspect=20)
    bar.set_label("length of a piece (tokens)", fontsize=9)
    bar.set_ticks(sorted({round(length) for length in np.geomspace(norm.vmin, norm.vmax, 4)}))
    bar.minorticks_off()
    bar.ax.yaxis.set_major_formatter(FuncFormatter(thousands))
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def draw_pipeline(plan: StepPlan, cost_model: CostModel, *, pipeline_parallel: int, virtual_stages: int) -> Figure:
    """The simulated pipeline of the rank that takes longest: a row a pipeline rank, forward and backward passes numbered."""
    cost = division_of(plan, cost_model).cost
    times = rank_times(cost, pipeline_parallel=pipeline_parallel, virtual_stages=virtual_stages)
    slowest = int(np.argmax(times))
    spans = timeline(cost[slowest], pipeline_parallel=pipeline_parallel, virtual_stages=virtual_stages)
    total = max(float(times[slowest]), 1e-30)
    figure = new_figure(11.0, 1.7 + 0.36 * pipeline_parallel)
    axes = figure.subplots()
    height = 0.86
    numbered = len(spans) <= 40 * pipeline_parallel
    patches = []
    for span in spans:
        colour = BLUE if span.task.forward else GREEN
        shade = 0.55 + 0.4 * (1 - span.task.chunk / max(virtual_stages, 2))
        width = (span.end - span.start) / total
        patches.append(
            Rectangle((span.start / total, span.task.rank), width, height, facecolor=colour, alpha=shade, edgecolor="white", linewidth=0.6)
        )
        if numbered and width > 0.009:
            axes.text((span.start + span.end) / 2 / total, span.task.rank + height / 2, str(span.task.microbatch), ha="center", va="center",
                      fontsize=7, color="white")  # fmt: skip
    axes.add_collection(PatchCollection(patches, match_original=True))
    axes.set_xlim(0, 1)
    axes.set_ylim(pipeline_parallel - 1 + height + 0.2, -0.2)
    axes.set_yticks([rank + height / 2 for rank in range(pipeline_parallel)], [f"PP {rank}" for rank in range(pipeline_parallel)])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("time, as a share of the step")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(colors=TEXT, labelsize=9)
    axes.tick_params(axis="y", length=0)
    idle = 1.0 - float(cost[slowest].sum()) / pipeline_parallel / total
    schedule = "1F1B" if virtual_stages == 1 else f"interleaved, {virtual_stages} chunks a rank (paler: later chunks)"
    axes.set_title(f"Step {plan.step}, the slowest rank (DP {slowest}), simulated: {schedule}, idle {idle:.1%}", loc="left", fontsize=10)
    legend = [Patch(facecolor=BLUE, label="forward pass of a microbatch"), Patch(facecolor=GREEN, label="backward pass")]
    figure.legend(handles=legend, frameon=False, fontsize=9, ncols=2, loc="outside lower center")
    return figure
