# SPDX-License-Identifier: Apache-2.0
"""Single files of a checkpoint: digests, and writing that survives a power cut and follows no link."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Iterable, Optional


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
