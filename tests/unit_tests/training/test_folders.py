# SPDX-License-Identifier: Apache-2.0
"""Nothing is written through a link that lies in a folder of the run."""

import os

import pytest

from megatron_dyn.training.checkpoint_files import TRACKER_NAME
from megatron_dyn.training.config import CheckpointConfig, ConfigError
from megatron_dyn.training.folders import LOCK_FILE, FolderLocks, require_continuation
from megatron_dyn.training.metrics_file import write_json


@pytest.fixture
def folders(tmp_path):
    """The run's folder, and a file outside it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text("precious\n")
    return tmp_path / "run", tmp_path / "outside"


@pytest.mark.parametrize("dangling", [False, True])
def test_a_lock_that_is_a_link_is_refused_by_name_and_not_followed(folders, dangling):
    run, outside = folders
    if dangling:
        outside.unlink()
    (run / LOCK_FILE).symlink_to(outside)
    with pytest.raises(ConfigError, match=rf"--save: .*{LOCK_FILE} is a symbolic link.*remove it"):
        FolderLocks({"--save": str(run)})
    assert outside.exists() != dangling
    assert dangling or outside.read_text() == "precious\n"


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_lock_that_is_no_file_is_refused_by_name(folders, kind):
    run, _ = folders
    {"folder": os.mkdir, "pipe": os.mkfifo}[kind](run / LOCK_FILE)
    with pytest.raises(ConfigError, match=f"{LOCK_FILE} is not a plain file.*remove it"):
        FolderLocks({"--save": str(run)})


def test_the_lock_is_taken_once_and_given_back(folders):
    run, _ = folders
    locks = FolderLocks({"--save": str(run), "--run-dir": str(run)})
    assert (run / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    with pytest.raises(ConfigError, match=f"in use by another run \\(process {os.getpid()} on "):
        FolderLocks({"--save": str(run)})
    locks.release()
    FolderLocks({"--save": str(run)}).release()


@pytest.mark.parametrize("dangling", [False, True])
def test_a_document_is_not_written_through_a_link_of_its_partial_name(folders, dangling):
    run, outside = folders
    if dangling:
        outside.unlink()
    (run / ".summary.json.partial").symlink_to(outside)
    write_json(run / "summary.json", {"a": 1})
    assert (run / "summary.json").read_text() == '{\n  "a": 1\n}\n' and not (run / "summary.json").is_symlink()
    assert outside.exists() != dangling
    assert dangling or outside.read_text() == "precious\n"


@pytest.mark.parametrize("how", ["no text", "a folder", "a pipe"])
def test_a_damaged_tracker_under_save_is_refused_by_name(folders, how):
    run, _ = folders
    {"no text": lambda path: path.write_bytes(b"\xff\xfe"), "a folder": os.mkdir, "a pipe": os.mkfifo}[how](run / TRACKER_NAME)
    with pytest.raises(ConfigError, match=f"--save: .*{TRACKER_NAME} (holds|is not a plain file).*name another folder"):
        require_continuation(CheckpointConfig(save=str(run)))
    require_continuation(CheckpointConfig(load=str(run)))  # there is something to load: it is refused when it is read


def test_a_run_that_would_bury_another_is_refused_and_an_empty_folder_is_not(folders):
    run, _ = folders
    require_continuation(CheckpointConfig(save=str(run)))
    with pytest.raises(ConfigError, match="--load .* holds no checkpoint"):
        require_continuation(CheckpointConfig(load=str(run)))
    (run / TRACKER_NAME).write_text("6\n")
    with pytest.raises(ConfigError, match="holds iteration 6 of an earlier run"):
        require_continuation(CheckpointConfig(save=str(run)))
    require_continuation(CheckpointConfig(save=str(run), load=str(run)))
