# SPDX-License-Identifier: Apache-2.0
"""Finding, building and loading the extension, and each way in which it cannot be had: with an installation and compilers that stand in."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from types import SimpleNamespace

import pytest

from megatron_dyn.userbuffers import choice, native, native_build
from megatron_dyn.userbuffers.native_build import NativeBuildError

VERSION = "2.15.0"


def install(folder, version=VERSION, header=True, torch_part=True):
    """What is looked for of Transformer Engine, in a folder of packages."""
    package = folder / "transformer_engine"
    (package / "common/include/transformer_engine").mkdir(parents=True)
    (package / "pytorch").mkdir()
    (package / "__init__.py").touch()
    if torch_part:
        (package / "pytorch/__init__.py").touch()
    if header:
        (package / "common/include/transformer_engine/comm_gemm_overlap.h").touch()
    information = folder / f"transformer_engine-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No Transformer Engine, toolkit, cache or loaded extension of this machine takes part."""
    real = native_build._package_folder
    site = tmp_path / "site"
    monkeypatch.setattr(native_build, "_package_folder", lambda name: _only_under(site, real(name)))
    monkeypatch.setattr(native_build, "prebuilt_file", lambda: tmp_path / "prebuilt" / native_build.FILE_NAME)
    monkeypatch.setenv(native_build.CACHE_VARIABLE, str(tmp_path / "cache"))
    for name in ("CUDA_PATH", "NCCL_HOME", "NCCL_ROOT", "LOCAL_RANK", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.syspath_prepend(str(site))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine" or name == native.MODULE]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine" or name == native.MODULE]:
        del sys.modules[name]


def _only_under(site, folder):
    return folder if folder and site in folder.parents else None


@pytest.fixture
def engine(tmp_path):
    install(tmp_path / "site")
    toolkit = tmp_path / "toolkit" / "include"
    toolkit.mkdir(parents=True)
    for header in native_build.CUDA_HEADERS:
        (toolkit / header).touch()
    return native_build.installed_transformer_engine()


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that writes a line to its log, and then does what it is told."""

    def of(script):
        program = tmp_path / "compiler"
        start = f'#!/bin/sh\necho "$@" >> {tmp_path}/log\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n'
        program.write_text(start + textwrap.dedent(script))
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        return lambda: (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []

    return of


def says(error, *parts):
    for part in (*parts, "backend='reference'"):
        assert str(part) in str(error.value), str(error.value)


# --- what is missing --------------------------------------------------------------------------------------------------


def test_without_transformer_engine():
    assert native_build.installed_transformer_engine() is None
    for call in (native_build.find_headers, native.load):
        with pytest.raises(NativeBuildError) as error:
            call()
        says(error, "Transformer Engine is not installed")
    assert native_build.find_extension().state == "impossible"


def test_transformer_engine_without_its_torch_part_is_none(tmp_path):
    install(tmp_path / "site", torch_part=False)
    assert native_build.installed_transformer_engine() is None


def test_what_is_found(engine, tmp_path):
    assert engine == (VERSION, tmp_path / "site" / "transformer_engine")
    headers = native_build.find_headers()
    assert headers.transformer_engine == tmp_path / "site/transformer_engine/common/include"
    assert headers.cuda[0] == tmp_path / "toolkit/include"


def test_without_the_headers_of_transformer_engine(tmp_path):
    install(tmp_path / "site", header=False)
    with pytest.raises(NativeBuildError) as error:
        native_build.find_headers()
    says(error, "comm_gemm_overlap.h", VERSION, "Reinstall")


@pytest.mark.parametrize("header", native_build.CUDA_HEADERS)
def test_without_a_header_of_cuda(engine, header, tmp_path, monkeypatch):
    (tmp_path / "toolkit/include" / header).unlink()
    monkeypatch.setattr(native_build, "_cuda_folders", lambda: [tmp_path / "toolkit/include"])
    with pytest.raises(NativeBuildError) as error:
        native_build.find_headers()
    says(error, f"header {header} ", "CUDA_HOME", tmp_path / "toolkit/include")


def test_the_header_of_nccl_is_the_installed_one_or_the_stand_in(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(native_build, "_cuda_folders", lambda: [tmp_path / "toolkit/include"])
    monkeypatch.setattr(native_build, "_nccl_folders", lambda: [tmp_path / "nccl"])
    assert native_build.find_headers().nccl == native_build.SOURCES / "shim_last"
    assert (native_build.SOURCES / "shim_last" / "nccl.h").is_file()
    (tmp_path / "nccl").mkdir()
    (tmp_path / "nccl/nccl.h").touch()
    assert native_build.find_headers().nccl == tmp_path / "nccl"


def test_without_a_compiler(engine, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(NativeBuildError) as error:
        native.load()
    says(error, "no C++ compiler", "CXX=no-such-compiler", "g++")
    monkeypatch.setenv("CXX", "'no end")
    with pytest.raises(native_build.NativeBuildError, match="no C.. compiler found .*no end"):
        native_build.find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert native_build.find_extension().state == "impossible"


def test_a_source_that_does_not_compile(engine, compiler, tmp_path):
    compiler("echo half > $out; echo 'error: no member named _ubuf' >&2; exit 1")
    with pytest.raises(NativeBuildError) as error:
        native.load()
    says(error, VERSION, "no member named _ubuf", "-std=c++17")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"] == []


def test_a_header_that_only_the_compiler_misses_is_named(engine, compiler):
    compiler("echo '/x/cuda_fp8.h:1:10: fatal error: nv/target: No such file or directory' >&2; exit 1")
    with pytest.raises(NativeBuildError) as error:
        native.load()
    says(error, "header nv/target ", "CUDA_HOME")


def test_a_cache_that_cannot_be_written(engine, compiler, tmp_path):
    compiler("touch $out")
    (tmp_path / "cache").touch()
    with pytest.raises(NativeBuildError) as error:
        native.load()
    says(error, native_build.CACHE_VARIABLE, tmp_path / "cache")


def test_a_transformer_engine_that_cannot_be_imported(engine, compiler, tmp_path):
    compiler("touch $out")
    (engine.folder / "pytorch/__init__.py").write_text("raise OSError('libcudnn is not here')")
    with pytest.raises(NativeBuildError) as error:
        native.load()
    says(error, "libcudnn is not here", engine.folder)


def test_a_file_that_cannot_be_loaded(engine, compiler):
    compiler("echo nonsense > $out")
    with pytest.raises(NativeBuildError) as error:
        native.load()
    says(error, "cannot be loaded", native_build.cached_file(engine))
    assert native.MODULE not in sys.modules


# --- what is used -----------------------------------------------------------------------------------------------------

MODULE_IN_C = """
#include <Python.h>
static PyObject *te_version(PyObject *self, PyObject *arguments) { return PyUnicode_FromString(VERSION); }
static PyMethodDef methods[] = {{"te_version", te_version, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_active_shape", "", -1, methods};
PyMODINIT_FUNC PyInit__active_shape(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def small_module(compiler, tmp_path):
    """In place of the real source: a module that says for which version it was made."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    (tmp_path / "module.c").write_text(MODULE_IN_C)
    include = sysconfig.get_paths()["include"]

    def of(version):
        return compiler(f"""exec cc -shared -fPIC -I{include} '-DVERSION="{version}"' {tmp_path}/module.c -o $out""")

    return of


def test_it_is_built_once_with_one_line(engine, small_module, capsys):
    log = small_module(VERSION)
    module = native.load()
    assert module.te_version() == VERSION and native.load() is module
    assert len(log()) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "compiling" in line and VERSION in line and str(native_build.cached_file(engine).parent) in line
    del sys.modules[native.MODULE]
    assert native.load().te_version() == VERSION
    assert len(log()) == 1 and capsys.readouterr().out == ""


def test_other_ranks_of_a_node_say_nothing(engine, small_module, capsys, monkeypatch):
    small_module(VERSION)
    monkeypatch.setenv("LOCAL_RANK", "3")
    native.load()
    assert capsys.readouterr() == ("", "")


def test_a_module_for_another_version_is_refused(engine, small_module):
    small_module("2.14.0")
    with pytest.raises(NativeBuildError, match="compiled for Transformer Engine 2.14.0, but 2.15.0 is installed.*Remove the file"):
        native.load()


def test_a_prebuilt_file_is_used_when_it_was_built_for_what_is_installed(engine, tmp_path):
    native_build.prebuilt_file().parent.mkdir()
    native_build.prebuilt_file().write_bytes(b"\0" + native_build.built_for(engine).encode() + b"\0")
    assert native_build.find_extension() == ("prebuilt", native_build.find_extension().detail, native_build.prebuilt_file())
    other = engine._replace(version=VERSION + "1")
    for stale in (b"", native_build.built_for(other).encode()):
        native_build.prebuilt_file().write_bytes(stale)
        assert native_build.find_extension().state == "to build"


def test_an_upgrade_of_anything_builds_anew(engine, monkeypatch, tmp_path):
    names = {native_build.cached_file(engine), native_build.cached_file(engine._replace(version="2.20.2"))}
    shutil.copytree(native_build.SOURCES, tmp_path / "csrc")
    with (tmp_path / "csrc/active_shape.cpp").open("a") as source:
        source.write("// changed\n")
    monkeypatch.setattr(native_build, "SOURCES", tmp_path / "csrc")
    names.add(native_build.cached_file(engine))
    monkeypatch.setattr(native_build.metadata, "version", lambda name: "99.0+cu999")
    names.add(native_build.cached_file(engine))
    assert len(names) == 4


def build_in_a_process(engine, output, ready):
    ready.wait()
    native_build.build_once(engine, output)


def test_several_ranks_at_once_build_one_file(engine, compiler, tmp_path):
    log = compiler("sleep 0.3; echo whole > $out")
    output = native_build.cached_file(engine)
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(4)
    ranks = [fork.Process(target=build_in_a_process, args=(engine, output, ready)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert len(log()) == 1 and output.read_text() == "whole\n"


def test_a_killed_builder_blocks_nobody(engine, compiler, tmp_path):
    compiler("echo whole > $out")
    folder = native_build.cached_file(engine).parent
    program = f"""
import time
from pathlib import Path
from megatron_dyn.userbuffers import native_build
with native_build._lock(Path({str(folder)!r})):
    Path({str(tmp_path / "held")!r}).touch()
    time.sleep(120)
"""
    root = native_build.SOURCES.parents[2]
    builder = subprocess.Popen([sys.executable, "-c", program], cwd=root)
    try:
        while not (tmp_path / "held").exists():
            assert builder.poll() is None
            time.sleep(0.05)
    finally:
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
    assert native_build.build_once(engine, native_build.cached_file(engine)).read_text() == "whole\n"


def set_up(tmp_path, **environment):
    """setup.py's part of an installation, from a copy of what it reads."""
    root = native_build.SOURCES.parents[2]
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(root / "megatron_dyn", source / "megatron_dyn", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=source, text=True, capture_output=True, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr, sorted(path.relative_to(source).as_posix() for path in (source / "megatron_dyn").rglob("*.so"))


def test_an_installation_beside_transformer_engine_compiles_it(engine, compiler, tmp_path):
    log = compiler("echo whole > $out")
    _, files = set_up(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert files == [f"megatron_dyn/userbuffers/{native_build.FILE_NAME}"]
    assert len(log()) == 1 and f'te={VERSION}' in log()[0]


def test_an_installation_that_cannot_compile_it_goes_on_without_it(engine, compiler, tmp_path):
    compiler("echo 'no member named _ubuf' >&2; exit 1")
    told, files = set_up(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert files == [] and "no member named _ubuf" in told


# --- which versions, and the probe ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "tested"),
    [("2.11", True), ("2.11.0", True), ("2.16.1+abc123", True), ("2.20.2", True), ("2.10.9", False), ("2.20.3", False), ("2.21.0", False),
     ("3.0", False), ("2.9.0", False), ("1.99.99", False), ("unknown", False)],
)  # fmt: skip
def test_the_tested_range(version, tested):
    assert native.is_tested(version) is tested


class Shapes:
    """One bulk buffer at address 4096, as the extension would describe it."""

    def __init__(self, rows):
        self.rows = rows

    def shape(self, index):
        return self.rows, 8

    def set_rows_of(self, index, rows):
        self.rows = rows

    def layout(self, index):
        return dict(dptr=4096, element_size=2, tp_size=2, tp_id=1, chunks=1, rows=self.rows, buffer_rows=self.rows, hidden=8,
                    capacity_rows=64, capacity_bytes=1024, chunk_layout=[])  # fmt: skip

    def get_buffer(self, local_chunk=False, shape=None):
        rows = self.rows // 2 if local_chunk else self.rows
        return SimpleNamespace(shape=[rows, 8], data_ptr=lambda: 4096 + (rows * 16 if local_chunk else 0), element_size=lambda: 2)


def test_an_untested_version_is_probed_and_says_so_once(monkeypatch, capsys):
    monkeypatch.setattr(native, "_announced", set())
    monkeypatch.setitem(sys.modules, native.MODULE, SimpleNamespace(te_version=lambda: "2.30.0"))
    shapes = Shapes(64)
    for _ in range(3):
        native.check_layout(shapes, 0, shapes)
    (line,) = capsys.readouterr().out.splitlines()
    assert all(part in line for part in ("2.30.0", *native.TESTED_TE))
    monkeypatch.setitem(sys.modules, native.MODULE, SimpleNamespace(te_version=lambda: native.TESTED_TE[0]))
    native.check_layout(shapes, 0, shapes)
    assert capsys.readouterr().out == "" and shapes.rows == 64


def test_a_buffer_that_does_not_follow_is_refused_and_the_shape_put_back(monkeypatch):
    monkeypatch.setitem(sys.modules, native.MODULE, SimpleNamespace(te_version=lambda: "2.30.0"))
    shapes, stuck = Shapes(64), Shapes(64)
    with pytest.raises(native.LayoutMismatchError, match="2.30.0.*32 rows.*2 ranks.*64, 8.*32, 8.*corrupt"):
        native.check_layout(shapes, 0, stuck)
    assert shapes.rows == 64


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_reference_is_chosen_when_asked_for(engine):
    assert choice.choose_backend("reference") == ("reference", "asked for")


@pytest.mark.parametrize("requested", ["", "TE", "nccl", None])
def test_an_unknown_backend(requested):
    with pytest.raises(ValueError, match="use one of auto, te, reference"):
        choice.choose_backend(requested)


OBSTACLES = [
    ("Transformer Engine is not installed", dict(engine=False)),
    ("no CUDA device is visible", dict(gpu=False)),
    ("no C++ compiler found", dict(compiler="no-such-compiler")),
]


@pytest.mark.parametrize(("obstacle", "setting"), OBSTACLES)
def test_what_stands_in_the_way_of_te(obstacle, setting, request, monkeypatch):
    if setting.get("engine", True):
        request.getfixturevalue("engine")
    monkeypatch.setattr(choice, "has_gpu", lambda: setting.get("gpu", True))
    monkeypatch.setenv("CXX", setting.get("compiler", "true"))
    backend, reason = choice.choose_backend("auto")
    assert backend == "reference" and obstacle in reason
    with pytest.raises(choice.BackendUnavailableError, match=f"'te' was asked for and cannot work here: {obstacle.replace('+', '.')}"):
        choice.choose_backend("te")


def test_te_is_chosen_where_it_works_without_importing_it(engine, monkeypatch):
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setenv("CXX", "true")
    assert choice.choose_backend("auto") == choice.choose_backend("te") == ("te", f"Transformer Engine {VERSION}, extension to build")
    assert "transformer_engine" not in sys.modules


def test_an_untested_te_is_chosen_and_said_to_be_probed(tmp_path, engine, monkeypatch):
    shutil.rmtree(tmp_path / "site")
    install(tmp_path / "site", version="2.31.0")
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    monkeypatch.setenv("CXX", "true")
    backend, reason = choice.choose_backend("auto")
    assert backend == "te" and "2.31.0 (outside the tested 2.11.0 to 2.20.2: each buffer is probed)" in reason
