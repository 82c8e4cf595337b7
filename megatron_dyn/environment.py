# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_dyn env``: what was found on this machine, and what a run would use of it.

Packages are looked up, not imported (Transformer Engine alone takes seconds); only torch is, to ask for the cards.
"""

import argparse
import importlib.util
import json
import platform
import shlex
import sys
from importlib import metadata
from typing import NamedTuple, Sequence

import torch

from megatron_dyn import __version__, device
from megatron_dyn.userbuffers import native_build
from megatron_dyn.userbuffers.choice import choose_backend
from megatron_dyn.userbuffers.native import TESTED_TE, is_tested


class Finding(NamedTuple):
    """One line: what was looked for, the version or state found (None when absent), and what that means."""

    name: str
    found: str | None
    note: str = ""


PACKAGES = {  # import name -> distribution, needed for
    "megatron.core": ("megatron-core", "model, schedules, optimizers"),
    "sentencepiece": ("sentencepiece", "tokenizer"),
    "numpy": ("numpy", ""),
    "yaml": ("PyYAML", "--config"),
    "rich": ("rich", "progress and tables"),
    "tensorboard": ("tensorboard", "--tensorboard-dir"),
    "matplotlib": ("matplotlib", "pictures of a run"),
    "zstandard": ("zstandard", "compressed documents"),
}


def find_all() -> list[Finding]:
    """Everything the command prints, in its order. Nothing is built and no process group is needed."""
    findings = [
        Finding("megatron-dyn", __version__),
        Finding("Python", platform.python_version(), sys.executable),
        Finding("torch", torch.__version__),
        _cuda(),
        _transformer_engine(),
        *(_package(name, *about) for name, about in PACKAGES.items()),
        _apex(),
        _compiler(),
        _extension(),
    ]
    backend, reason = choose_backend("auto")
    return [*findings, Finding("UserBuffers backend", backend, reason)]


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Returns:
        0: what is absent is a finding, not an error.
    """
    parser = argparse.ArgumentParser(prog="megatron_dyn env", description="What was found here, and what a run would use of it.")
    parser.add_argument("--json", action="store_true", help="one JSON object: name -> found (null when absent) and note")
    arguments = parser.parse_args(argv)
    findings = find_all()
    if arguments.json:
        print(json.dumps({finding.name: {"found": finding.found, "note": finding.note} for finding in findings}, indent=2))
    elif sys.stdout.isatty():
        _print_table(findings)
    else:
        print("\n".join(_lines(findings)))
    return 0


def _lines(findings: Sequence[Finding]) -> list[str]:
    name_width = max(len(finding.name) for finding in findings)
    found_width = max(len(_shown(finding)) for finding in findings)
    return [f"{finding.name:<{name_width}}  {_shown(finding):<{found_width}}  {finding.note}".rstrip() for finding in findings]


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:  # Text: brackets in a message are not markup
        table.add_row(Text(finding.name, "bold"), Text(_shown(finding), "green" if finding.found else "dim"), Text(finding.note))
    Console().print(table)


def _shown(finding: Finding) -> str:
    return finding.found if finding.found is not None else "not found"


def _cuda() -> Finding:
    cards = device.card_names()
    built = torch.version.cuda
    if cards:
        kinds = ", ".join(f"{cards.count(name)} x {name}" for name in dict.fromkeys(cards))
        return Finding("CUDA", built, kinds)
    return Finding("CUDA", built, "no device is visible: everything runs on the CPU" if built else "this torch is built for the CPU")


def _transformer_engine() -> Finding:
    engine = native_build.installed_transformer_engine()
    if engine is None:
        return Finding("transformer_engine", None, "GPU layers, FP8, UserBuffers")
    tested = f"tested range {' to '.join(TESTED_TE)}"
    note = f"in the {tested}" if is_tested(engine.version) else f"outside the {tested}: probed at start"
    return Finding("transformer_engine", engine.version, note)


def _package(import_name: str, distribution: str, use: str) -> Finding:
    try:
        return Finding(distribution, metadata.version(distribution), use)
    except metadata.PackageNotFoundError:
        found = "unknown version" if _importable(import_name) else None  # a checkout on the path has no metadata
        return Finding(distribution, found, use)


def _apex() -> Finding:
    """NVIDIA's: another package of this name is on PyPI, without these kernels."""
    if not _importable("apex") or not _importable("amp_C"):
        return Finding("Apex", None, "optional fused kernels; never required")
    try:
        return Finding("Apex", metadata.version("apex"), "fused kernels are used")
    except metadata.PackageNotFoundError:
        return Finding("Apex", "unknown version", "fused kernels are used")


def _compiler() -> Finding:
    try:
        return Finding("C++ compiler", shlex.join(native_build.find_compiler()), "compiles the extension on first use")
    except native_build.NativeBuildError:
        return Finding("C++ compiler", None, "compiles the extension on first use")


def _extension() -> Finding:
    if native_build.installed_transformer_engine() is None:
        return Finding("UserBuffers extension", None, "needs Transformer Engine")
    extension = native_build.find_extension()
    if extension.state == "impossible":
        return Finding("UserBuffers extension", None, f"cannot be built: {extension.detail}")
    return Finding("UserBuffers extension", extension.state, extension.detail)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
