# SPDX-License-Identifier: Apache-2.0
"""Compiles csrc/active_shape.cpp against the installed Transformer Engine: one command of the host's C++ compiler, no nvcc.

    prebuilt    beside this file, when the package was installed where torch and Transformer Engine were importable (setup.py)
    cached      in torch's folder for extensions (TORCH_EXTENSIONS_DIR), built there on first use

It is one source file of host code, so the compiler is called directly: ninja is not needed, and the lock is the kernel's, which a killed
process cannot leave behind. The flags are those of torch's own extension builder. setup.py loads this file by its path: nothing above
the functions imports more than the standard library.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Iterator, NamedTuple

SOURCES = Path(__file__).resolve().parent / "csrc"
SOURCE = SOURCES / "active_shape.cpp"
FILE_NAME = "_active_shape" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")
CUDA_HEADERS = ("cuda.h", "cuda_runtime_api.h", "cuda_fp8.h")
CACHE_VARIABLE = "TORCH_EXTENSIONS_DIR"
_TE_DISTRIBUTIONS = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu13", "transformer-engine-cu12")
_WITHOUT_IT = "Transformer Engine's buffers would keep the one shape they were registered with"
_OR_REFERENCE = "or use backend='reference', which exchanges with torch.distributed."


class NativeBuildError(RuntimeError):
    """The extension cannot be built or loaded here; the message names what is missing and the way out."""


# --- what there is ----------------------------------------------------------------------------------------------------


class TransformerEngine(NamedTuple):
    """An installed Transformer Engine, found without importing it (which takes seconds and needs CUDA's libraries)."""

    version: str
    folder: Path  # of the package transformer_engine

    @property
    def include(self) -> Path:
        return self.folder / "common" / "include"


def installed_transformer_engine() -> TransformerEngine | None:
    """The Transformer Engine that `import transformer_engine` would find; None without one, or without its torch part."""
    folder = _package_folder("transformer_engine")
    if folder is None or not (folder / "pytorch" / "__init__.py").is_file():
        return None
    for name in _TE_DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return TransformerEngine(metadata.version(name), folder)
    return None


class Headers(NamedTuple):
    """Folders for the compiler, in the order in which it searches them."""

    transformer_engine: Path
    cuda: tuple[Path, ...]
    nccl: Path  # csrc/shim_last where NCCL's header is not installed: only the name of its handle is needed


def find_headers(engine: TransformerEngine | None = None) -> Headers:
    """The include folders of Transformer Engine, CUDA and NCCL.

    Args:
        engine: the Transformer Engine to compile against; None takes the installed one.
    Raises:
        NativeBuildError: Transformer Engine or a header is not there.
    """
    engine = engine or installed_transformer_engine()
    if engine is None:
        raise no_transformer_engine()
    if not (engine.include / "transformer_engine" / "comm_gemm_overlap.h").is_file():
        raise NativeBuildError(
            f"header transformer_engine/comm_gemm_overlap.h of Transformer Engine {engine.version} is not in {engine.include}: the active "
            f"shape cannot be compiled, so {_WITHOUT_IT}. Reinstall Transformer Engine with its headers (its wheels have them), {_OR_REFERENCE}"
        )
    folders = _cuda_folders()
    for header in CUDA_HEADERS:
        if not any((folder / header).is_file() for folder in folders):
            raise _missing_header(header, folders)
    nccl = next((folder for folder in [*_nccl_folders(), *folders] if (folder / "nccl.h").is_file()), SOURCES / "shim_last")
    return Headers(engine.include, tuple(folders), nccl)


def find_compiler() -> list[str]:
    """The host's C++ compiler as the start of a command: ``CXX``, else g++, c++ or clang++.

    Raises:
        NativeBuildError: there is none.
    """
    try:
        wanted = shlex.split(os.environ.get("CXX", ""))
    except ValueError:  # a quotation that does not end
        wanted = [os.environ["CXX"]]
    for command in [wanted] if wanted else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    tried = f"CXX={shlex.join(wanted)}" if wanted else "g++, c++, clang++"
    raise NativeBuildError(
        f"no C++ compiler found ({tried}): the active shape cannot be compiled, so {_WITHOUT_IT}. Install g++ (package g++ or gcc-c++) or "
        f"name a compiler with CXX, {_OR_REFERENCE}"
    )


def no_transformer_engine() -> NativeBuildError:
    """The error where there is none."""
    return NativeBuildError(
        f"Transformer Engine is not installed: there are no buffers of its whose shape could be set. Install it, {_OR_REFERENCE}"
    )


def _package_folder(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]) if locations else None


def _cuda_folders() -> list[Path]:
    """Those that exist: of the toolkit that is named, of NVIDIA's wheels, of the toolkit found, of conda."""
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    wheels = _package_folder("nvidia")
    nvcc = shutil.which("nvcc")
    candidates = [root / "include" for root in roots]
    candidates += sorted(wheels.glob("*/include"), reverse=True) if wheels else []
    candidates += [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    candidates += [Path("/usr/local/cuda/include"), *Path(sys.prefix).glob("targets/*/include"), Path("/usr/include")]
    return [folder for folder in dict.fromkeys(candidates) if (folder / "cuda.h").is_file() or wheels and wheels in folder.parents]


def _nccl_folders() -> list[Path]:
    roots = [Path(os.environ[name]) / "include" for name in ("NCCL_HOME", "NCCL_ROOT") if os.environ.get(name)]
    return [*roots, Path("/usr/include"), Path("/usr/local/include")]


def _missing_header(header: str, searched: list[Path]) -> NativeBuildError:
    places = ", ".join(map(str, searched)) or "CUDA_HOME, NVIDIA's wheels, /usr/local/cuda"
    return NativeBuildError(
        f"header {header} was not found (looked in {places}): the active shape cannot be compiled, so {_WITHOUT_IT}. Install the CUDA "
        f"toolkit's headers (or name the toolkit with CUDA_HOME), {_OR_REFERENCE}"
    )


# --- building ---------------------------------------------------------------------------------------------------------


def built_for(engine: TransformerEngine) -> str:
    """What a module must have been compiled for to be used; it is written into the file, where `is_built_for` finds it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h")):
        digest.update(path.read_bytes())
    return f"megatron_dyn active shape: te={engine.version} torch={metadata.version('torch')} source={digest.hexdigest()[:12]};"


def is_built_for(file: Path, engine: TransformerEngine) -> bool:
    """Whether a compiled module fits, found without loading it."""
    try:
        return built_for(engine).encode() in file.read_bytes()
    except OSError:
        return False


def prebuilt_file() -> Path:
    """Where setup.py puts it."""
    return Path(__file__).resolve().parent / FILE_NAME


def cached_file(engine: TransformerEngine) -> Path:
    """Where it is built on first use. The name carries the versions, so an upgrade builds anew."""
    root = os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    source = re.search(r"source=(\w+)", built_for(engine))[1]
    return Path(root) / f"megatron_dyn_te{engine.version}_torch{metadata.version('torch')}_{source}" / FILE_NAME


def compile_command(engine: TransformerEngine, output: Path) -> list[str]:
    """The one command that makes the module.

    Raises:
        NativeBuildError: a header or the compiler is not there.
    """
    headers = find_headers(engine)
    import torch  # for the ABI it was built with; whoever gets here uses it anyway

    abi = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # older versions of torch pin these, so that pybind11 modules know each other
        value = getattr(torch._C, f"_PYBIND11_{name}", None)
        abi += [f'-DPYBIND11_{name}="{value}"'] if value is not None else []
    system = [headers.transformer_engine, Path(torch.__file__).parent / "include", Path(sysconfig.get_paths()["include"]), *headers.cuda]
    return [
        *find_compiler(),
        *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
        *abi,
        f'-DMEGATRON_DYN_TE_VERSION="{engine.version}"',
        f'-DMEGATRON_DYN_BUILT_FOR="{built_for(engine)}"',
        f"-I{SOURCES / 'shim'}",
        *(argument for folder in system if folder != Path("/usr/include") for argument in ("-isystem", str(folder))),
        *("-idirafter", str(headers.nccl)),
        str(SOURCE),
        *("-o", str(output)),
    ]


def build(engine: TransformerEngine, output: Path) -> Path:
    """Compile into ``output``, which appears whole or not at all.

    Raises:
        NativeBuildError: a header or the compiler is missing, or the source does not compile against these headers.
    """
    unfinished = output.with_name(f".{os.getpid()}.{output.name}")
    command = compile_command(engine, unfinished)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        result = subprocess.run(command, text=True, capture_output=True)
        if result.returncode != 0:
            lacking = re.search(r"fatal error: (\S+): No such file", result.stderr)
            if lacking:
                raise _missing_header(lacking[1], list(find_headers(engine).cuda))
            raise NativeBuildError(
                f"the active shape does not compile against the headers of Transformer Engine {engine.version}, so {_WITHOUT_IT}. Use a "
                f"version for which it is tested, {_OR_REFERENCE}\n{shlex.join(command)}\n{result.stderr.strip()[-4000:]}"
            )
        os.replace(unfinished, output)
    except OSError as error:
        raise NativeBuildError(
            f"cannot write {output} ({error}): the active shape cannot be compiled there, so {_WITHOUT_IT}. Name a folder that can be "
            f"written with {CACHE_VARIABLE}, {_OR_REFERENCE}"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return output


def build_once(engine: TransformerEngine, output: Path) -> Path:
    """`build`, by one of the processes that want it at the same time; the others wait for the file.

    Raises:
        NativeBuildError: see `build`.
    """
    with _lock(output.parent):
        return output if output.is_file() else build(engine, output)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """The kernel drops it with the process. Where a file system has no locks, several build; each puts a whole file in place."""
    descriptor = None
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


# --- what would happen ------------------------------------------------------------------------------------------------


class Extension(NamedTuple):
    """How the extension would be had: ``state`` is "prebuilt", "cached", "to build" or "impossible" (then ``detail`` is the reason)."""

    state: str
    detail: str
    file: Path | None


def find_extension(engine: TransformerEngine | None = None) -> Extension:
    """Where the extension would come from. Loads and builds nothing."""
    engine = engine or installed_transformer_engine()
    try:
        if engine is None:
            raise no_transformer_engine()
        if is_built_for(prebuilt_file(), engine):
            return Extension("prebuilt", f"for Transformer Engine {engine.version}, when this package was installed", prebuilt_file())
        if cached_file(engine).is_file():
            return Extension("cached", str(cached_file(engine)), cached_file(engine))
        compiler = find_compiler()[0]
        find_headers(engine)
        return Extension("to build", f"on first use, with {compiler}, into {cached_file(engine).parent}", cached_file(engine))
    except NativeBuildError as error:
        return Extension("impossible", str(error), None)
