# SPDX-License-Identifier: Apache-2.0
"""The whole log of a run: its folder after an end, a crash and a resume, and what happens when an output fails."""

import io
import json
import subprocess
import sys

import pytest
from metrics_samples import planner, records
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dyn.__main__ import main
from megatron_dyn.training import plots
from megatron_dyn.training.console import RunConsole
from megatron_dyn.training.metrics_file import read_metrics
from megatron_dyn.training.run_log import RunLog, TensorBoardSink, write_report

TOTAL = 8


def open_log(folder, *, start_iteration=0, enabled=True, tensorboard=True):
    output = io.StringIO()
    console = RunConsole(
        total_iterations=TOTAL, start_iteration=start_iteration, enabled=enabled, console=Console(file=output, width=120, highlight=False)
    )
    log = RunLog(
        folder,
        enabled=enabled,
        total_iterations=TOTAL,
        start_iteration=start_iteration,
        header={"model": "tiny"},
        tensorboard=tensorboard,
        console=console,
    )
    return log, output


def train(log, first, last, *, loss_shift=0.0):
    plans = planner()
    for record in records(last - first + 1, first=first, plans=plans):
        record.lm_loss += loss_shift
        log.step(record, plans.plan(record.iteration - 1))
        if record.iteration % 2 == 0:
            log.validation(iteration=record.iteration, loss=record.lm_loss + 0.1, tokens=50, documents=3, seconds=0.2)
            log.checkpoint(iteration=record.iteration, path="somewhere", seconds=0.1)


def scalars(folder, tag):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]


def test_the_run_file_tells_the_latest_settings_and_where_the_run_was_resumed(tmp_path):
    def opened(start_iteration, **about):
        with RunLog(tmp_path, enabled=True, total_iterations=TOTAL, start_iteration=start_iteration, tensorboard=False, about=about):
            return json.loads((tmp_path / "run.json").read_text())

    assert opened(0, lr=1)["resumed"] == []
    assert opened(4, lr=2) | {"versions": 0} == {"lr": 2, "resumed": [4], "versions": 0}
    assert opened(6)["resumed"] == [4, 6]
    assert opened(5)["resumed"] == [4, 5]  # an older checkpoint: what followed is made again
    (tmp_path / "run.json").write_text("[")
    assert opened(7)["resumed"] == [7]
    assert opened(0)["resumed"] == []


def test_a_finished_run_leaves_everything(tmp_path):
    folder = tmp_path / "runs" / "demo"
    log, output = open_log(folder)
    with log:
        train(log, 1, TOTAL)
        summary = log.finish({"parallel": {"TP": 2}})
    assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "run.json", "summary.json", "packing.json", "plot.png", "packing.png", "tensorboard"}
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert summary["steps"] == TOTAL and summary["parallel"] == {"TP": 2} and {"python", "torch", "megatron-core"} <= set(summary["versions"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == TOTAL + 4
    assert lines[2] == {**lines[2], "iteration": 2, "validation lm loss": 4.1, "validation-tokens": 50}
    losses = [(record.iteration, record.lm_loss) for record in records(TOTAL)]
    for tag in ("lm loss", "learning-rate", "grad-norm", "iteration-time", "batch-size", "fill", "T/min", "T/mean", "T/max"):
        assert [step for step, _ in scalars(folder, tag)] == list(range(1, TOTAL + 1))
    assert scalars(folder, "lm loss") == losses
    assert scalars(folder, "lm loss validation") == [(step, loss + 0.1) for step, loss in losses if step % 2 == 0]
    text = output.getvalue()
    assert "WARNING" not in text
    assert "checkpoint of iteration 8" in text and "Summary of the run" in text and "plot.png" in text


def test_after_a_crash_the_run_reads_as_if_unbroken(tmp_path):
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    log, _ = open_log(broken)
    log.start()
    train(log, 1, 6, loss_shift=0.0)
    # Killed after step 6 and resumed from the checkpoint of step 4: neither finish() nor close() is called on the first log.
    log._tensorboard.flush()
    log, output = open_log(broken, start_iteration=4)
    with log:
        train(log, 5, TOTAL, loss_shift=0.25)
        summary = log.finish({})
    assert "dropped 3 records after iteration 4" in output.getvalue()
    log, _ = open_log(unbroken)
    with log:
        train(log, 1, 4)
        train(log, 5, TOTAL, loss_shift=0.25)
        expected = log.finish({})
    assert summary == expected
    assert (broken / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    for tag in ("lm loss", "lm loss validation", "T/max"):
        assert scalars(broken, tag) == scalars(unbroken, tag)


def test_without_purging_the_lost_steps_would_stay_in_tensorboard(tmp_path, monkeypatch):
    """The mutant of the test above: it must see a writer which does not purge."""
    log, _ = open_log(tmp_path)
    log.start()
    train(log, 1, 6)
    log._tensorboard.flush()
    monkeypatch.setattr(TensorBoardSink, "__init__", lambda self, folder, *, start_iteration: unpurged(self, folder))
    log, _ = open_log(tmp_path, start_iteration=4)
    with log:
        train(log, 5, TOTAL)
    assert [step for step, _ in scalars(tmp_path, "lm loss")] != list(range(1, TOTAL + 1))


def unpurged(sink, folder):
    from torch.utils.tensorboard import SummaryWriter

    sink._writer = SummaryWriter(str(folder))


def test_only_the_enabled_rank_writes(tmp_path):
    log, output = open_log(tmp_path / "run", enabled=False)
    with log:
        train(log, 1, 3)
        log.warning("not here")
        log.notice("nor here")
        assert log.finish({}) == {}
    assert not (tmp_path / "run").exists()
    assert output.getvalue() == ""


def test_without_a_folder_there_is_only_the_console(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log, output = open_log(None)
    with log:
        train(log, 1, 3)
        assert log.finish({}) == {}
    assert list(tmp_path.iterdir()) == []
    assert output.getvalue().count("iteration ") >= 3


def test_a_picture_that_cannot_be_drawn_costs_nothing_else(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(plots, "plot_run", fail)
    monkeypatch.setattr(plots, "describe_packing", fail)
    log, output = open_log(tmp_path)
    with log:
        train(log, 1, 3)
        assert log.finish({})["steps"] == 3
    text = output.getvalue()
    assert "WARNING packing.json could not be written" in text
    assert "plot.png could not be drawn: RuntimeError: no fonts" in text
    assert not list(tmp_path.glob("*.png"))


class FullFor:
    """A file on a disk that takes half a line and then nothing, until there is room."""

    def __init__(self, handle):
        self._handle, self.full = handle, True

    def write(self, data):
        if self.full:
            self._handle.write(bytes(data[: len(data) // 2]))
            raise OSError(28, "No space left on device")
        return self._handle.write(data)

    def __getattr__(self, name):
        return getattr(self._handle, name)


@pytest.mark.parametrize("freed", [True, False])
def test_records_wait_while_the_disk_is_full(tmp_path, freed):
    log, output = open_log(tmp_path, tensorboard=False)
    with log:
        train(log, 1, 2)
        log._file._handle = FullFor(log._file._handle)
        train(log, 3, 5)
        assert [step["iteration"] for step in read_metrics(tmp_path).steps] == [1, 2], "whole lines only"
        log._file._handle.full = not freed
        train(log, 6, 6)
    assert [step["iteration"] for step in read_metrics(tmp_path).steps] == ([1, 2, 3, 4, 5, 6] if freed else [1, 2])
    said = " ".join(output.getvalue().split())  # lines are as wide as the console
    assert said.count("training goes on and its records wait") == 1, "told once, not every step"
    assert ("records that waited" in said) == freed and "iteration 6/8" in said
    assert ("training goes on without" in said) != freed, "what is lost at the end is told"


def test_a_gap_is_told(tmp_path):
    log, output = open_log(tmp_path, start_iteration=4)
    with log:
        train(log, 5, 6)
    assert "WARNING" in output.getvalue() and "goes on from 4" in output.getvalue()


def test_report_alone_draws_an_unfinished_run(tmp_path, capsys):
    log, _ = open_log(tmp_path, tensorboard=False)
    log.start()
    train(log, 1, 5)
    assert main(["report", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 5
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "packing.png").read_bytes().startswith(b"\x89PNG")
    assert "different T" in capsys.readouterr().out


def test_report_keeps_what_the_run_added_to_its_summary(tmp_path):
    log, _ = open_log(tmp_path, tensorboard=False)
    with log:
        train(log, 1, 5)
        summary = log.finish({"parallel": {"TP": 2}})
    (tmp_path / "plot.png").unlink()
    assert [path.name for path in write_report(tmp_path)] == ["summary.json", "plot.png", "packing.png"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_report_refuses_a_folder_without_records(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_log_costs_no_heavy_import():
    program = (
        "import sys, megatron_dyn.training.run_log, megatron_dyn.training.cli\n"
        "print([name for name in ('matplotlib', 'tensorboard', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
