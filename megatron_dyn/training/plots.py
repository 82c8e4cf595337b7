# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run: the curves over its steps, and how one step's documents were packed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from megatron_dyn.figures import (
    BLUE,
    GREEN,
    GREY,
    LENGTH_COLOURS,
    ORANGE,
    RED,
    UNUSED,
    as_png,
    legend_above,
    new_figure,
    thousands,
    tidy,
    write_whole,
)
from megatron_dyn.training.metrics import Metrics, StepRecord

if TYPE_CHECKING:
    from megatron_dyn.planning import StepPlan

MOST_BARS = 40
"""Microbatches drawn in a picture of a step's packing; more cannot be told apart."""
MOST_POINTS = 20_000
"""Points drawn in the scatter of T."""

PADDING = {"facecolor": "#fbd3b4", "edgecolor": ORANGE, "hatch": "//////"}


def _save(figure: Figure, path: Path) -> None:
    write_whole(path, as_png(figure))


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values; over fewer at the start. Not-a-number counts for nothing."""
    valid = np.isfinite(values)
    total, count = np.cumsum(np.where(valid, values, 0.0)), np.cumsum(valid)
    total[window:], count[window:] = total[window:] - total[:-window], count[window:] - count[:-window]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def plot_run(metrics: Metrics, path: Path, *, title: str) -> None:
    """Draws the loss with its evaluations, T of every microbatch under the capacity, and the fill, over the steps.

    Args:
        metrics: at least one step.
        path: the PNG to write; replaced in one move.
    """
    steps = metrics.steps
    if not steps:
        raise ValueError(f"{path}: there is no step to draw")
    figure = new_figure(9.5, 9.0)
    figure.get_layout_engine().set(hspace=0.04)
    tokens, documents = (sum(step[key] for step in steps) for key in ("num-tokens", "documents"))
    figure.suptitle(f"{title}: {len(steps):,} steps, {documents:,} documents, {tokens:,} real tokens", fontsize=13, fontweight="bold")
    loss_axes, length_axes, fill_axes = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2.4, 1.4])
    _draw_loss(loss_axes, metrics)
    _draw_lengths(length_axes, steps)
    _draw_fill(fill_axes, steps)
    fill_axes.set_xlabel("iteration (optimizer steps)")
    fill_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.align_ylabels()
    _save(figure, path)


def _column(steps: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    return np.array([np.nan if step[key] is None else step[key] for step in steps], dtype=float)


def _draw_loss(axes: Any, metrics: Metrics) -> None:
    tidy(axes)
    iterations, losses = _column(metrics.steps, "iteration"), _column(metrics.steps, "lm loss")
    window = max(1, len(iterations) // 60)
    few = len(iterations) <= 80
    axes.plot(iterations, losses, color=BLUE, linewidth=1.6 if window == 1 else 0.8, alpha=1 if window == 1 else 0.35,
              marker="o" if few else None, markersize=3, label="training")  # fmt: skip
    if window > 1:
        axes.plot(iterations, _smooth(losses, window), color=BLUE, linewidth=1.8, label=f"training, mean of {window} steps")
    evaluated = [record for record in metrics.validations if record["validation lm loss"] is not None]
    if evaluated:
        axes.plot(
            [record["iteration"] for record in evaluated], [record["validation lm loss"] for record in evaluated],
            color=ORANGE, linewidth=1.2, linestyle="--", marker="D", markersize=6, markeredgecolor="white", label="held-out documents",
        )  # fmt: skip
    skipped = [step["iteration"] for step in metrics.steps if step["skipped"]]
    for position, iteration in enumerate(skipped):
        axes.axvline(iteration, color=RED, linewidth=1, alpha=0.5, label=f"skipped steps ({len(skipped)})" if position == 0 else None)
    axes.set_ylabel("lm loss (nats / token)")
    axes.set_title("Loss", loc="left", fontsize=11)
    legend_above(axes)


def _draw_lengths(axes: Any, steps: Sequence[Mapping[str, Any]]) -> None:
    tidy(axes)
    counts = np.array([len(step["T"]) for step in steps])
    iterations = np.repeat(_column(steps, "iteration"), counts)
    lengths = np.concatenate([np.asarray(step["T"], dtype=float) for step in steps])
    stride = -(-len(lengths) // MOST_POINTS)
    size = float(np.clip(12_000 / (len(lengths) / stride), 3, 20))
    label = "a microbatch" if stride == 1 else f"a microbatch (one in {stride} is drawn)"
    axes.scatter(iterations[::stride], lengths[::stride], s=size, color=GREEN, alpha=0.6, linewidths=0, zorder=3, label=label)
    axes.plot(_column(steps, "iteration"), _column(steps, "capacity"), color=RED, linewidth=1.3, label=f"capacity {steps[-1]['capacity']:,}")
    axes.set_ylim(0, float(max(_column(steps, "capacity").max(), lengths.max())) * 1.08)
    axes.yaxis.set_major_formatter(FuncFormatter(thousands))
    axes.set_ylabel("T (tokens)")
    axes.set_title(f"T, the packed length of a microbatch ({len(np.unique(lengths)):,} different)", loc="left", fontsize=11)
    legend_above(axes)


def _draw_fill(axes: Any, steps: Sequence[Mapping[str, Any]]) -> None:
    tidy(axes)
    iterations = _column(steps, "iteration")
    axes.plot(iterations, _column(steps, "slot-fill"), color=GREY, linewidth=1.3, label="slot fill: real tokens / sum of T")
    axes.plot(iterations, _column(steps, "fill"), color=GREEN, linewidth=1.5, label="fill: real tokens / (microbatches x B)")
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("share of tokens")
    axes.set_title("Fill", loc="left", fontsize=11)
    legend_above(axes)


def describe_packing(plan: "StepPlan", record: StepRecord) -> dict[str, Any]:
    """What a picture of a step's packing needs, JSON-able: of at most `MOST_BARS` microbatches, the same number of each rank.

    A piece is [its first row, its length]; a row is a token of T.
    """
    ranks = plan.microbatches[:MOST_BARS]
    each = max(1, MOST_BARS // len(ranks))
    return {
        "iteration": record.iteration,
        "documents": record.documents,
        "microbatches": record.microbatches,
        "data_parallel_size": len(plan.microbatches),
        "fill": record.fill,
        "slot_fill": record.slot_fill,
        "max_tokens_per_microbatch": record.max_tokens_per_microbatch,
        "capacity": record.capacity,
        "ranks": [
            [
                {
                    "T": int(microbatch.T),
                    "tokens": int(microbatch.num_tokens),
                    "pieces": [
                        [int(start), int(piece.length)] for start, piece in zip(microbatch.cu_seqlens_padded[:-1], microbatch.pieces, strict=False)
                    ],
                }
                for microbatch in rank[:each]
            ]
            for rank in ranks
        ],
    }


def plot_packing(packing: Mapping[str, Any], path: Path) -> None:
    """Draws one step: a bar a microbatch, made of its pieces, its padding, and what is left up to the capacity.

    Args:
        packing: as `describe_packing` made it.
        path: the PNG to write; replaced in one move.
    """
    ranks, capacity = packing["ranks"], packing["capacity"]
    bars = [bar for rank in ranks for bar in rank]
    lengths = [length for bar in bars for _, length in bar["pieces"]] or [1]
    norm = LogNorm(vmin=min(lengths), vmax=max(max(lengths), min(lengths) + 1))
    figure = new_figure(10.5, min(14.0, 2.4 + 0.28 * len(bars) + 0.2 * len(ranks)))
    axes = figure.subplots()
    _draw_bars(axes, packing, norm)
    axes.axvline(capacity, color=RED, linewidth=1.4)
    axes.set_xlim(0, capacity * 1.001)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(thousands))
    axes.set_xlabel("tokens")
    axes.set_ylabel("microbatch")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    axes.tick_params(colors="#40454d", labelsize=9)
    axes.tick_params(axis="y", length=0)
    shown = "" if len(bars) == packing["microbatches"] else f" ({len(bars)} are shown)"
    figure.suptitle(f"How step {packing['iteration']} was packed", fontsize=13, fontweight="bold")
    axes.set_title(
        f"documents: {packing['documents']:,}   |   microbatches: {packing['microbatches']:,}{shown}   |   "
        f"fill {packing['fill']:.1%}   |   slot fill {packing['slot_fill']:.1%}",
        fontsize=10,
        color="#40454d",
    )
    legend = [
        Patch(facecolor=LENGTH_COLOURS(0.55), label="a piece: a document, or a part of one"),
        Patch(**PADDING, label="padding"),
        Patch(facecolor=UNUSED, label="budget not used"),
        Line2D([], [], color=RED, linewidth=1.4, label=f"capacity {capacity:,}"),
    ]
    figure.legend(handles=legend, frameon=False, fontsize=9, ncols=4, loc="outside lower center")
    colour_bar = figure.colorbar(ScalarMappable(norm=norm, cmap=LENGTH_COLOURS), ax=axes, pad=0.02, fraction=0.03, aspect=30)
    colour_bar.set_label("length of a piece (tokens)", fontsize=9)
    colour_bar.set_ticks(sorted({round(length) for length in np.geomspace(norm.vmin, norm.vmax, 5)}))
    colour_bar.minorticks_off()
    colour_bar.ax.yaxis.set_major_formatter(FuncFormatter(thousands))
    colour_bar.ax.tick_params(labelsize=9)
    colour_bar.outline.set_visible(False)
    _save(figure, path)


def _draw_bars(axes: Any, packing: Mapping[str, Any], norm: LogNorm) -> None:
    """The bars from top to bottom, a small gap between data-parallel ranks, T and fill written beside each."""
    gap, height = 0.55, 0.74
    capacity, budget = packing["capacity"], packing["max_tokens_per_microbatch"]
    pieces: list[Rectangle] = []
    ticks: list[float] = []
    labels: list[str] = []
    y = 0.0
    for rank_index, rank in enumerate(packing["ranks"]):
        for index, bar in enumerate(rank):
            axes.add_patch(Rectangle((0, y), capacity, height, facecolor=UNUSED))
            axes.add_patch(Rectangle((0, y), bar["T"], height, linewidth=0, **PADDING))  # what no piece covers stays visible
            pieces += [Rectangle((start, y), length, height, facecolor=LENGTH_COLOURS(norm(length))) for start, length in bar["pieces"]]
            axes.annotate(
                f"T {bar['T']:,}, fill {bar['tokens'] / budget:.0%}", (capacity, y + height / 2), xytext=(6, 0), textcoords="offset points",
                va="center", fontsize=8, color="#40454d", annotation_clip=False,
            )  # fmt: skip
            ticks.append(y + height / 2)
            labels.append(f"DP {rank_index}, {index}" if packing["data_parallel_size"] > 1 else f"{index}")
            y += 1
        y += gap
    collection = PatchCollection(pieces, match_original=True)
    collection.set_edgecolor("white")
    collection.set_linewidth(0.7 if len(pieces) <= 40 * len(ticks) else 0.15)
    axes.add_collection(collection)
    axes.set_ylim(y - gap, -0.3)
    axes.set_yticks(ticks, labels)
