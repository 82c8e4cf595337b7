# SPDX-License-Identifier: Apache-2.0
"""Which backend moves the data: Transformer Engine's UserBuffers, or the reference on torch.distributed. Decided here alone."""

from megatron_dyn.device import has_gpu
from megatron_dyn.userbuffers.native import TESTED_TE, is_tested
from megatron_dyn.userbuffers.native_build import find_extension, installed_transformer_engine

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
    engine = installed_transformer_engine()
    if engine is None:
        obstacle = "Transformer Engine is not installed"
    elif not has_gpu():
        obstacle = "no CUDA device is visible, and Transformer Engine's buffers live on one"
    else:
        extension = find_extension(engine)
        if extension.state != "impossible":
            tested = "" if is_tested(engine.version) else f" (outside the tested {' to '.join(TESTED_TE)}: each buffer is probed)"
            return "te", f"Transformer Engine {engine.version}{tested}, extension {extension.state}"
        obstacle = extension.detail.split("\n")[0].removesuffix(".")
    if requested == "te":
        raise BackendUnavailableError(
            f"UserBuffers backend 'te' was asked for and cannot work here: {obstacle}. With backend='auto' or 'reference' the exchanges "
            "run on torch.distributed; `python -m megatron_dyn env` tells what was found."
        )
    return "reference", obstacle
