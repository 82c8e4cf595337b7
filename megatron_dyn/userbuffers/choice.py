# SPDX-License-Identifier: Apache-2.0
"""Which backend moves the data: Transformer Engine's UserBuffers, or the reference on torch.distributed. Decided here alone."""

from megatron_dyn.device import has_gpu
from megatron_dyn.userbuffers.native import TESTED_TE, is_tested
from megatron_dyn.userbuffers.native_build import find_extension, installed_transformer_engine, no_transformer_engine

BACKENDS = ("auto", "te", "reference")


class BackendUnavailableError(ValueError):
    """The backend that was asked for does not work here; the message says why."""


def choose_backend(requested: str) -> tuple[str, str]:
    """The backend to use, and why. Imports no Transformer Engine, builds nothing, and is no collective.

    Args:
        requested: "te", "reference", or "auto": te where it works.
    Returns:
        ("te" or "reference", the reason for a log or a person).
    Raises:
        ValueError: an unknown backend.
        BackendUnavailableError: "te" where it cannot work.
    """
    if requested not in BACKENDS:
        raise ValueError(f"UserBuffers backend {requested!r} is not known: use one of {', '.join(BACKENDS)}.")
    if requested == "reference":
        return "reference", "asked for"
    obstacle = _obstacle()
    if obstacle is None:
        return "te", _found()
    if requested == "te":
        raise BackendUnavailableError(f"UserBuffers backend 'te' was asked for and cannot work here: {obstacle}")
    return "reference", obstacle


def _obstacle() -> str | None:
    """What keeps Transformer Engine's UserBuffers from working here."""
    if installed_transformer_engine() is None:
        return str(no_transformer_engine())
    if not has_gpu():
        return (
            "no CUDA device is visible, and Transformer Engine's buffers live on one. Make one visible (CUDA_VISIBLE_DEVICES), or use "
            "backend='reference', which runs on the CPU too."
        )
    extension = find_extension()
    return extension.detail if extension.state == "impossible" else None


def _found() -> str:
    engine = installed_transformer_engine()
    extension = find_extension(engine)
    tested = "" if is_tested(engine.version) else f", outside the tested versions {' to '.join(TESTED_TE)}: probed at start"
    return f"Transformer Engine {engine.version}{tested}; extension {extension.state}"
