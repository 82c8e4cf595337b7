# SPDX-License-Identifier: Apache-2.0
"""A run's log: every record goes to the console, to `metrics.jsonl` and to TensorBoard; the end makes the summary and the pictures.

| file in the run's folder | made                                            |
|--------------------------|-------------------------------------------------|
| `run.json`               | settings, versions and documents, at every start |
| `metrics.jsonl`          | a line a step and an evaluation, as they happen |
| `tensorboard/`           | the same numbers, under Megatron-LM's tags      |
| `packing.json`           | the division of the step with most documents    |
| `summary.json`, `plot.png`, `packing.png` | at the end, or by `python -m megatron_dyn report` |
"""

import contextlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dyn.training.console import RunConsole, summary_rows
from megatron_dyn.training.metrics import StepRecord, ValidationRecord, summarize
from megatron_dyn.training.metrics_file import METRICS_FILE, MetricsFile, read_metrics, write_json

if TYPE_CHECKING:
    from megatron_dyn.planning import StepPlan

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
PACKING_FILE = "packing.json"
TENSORBOARD_FOLDER = "tensorboard"
VERSIONED_PACKAGES = ("megatron-dyn", "megatron-core", "torch", "transformer-engine", "numpy")


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers; packages that are absent are left out."""
    versions = {"python": platform.python_version()}
    for name in VERSIONED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


class TensorBoardSink:
    """Writes scalars under the tags of Megatron-LM (`megatron/training/training.py`, `training_log`), and the plan's own beside them.

    Megatron-LM's second set of curves, "... vs samples", is left out: purging after a resume goes by the step of the curve, and would
    take those curves' beginnings away.

    Args:
        folder: where the events go.
        start_iteration: steps already done; what an earlier process wrote after it is purged from the curves.
    """

    def __init__(self, folder: Path, *, start_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_iteration + 1, max_queue=100, flush_secs=30)

    def step(self, record: StepRecord) -> None:
        """Writes one step."""
        for tag, value in {
            "lm loss": record.lm_loss,
            "grad-norm": record.grad_norm,
            "learning-rate": record.learning_rate,
            "batch-size": record.documents,
            "iteration-time": record.step_time,
            "data-time": record.data_time,
            "num-tokens": record.num_tokens,
            "tokens-per-second": record.tokens_per_second,
            "microbatches": record.microbatches,
            "fill": record.fill,
            "slot-fill": record.slot_fill,
            "imbalance": record.imbalance,
            "T/min": record.T_min,
            "T/mean": record.T_mean,
            "T/max": record.T_max,
            "pipeline-bubble": record.extra.get("pipeline-bubble"),
            "pipeline-bubble-measured": record.extra.get("pipeline-bubble-measured"),
        }.items():
            self._scalar(tag, value, record.iteration)

    def validation(self, record: ValidationRecord) -> None:
        """Writes one evaluation."""
        self._scalar("lm loss validation", record.loss, record.iteration)
        self._scalar("lm loss validation ppl", record.perplexity, record.iteration)

    def text(self, tag: str, lines: Sequence[str]) -> None:
        """Writes a preformatted text."""
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in lines))

    def _scalar(self, tag: str, value: float | None, iteration: int) -> None:
        if value is not None:
            self._writer.add_scalar(tag, value, iteration)

    def flush(self) -> None:
        """Hands what is queued to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


class RunLog:
    """Where the training loop reports to. A context manager; leaving it stops the progress bar and closes the files.

    Training is never ended by its log: a file that cannot be written or a picture that cannot be drawn is told as a warning,
    and that output is given up. Only opening the files at the start may raise.

    Args:
        run_dir: the run's folder, made when absent; None keeps everything on the console.
        enabled: False on every rank but one; the log then does nothing at all.
        total_iterations: steps of the whole run.
        start_iteration: steps done before this process started (the iteration of the checkpoint resumed from, or 0).
            Records after it are dropped from the files of an earlier process.
        log_interval: a console line every so many steps.
        header: label -> line or lines for the top of the console (device, parallel sizes, model, capacity, corpus).
        tensorboard: write TensorBoard events (needs `run_dir`).
        about: what `run.json` holds beside the versions: plain values.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        *,
        enabled: bool,
        total_iterations: int,
        start_iteration: int = 0,
        log_interval: int = 1,
        header: Mapping[str, str | Sequence[str]] | None = None,
        tensorboard: bool = True,
        about: Mapping[str, Any] | None = None,
        console: RunConsole | None = None,
    ) -> None:
        self.run_dir = Path(run_dir) if run_dir is not None and enabled else None
        self.enabled, self.start_iteration, self.total_iterations = enabled, start_iteration, total_iterations
        self.header = dict(header or {})
        self.console = console or RunConsole(
            total_iterations=total_iterations, start_iteration=start_iteration, log_interval=log_interval, enabled=enabled
        )
        self._tensorboard_wanted = tensorboard
        self._about = dict(about or {})
        self._file: MetricsFile | None = None
        self._tensorboard: TensorBoardSink | None = None
        self._packed_documents: float = 0  # documents of the step whose packing is kept

    def start(self) -> "RunLog":
        """Opens the files and prints the header.

        Raises:
            OSError: the folder or its metrics file cannot be made.
            MetricsError: the folder's metrics file is broken.
        """
        if not self.enabled:
            return self
        if self.run_dir is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._file = MetricsFile(self.run_dir / METRICS_FILE, start_iteration=self.start_iteration)
            self._guarded(RUN_FILE, self._write_run_file)
            if self.start_iteration > 0 and (self.run_dir / PACKING_FILE).exists():
                self._packed_documents = json.loads((self.run_dir / PACKING_FILE).read_text(encoding="utf-8"))["documents"]
            if self._tensorboard_wanted:
                self._guarded("TensorBoard events", self._open_tensorboard)
        self.console.start(self.header)
        if self._file is not None:
            self._tell_how_the_file_continues(self._file)
        return self

    def _write_run_file(self) -> None:
        """Settings of the latest start; where a run was resumed, `resumed` lists the iterations that it went on from."""
        path, resumed = self.run_dir / RUN_FILE, []
        if self.start_iteration > 0:
            with contextlib.suppress(OSError, ValueError, KeyError):
                resumed = [at for at in json.loads(path.read_text(encoding="utf-8"))["resumed"] if at < self.start_iteration]
            resumed.append(self.start_iteration)
        write_json(path, {**self._about, "resumed": resumed, "versions": package_versions()})

    def _tell_how_the_file_continues(self, file: MetricsFile) -> None:
        if file.dropped and self.start_iteration == 0:
            self.notice(f"{file.path}: an earlier run's records were moved to {file.previous.name}")
        elif file.dropped:
            self.notice(f"{file.path}: dropped {file.dropped} records after iteration {self.start_iteration}; those steps are made again")
        if file.last_iteration < self.start_iteration:
            self.warning(
                f"{file.path} ends at iteration {file.last_iteration}, the run goes on from {self.start_iteration}: "
                f"summary and plots will lack the steps between"
            )

    def _open_tensorboard(self) -> None:
        self._tensorboard = TensorBoardSink(self.run_dir / TENSORBOARD_FOLDER, start_iteration=self.start_iteration)
        lines = [f"{label}: {line}" for label, value in self.header.items() for line in ([value] if isinstance(value, str) else value)]
        if lines:
            self._tensorboard.text("run", lines)

    def __enter__(self) -> "RunLog":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, record: StepRecord, plan: "StepPlan | None" = None) -> None:
        """Takes one step in. Of the plans given, the one with most documents is drawn at the end: there is most to see in it."""
        if not self.enabled:
            return
        self._write(record)
        if plan is not None and self.run_dir is not None and record.documents > self._packed_documents:
            written = self._guarded(PACKING_FILE, self._save_packing, record, plan)
            self._packed_documents = record.documents if written else float("inf")
        self.console.step(record)

    def _save_packing(self, record: StepRecord, plan: "StepPlan") -> None:
        from megatron_dyn.training.plots import describe_packing

        write_json(self.run_dir / PACKING_FILE, describe_packing(plan, record))

    def validation(self, *, iteration: int, loss: float | None, tokens: int, documents: int, seconds: float) -> None:
        """Takes one evaluation in: `loss` in nats a token over `tokens` loss tokens of `documents` documents."""
        if not self.enabled:
            return
        record = ValidationRecord(iteration=iteration, loss=loss, tokens=tokens, documents=documents, seconds=seconds)
        self._write(record)
        self.console.validation(record)

    def _write(self, record: StepRecord | ValidationRecord) -> None:
        if self._file is not None:
            self._append(self._file, record)
        if self._tensorboard is not None:
            write = self._tensorboard.step if isinstance(record, StepRecord) else self._tensorboard.validation
            if not self._guarded("TensorBoard events", write, record):
                self._tensorboard = None

    def _append(self, file: MetricsFile, record: StepRecord | ValidationRecord) -> None:
        """A disk that is full now may have room later: records wait for it."""
        waited = file.waiting
        try:
            file.append(record)
        except OSError as error:
            if not waited:
                self.warning(f"{file.path} could not be written, training goes on and its records wait: {type(error).__name__}: {error}")
            return
        except Exception as error:  # a log must not cost a training run
            self.warning(f"{file.path} could not be written, training goes on without: {type(error).__name__}: {error}")
            self._file = None
            return
        if waited:
            self.notice(f"{file.path} can be written again: it has the {waited} records that waited")

    def notice(self, text: str) -> None:
        """Prints a line of information."""
        self.console.notice(text)

    def warning(self, text: str) -> None:
        """Prints a line that stands out."""
        self.console.warning(text)

    def checkpoint(self, *, iteration: int, path: str | Path, seconds: float) -> None:
        """Tells of a saved checkpoint and makes the records up to it durable."""
        if not self.enabled:
            return
        if self._file is not None and not self._file.waiting:  # what waits has been told
            self._guarded(str(self._file.path), self._file.sync)
        if self._tensorboard is not None:
            self._guarded("TensorBoard events", self._tensorboard.flush)
        self.console.notice(f"checkpoint of iteration {iteration} saved to {path} in {seconds:.1f} s")

    def finish(self, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Closes the files, writes the summary of the whole run and the pictures, and prints the final table.

        Args:
            extra: more keys for the summary (parallel sizes, model parameters, why the run ended).

        Returns:
            the summary; empty where the log is disabled or keeps no files.
        """
        self.close()
        if self.run_dir is None:
            return {}
        written: list[Path] = []
        self._guarded("summary and pictures", lambda: written.extend(write_report(self.run_dir, extra=extra, warn=self.warning)))
        summary = load_summary(self.run_dir)
        self.console.table(summary_rows(summary), title="Summary of the run")
        for path in [*written, self.run_dir / METRICS_FILE]:
            self.notice(f"wrote {path}")
        return summary

    def close(self) -> None:
        """Stops the progress bar and closes the files; a second call does nothing."""
        self.console.stop()
        if self._file is not None:
            self._guarded(str(self._file.path), self._file.close)
            self._file = None
        if self._tensorboard is not None:
            self._guarded("TensorBoard events", self._tensorboard.close)
            self._tensorboard = None

    def _guarded(self, output: str, action: Callable[..., Any], *arguments: Any) -> bool:
        """Runs an action of the log; whatever goes wrong becomes a warning, because a log must not cost a training run."""
        try:
            action(*arguments)
        except Exception as error:
            self.warning(f"{output} could not be written, training goes on without: {type(error).__name__}: {error}")
            return False
        return True


def load_summary(run_dir: Path) -> dict[str, Any]:
    """The folder's `summary.json`, or nothing when there is none."""
    path = Path(run_dir) / SUMMARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_report(
    run_dir: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    warn: Callable[[str], None] | None = None,
) -> list[Path]:
    """Writes `summary.json`, `plot.png` and, when a step's packing was kept, `packing.png`, all from the records on disk.

    Args:
        run_dir: the folder of a run, finished or not.
        extra: more keys for the summary. Without it, the extra keys of an earlier summary are kept.
        warn: takes the message when a picture cannot be drawn; None raises the error instead.

    Returns:
        the files written.

    Raises:
        MetricsError: the folder holds no readable metrics file.
    """
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir)
    added = {"versions": package_versions(), **extra} if extra is not None else load_summary(run_dir)
    summary = {**added, **summarize(metrics)}
    write_json(run_dir / SUMMARY_FILE, summary)
    written = [run_dir / SUMMARY_FILE]

    def draw_curves(target: Path) -> None:
        from megatron_dyn.training.plots import plot_run

        plot_run(metrics, target, title=f"Run {run_dir.resolve().name}")

    def draw_packing(target: Path) -> None:
        from megatron_dyn.training.plots import plot_packing

        plot_packing(json.loads((run_dir / PACKING_FILE).read_text(encoding="utf-8")), target)

    pictures = {run_dir / "plot.png": draw_curves} if metrics.steps else {}
    if (run_dir / PACKING_FILE).exists():
        pictures[run_dir / "packing.png"] = draw_packing
    for target, draw in pictures.items():
        try:
            draw(target)
        except Exception as error:
            if warn is None:
                raise
            warn(f"{target} could not be drawn: {type(error).__name__}: {error}")
        else:
            written.append(target)
    return written
