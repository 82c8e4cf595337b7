# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_dyn env`: it tells what there is and what is not, and what a run would use."""

import json
import subprocess
import sys

import torch

from megatron_dyn import __main__, __version__, environment
from megatron_dyn.userbuffers import choice, native_build


def findings():
    return {finding.name: finding for finding in environment.find_all()}


def test_plain_and_json_tell_the_same(capsys):
    assert __main__.main(["env"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert __main__.main(["env", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)
    assert len(plain) == len(as_json)
    for line, (name, told) in zip(plain, as_json.items()):
        assert line.startswith(name) and (told["found"] or "not found") in line and line.endswith(told["note"])


def test_what_is_here_is_told():
    found = findings()
    assert found["megatron-dyn"].found == __version__
    assert found["torch"].found == torch.__version__
    assert found["megatron-core"].found and found["sentencepiece"].found
    assert (found["UserBuffers backend"].found, found["UserBuffers backend"].note) == choice.choose_backend("auto")


def test_what_is_absent_is_a_finding(monkeypatch):
    monkeypatch.setattr(native_build, "installed_transformer_engine", lambda: None)
    monkeypatch.setattr(choice, "installed_transformer_engine", lambda: None)
    monkeypatch.setitem(environment.PACKAGES, "no_such_package", ("no-such-package", "nothing"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = findings()
    assert [found[name].found for name in ("transformer_engine", "no-such-package", "C++ compiler", "UserBuffers extension")] == [None] * 4
    assert found["UserBuffers backend"][1:] == ("reference", "Transformer Engine is not installed")


def test_an_installed_transformer_engine(monkeypatch, tmp_path):
    engine = native_build.TransformerEngine("2.99.0", tmp_path)
    monkeypatch.setattr(native_build, "installed_transformer_engine", lambda: engine)
    monkeypatch.setattr(choice, "installed_transformer_engine", lambda: engine)
    monkeypatch.setattr(choice, "has_gpu", lambda: True)
    found = findings()
    assert found["transformer_engine"][1:] == ("2.99.0", "outside the tested range 2.11.0 to 2.20.2: probed at start")
    assert found["UserBuffers extension"].found is None and "comm_gemm_overlap.h" in found["UserBuffers extension"].note
    assert found["UserBuffers backend"].found == "reference" and "comm_gemm_overlap.h" in found["UserBuffers backend"].note


def test_another_package_named_apex_is_not_taken_for_nvidias(monkeypatch):
    monkeypatch.setattr(environment, "_importable", lambda name: name == "apex")
    assert findings()["Apex"].found is None


def test_the_cards_are_counted_by_kind(monkeypatch):
    monkeypatch.setattr(environment.device, "card_names", lambda: ["H200", "H200", "L4"])
    assert findings()["CUDA"].note == "2 x H200, 1 x L4"


def test_a_terminal_gets_a_table(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert environment.main([]) == 0
    told = capsys.readouterr().out
    assert "transformer_engine" in told and "UserBuffers backend" in told


def test_it_imports_no_transformer_engine():
    program = """
import sys
from megatron_dyn.environment import main
main([])
print([name for name in sys.modules if name.split(".")[0] in ("transformer_engine", "apex")])
"""
    assert subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True).stdout.endswith("[]\n")
