# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures of plans as one HTML page that needs nothing else: no script, no font and no picture from elsewhere."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dyn.figures import write_whole
from megatron_dyn.planning import pictures
from megatron_dyn.planning.config import PlanConfig
from megatron_dyn.planning.report import Planned
from megatron_dyn.web_page import page, table, write_pictures


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
        simulated = pictures.draw_pipeline(planned.plan, config.cost, **pipeline)
        drawn["pipeline"] = ("The pipeline of the slowest rank in that step, simulated", simulated)
    written, figures = write_pictures(folder, drawn)
    body = [f"<h1>{html.escape(sections[0].title)}</h1>", *map(_table, sections[0].tables), *figures]
    for section in sections[1:]:
        body += [f"<h2>{html.escape(section.title)}</h2>", *map(_table, section.tables)]
    write_whole(folder / "plan.html", page(f"Plans of {values.get('source', 'a corpus')}", body))
    write_whole(folder / "plan.json", (json.dumps(values, indent=2) + "\n").encode())
    return [folder / "plan.html", *written, folder / "plan.json"]


def _table(found: TableOf) -> str:
    lines = [f"<h3>{html.escape(found.title)}</h3>"] if found.title else []
    kind = "facts" if not found.columns else "columns" if not found.columns[0] else "plain"
    lines.append(table(found.columns, found.rows, kind=kind))
    return "\n".join(lines + [f'<p class="note">{html.escape(note)}</p>' for note in found.notes])
