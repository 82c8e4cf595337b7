# SPDX-License-Identifier: Apache-2.0
"""What is given: names, folders, the reference; and files that are damaged."""

import json
import os
import sys

import pytest
from written_run import write_run

from megatron_dyn.__main__ import main as megatron_dyn
from megatron_dyn.compare import CompareError
from megatron_dyn.compare.command import main


def test_one_name_for_runs_of_other_settings_is_refused(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=2, way="packed-fixed")
    c = write_run(tmp_path / "c", way="pad-to-max")
    with pytest.raises(CompareError, match="both called 'mine', and differ in data.microbatching"):
        main([f"mine={a}", f"mine={b}", str(c)])


def test_one_name_and_one_seed_twice_says_what_it_is(tmp_path):
    a, b, c = (write_run(tmp_path / name) for name in "abc")
    with pytest.raises(CompareError, match="both called 'mine', and both have the seed 1"):
        main([f"mine={a}", f"mine={b}", f"other={c}"])


@pytest.mark.parametrize("second", ["new={}", "new={}/../a", "{}"])
def test_a_folder_given_twice_is_refused(tmp_path, second):
    a = write_run(tmp_path / "a")
    with pytest.raises(CompareError, match="given twice"):
        main([f"old={a}", second.format(a)])


def test_two_arms_of_one_name_are_refused(tmp_path):
    write_run(tmp_path / "a"), write_run(tmp_path / "packed-fixed", way="packed-fixed", lr=2.0), write_run(tmp_path / "c", tp=2)
    with pytest.raises(CompareError, match="two arms would be called 'packed-fixed'"):
        main([str(tmp_path / "a"), str(tmp_path / "packed-fixed"), f"packed-fixed={tmp_path / 'c'}"])


@pytest.mark.parametrize("wanted", ["new", "{}/b", "new={}/b", "b"])
def test_the_reference_is_an_arm_a_folder_or_both(tmp_path, capsys, wanted):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    main([f"old={a}", f"new={b}", "--reference", wanted.format(tmp_path), "--json"])
    assert [arm["name"] for arm in json.loads(capsys.readouterr().out)["arms"]] == ["new", "old"]
    with pytest.raises(CompareError, match=r"none of the arms \(old, new\)"):
        main([f"old={a}", f"new={b}", "--reference", f"old={b}"])


def test_an_equals_sign_belongs_to_the_folder_from_the_second_on(tmp_path, capsys):
    a, b = write_run(tmp_path / "lr=1" / "a"), write_run(tmp_path / "lr=1" / "b")
    main([f"old={a}", str(b), "--json"])
    assert json.loads(capsys.readouterr().out)["arms"][0]["name"] == "old"
    for word in (f"={a}", "x="):
        with pytest.raises(CompareError, match="give NAME=FOLDER, both not empty"):
            main([word, str(b)])


def test_names_are_printed_as_they_are(tmp_path, capsys):
    names = [r"$\frac$ a$b", "_hidden", "[bold]b[/x]", ":smile:"]
    assert main([f"{name}={write_run(tmp_path / str(number))}" for number, name in enumerate(names)]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_a_damaged_settings_file_is_named(tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", way="packed-fixed")
    sound = json.loads((b / "run.json").read_text())
    sections = sound["settings"]
    for damage in (
        [], None, {**sound, "settings": []}, {**sound, "settings": {**sections, "model": None}}, {**sound, "resumed": 3}, {**sound, "operations": {}},
        {**sound, "settings": {name: values for name, values in sections.items() if name != "model"}}, {**sound, "parallel": {"TP": "1"}},
        {**sound, "settings": {**sections, "training": {"seed": None}}}, {**sound, "documents": []},
    ):  # fmt: skip
        (b / "run.json").write_text(json.dumps(damage))
        assert megatron_dyn(["compare", str(a), str(b)]) == 2
        assert str(b / "run.json") in capsys.readouterr().err
    (b / "run.json").write_text(json.dumps(sound))
    lines = (b / "metrics.jsonl").read_text()
    (b / "metrics.jsonl").write_text(lines.replace('"T": [64, 64]', '"T": null', 1))
    assert megatron_dyn(["compare", str(a), str(b)]) == 2 and str(b) in capsys.readouterr().err


def test_a_reader_who_leaves_is_no_error(tmp_path, monkeypatch):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", way="packed-fixed")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main([str(a), str(b)]) == 0
        gone.flush()  # as the interpreter does at its end
