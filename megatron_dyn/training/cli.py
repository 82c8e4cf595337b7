# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dyn report RUN_DIR` (summary and pictures of a run, from the records it left) and `flags`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_dyn.training.console import RunConsole, summary_rows
from megatron_dyn.training.run_log import load_summary, write_report


def report(argv: Sequence[str] | None = None) -> int:
    """Draws a run again from its `metrics.jsonl`, finished or not.

    Returns:
        0.

    Raises:
        MetricsError: a folder holds no readable records.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-dyn report",
        description="Write summary.json, plot.png and packing.png of a run from the records in its folder, and print the summary.",
    )
    parser.add_argument("run_dir", nargs="+", type=Path, metavar="RUN_DIR", help="the folder given to --run-dir, with its metrics.jsonl")
    arguments = parser.parse_args(argv)
    console = RunConsole(total_iterations=0, console=Console(highlight=False))
    for run_dir in arguments.run_dir:
        written = write_report(run_dir)
        console.table(summary_rows(load_summary(run_dir)), title=f"Summary of {run_dir}")
        for path in written:
            console.notice(f"wrote {path}")
    return 0


def flags(argv: Sequence[str] | None = None) -> int:
    """Prints the page of flags (`docs/flags.md`).

    Returns:
        0.
    """
    argparse.ArgumentParser(prog="megatron-dyn flags", description="Print the flags of pretrain_gpt_thd.py as a Markdown page.").parse_args(argv)
    from megatron_dyn.training.arguments import flags_page  # takes Megatron-Core's import time, which report need not pay

    print(flags_page(), end="")
    return 0
