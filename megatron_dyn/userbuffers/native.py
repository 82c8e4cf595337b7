# SPDX-License-Identifier: Apache-2.0
"""Loads the extension that sets the shape of Transformer Engine's buffers, and makes sure that it reads them right.

module                   ActiveShapes, fence, te_version (csrc/active_shape.cpp)
layout of one buffer     rows, hidden, chunks: what the extension reads from the communicator
buffer of one            data_ptr, shape, element_size: what Transformer Engine itself says of it, through `get_buffer`
"""

import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_dyn.userbuffers.native_build import (
    NativeBuildError,
    build_once,
    find_extension,
    find_headers,
    installed_transformer_engine,
    no_transformer_engine,
)

__all__ = ["TESTED_TE", "LayoutMismatchError", "NativeBuildError", "check_layout", "find_headers", "is_tested", "load"]

TESTED_TE = ("2.11.0", "2.20.2")
"""First and last version of Transformer Engine with which the active shape was run on GPUs."""

MODULE = "megatron_dyn.userbuffers._active_shape"


class LayoutMismatchError(RuntimeError):
    """A buffer of this Transformer Engine is not laid out as the extension reads it; setting its shape would corrupt memory."""


def is_tested(te_version: str) -> bool:
    """Whether a version of Transformer Engine lies in the range `TESTED_TE`."""
    first, last = map(_numbers, TESTED_TE)
    return first <= _numbers(te_version) <= last


def load() -> ModuleType:
    """The extension: prebuilt, cached, or compiled now (some ten seconds, once for each version).

    Several ranks may call it at the same time: one compiles, the others wait. It says one line when it compiles, and nothing else.

    Raises:
        NativeBuildError: there is no Transformer Engine, it cannot be imported, or the extension cannot be built or loaded.
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    engine = installed_transformer_engine()
    if engine is None:
        raise no_transformer_engine()
    found = find_extension(engine)
    if found.state == "impossible":
        raise NativeBuildError(found.detail)
    if found.state == "to build":
        _say(f"compiling the active shape for Transformer Engine {engine.version} {found.detail}; this happens once")
        build_once(engine, found.file)
    try:
        importlib.import_module("transformer_engine.pytorch")  # its library has the symbols that the extension uses
    except Exception as error:  # whatever an installation that does not fit raises
        raise NativeBuildError(
            f"Transformer Engine {engine.version} is installed in {engine.folder} but cannot be imported "
            f"({type(error).__name__}: {error}). Repair it, or use backend='reference', which exchanges with torch.distributed."
        ) from error
    return _import(found.file, engine.version)


def check_layout(shapes: Any, index: int, te_comm: Any) -> None:
    """Compare what the extension reads of a communicator with what Transformer Engine says, at its present shape and at a smaller one.

    Args:
        shapes: the `ActiveShapes`; keeps its shape.
        index: of the communicator in it.
        te_comm: the same communicator, a `CommOverlap` or `CommOverlapP2P` of transformer_engine_torch.
    Raises:
        LayoutMismatchError: they differ.
    """
    version = sys.modules[MODULE].te_version() if MODULE in sys.modules else "of an unknown version"
    if not is_tested(version) and version not in _announced:
        _announced.add(version)
        _say(
            f"Transformer Engine {version} is outside the tested versions {' to '.join(TESTED_TE)}: the layout of each buffer is compared "
            "with what Transformer Engine reports"
        )
    rows, _ = shapes.shape(index)
    layout = shapes.layout(index)
    smaller = _smaller_rows(rows, layout["tp_size"])
    try:
        _compare(layout, te_comm, rows, version)
        if smaller != rows:
            shapes.set_rows_of(index, smaller)
            _compare(shapes.layout(index), te_comm, smaller, version)
    finally:
        shapes.set_rows_of(index, rows)


_announced: set[str] = set()


def _smaller_rows(rows: int, tp_size: int) -> int:
    """About half, in whole chunks; the same where one chunk has one row."""
    return max(rows // tp_size // 2, 1) * tp_size


def _compare(layout: dict[str, Any], te_comm: Any, rows: int, version: str) -> None:
    tp_size, chunks, hidden, element_size = (layout[name] for name in ("tp_size", "chunks", "hidden", "element_size"))
    local_rows = rows // tp_size
    row_bytes = hidden * element_size
    is_ring = bool(layout["chunk_layout"])
    buffer_rows = local_rows * chunks if is_ring else rows

    def same(what: str, here: object, there: object) -> None:
        if here != there:
            raise LayoutMismatchError(
                f"Transformer Engine {version}: {what} of a buffer with {rows} rows for {tp_size} ranks is {there}, where {here} was "
                f"expected. Its layout is not the one known from {' to '.join(TESTED_TE)}, so setting its shape would corrupt memory. Install a "
                "version in that range, or use backend='reference'."
            )

    same("the number of rows read back", rows, layout["rows"])
    same("the number of buffer rows read back", buffer_rows, layout["buffer_rows"])
    if is_ring:
        expected = [(chunk * local_rows * row_bytes, local_rows, hidden) for chunk in range(chunks)]
        same("the list of chunks (offset in bytes, rows, hidden) read back", expected, [tuple(chunk) for chunk in layout["chunk_layout"]])
    if buffer_rows * row_bytes > layout["capacity_bytes"]:
        same("the number of bytes in use", f"at most {layout['capacity_bytes']}", buffer_rows * row_bytes)
    same("the shape of the whole part", [buffer_rows, hidden], list(te_comm.get_buffer(local_chunk=False).shape))
    local_start = layout["dptr"] + layout["tp_id"] * local_rows * row_bytes
    for part, shape, start in (("whole", [buffer_rows, hidden], layout["dptr"]), ("local", [local_rows, hidden], local_start)):
        try:  # it refuses a shape of another number of elements than its own
            buffer = te_comm.get_buffer(local_chunk=part == "local", shape=shape)
        except RuntimeError as error:
            same(f"the shape of the {part} part", shape, f"another ({str(error).strip().splitlines()[0]})")
        same(f"the address of the {part} part", start, buffer.data_ptr())
        same(f"the shape of the {part} part", shape, list(buffer.shape))
        same(f"the element size of the {part} part", element_size, buffer.element_size())


def _import(file: Path, te_version: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, file)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise NativeBuildError(
            f"the compiled active shape cannot be loaded ({error}): it does not fit Transformer Engine {te_version} as installed. Remove "
            f"{file} to have it compiled anew, or use backend='reference'."
        ) from error
    if module.te_version() != te_version:
        raise NativeBuildError(
            f"{file} was compiled for Transformer Engine {module.te_version()}, but {te_version} is installed: it would read other memory "
            "than it means. Remove the file to have it compiled anew."
        )
    sys.modules[MODULE] = module
    return module


def _numbers(version: str) -> tuple[int, int, int]:
    """The release part: 2.20.2+abc -> (2, 20, 2), 2.11 -> (2, 11, 0); (0, 0, 0) when there is none, which is before all others."""
    release = [int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3]]
    return tuple([*release, 0, 0, 0][:3])


def _say(line: str) -> None:
    """Once on each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"userbuffers: {line}", flush=True)
