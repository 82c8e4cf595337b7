# SPDX-License-Identifier: Apache-2.0
"""What a person sees: one line a step in a log file, a bar on a terminal, nothing that an ASCII stream cannot take."""

import io
import re

import pytest
from metrics_samples import records
from rich.console import Console

from megatron_dyn.training.console import RunConsole, format_clock, format_seconds, summary_rows
from megatron_dyn.training.metrics import ValidationRecord


def printed(run, *, terminal=False, width=80, encoding="utf-8", **options):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    console = RunConsole(
        total_iterations=options.pop("total_iterations", 10),
        console=Console(
            file=stream, width=width, highlight=False, force_terminal=terminal, color_system="standard" if terminal else None, _environ={}
        ),
        **options,
    )
    run(console)
    console.stop()
    return raw.getvalue().decode(encoding)


def test_a_step_is_one_line_whatever_the_width():
    (record,) = records(1, lm_loss=7.83456, grad_norm=1.23456)
    (line,) = printed(lambda console: console.step(record), width=40).splitlines()
    assert "\x1b" not in line
    for part in ("iteration  1/10", "lm loss 7.8346", "lr 1.00e-03", "grad norm 1.235", f"microbatches {record.microbatches}",
                 f"T {record.T_min}/{record.T_mean:.0f}/{record.T_max}", f"fill {record.fill:.1%}", "time 0.500 s", "ETA 0:04"):  # fmt: skip
        assert part in line, part


def test_an_interval_is_one_line_with_the_loss_per_token():
    steps = records(10)
    steps[4].num_loss_tokens, steps[4].lm_loss = 10 * steps[4].num_loss_tokens, 1.0
    lines = printed(lambda console: [console.step(record) for record in steps], log_interval=5).splitlines()
    assert [re.match(r"iteration +(\d+)", line).group(1) for line in lines] == ["1", "5", "10"]
    taken = steps[1:5]
    loss = sum(record.lm_loss * record.num_loss_tokens for record in taken) / sum(record.num_loss_tokens for record in taken)
    assert f"lm loss {loss:.4f} " in lines[1]
    assert f"lm loss {sum(record.lm_loss for record in taken) / 4:.4f} " not in lines[1], "a mean of means must differ here"
    assert f"T {min(record.T_min for record in taken)}/" in lines[1]


def test_a_skipped_step_stands_out_even_between_lines():
    steps = records(6)
    steps[2].skipped, steps[2].lm_loss, steps[2].grad_norm = True, None, None
    lines = printed(lambda console: [console.step(record) for record in steps], log_interval=100).splitlines()
    assert len(lines) == 2
    assert "SKIPPED, weights unchanged: 3" in lines[1] and "grad norm -" in lines[1]


def test_a_terminal_gets_a_bar_and_a_file_none():
    def run(console):
        console.start({"model": "tiny", "corpus": ["train: 3 documents", "valid: 1 document"]})
        for record in records(3):
            console.step(record)

    shown, plain = printed(run, terminal=True, width=120), printed(run)
    last_bar = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown[shown.rindex("training") :])
    assert " 3/10 loss 2.6667 ETA 0:04" in last_bar
    assert "training" not in plain and "\x1b" not in plain
    assert plain.splitlines()[:3] == ["model   tiny", "corpus  train: 3 documents", "        valid: 1 document"]
    assert len(plain.splitlines()) == 6


@pytest.mark.parametrize("terminal", [False, True])
def test_an_ascii_stream_takes_everything(terminal):
    def run(console):
        console.start({"model": "tiny"})
        console.step(records(1)[0])
        console.validation(ValidationRecord(iteration=1, loss=None, tokens=0, documents=0, seconds=0.1))
        console.warning("careful")
        console.table({"steps": "1"}, title="Summary")

    assert "WARNING careful" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed(run, terminal=terminal, encoding="ascii"))


def test_square_brackets_in_a_text_are_not_markup():
    assert printed(lambda console: console.notice("corpus [/a/b] [bold]")) == "corpus [/a/b] [bold]\n"


def test_a_disabled_console_is_silent():
    def run(console):
        console.start({"model": "tiny"})
        console.step(records(1)[0])
        console.warning("careful")
        console.table({"steps": "1"}, title="Summary")

    assert printed(run, enabled=False) == ""


def test_times_are_readable():
    assert [format_seconds(value) for value in (0.0842, 12.34, 3700)] == ["0.084 s", "12.3 s", "1:01:40"]
    assert [format_clock(value) for value in (0, 59.6, 3599.4, 86400)] == ["0:00", "1:00", "59:59", "24:00:00"]


def test_the_eta_follows_the_pace():
    console = RunConsole(total_iterations=100, console=Console(file=io.StringIO()))
    for record in records(10, step_time=2.0):
        console.step(record)
    assert console.eta_seconds(10) == pytest.approx(180.0)


def test_the_table_leaves_out_what_does_not_exist():
    rows = summary_rows({"steps": 3, "loss_first": None, "loss_last": None, "fill": 0.9, "dropped_documents": 2, "truncated_tokens": 0})
    assert rows == {"steps": "3", "fill (of the budget)": "90.0%", "dropped documents": "2"}


def test_a_log_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match="log_interval is 0"):
        RunConsole(total_iterations=1, log_interval=0)
