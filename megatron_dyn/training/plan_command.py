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

from megatron_dyn.planning import Planner
from megatron_dyn.planning.page import Section, TableOf, plan_page
from megatron_dyn.planning.report import PlanReport, report_on
from megatron_dyn.training.plan_settings import PlanRequest, build_parser, read_request
from megatron_dyn.training.plan_tables import facts_table, recommendation_tables, ways_table

DEFAULT_STEPS = 32


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m megatron_dyn plan``.

    Returns:
        0.

    Raises:
        ValueError: what was asked for is contradictory or cannot be planned; the message says why and what would do.
    """
    found = vars(build_parser().parse_args(argv))
    as_json, output = found.pop("json", False), found.pop("output", None)
    request = read_request(found)
    values: dict[str, object] = {"source": request.source}
    sections: list[Section] = []
    if request.get("recommend", False):
        # Here, not above: what is only reported needs no model.
        from megatron_dyn.training.recommend import recommend

        proposal = recommend(
            request.lengths,
            plan_config=_open_batch(request),
            model=request.model,
            parallel=request.parallel,
            vocab_size=request.vocab_size,
            bf16=request.get("bf16", True),
            device_memory_gib=request.get("device_memory_gib"),
            data_parallel_size=request.data_parallel_size,
            budget=request.get("max_tokens_per_microbatch"),
            global_batch_given=_batch_given(request),
        )
        values["recommendation"] = proposal.as_dict()
        sections.append(Section("Recommendation", recommendation_tables(proposal)))
        changes = {"max_tokens_per_microbatch": proposal.max_tokens_per_microbatch}
        if proposal.global_batch_tokens is not None:
            changes["global_batch_tokens"] = proposal.global_batch_tokens
        config = request.plan_config(**changes)
    else:
        config = request.plan_config()
    began = time.perf_counter()
    planner = Planner(request.lengths, config, request.fingerprint)
    opened = time.perf_counter() - began
    first = request.get("first_step", 0)
    planned = report_on(
        planner,
        first_step=first,
        steps=request.get("steps", min(DEFAULT_STEPS, planner.steps_per_epoch())),
        pipeline_parallel=request.parallel.pipeline_model_parallel_size,
        virtual_stages=request.virtual_stages,
        compare=request.get("compare", True),
        open_seconds=opened,
    )
    values["plans"] = planned.report.as_dict()
    sections.insert(0, Section(_title(request, planned.report), [facts_table(planned.report), ways_table(planned.report)]))
    if as_json:
        print(json.dumps(values, indent=2))
    else:
        for section in sections:
            _print(section)
    if output is not None:
        for path in plan_page(Path(output), planned, config, sections, values):
            print(f"wrote {path}", file=sys.stderr)
    return 0


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
    return f"{request.source}: steps {report.first_step} to {last}, B {budget:,}, DP {request.data_parallel_size}"


def _print(section: Section) -> None:
    console = Console(highlight=False)
    for position, found in enumerate(section.tables):
        console.print(_rich(found, section.title if position == 0 else found.title))
        for note in found.notes:
            console.print(escape(note), soft_wrap=True, style="dim")


def _rich(found: TableOf, title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=bool(found.columns))
    width = len(found.columns) or len(found.rows[0])
    for position in range(width):
        header = escape(found.columns[position]) if found.columns else ""
        table.add_column(header, justify="right" if found.columns and position else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*map(escape, row))
    return table
