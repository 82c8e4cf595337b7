# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dyn plan`: what the plans of some steps look like, before anything is trained."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_dyn.planning import PlanConfig, PlanError, Planner
from megatron_dyn.planning.page import Section, TableOf, plan_page
from megatron_dyn.planning.report import Planned, PlanReport, report_on
from megatron_dyn.training.config import ConfigError
from megatron_dyn.training.folders import require_writable
from megatron_dyn.training.model_config import check_positions
from megatron_dyn.training.plan_from_settings import in_flags
from megatron_dyn.training.plan_settings import PlanRequest, read_flags, read_request
from megatron_dyn.training.plan_tables import facts_table, recommendation_tables, ways_table, warnings_of
from megatron_dyn.training.recommend import recommend

DEFAULT_STEPS = 32
PROGRESS_EVERY_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m megatron_dyn plan``.

    Returns:
        0.

    Raises:
        ValueError: what was asked for is contradictory or cannot be planned; the message says why and what would do.
    """
    found, passed_over = read_flags(argv)
    as_json, output = found.pop("json", False), found.pop("output", None)
    if passed_over:
        print(f"passed over, as they say nothing about plans: {' '.join(passed_over)}", file=sys.stderr)
    request = read_request(found)
    require_writable("--output", output)
    try:
        planned, config, sections, values = _plan(request)
    except PlanError as error:
        raise ConfigError(in_flags(str(error))) from error
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        for section in sections:
            _print(section)
    if output is not None:
        for path in plan_page(Path(output), planned, config, sections, values):
            print(f"wrote {path}", file=sys.stderr)
    return 0


def _plan(request: PlanRequest) -> tuple[Planned, PlanConfig, list[Section], dict[str, object]]:
    """The plans, their settings, their tables and what JSON says of them."""
    values: dict[str, object] = {"source": request.source, "part": request.part, "blend": request.blend}
    sections: list[Section] = []
    changes: dict[str, object] = {}
    if request.get("recommend", False):
        proposal = recommend(
            request.lengths,
            plan_config=_open_batch(request),
            settings=request.memory,
            device_memory_gib=request.get("device_memory_gib"),
            budget=request.budget,
            token_bucket=request.get("token_bucket"),
            global_batch_given=_batch_given(request),
        )
        values["recommendation"] = proposal.as_dict()
        sections.append(Section("Recommendation", recommendation_tables(proposal)))
        proposed = ("max_tokens_per_microbatch", "global_batch_tokens", "token_bucket")
        changes = {name: getattr(proposal, name) for name in proposed if getattr(proposal, name) is not None}
    config = request.plan_config(**changes)
    began = time.perf_counter()
    planner = Planner(request.lengths, config, request.fingerprint)
    if request.model is not None:
        check_positions(request.model, planner.longest_piece, joined=config.microbatching == "concat-chunk")
    opened = time.perf_counter() - began
    steps = request.get("steps", min(DEFAULT_STEPS, planner.steps_per_epoch(at_most=DEFAULT_STEPS)))
    planned = report_on(
        planner,
        first_step=request.get("first_step", 0),
        steps=steps,
        pipeline_parallel=request.parallel.pipeline_model_parallel_size,
        virtual_stages=request.virtual_stages,
        compare=request.get("compare", True),
        open_seconds=opened,
        progress=_Progress(steps),
    )
    values["plans"] = planned.report.as_dict()
    values["warnings"] = warnings_of(planned.report)
    facts = facts_table(planned.report, part=request.part, blend=request.blend)
    sections.insert(0, Section(_title(request, planned.report), [facts, ways_table(planned.report)]))
    return planned, config, sections, values


class _Progress:
    """A line on stderr every few seconds, so that a long run is not silent."""

    def __init__(self, steps: int):
        self._steps, self._began = steps, time.perf_counter()
        self._said = self._began

    def __call__(self, done: int) -> None:
        now = time.perf_counter()
        if now - self._said >= PROGRESS_EVERY_SECONDS and done < self._steps:
            self._said = now
            left = (now - self._began) / done * (self._steps - done)
            print(f"{done:,} of {self._steps:,} steps planned and compared, about {left:.0f} s to go", file=sys.stderr, flush=True)


def _batch_given(request: PlanRequest) -> bool:
    return request.get("global_batch_size") is not None or request.get("global_batch_tokens") is not None


def _open_batch(request: PlanRequest):
    """`plan_config` that takes a global batch only where none was given."""

    def plan_config(*, global_batch_tokens: int, **changes: object):
        return (
            request.plan_config(**changes)
            if _batch_given(request)
            else request.plan_config(**changes, global_batch_tokens=global_batch_tokens)
        )

    return plan_config


def _title(request: PlanRequest, report: PlanReport) -> str:
    last = report.first_step + report.steps - 1
    budget = report.settings["max_tokens_per_microbatch"]
    steps = f"step {last}" if report.steps == 1 else f"steps {report.first_step} to {last}"
    return f"{request.source}: {steps}, B {budget:,}, DP {request.data_parallel_size}"


def _print(section: Section) -> None:
    console = Console(highlight=False)
    for position, found in enumerate(section.tables):
        console.print(_rich(found, section.title if position == 0 else found.title))
        for note in found.notes:
            console.print(escape(note), soft_wrap=True, style="bold red" if note.startswith("WARNING") else "dim")


def _rich(found: TableOf, title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=bool(found.columns))
    width = len(found.columns) or len(found.rows[0])
    for position in range(width):
        header = escape(found.columns[position]) if found.columns else ""
        table.add_column(header, justify="right" if found.columns and position else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*map(escape, row))
    return table
