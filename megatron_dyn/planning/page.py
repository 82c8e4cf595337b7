# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of plans as one HTML page that needs nothing else: no script, no font and no picture from elsewhere."""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dyn.figures import as_png, write_whole
from megatron_dyn.planning import pictures
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.report import Planned

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #23272e; background: #fff; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid #e3e6ea; text-align: right; vertical-align: top; }
th:first-child, td:first-child, .facts td { text-align: left; } th { color: #5a616b; font-weight: 600; vertical-align: bottom; }
.columns td:nth-child(2) { font-weight: 600; } .note { color: #5a616b; font-size: .9rem; margin: .2rem 0; }
img { max-width: 100%; height: auto; } figure { margin: 1.2rem 0; } figcaption { color: #5a616b; font-size: .9rem; }
"""


@dataclass(frozen=True, kw_only=True)
class TableOf:
    """A table of texts."""

    rows: list[tuple[str, ...]]
    columns: tuple[str, ...] = ()
    """Headings; without them a row is a name and its value."""
    title: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """Tables under one heading."""

    title: str
    tables: list[TableOf]


def plan_page(folder: Path, planned: Planned, config: PlanConfig, sections: Sequence[Section], values: Mapping[str, object]) -> list[Path]:
    """Writes plan.html, its pictures as PNG, and plan.json.

    Args:
        folder: made if it is not there; files of the same names are replaced.
        config: the planner's settings.
        sections: the tables of the page.
        values: what plan.json holds.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pipeline = planned.report.pipeline
    drawn = {
        "lengths": ("Lengths of the documents, and T of the planned microbatches", pictures.draw_lengths(planned)),
        "steps": ("Fill and imbalance of each step", pictures.draw_steps(planned)),
        "step": ("One step on its ranks: the width is the cost", pictures.draw_step(planned.plan, config)),
    }
    if pipeline["pipeline_parallel"] > 1:
        picture = pictures.draw_pipeline(planned.plan, config.cost, **pipeline)
        drawn["pipeline"] = ("The pipeline of the slowest rank in that step, simulated", picture)
    written, figures = [], []
    for name, (caption, figure) in drawn.items():
        content = as_png(figure)
        write_whole(folder / f"{name}.png", content)
        written.append(folder / f"{name}.png")
        source = base64.b64encode(content).decode()
        told = html.escape(caption)
        figures.append(f'<figure><img alt="{told}" src="data:image/png;base64,{source}"><figcaption>{told}</figcaption></figure>')
    page = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Plans of {html.escape(str(values.get('source', 'a corpus')))}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(sections[0].title)}</h1>",
        *map(_table, sections[0].tables),
        *figures,
    ]
    for section in sections[1:]:
        page += [f"<h2>{html.escape(section.title)}</h2>", *map(_table, section.tables)]
    page += ["</body></html>", ""]
    write_whole(folder / "plan.html", "\n".join(page).encode())
    write_whole(folder / "plan.json", (json.dumps(values, indent=2) + "\n").encode())
    return [folder / "plan.html", *written, folder / "plan.json"]


def _table(found: TableOf) -> str:
    lines = [f"<h3>{html.escape(found.title)}</h3>"] if found.title else []
    kind = "facts" if not found.columns else "columns" if not found.columns[0] else "plain"
    lines.append(f'<div class="scroll"><table class="{kind}">')
    if found.columns:
        lines.append("<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in found.columns) + "</tr>")
    lines += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in found.rows]
    lines.append("</table></div>")
    return "\n".join(lines + [f'<p class="note">{html.escape(note)}</p>' for note in found.notes])
