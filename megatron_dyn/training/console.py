# SPDX-License-Identifier: Apache-2.0
"""What a person sees of a run: a header, a line a step or so, a progress bar on a terminal, a short table at the end.

Where the output is no terminal (a log file, a pipe) there is no bar and no colour, and every line stands on its own for `grep`.
Only ASCII is printed, because batch systems still run with encodings that hold nothing else.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from megatron_dyn.training.metrics import POLICY_COUNTS, StepRecord, ValidationRecord

STEPS_FOR_ETA = 50


def format_seconds(seconds: float) -> str:
    """`0.084 s`, `12.3 s` or, from two minutes on, `h:mm:ss`."""
    if seconds < 120:
        return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"
    return format_clock(seconds)


def format_clock(seconds: float) -> str:
    """`m:ss` or `h:mm:ss`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class Interval:
    """Steps since the last printed line, taken together: losses are weighted by loss tokens, ratios are of totals."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        """Takes one more step in."""
        self.records.append(record)

    def fields(self) -> list[tuple[str, str]]:
        """(label, value) pairs of the line, in order. `microbatches` is a mean when the steps differ."""
        last, count = self.records[-1], len(self.records)
        counted = [record for record in self.records if record.lm_loss is not None and not record.skipped]
        weight = sum(record.num_loss_tokens for record in counted)
        loss = sum(record.lm_loss * record.num_loss_tokens for record in counted) / weight if weight else last.lm_loss
        holding = [max(1, record.microbatches - record.fillers) for record in self.records]
        T_mean = sum(record.T_mean * held for record, held in zip(self.records, holding, strict=True)) / sum(holding)
        T_min, T_max = min(record.T_min for record in self.records), max(record.T_max for record in self.records)
        tokens = sum(record.num_tokens for record in self.records)
        slots = sum(record.microbatches * record.max_tokens_per_microbatch for record in self.records)
        seconds = sum(record.step_time for record in self.records)
        microbatches = sum(record.microbatches for record in self.records) / count
        bubble = last.extra.get("pipeline-bubble-measured", last.extra.get("pipeline-bubble"))
        return [
            ("lm loss", _number(loss, ".4f")),
            ("lr", f"{last.learning_rate:.2e}"),
            ("grad norm", _number(last.grad_norm, ".3f")),
            ("microbatches", f"{microbatches:.0f}" if microbatches == int(microbatches) else f"{microbatches:.1f}"),
            ("T", f"{T_min}/{T_mean:.0f}/{T_max}"),
            ("fill", f"{tokens / slots:.1%}"),
            *([] if bubble is None else [("bubble", f"{bubble:.1%}")]),
            ("tokens/s", f"{tokens / seconds:,.0f}" if seconds > 0 else "-"),
            ("time", format_seconds(seconds / count)),
        ]


def _survives(method: Callable[..., None]) -> Callable[..., None]:
    """A closed terminal, a broken pipe or a full disk behind standard output silences the console and never ends the run."""

    @functools.wraps(method)
    def guarded(self: "RunConsole", *arguments: Any, **named: Any) -> None:
        try:
            method(self, *arguments, **named)
        except (OSError, SystemExit):  # rich turns a broken pipe into SystemExit
            self.enabled, self._progress = False, None

    return guarded


class RunConsole:
    """Prints the progress of one run.

    Args:
        total_iterations: steps of the whole run.
        start_iteration: steps done before this process started.
        log_interval: a line every so many steps, and at the first, the last and every skipped step.
        enabled: False on every rank but one.
        console: where to print; standard output by default.
    """

    def __init__(
        self,
        *,
        total_iterations: int,
        start_iteration: int = 0,
        log_interval: int = 1,
        enabled: bool = True,
        console: Console | None = None,
    ) -> None:
        if log_interval < 1:
            raise ValueError(f"log_interval is {log_interval}: a line every so many steps needs at least 1")
        self.total_iterations, self.start_iteration, self.log_interval = total_iterations, start_iteration, log_interval
        self.enabled = enabled
        self.console = console or Console(highlight=False, quiet=not enabled)
        self._interval = Interval()
        self._step_times: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @_survives
    def start(self, header: Mapping[str, str | Sequence[str]]) -> None:
        """Prints the header (a label and one or several lines each) and, on a terminal, opens the progress bar."""
        if not self.enabled:
            return
        width = max((len(label) for label in header), default=0)
        for label, value in header.items():
            for position, line in enumerate([value] if isinstance(value, str) else value):
                self._print(Text.assemble((f"{label if position == 0 else '':<{width}}  ", "bold cyan"), str(line)))
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # auto_refresh would be a thread holding rich's lock; a process forked meanwhile (checkpoint writers) could wait for it for ever.
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=40),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TextColumn("ETA {task.fields[eta]}"),
                console=self.console,
                auto_refresh=False,
            )
            self._task = self._progress.add_task("training", total=self.total_iterations, completed=self.start_iteration, loss="", eta="-")
            self._progress.start()
            self._progress.refresh()

    @_survives
    def step(self, record: StepRecord) -> None:
        """Takes a step in; prints a line when one is due."""
        if not self.enabled:
            return
        self._step_times.append(record.step_time)
        self._interval.add(record)
        eta = format_clock(self.eta_seconds(record.iteration))
        due = record.iteration % self.log_interval == 0 or record.iteration in (self.start_iteration + 1, self.total_iterations)
        if due or record.skipped:
            self._print(self._step_line(record, eta))
            self._interval = Interval()
        if self._progress is not None:
            loss = "" if record.lm_loss is None else f"loss {record.lm_loss:.4f}"
            self._progress.update(self._task, completed=record.iteration, loss=loss, eta=eta)
            self._progress.refresh()

    def eta_seconds(self, iteration: int) -> float:
        """Seconds that the steps after `iteration` will take at the pace of the last fifty."""
        if not self._step_times:
            return math.nan
        return max(0, self.total_iterations - iteration) * sum(self._step_times) / len(self._step_times)

    def _step_line(self, record: StepRecord, eta: str) -> Text:
        width = len(str(self.total_iterations))
        skipped = [old.iteration for old in self._interval.records if old.skipped]
        line = Text.assemble((f"iteration {record.iteration:>{width}}/{self.total_iterations}", "bold"))
        remaining = [] if self._progress is not None else [("ETA", eta)]  # the bar shows it
        for label, value in [*self._interval.fields(), *remaining]:
            line.append(" | ", "dim").append(f"{label} ", "dim").append(value, "bold green" if label == "lm loss" else "")
        if skipped:
            line.append(" | ", "dim").append(f"SKIPPED, weights unchanged: {', '.join(map(str, skipped))}", "bold black on yellow")
        return line

    @_survives
    def validation(self, record: ValidationRecord) -> None:
        """Prints the result of an evaluation."""
        loss, perplexity = _number(record.loss, ".4f"), _number(record.perplexity, ".2f")
        self._print(
            Text.assemble(
                (f"validation after iteration {record.iteration}", "bold magenta"),
                f" | lm loss {loss} | ppl {perplexity} | {record.tokens:,} tokens of {record.documents:,} documents"
                f" | {format_seconds(record.seconds)}",
            )
        )

    @_survives
    def notice(self, text: str) -> None:
        """Prints a line of information."""
        self._print(Text(text))

    @_survives
    def warning(self, text: str) -> None:
        """Prints a line that stands out."""
        self._print(Text.assemble(("WARNING", "bold black on yellow"), (f" {text}", "yellow")))

    @_survives
    def table(self, rows: Mapping[str, str], *, title: str) -> None:
        """Prints a short two-column table."""
        if not self.enabled:
            return
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, pad_edge=True)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(justify="right", overflow="fold")
        for label, value in rows.items():
            table.add_row(label, value)
        self.console.print(table)

    @_survives
    def stop(self) -> None:
        """Takes the progress bar away, leaving its last state; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _print(self, text: Text) -> None:
        # soft_wrap: a log line stays one line whatever the width of the terminal, as `grep` expects.
        if self.enabled:
            self.console.print(text, soft_wrap=True)


def summary_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """The lines of the final table, for the values that exist."""

    def several(form: str, *keys: str) -> str | None:
        values = [summary.get(key) for key in keys]
        return None if None in values else form.format(*values)

    seconds, data_seconds = summary.get("seconds"), summary.get("data_seconds")
    steps = several("{:,}", "steps")
    if steps is not None and summary.get("skipped_steps"):
        steps += f" ({summary['skipped_steps']:,} skipped)"
    microbatches = several("{:,}", "microbatches")
    if microbatches is not None and summary.get("fillers"):
        microbatches += f" ({summary['fillers']:,} without documents)"
    rows = {
        "steps": steps,
        "lm loss, first -> last": several("{:.4f} -> {:.4f}", "loss_first", "loss_last"),
        "validation lm loss": several("{:.4f}", "validation_loss"),
        "validation perplexity": several("{:.2f}", "validation_ppl"),
        "documents": several("{:,}", "documents"),
        "real tokens": several("{:,}", "tokens"),
        "microbatches": microbatches,
        "T min / mean / max": several("{:,} / {:,.0f} / {:,}", "T_min", "T_mean", "T_max"),
        "different T": several("{:,}", "distinct_T"),
        "capacity": several("{:,} tokens", "capacity"),
        "fill (of the budget)": several("{:.1%}", "fill"),
        "slot fill (of T)": several("{:.1%}", "slot_fill"),
        "imbalance (max / mean cost)": several("{:.3f}", "imbalance"),
        "real tokens/s (median step)": several("{:,.0f}", "tokens_per_second"),
        "time in steps": None if seconds is None else format_seconds(seconds),
        "of it waiting for data": None if not seconds or data_seconds is None else f"{data_seconds / seconds:.1%}",
    }
    for key in POLICY_COUNTS:
        if count := summary.get(key.replace("-", "_")):
            rows[key.replace("-", " ")] = f"{count:,}"
    return {label: value for label, value in rows.items() if value is not None}
