# SPDX-License-Identifier: Apache-2.0
"""Everything about the package is said in pyproject.toml, but one thing: the extension for Transformer Engine.

It is compiled here where torch and Transformer Engine are importable (``pip install --no-build-isolation``). Elsewhere, and when it does
not compile, the package is installed without it, and it is compiled on first use.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

NAME = "megatron_dyn.userbuffers._active_shape"
BUILDER = Path(__file__).resolve().parent / "megatron_dyn" / "userbuffers" / "native_build.py"


def load_builder():
    """megatron_dyn/userbuffers/native_build.py without the package around it, which wants to be installed first."""
    spec = importlib.util.spec_from_file_location("native_build", BUILDER)
    module = sys.modules["native_build"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildActiveShape(build_ext):
    """Compiles with the one command that first use has too."""

    def build_extension(self, extension):
        builder = load_builder()
        try:
            builder.build(builder.installed_transformer_engine(), Path(self.get_ext_fullpath(extension.name)).resolve())
        except builder.NativeBuildError as error:
            raise CompileError(str(error)) from error


extensions = []
if BUILDER.is_file() and importlib.util.find_spec("torch") and load_builder().installed_transformer_engine():
    extensions = [Extension(NAME, sources=[], optional=True)]  # optional: a failure is reported, and the package installed without it

setup(ext_modules=extensions, cmdclass={"build_ext": BuildActiveShape})
