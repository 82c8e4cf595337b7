# SPDX-License-Identifier: Apache-2.0
"""The look of the house's pictures: matplotlib's object interface on the Agg canvas, without a window system or global state."""

import io
import os
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#2563a8", "#e07b39", "#3a8f5c", "#c0392b", "#8a8f98"
TEXT = "#40454d"
LENGTH_COLOURS = LinearSegmentedColormap.from_list("length", ["#cfe8f3", "#7fc1d8", "#3d8fb8", "#23588f", "#1b2a5c"])
UNUSED = "#eff1f4"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Any) -> None:
    """Quiet axes: two spines, a pale grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(True, color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=TEXT, labelsize=9)


def legend_above(axes: Any, columns: int = 4) -> None:
    """A legend in the line of the panel's title, where it hides no data."""
    axes.legend(
        frameon=False, fontsize=9, ncols=columns, loc="lower right", bbox_to_anchor=(1.01, 0.98), borderaxespad=0.2, columnspacing=1.4
    )


def legend_over(figure: Figure, axes: Any, columns: int = 4) -> None:
    """One legend of a panel's lines above all panels: it takes its height from the figure, and no width from a panel."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=9, ncols=min(columns, max(1, len(labels))), loc="outside upper right", columnspacing=1.4)


def as_label(name: str) -> str:
    """A user's word as matplotlib text: no formula between dollars, and not left out of a legend for a leading underscore."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def thousands(value: float, _: int | None = None) -> str:
    """Tick labels as 12,345; with as many digits as the tick has, where it is between two integers."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.6g}"


def as_png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file in one move: whoever looks sees the old one or the new one, whole."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "xb") as handle:  # a new file: never through a link that lay there
        handle.write(content)
    os.replace(partial, path)
