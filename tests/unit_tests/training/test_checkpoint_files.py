# SPDX-License-Identifier: Apache-2.0
"""The folder protocol alone: a process killed between any two file operations leaves a usable checkpoint."""

import json
import logging
import os
import shutil

import pytest

from megatron_dyn.training import checkpoint_files
from megatron_dyn.training.checkpoint_disk import digest_files
from megatron_dyn.training.checkpoint_files import SEAL_NAME, TRACKER_NAME, CheckpointError, CheckpointFolder


def write(folder: CheckpointFolder, iteration: int, content: str = "", keep_last=None) -> None:
    staging = folder.begin(iteration)
    for name in ("common.pt", "__0_0.distcp"):
        (staging / name).write_text(f"{name} of {iteration} {content}")
    folder.seal(staging, {"iteration": iteration, "content": content}, digest_files(staging, ["common.pt", "__0_0.distcp"]))
    folder.publish(staging, iteration)
    folder.prune(iteration, keep_last)


def read(folder: CheckpointFolder, iteration: int) -> str:
    """The content, after every check that a load does."""
    seal = folder.read_seal(iteration)
    folder.check_files(iteration, seal["files"], seal["files"])
    assert seal["iteration"] == iteration
    return seal["content"]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


class Killer:
    """Kills before the n-th operation that changes the disk; a deletion is killed half-way, too."""

    def __init__(self, monkeypatch, root):
        self.left, self.root = None, str(root)
        for owner, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, original):
        def operation(*args, **kwargs):
            if self.left is not None:
                if self.left == 0:
                    raise Killed
                self.left -= 1
            return original(*args, **kwargs)

        return operation


@pytest.mark.parametrize("case", ["first", "next", "rewrite", "prune"])
def test_killed_before_any_operation_the_old_or_the_new_checkpoint_is_whole(case, tmp_path, monkeypatch):
    before = {"first": [], "next": [10], "rewrite": [10, 20], "prune": [10, 20]}[case]
    target, keep = {"first": 10, "next": 20, "rewrite": 20, "prune": 30}[case], 2 if case == "prune" else None
    killer, operations, seen = Killer(monkeypatch, tmp_path), 0, set()
    while True:
        folder = CheckpointFolder(tmp_path / f"kill_{operations}")
        for iteration in before:
            write(folder, iteration, "old")
        killer.left = operations
        try:
            write(folder, target, "new", keep_last=keep)
            survived = True
        except Killed:
            survived = False
        killer.left = None
        latest = folder.latest()
        found = None if latest is None else (latest, read(folder, latest))
        old = (before[-1], "old") if before else None
        assert found in (old, (target, "new")), f"killed before operation {operations}"
        seen.add(found)
        write(folder, 40, "after")  # the next run saves as if nothing had happened, and clears away what was left
        assert (folder.latest(), read(folder, 40)) == (40, "after")
        assert not [p.name for p in folder.root.iterdir() if not p.name.startswith("iter_") and p.name != TRACKER_NAME]
        assert not [p.name for p in folder.root.iterdir() if "." in p.name and p.name != TRACKER_NAME]
        if survived:
            break
        operations += 1
    assert operations >= 8 and seen == {old, (target, "new")}


def test_a_protocol_that_names_before_it_renames_is_caught(tmp_path, monkeypatch):
    """Mutant: the tracker is written before the folder has its name."""

    def hasty(self, staging, iteration):
        (self.root / TRACKER_NAME).write_text(str(iteration))
        os.rename(staging, self.root / f"iter_{iteration:07d}")

    monkeypatch.setattr(CheckpointFolder, "publish", hasty)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        test_killed_before_any_operation_the_old_or_the_new_checkpoint_is_whole("next", tmp_path, monkeypatch)


def test_layout_is_megatrons_and_the_newest_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path / "new" / "folder")
    assert folder.latest() is None and folder.iterations() == []
    for iteration in (10, 20, 30, 40):
        write(folder, iteration, keep_last=2)
    assert sorted(p.name for p in folder.root.iterdir()) == ["iter_0000030", "iter_0000040", TRACKER_NAME]
    assert (folder.root / TRACKER_NAME).read_text() == "40"
    write(folder, 25, keep_last=1)  # the run was taken back to an older state
    assert folder.iterations() == [25, 30, 40] and folder.latest() == 25


def test_nothing_is_deleted_when_the_new_checkpoint_does_not_get_complete(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    write(folder, 10)
    monkeypatch.setattr(checkpoint_files, "write_flushed", lambda path, text: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        write(folder, 20, keep_last=1)
    assert folder.latest() == 10 and read(folder, 10) == ""


@pytest.mark.parametrize("text", ["", "twenty", "release", "2e1"])
def test_a_damaged_tracker_is_refused_with_the_way_out(tmp_path, text):
    folder = CheckpointFolder(tmp_path)
    write(folder, 10), write(folder, 20)
    (tmp_path / TRACKER_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=f"{TRACKER_NAME} holds '{text}'.*Iteration 20 is usable.*write 20 into"):
        folder.latest()


DAMAGED_TRACKERS = {  # how it is made, and what is said of it
    "no text": (lambda path: path.write_bytes(b"\xff\xfe"), r"holds '\\\\xff\\\\xfe' instead of an iteration number"),
    "5,000 digits": (lambda path: path.write_text("2" * 5000), "holds '2{40}' and more instead of an iteration number"),
    "digits of another script": (lambda path: path.write_text("\u0662\u0660"), "holds '..' instead of an iteration number"),
    "a folder": (lambda path: path.mkdir(), "is not a plain file .remove it."),
    "a pipe": (os.mkfifo, "is not a plain file .remove it."),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be read .*symbolic links"),
}


@pytest.mark.parametrize("how", DAMAGED_TRACKERS)
def test_a_tracker_that_is_no_short_text_is_refused_with_the_way_out(tmp_path, how):
    folder, (make, expected) = CheckpointFolder(tmp_path), DAMAGED_TRACKERS[how]
    write(folder, 10), write(folder, 20)
    (tmp_path / TRACKER_NAME).unlink()
    make(tmp_path / TRACKER_NAME)
    with pytest.raises(CheckpointError, match=f"{TRACKER_NAME} {expected}.*Iteration 20 is usable.*write 20 into"):
        folder.latest()


def test_a_tracker_that_names_a_missing_checkpoint_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 10)
    (tmp_path / TRACKER_NAME).write_text("30")
    with pytest.raises(CheckpointError, match="names iteration 30.*not a complete checkpoint.*Iteration 10 is usable"):
        folder.latest()


def test_without_a_tracker_the_newest_complete_checkpoint_is_used(tmp_path, caplog):
    folder = CheckpointFolder(tmp_path)
    write(folder, 10), write(folder, 20)
    (tmp_path / TRACKER_NAME).unlink()
    (tmp_path / "iter_0000030").mkdir()  # not sealed
    with caplog.at_level(logging.WARNING):
        assert folder.latest() == 20
    assert "using the newest complete checkpoint, iteration 20" in caplog.text


@pytest.mark.parametrize("name", ["common.pt", "__0_0.distcp"])
@pytest.mark.parametrize(
    "how, expected",
    [("cut", "has 1. bytes|has 2. bytes"), ("flip", "SHA-256"), ("delete", "is missing")],
)
def test_a_damaged_file_is_named_with_the_older_checkpoint_that_is_whole(tmp_path, name, how, expected):
    folder = CheckpointFolder(tmp_path)
    for iteration in (10, 20, 30):
        write(folder, iteration)
    for iteration in (20, 30):
        path = tmp_path / f"iter_{iteration:07d}" / name
        content = path.read_bytes()
        if how == "delete":
            path.unlink()
        else:
            path.write_bytes(content[:-1] if how == "cut" else content[:3] + b"#" + content[4:])
    with pytest.raises(CheckpointError, match=f"iter_0000030/{name} .*({expected}).*Iteration 10 is usable: .*write 10 into"):
        read(folder, 30)
    shutil.rmtree(tmp_path / "iter_0000010")
    with pytest.raises(CheckpointError, match="No older checkpoint in this folder is usable"):
        read(folder, 30)


@pytest.mark.parametrize("change", [("content", "edited"), ("iteration", 31), ("files", {})])
def test_an_edited_seal_is_refused(tmp_path, change):
    folder = CheckpointFolder(tmp_path)
    write(folder, 30)
    path = tmp_path / "iter_0000030" / SEAL_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), change[0]: change[1]}))
    with pytest.raises(CheckpointError, match="does not match its own SHA-256"):
        folder.read_seal(30)


def test_a_checkpoint_in_the_folder_of_another_iteration_is_refused_with_the_way_out(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for iteration in (2, 4, 6):
        write(folder, iteration)
    for iteration in (4, 6):
        shutil.rmtree(tmp_path / f"iter_000000{iteration}")
        shutil.copytree(tmp_path / "iter_0000002", tmp_path / f"iter_000000{iteration}")
    with pytest.raises(CheckpointError, match=f"iter_0000006/{SEAL_NAME} is of iteration 2.*Iteration 2 is usable: .*write 2 into"):
        folder.read_seal(6)


@pytest.mark.parametrize("iteration", [5, "x", "6", 6.0, None, [6]])
def test_a_seal_of_another_iteration_than_its_folders_is_refused(tmp_path, iteration):
    folder = CheckpointFolder(tmp_path)
    write(folder, 4), write(folder, 6)
    (tmp_path / "iter_0000006" / SEAL_NAME).unlink()
    folder.seal(tmp_path / "iter_0000006", {"iteration": iteration}, {})
    with pytest.raises(CheckpointError, match="is of iteration .*Iteration 4 is usable") as caught:
        folder.read_seal(6)
    assert repr(iteration) in str(caught.value)


def test_damage_of_every_checkpoint_is_found_in_one_pass(tmp_path, monkeypatch):
    folder, read_seals = CheckpointFolder(tmp_path), []
    for iteration in range(1, 13):
        write(folder, iteration)
        (tmp_path / f"iter_{iteration:07d}" / SEAL_NAME).write_text("{}")
    original = CheckpointFolder._verified_seal
    monkeypatch.setattr(CheckpointFolder, "_verified_seal", lambda self, number: read_seals.append(number) or original(self, number))
    with pytest.raises(CheckpointError, match="No older checkpoint in this folder is usable"):
        folder.read_seal(12)
    assert sorted(read_seals) == list(range(1, 13))


def test_unknown_format_versions_and_half_a_seal_are_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 30)
    path = tmp_path / "iter_0000030" / SEAL_NAME
    whole = path.read_text()
    path.write_text(json.dumps({**json.loads(whole), "format_version": 2}))
    with pytest.raises(CheckpointError, match="format version 2; this program reads version 1 only"):
        folder.read_seal(30)
    for text in (whole[: len(whole) // 2], "", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=f"{SEAL_NAME} is damaged"):
            folder.read_seal(30)


def test_leftovers_are_swept_and_strangers_are_left_alone(tmp_path):
    folder = CheckpointFolder(tmp_path)
    write(folder, 10)
    for name in ("iter_0000020.tmp-0a1b2c3d", "iter_0000005.deleted-0a1b2c3d", "iter_0000010.replaced-0a1b2c3d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("x")
    for name in ("iter_0000020.mine", "notes.txt", "iter_20"):
        (tmp_path / name).mkdir()
    write(folder, 20)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["iter_0000010", "iter_0000020", "iter_0000020.mine", "iter_20", "notes.txt", TRACKER_NAME]
    )
