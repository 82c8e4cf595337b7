# SPDX-License-Identifier: Apache-2.0
"""The file of a run's records, `metrics.jsonl`: written a line at a time, continued after a crash, read strictly.

After a crash and a resume from iteration k the file holds each iteration once: what came after k is dropped before the first new line.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_dyn.training.metrics import Metrics, StepRecord, ValidationRecord

METRICS_FILE = "metrics.jsonl"
PREVIOUS_METRICS_FILE = "metrics.previous.{number}.jsonl"


class MetricsError(ValueError):
    """A metrics file that cannot be read or continued; the message names the file, the line and the way out."""


def strict_json(value: Any, **options: Any) -> str:
    """`json.dumps` with `null` for every float that is not finite, at any depth."""

    def finite(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {str(key): finite(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple | set | frozenset):
            return [finite(inner) for inner in item]
        if isinstance(item, Path):
            return str(item)
        if hasattr(item, "tolist"):  # numpy scalars and arrays, torch tensors
            return finite(item.tolist())
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(finite(value), allow_nan=False, ensure_ascii=False, **options)


def write_json(path: Path, value: Any) -> None:
    """Writes one JSON document so that `path` always holds either the old document or the whole new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "x", encoding="utf-8") as handle:  # a new file: never through a link that lay there
        handle.write(strict_json(value, indent=2) + "\n")
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(partial, path)


def _parse(line: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    record = json.loads(line.decode("utf-8"), parse_constant=refuse)
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        raise ValueError("it is not an object with an integer `iteration`")
    return record


def iter_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file in file order, one at a time.

    A last line without its newline that is not complete JSON is what a killed run leaves behind: it is passed over.

    Raises:
        MetricsError: any other line is not a record.
    """
    for _, record in _iter_lines(path):
        yield record


def _iter_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                record = _parse(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise MetricsError(
                    f"{path}, line {number}: not a metrics record ({error}); the plots and the summary would be wrong: "
                    f"remove that line, or start the run in another folder"
                ) from error
            yield line.rstrip(b"\r\n") + b"\n", record


def read_metrics(path: Path) -> Metrics:
    """Reads `metrics.jsonl`, or the one in the folder `path`.

    Raises:
        MetricsError: the file is absent or holds a broken line.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise MetricsError(f"{path}: no such file, so there is nothing to report; give the folder named by --run-dir")
    steps: dict[int, dict[str, Any]] = {}
    validations: dict[int, dict[str, Any]] = {}
    for record in iter_records(path):
        if "lm loss" in record:
            steps[record["iteration"]] = record
        elif "validation lm loss" in record:
            validations[record["iteration"]] = record
    return Metrics(steps=[steps[key] for key in sorted(steps)], validations=[validations[key] for key in sorted(validations)])


class MetricsFile:
    """Appends records to `metrics.jsonl`: one line a record, handed to the operating system at once.

    Args:
        path: the file; made when absent.
        start_iteration: steps already done (the iteration of the checkpoint resumed from; 0 for a new run). Records after it
            come from steps that will be made again and are dropped, as is a half-written last line, by replacing the file
            in one move. A new run (0) keeps the file of an earlier one as `metrics.previous.N.jsonl`.
    """

    def __init__(self, path: Path, *, start_iteration: int) -> None:
        self.path = Path(path)
        self.dropped = 0
        """Records of an earlier run that were dropped."""
        self.last_iteration = 0
        """Iteration of the last step in the file."""
        self.previous: Path | None = None
        """Where the records of an earlier run were moved to."""
        self._continue_after(start_iteration)
        self._handle = open(self.path, "ab", buffering=0)
        self._size = self._handle.seek(0, os.SEEK_END)
        self._waiting: list[bytes] = []

    def _continue_after(self, start_iteration: int) -> None:
        if not self.path.exists():
            return
        if start_iteration == 0:
            with open(self.path, "rb") as earlier:
                self.dropped = sum(1 for _ in earlier)
            if self.dropped:
                numbers = itertools.count(1)
                names = (self.path.with_name(PREVIOUS_METRICS_FILE.format(number=number)) for number in numbers)
                self.previous = next(name for name in names if not name.exists())
                os.replace(self.path, self.previous)
            return
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.unlink(missing_ok=True)
        with open(partial, "xb") as kept:
            for line, record in _iter_lines(self.path):
                if record["iteration"] > start_iteration:
                    self.dropped += 1
                    continue
                kept.write(line)
                if "lm loss" in record:
                    self.last_iteration = record["iteration"]
            kept.flush()
            os.fsync(kept.fileno())
        os.replace(partial, self.path)

    def append(self, record: StepRecord | ValidationRecord) -> None:
        """Writes one record.

        Raises:
            ValueError: a step that is not after the last one in the file.
            OSError: the line could not be written (a full disk). It is kept, and written with the next one that can be; the file ends with
                whole lines.
        """
        if isinstance(record, StepRecord):
            if record.iteration <= self.last_iteration:
                raise ValueError(f"{self.path}: iteration {record.iteration} after iteration {self.last_iteration}: it would be recorded twice")
            self.last_iteration = record.iteration
        self._waiting.append((strict_json(record.as_json()) + "\n").encode())
        self._write_waiting()

    @property
    def waiting(self) -> int:
        """Records that could not be written yet."""
        return len(self._waiting)

    def _write_waiting(self) -> None:
        data = memoryview(b"".join(self._waiting))
        try:
            written = 0
            while written < len(data):
                written += self._handle.write(data[written:])
        except OSError:
            self._handle.truncate(self._size)  # no half line, which a reader would take for the end of the run
            self._handle.seek(self._size)
            raise
        self._size += len(data)
        self._waiting.clear()

    def sync(self) -> None:
        """Waits until the disk has every record: done at a checkpoint, so that a resume never finds fewer steps than the checkpoint."""
        self._write_waiting()
        os.fsync(self._handle.fileno())

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        try:
            if not self._handle.closed:
                self._write_waiting()
        finally:
            self._handle.close()
