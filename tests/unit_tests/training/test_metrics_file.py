# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl through crashes: each iteration once, nothing lost before the checkpoint, no broken line behind."""

import json
import os
import signal
import subprocess
import sys

import pytest
from metrics_samples import records

from megatron_dyn.training import metrics_file
from megatron_dyn.training.metrics import ValidationRecord
from megatron_dyn.training.metrics_file import MetricsError, MetricsFile, read_metrics, write_json


def write(path, iterations, start_iteration=0):
    file = MetricsFile(path, start_iteration=start_iteration)
    for record in records(iterations[-1] - iterations[0] + 1, first=iterations[0]):
        file.append(record)
    file.close()
    return file


def iterations(path):
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_each_record_is_readable_at_once(path):
    file = MetricsFile(path, start_iteration=0)
    for count, record in enumerate(records(3), start=1):
        file.append(record)
        assert len(read_metrics(path).steps) == count, "a line must not wait in a buffer"
    file.close()


def test_a_kill_at_any_byte_leaves_a_file_that_reads_and_goes_on(path):
    write(path, range(1, 4))
    whole = path.read_bytes()
    start_of_third = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for end in range(start_of_third, len(whole) + 1, 7):
        path.write_bytes(whole[:end])
        assert [step["iteration"] for step in read_metrics(path).steps][:2] == [1, 2]
        write(path, range(3, 5), start_iteration=2)
        assert iterations(path) == [1, 2, 3, 4]


def test_a_killed_process_loses_no_finished_line(path, tmp_path):
    program = (
        "import sys, os, signal; sys.path.insert(0, sys.argv[2])\n"
        "from metrics_samples import records\n"
        "from megatron_dyn.training.metrics_file import MetricsFile\n"
        "file = MetricsFile(sys.argv[1], start_iteration=0)\n"
        "for record in records(5): file.append(record)\n"
        "file._handle.write(b'{\"iteration\": 6, \"lm lo')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path), os.path.dirname(__file__)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [step["iteration"] for step in read_metrics(path).steps] == [1, 2, 3, 4, 5]


def test_resume_drops_what_will_be_made_again(path):
    file = MetricsFile(path, start_iteration=0)
    for record in records(6):
        file.append(record)
        if record.iteration % 2 == 0:
            file.append(ValidationRecord(iteration=record.iteration, loss=1.0, tokens=1, documents=1, seconds=1))
    file.close()
    before = path.read_bytes().splitlines()
    resumed = write(path, range(5, 7), start_iteration=4)
    assert resumed.dropped == 3
    assert path.read_bytes().splitlines()[:6] == before[:6], "kept lines are kept byte for byte"
    metrics = read_metrics(path)
    assert [step["iteration"] for step in metrics.steps] == [1, 2, 3, 4, 5, 6]
    assert [record["iteration"] for record in metrics.validations] == [2, 4]


def test_dropping_is_one_move(path, monkeypatch):
    write(path, range(1, 6))
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics_file.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsFile(path, start_iteration=2)
    assert path.read_bytes() == before


def test_a_new_run_keeps_the_records_of_the_earlier_one(path):
    write(path, range(1, 4))
    before = path.read_bytes()
    file = write(path, range(1, 3))
    assert file.dropped == 3
    assert iterations(path) == [1, 2]
    assert path.with_name("metrics.previous.1.jsonl").read_bytes() == before
    write(path, range(1, 2))
    assert path.with_name("metrics.previous.1.jsonl").read_bytes() == before, "a third run keeps both"
    assert path.with_name("metrics.previous.2.jsonl").exists()


def test_an_iteration_is_never_written_twice(path):
    write(path, range(1, 4))
    file = MetricsFile(path, start_iteration=3)
    assert file.last_iteration == 3
    with pytest.raises(ValueError, match="iteration 3 after iteration 3"):
        file.append(records(1, first=3)[0])
    file.close()


@pytest.mark.parametrize(
    "broken", [b'{"iteration": 2, "lm loss": NaN}', b"[1]", b'{"lm loss": 1}', b'{"iteration": 2, "lm', b"\xff", b"\x00\x00", b""]
)
def test_a_broken_line_is_named(path, broken):
    write(path, range(1, 3))
    path.write_bytes(path.read_bytes() + broken + b"\n")
    with pytest.raises(MetricsError, match=r"metrics\.jsonl, line 3: .*remove that line"):
        read_metrics(path)


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(MetricsError, match="no such file.*--run-dir"):
        read_metrics(tmp_path)


def test_a_failed_write_leaves_the_old_document(tmp_path):
    target = tmp_path / "summary.json"
    write_json(target, {"steps": 1})
    with pytest.raises(TypeError):
        write_json(target, {"steps": object()})
    assert json.loads(target.read_text()) == {"steps": 1}
