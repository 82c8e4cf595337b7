# SPDX-License-Identifier: Apache-2.0
"""The extension compiles against the headers of the first and the last tested Transformer Engine, and does its arithmetic right.

Needs a C++ compiler and the headers: from the folders in MEGATRON_DYN_TE_HEADERS (each where ``pip install --target`` put one version,
separated by colons), else from PyPI's wheels, of which the headers are kept in the user's cache. `make test-native` runs it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import native_checks
import pytest

from megatron_dyn.userbuffers import native, native_build

HERE = Path(__file__).resolve().parent
HEADERS_VARIABLE = "MEGATRON_DYN_TE_HEADERS"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_dyn" / "headers"
CUDA_WHEELS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88", "nvidia-cuda-cccl==13.0.85")

pytestmark = [pytest.mark.native, pytest.mark.timeout(1500)]


def download(requirement, folder):
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder)]
    result = subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], text=True, capture_output=True)
    if result.returncode != 0:
        last = (result.stderr.strip() or "no message").splitlines()[-1]
        pytest.skip(f"pip cannot download {requirement} ({last}); name a folder that has it with {HEADERS_VARIABLE}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def fetch_headers(requirement, folder):
    """The headers of a wheel, in ``folder`` for the next time."""
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as unfinished:
        wheel = download(requirement, Path(unfinished))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(unfinished) / "headers", [name for name in archive.namelist() if "/include/" in name])
        (Path(unfinished) / "headers").replace(folder)
    return folder


def named_folders():
    """Version -> folder, of those in the environment variable."""
    found = {}
    for folder in filter(None, os.environ.get(HEADERS_VARIABLE, "").split(os.pathsep)):
        for information in Path(folder).glob("transformer_engine*.dist-info"):
            found[re.search(r"-([0-9.]+)\.dist-info", information.name)[1]] = Path(folder)
    return found


@pytest.fixture(scope="module")
def compiler():
    try:
        return native_build.find_compiler()
    except native_build.NativeBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cuda_headers(compiler):
    """CUDA_HOME as it is where the toolkit is installed, else of NVIDIA's wheels."""
    if all(any((folder / header).is_file() for folder in native_build._cuda_folders()) for header in native_build.CUDA_HEADERS):
        yield
        return
    folders = [fetch_headers(wheel, CACHE / wheel.replace("==", "-")) / "nvidia" / "cu13" / "include" for wheel in CUDA_WHEELS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_build, "_cuda_folders", lambda: folders)
        yield


@pytest.fixture(scope="module", params=native.TESTED_TE)
def engine(request, cuda_headers):
    folder = named_folders().get(request.param)
    if folder is None:
        folder = fetch_headers(f"transformer-engine-cu13=={request.param}", CACHE / f"transformer-engine-{request.param}")
    return native_build.TransformerEngine(request.param, folder / "transformer_engine")


@pytest.fixture(scope="module")
def extension(engine, tmp_path_factory):
    return native_build.build(engine, tmp_path_factory.mktemp("extension") / native_build.FILE_NAME)


@pytest.fixture(scope="module")
def stand_in(engine, tmp_path_factory):
    module = tmp_path_factory.mktemp("stand_in") / "stand_in_te.so"
    command = native_build.compile_command(engine, module)
    command[command.index(str(native_build.SOURCE))] = str(HERE / "stand_in_te.cpp")
    command[command.index("-fvisibility=hidden")] = "-fvisibility=default"
    subprocess.run(command, check=True)
    return module


def run_checks(extension, stand_in):
    """The program, in a process of its own."""
    command = [sys.executable, str(HERE / "native_checks.py"), str(extension), str(stand_in)]
    return subprocess.run(command, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(HERE.parents[2])})


@pytest.fixture(scope="module")
def outcomes(extension, stand_in):
    result = run_checks(extension, stand_in)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_it_compiles_without_a_warning(engine, tmp_path):
    command = [*native_build.compile_command(engine, tmp_path / "module.so"), "-Werror"]
    result = subprocess.run(command, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr


def test_it_needs_no_symbol_of_cuda_or_torch(extension):
    """Host code over what Transformer Engine's package has loaded: nothing else has to be found where it is loaded."""
    symbols = subprocess.run(["nm", "-DC", "--undefined-only", str(extension)], text=True, capture_output=True, check=True).stdout
    names = [line.split(maxsplit=1)[1] for line in symbols.splitlines()]
    assert [name for name in names if re.search("cuda|cuStream|nccl|torch|c10|at::", name, re.IGNORECASE)] == []
    own = [name for name in names if re.search("nvte|transformer_engine", name)]
    assert own and all(name.startswith(("nvte_tensor_", "nvte_set_tensor_param", "typeinfo for transformer_engine::")) for name in own)


def test_the_file_says_what_it_was_built_for(engine, extension, outcomes):
    assert native_build.is_built_for(extension, engine)
    assert not native_build.is_built_for(extension, engine._replace(version="2.12.0"))
    assert outcomes["te_version"] == engine.version


@pytest.mark.parametrize("check", native_checks.CHECKS)
def test_on_communicators_that_stand_in(outcomes, check):
    assert outcomes["outcomes"][check] == "passed", outcomes["outcomes"][check]


MUTANTS = {
    "chunks start at a whole buffer's share": ("start += chunk_bytes;", "start += chunk_bytes * tp_size / num_chunks;"),
    "the chunks are left alone": ("set(chunk, start, chunk_rows);", ";"),
    "a ring counts its rows as a bulk buffer": ("buffer->size(0) / num_chunks * tp_size; }", "buffer->size(0); }"),
    "the reduce-scatter's extra chunks are forgotten": ("set(*buffer, data, chunk_rows * num_chunks);", "set(*buffer, data, rows);"),
    "beyond the capacity is allowed": ("rows <= capacity && ", ""),
    "TP need not divide the rows": ("&& rows % multiple == 0", ""),
    "the smallest capacity is not kept": ("std::min(max_rows_, c.capacity_rows)", "c.capacity_rows + max_rows_"),
    "cuBLASMp is taken": ("if (with_cublasmp(comm)) {", "if (false) {"),
    "the communicators may die": ('add_bulk, py::arg("comm"), py::keep_alive<1, 2>())', 'add_bulk, py::arg("comm"))'),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, engine, outcomes, stand_in, tmp_path, monkeypatch):
    if engine.version != native.TESTED_TE[-1]:
        pytest.skip("once is enough")
    before, after = MUTANTS[mutant]
    source = native_build.SOURCE.read_text()
    assert source.count(before) == 1
    (tmp_path / "mutant.cpp").write_text(source.replace(before, after))
    monkeypatch.setattr(native_build, "SOURCE", tmp_path / "mutant.cpp")
    broken = native_build.build(engine, tmp_path / native_build.FILE_NAME)
    result = run_checks(broken, stand_in)
    if result.returncode == 0:  # else it died of it
        found = json.loads(result.stdout.splitlines()[-1])["outcomes"]
        assert [check for check, outcome in found.items() if outcome != "passed"]
