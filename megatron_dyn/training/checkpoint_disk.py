# SPDX-License-Identifier: Apache-2.0
"""Single files of a checkpoint: the tracker, digests, and writing that survives a power cut and follows no link. No torch is needed."""

import hashlib
import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Iterable, Optional

TRACKER_NAME = "latest_checkpointed_iteration.txt"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be used here. Raised on every rank with the same reason."""


def tracked_iteration(tracker: Path) -> Optional[int]:
    """The iteration that a tracker file names; None when there is no such file. Never waits, as reading a pipe would.

    Raises:
        CheckpointError: it is not a plain file, cannot be read, or holds anything but an iteration number.
    """
    try:
        descriptor = os.open(tracker, os.O_RDONLY | os.O_NONBLOCK)
        try:
            content = os.read(descriptor, 1000) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{tracker} cannot be read ({error.strerror})") from error
    if content is None:
        raise CheckpointError(f"{tracker} is not a plain file (remove it)")
    text = content.decode("utf-8", errors="backslashreplace").strip()
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}{' and more' if text[40:] else ''} instead of an iteration number")
    return int(text)


def digest_files(folder: Path, names: Iterable[str]) -> "dict[str, dict]":
    """Size in bytes and SHA-256 of files, as the seal holds them."""
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": _digest_of_file(folder / name)} for name in names}


def file_problem(path: Path, expected: dict) -> Optional[str]:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"is damaged: it has {size} bytes, {expected['bytes']} were written"
        found = _digest_of_file(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"
    if found != expected["sha256"]:
        return f"is damaged: its SHA-256 is {found[:12]}..., {expected['sha256'][:12]}... was written"
    return None


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def digest_of_json(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def remove_folder(path: Path) -> None:
    """A checkpoint's folder; of a link to one the link alone, since what it points to lies elsewhere."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def write_flushed(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as stream:  # a new file: never through a link that lay there
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def flush(path: Path) -> None:
    """fsync a file or a folder: a rename is durable only after its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
