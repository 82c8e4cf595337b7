# SPDX-License-Identifier: Apache-2.0
"""The folders a run writes into: writable, not in use by another run, and not another run's."""

import errno
import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path

from megatron_dyn.training.checkpoint_disk import TRACKER_NAME, CheckpointError, tracked_iteration
from megatron_dyn.training.config import CheckpointConfig, ConfigError

LOCK_FILE = ".megatron-dyn.lock"


def require_writable(flag: str, folder: str | None) -> None:
    """Make a folder and write into it, before any rank waits for another.

    Raises:
        ConfigError: Naming the flag and the reason.
    """
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be written ({error.strerror}): name another folder") from error


def require_continuation(checkpoint: CheckpointConfig) -> None:
    """Refuse to start afresh where a run was to be continued, and to write over a run that is not.

    `--load` and `--save` of one folder is the pattern of a run that is started again and again: it may be empty the first time.

    Raises:
        ConfigError: `--load` names another folder than `--save` and holds no checkpoint; or `--save` holds checkpoints, and `--load` does
            not name the same folder; or it is damaged, so that nobody knows.
    """
    load, save = (None if folder is None else Path(folder).resolve() for folder in (checkpoint.load, checkpoint.save))
    if load is not None and load == save:
        return
    if load is not None and not (load / TRACKER_NAME).exists():
        above = f" (it is one iteration; name the folder above it: {load.parent})" if (load.parent / TRACKER_NAME).is_file() else ""
        raise ConfigError(
            f"--load {checkpoint.load} holds no checkpoint{above}: the run would start from scratch. Name the folder that holds "
            f"{TRACKER_NAME}, leave --load out, or give --save the same folder to begin a run that continues from there"
        )
    if save is None:
        return
    try:
        latest = tracked_iteration(Path(checkpoint.save) / TRACKER_NAME)
    except CheckpointError as error:
        raise ConfigError(f"--save: {error}, so it is not known whether a run would be buried: mend it, or name another folder") from error
    if latest is not None:
        raise ConfigError(
            f"--save {checkpoint.save} holds iteration {latest} of an earlier run, which this run would bury under its own: "
            f"continue it with --load {checkpoint.save}, or name another folder"
        )


class FolderLocks:
    """Locks of one process on folders; another run that wants one is told who holds it. Released when the process ends, however.

    Raises:
        ConfigError: A folder is in use, or what has the lock's name is not a plain file.
    """

    def __init__(self, folders: dict[str, str | None]):
        self._held: dict[Path, int] = {}
        for flag, folder in folders.items():
            if folder is not None and Path(folder).resolve() not in self._held:
                self._take(flag, Path(folder).resolve())

    def _take(self, flag: str, folder: Path) -> None:
        descriptor = _open_lock(flag, folder / LOCK_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigError(
                    f"{flag} {folder} is in use by another run ({holder or 'holder unknown'}): two runs would delete each other's "
                    "files; wait for it, stop it, or name another folder"
                ) from error
            return  # this file system has no locks
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._held[folder] = descriptor

    def release(self) -> None:
        """Give the folders back."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


def _open_lock(flag: str, path: Path) -> int:
    """Opens the lock itself, never what a link of its name points at: that lies outside the folder."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if not os.path.lexists(path):
            raise
        what = {errno.ELOOP: "is a symbolic link", errno.EISDIR: "is not a plain file"}.get(error.errno, f"cannot be opened ({error.strerror})")
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        what = "is not a plain file"
    raise ConfigError(f"{flag}: {path} {what}, so the folder cannot be locked without writing elsewhere: remove it, or name another folder")
