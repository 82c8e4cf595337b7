# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is data: loading one runs no code that it brings along.

| file              | what reads it                                            | how it is kept to data                                       |
|-------------------|----------------------------------------------------------|--------------------------------------------------------------|
| common.pt         | `torch.load` (weights only by default)                   | weights only, forced                                         |
| __<r>_<n>.distcp  | DCP: tensors weights only, objects `weights_only=False`  | weights only, forced; Megatron-Core names its harmless types |
| .metadata         | DCP: `pickle.load`                                       | unpickled here first, with these types only                  |
| megatron_dyn.json, metadata.json | json                                      | file names without a folder; format torch_dist only          |

The seal's digests show damage, not forgery: who can write the files can write the seal.
"""

import contextlib
import io
import json
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Optional

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_dyn.training.checkpoint_files import COMMON_NAME, CheckpointError

_METADATA_NAME = ".metadata"
_FORMAT = "torch_dist"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )),
    (f"{_DCP}.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size"), ("torch", "device"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("collections", "OrderedDict"),
}  # fmt: skip


class _DataOnly(pickle.Unpickler):
    """Knows the types of DCP's metadata and no others."""

    def find_class(self, module: str, name: str):
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's description")


def require_data_only(folder: Path) -> None:
    """Refuse a checkpoint whose description or common state would run code, or that names files outside its folder.

    Raises:
        CheckpointError: Naming the file.
    """
    path = folder / _METADATA_NAME
    try:
        metadata = _description(folder)
        named = {info.relative_path for info in metadata.storage_data.values()} if isinstance(metadata, Metadata) else None
    except Exception as error:  # a pickle that is no pickle raises nearly anything
        raise CheckpointError(_not_used(path, str(error))) from error
    if named is None or any(name != os.path.basename(name) for name in named):
        raise CheckpointError(f"{path} is not used: it names files outside the checkpoint. It was not written by this program")
    try:
        found = json.loads((folder / "metadata.json").read_text(encoding="utf-8")).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'metadata.json'} cannot be read: {error}") from error
    if found != _FORMAT:
        raise CheckpointError(f"{folder / 'metadata.json'} names the format {found!r}; this program reads {_FORMAT!r} only")
    common = folder / COMMON_NAME
    with open(common, "rb") as stream:
        reason = _why_not_data(stream)
    if reason:
        raise CheckpointError(_not_used(common, reason))


def first_foreign_part(folder: Path) -> Optional[str]:
    """Which tensor file weights-only loading refuses, and why, in one sentence; None if none. Reads every part: for a load that failed."""
    for part in _description(folder).storage_data.values():
        path = folder / part.relative_path
        with open(path, "rb") as stream:
            stream.seek(part.offset)
            reason = _why_not_data(io.BytesIO(stream.read(part.length)))
        if reason:
            return _not_used(path, reason)
    return None


def _description(folder: Path) -> Metadata:
    with open(folder / _METADATA_NAME, "rb") as stream:
        return _DataOnly(stream).load()


def _why_not_data(stream: BinaryIO) -> Optional[str]:
    """Short, without the advice of `torch.load` to trust the file."""
    try:
        torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle that is no pickle raises nearly anything
        named = re.search(r"\bGLOBAL (\S+)", str(error))
        return f"it names {named[1]}, which is no data" if named else f"it holds more than tensors and plain values ({type(error).__name__})"
    return None


def _not_used(path: Path, reason: str) -> str:
    return f"{path} is not used: {reason}. It was not written by this program; do not load it elsewhere"


@contextlib.contextmanager
def weights_only_loading() -> Iterator[None]:
    """`torch.load` unpickles tensors and harmless types only, also where its caller says otherwise."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
