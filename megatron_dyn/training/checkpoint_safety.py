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
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_dyn.training.checkpoint_files import CheckpointError

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
    """Refuse a checkpoint whose description would run code, or names files outside its folder.

    Raises:
        CheckpointError: Naming the file.
    """
    path = folder / _METADATA_NAME
    try:
        with open(path, "rb") as stream:
            metadata = _DataOnly(stream).load()
        named = {info.relative_path for info in metadata.storage_data.values()} if isinstance(metadata, Metadata) else None
    except Exception as error:  # a pickle that is no pickle raises nearly anything
        raise CheckpointError(f"{path} is not used: {error}. It was not written by this program; do not load it elsewhere") from error
    if named is None or any(name != os.path.basename(name) for name in named):
        raise CheckpointError(f"{path} is not used: it names files outside the checkpoint. It was not written by this program")
    try:
        found = json.loads((folder / "metadata.json").read_text(encoding="utf-8")).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'metadata.json'} cannot be read: {error}") from error
    if found != _FORMAT:
        raise CheckpointError(f"{folder / 'metadata.json'} names the format {found!r}; this program reads {_FORMAT!r} only")


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
