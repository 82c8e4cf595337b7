# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dyn compare RUN RUN [...]`: do these runs train alike, and which is faster."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dyn.compare.arms import arms_of, differing_settings
from megatron_dyn.compare.report import CLASSES, HOLDS, SUMMARY_COLUMNS, as_json, headline, number, summary_rows, write_report
from megatron_dyn.compare.runs import CompareError, read_run
from megatron_dyn.compare.verdicts import compare_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the runs, prints the verdicts, writes the report.

    Returns:
        0 when everything judged holds, 1 when a check fails.

    Raises:
        CompareError, MetricsError: runs that cannot be compared (exit status 2).
    """
    parser = argparse.ArgumentParser(
        prog="megatron-dyn compare",
        description="Compare runs that trained on the same documents: runs that differ in their seed alone are one arm; every arm is compared with "
        "the reference arm. fp32 arms must agree within 1e-5 at every step, others within what seeds differ by (3 seeds or more).",
        epilog="exit status: 0 all checks hold, 1 a check fails, 2 the runs cannot be compared",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run (its --run-dir); NAME=FOLDER names its arm, for runs that settings do not tell apart")
    parser.add_argument("--reference", metavar="RUN", help="a run of the arm that the others are compared with (default: the first)")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="what a rank's device can do (1e12 operations a second): shows MFU")
    parser.add_argument("--output", type=Path, metavar="DIR", help="also write compare.html, its pictures and compare.json there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    own = parser.parse_args(argv)
    if own.peak_tflops is not None and not 0 < own.peak_tflops < float("inf"):
        raise CompareError(f"--peak-tflops is {own.peak_tflops}: give what a rank's device can do, in 1e12 operations a second")
    if own.output is not None and own.output.exists() and not own.output.is_dir():
        raise CompareError(f"--output {own.output} is a file: name a folder for the page and its pictures")
    given = [word.rpartition("=") if not Path(word).exists() else ("", "", word) for word in own.runs]
    folders = [Path(folder) for _, _, folder in given]
    runs = [read_run(folder, name, arm or None) for folder, name, (arm, _, _) in zip(folders, _names(folders), given)]
    arms = arms_of(runs, own.reference)
    verdicts = compare_runs(arms, peak_tflops=own.peak_tflops)
    if own.json:
        print(json.dumps(as_json(arms, verdicts), indent=2))
    else:
        _show(arms, verdicts)
    if own.output is not None:
        written = write_report(own.output, arms, verdicts)
        print(f"wrote {', '.join(str(path) for path in written)}", file=sys.stderr if own.json else sys.stdout)
    return 1 if any(verdict.holds is False for verdict in verdicts) else 0


def _names(folders: list[Path]) -> list[str]:
    """Each folder without what all share."""
    if len(folders) < 2:
        return [folder.name for folder in folders]
    whole = [folder.resolve() for folder in folders]
    common = Path(os.path.commonpath(whole))
    return [str(folder.relative_to(common)) if folder != common else folder.name for folder in whole]


def _show(arms, verdicts) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    styles = {"good": "green", "bad": "bold red", "open": "dim"}
    for text, holds in headline(arms, verdicts):
        console.print(text, style=styles[CLASSES[holds]])
    summary = Table(*SUMMARY_COLUMNS, box=None, pad_edge=False)
    for column in summary.columns[1:]:
        column.justify = "right"
    for row in summary_rows(arms):
        summary.add_row(*row)
    checks = Table("", "check", "arm", "value", "limit", "what", box=None, pad_edge=False)
    for verdict in verdicts:
        row = (HOLDS[verdict.holds], verdict.name, verdict.arm, number(verdict.value), number(verdict.threshold), verdict.text)
        checks.add_row(*row, style=styles[CLASSES[verdict.holds]])
    settings = Table("setting", *(arm.name for arm in arms), box=None, pad_edge=False)
    for row in differing_settings(arms):
        settings.add_row(*row)
    console.print("", summary, "", checks, "", settings)
