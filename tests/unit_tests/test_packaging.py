# SPDX-License-Identifier: Apache-2.0
"""What a newcomer installs: the wheel is whole and needs neither CUDA nor Transformer Engine, the pins fit, make says the truth."""

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import megatron_dyn

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_dyn"
PINS = ROOT / "requirements" / "demo-cpu.txt"


def run(*command, cwd=ROOT, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    result = subprocess.run(command, cwd=cwd, env={**kept, **environment}, text=True, capture_output=True, timeout=240)
    assert result.returncode == 0, f"{command}: exit {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def sources_and_data():
    """Every file that a running package may want: what the wheel has to hold, said independently of pyproject.toml."""
    wanted = {".py", ".yaml", ".yml", ".json", ".cpp", ".h", ".cu", ".typed"}
    return sorted(
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*")
        if path.suffix in wanted and path.is_file() and "__pycache__" not in path.parts
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build folder of an older tree can lend it files."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "megatron_dyn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), ".", cwd=source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel alone in a fresh environment that sees this one's dependencies, but not this repository."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "dependencies.pth").write_text(str(Path(metadata.distribution("torch").locate_file(""))) + "\n")
    return python


def test_the_wheel_holds_every_module_and_data_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == set(sources_and_data())


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_metadata(wheel_metadata):
    assert wheel_metadata["Name"] == "megatron-dyn"
    assert wheel_metadata["Version"] == megatron_dyn.__version__
    assert wheel_metadata["License-Expression"] == "Apache-2.0"
    assert wheel_metadata["Requires-Python"] == ">=3.10"
    requirements = [Requirement(text) for text in wheel_metadata.get_all("Requires-Dist")]
    always = {requirement.name.lower() for requirement in requirements if requirement.marker is None}
    assert always == {"torch", "megatron-core", "numpy", "sentencepiece", "pyyaml", "rich", "tensorboard", "matplotlib", "zstandard"}
    te = [str(requirement) for requirement in requirements if requirement.marker and requirement.marker.evaluate({"extra": "te"})]
    assert len(te) == 1 and te[0].startswith("transformer-engine[pytorch]")


def test_the_wheel_works_without_cuda_and_transformer_engine(installed, tmp_path):
    """From another folder, with the GPUs hidden and Transformer Engine and Apex made impossible to import."""
    program = """
import importlib, pathlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch", "apex"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import megatron_dyn
assert pathlib.Path(megatron_dyn.__file__).is_relative_to(sys.prefix), megatron_dyn.__file__
for found in pkgutil.walk_packages(megatron_dyn.__path__, "megatron_dyn."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            # The modules that consist of Transformer Engine's classes say so, and are imported by name only.
            if not (found.name.startswith("megatron_dyn.layers.te_") and error.name.startswith("transformer_engine")):
                raise
        print(found.name)
"""
    imported = run(str(installed), "-W", "ignore", "-c", program, cwd=tmp_path, CUDA_VISIBLE_DEVICES="").split()
    assert {"megatron_dyn.corpus", "megatron_dyn.planning.planner", "megatron_dyn.microbatch.stream"} <= set(imported)


def test_the_entry_point_is_the_module(installed, tmp_path):
    command = installed.parent / "megatron-dyn"
    as_script = run(str(command), "--help", cwd=tmp_path)
    as_module = run(str(installed), "-m", "megatron_dyn", "--help", cwd=tmp_path)
    assert "preprocess" in as_script
    assert as_script.split("\n", 1)[1] == as_module.split("\n", 1)[1]  # the usage line may name the program otherwise


def pins():
    lines = [line.split("#")[0].strip() for line in PINS.read_text().splitlines()]
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in map(Requirement, filter(None, lines))}


def test_the_pins_are_exact_complete_and_inside_the_declared_ranges(wheel_metadata):
    pinned = pins()
    assert next(iter(pinned)) == "torch", "torch comes first: it is installed in a call of its own"
    assert all(re.fullmatch(r"==[0-9.]+", str(requirement.specifier)) for requirement in pinned.values())
    declared = [Requirement(text) for text in wheel_metadata.get_all("Requires-Dist")]
    for requirement in declared:
        if requirement.marker is None or requirement.marker.evaluate({"extra": "test"}):
            version = str(pinned[requirement.name.lower()].specifier)[2:]
            assert requirement.specifier.contains(version), f"{requirement} does not admit the pinned {version}"


def test_nothing_that_the_pins_bring_is_left_unpinned():
    pinned = pins()
    for name in list(pinned):
        if name in ("torch", "setuptools"):  # what torch brings depends on the build (CPU or CUDA)
            continue
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert requirement.name.lower().replace("_", "-") in pinned, f"{name} needs {requirement}, which is not pinned"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the pins are for Python 3.11 and newer")
def test_this_environment_is_the_pinned_one():
    """Otherwise these tests say nothing about what `make install` gives."""
    if ROOT / ".venv" != Path(sys.prefix):
        pytest.skip("not running in the repository's .venv")
    wrong = {name: metadata.version(name) for name, pin in pins().items() if Version(metadata.version(name)).public != str(pin.specifier)[2:]}
    assert wrong == {}


def test_make_lists_its_targets():
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    for output in (run("make", "--no-print-directory"), run("make", "--no-print-directory", "help")):
        assert re.findall(r"^  make (\S+)", output, re.MULTILINE) == phony.split()


def test_make_install_does_nothing_twice_and_again_when_a_pin_changes(tmp_path):
    """On a copy with a stand-in for pip: what would be run, and when."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*" >> calls\n[ "$1" = --version ] && echo Python 3.11 || true\n')
    python.chmod(0o755)

    def install():
        (tmp_path / "calls").write_text("")
        run("make", "install", cwd=tmp_path)
        return [line for line in (tmp_path / "calls").read_text().splitlines() if " install " in line]

    torch, others, own = install()
    assert torch.endswith(f"install torch{pins()['torch'].specifier}")
    assert others.endswith("install -r requirements/demo-cpu.txt")
    assert own.endswith("install --no-deps --no-build-isolation --editable .")
    assert install() == []
    later = (tmp_path / ".venv" / ".installed").stat().st_mtime + 5
    os.utime(tmp_path / "requirements" / "demo-cpu.txt", (later, later))
    assert len(install()) == 3


def test_make_install_names_the_way_out_without_a_python(tmp_path):
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    result = subprocess.run(["make", "install", "PYTHON=no-such-python"], cwd=tmp_path, text=True, capture_output=True, timeout=60)
    assert result.returncode != 0 and "PYTHON=" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_continuous_integration_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert {"set -eu", "exec make test"} <= set(script.read_text().splitlines())


def test_the_license_is_apache_2():
    text = " ".join((ROOT / "LICENSE").read_text().split())
    assert hashlib.sha256(text.encode()).hexdigest() == "0ffddef9e48f8a09aed5caf2d44f7ba1c1be2d9b8e0a6f693b1635b2d5566645"


def test_every_source_is_python_3_10():
    for path in [*PACKAGE.rglob("*.py"), ROOT / "pretrain_gpt_thd.py"]:
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 10))


def test_every_source_names_its_license():
    tracked = [path for folder in ("megatron_dyn", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    header = "# SPDX-License-Identifier: Apache-2.0"
    missing = [str(path.relative_to(ROOT)) for path in tracked if header not in path.read_text().split("\n\n")[0].splitlines()[:2]]
    assert missing == []


GPU_PROBE = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    raise AssertionError("ran")
"""


def test_gpu_tests_are_collected_and_skipped_with_a_reason(tmp_path):
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_gpu_probe.py").write_text(GPU_PROBE)
    output = run(sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path), cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert "1 skipped" in output and "needs a CUDA device" in output


HANG_PROBE = """
import time

def test_hangs():
    time.sleep(60)
"""


def test_a_hanging_test_fails_instead_of_stalling_the_run(tmp_path):
    (tmp_path / "test_hang_probe.py").write_text(HANG_PROBE)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "--timeout", "1", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=50)
    assert result.returncode == 1 and "Timeout" in result.stdout and "1 failed" in result.stdout
