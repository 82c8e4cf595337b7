# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dyn compare RUN RUN [...]`: do these runs train alike, and which is faster."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dyn.compare.arms import arms_of, differing_settings, split_word
from megatron_dyn.compare.comparison import Comparison, compare_arms
from megatron_dyn.compare.report import CLASSES, as_json, check_rows, summary, write_report
from megatron_dyn.compare.runs import CompareError, read_run
from megatron_dyn.training.metrics_file import strict_json

EXIT_STATUS = {True: 0, False: 1, None: 3}
"""All arms hold; a check fails; an arm is not decided. (2: the runs cannot be compared.)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the runs, writes the report, prints the verdicts.

    Returns:
        0 when every arm is decided and holds, 1 when a check fails, 3 when none fails and an arm is not decided (`holds: null` in the JSON).

    Raises:
        CompareError, MetricsError: runs that cannot be compared (exit status 2).
    """
    parser = argparse.ArgumentParser(
        prog="megatron-dyn compare",
        description="Compare runs that trained on the same documents: runs that differ in their seed alone are one arm; every arm is compared with "
        "the reference arm. fp32 arms must agree within 1e-5 at every step, others within what seeds differ by (3 seeds or more).",
        epilog="exit status: 0 every arm is decided and holds, 1 a check fails, 2 the runs cannot be compared, 3 no check fails, but an arm is not "
        "decided: too few seeds of the reference, steps that are missing at the end or have no finite loss, or no held-out loss where that alone "
        "can tell",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run (its --run-dir); NAME=FOLDER names its arm, for runs that settings do not tell apart"
    )
    parser.add_argument("--reference", metavar="ARM", help="what the others are compared with: an arm's name, or a run of it (default: the first)")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="what a rank's device can do (1e12 operations a second): shows MFU")
    parser.add_argument("--no-speed", action="store_true", help="say nothing of speeds: for runs that shared a machine")
    parser.add_argument("--note", metavar="TEXT", help="your own words about these runs, shown under the result")
    parser.add_argument("--output", type=Path, metavar="DIR", help="also write compare.html, its pictures and compare.json there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    own = parser.parse_args(argv)
    if own.peak_tflops is not None and not 0 < own.peak_tflops < float("inf"):
        raise CompareError(f"--peak-tflops is {own.peak_tflops}: give what a rank's device can do, in 1e12 operations a second")
    if own.peak_tflops is not None and own.no_speed:
        raise CompareError("--peak-tflops shows a speed and --no-speed withholds it: leave one out")
    if own.output is not None and own.output.exists() and not own.output.is_dir():
        raise CompareError(f"--output {own.output} is a file: name a folder for the page and its pictures")
    given = [split_word(word) for word in own.runs]
    runs = [read_run(folder, name, arm) for (arm, folder), name in zip(given, _names([folder for _, folder in given]))]
    found = compare_arms(arms_of(runs, own.reference), peak_tflops=own.peak_tflops, with_speed=not own.no_speed, note=own.note)
    written = [] if own.output is None else write_report(own.output, found)
    told = f"wrote {', '.join(str(path) for path in written)}\n" if written else ""
    if own.json:
        sys.stderr.write(told)
    _print(strict_json(as_json(found), indent=2) + "\n" if own.json else _tables(found) + told)
    return EXIT_STATUS[found.holds]


def _names(folders: list[Path]) -> list[str]:
    """Each folder without what all share."""
    if len(folders) < 2:
        return [folder.name for folder in folders]
    whole = [folder.resolve() for folder in folders]
    common = Path(os.path.commonpath(whole))
    return [str(folder.relative_to(common)) if folder != common else folder.name for folder in whole]


def _print(text: str) -> None:
    """To a reader who may leave before the end, such as `head`: that is no error of the comparison."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end


def _tables(found: Comparison) -> str:
    from rich.console import Console
    from rich.table import Table

    # names are the user's: brackets in them are no markup; a file or a pipe has no width of its own
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 150)
    styles = {"good": "green", "bad": "bold red", "undecided": "yellow", "open": "dim"}
    columns, rows = summary(found)
    arms = Table(*columns, box=None, pad_edge=False)
    for column in arms.columns[1:]:
        column.justify = "right"
    for row in rows:
        arms.add_row(*row)
    checks = Table("", "check", "arm", "value", "limit", "what", box=None, pad_edge=False)
    for verdict, row in zip(found.verdicts, check_rows(found.verdicts)):
        checks.add_row(*row, style=styles[CLASSES[verdict.outcome]])
    settings = Table("setting", *(arm.name for arm in found.arms), box=None, pad_edge=False)
    for row in differing_settings(found.arms):
        settings.add_row(*row)
    with console.capture() as shown:
        for text, holds in found.headline:
            console.print(text, style={True: "green", False: "bold red", None: "bold yellow"}[holds])
        if found.note:
            console.print(found.note)
        console.print("", arms, "", checks, "", settings)
    return shown.get()
