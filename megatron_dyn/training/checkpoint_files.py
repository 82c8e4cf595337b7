# SPDX-License-Identifier: Apache-2.0
"""The folder of checkpoints: what lies on disk, and in which order it gets there.

    <save>/latest_checkpointed_iteration.txt      "60": Megatron's own name and content
    <save>/iter_0000060/                          one complete checkpoint
        common.pt  .metadata  metadata.json  __<rank>_<n>.distcp      Megatron's torch_dist format
        megatron_dyn.json                         the seal: description, and size and SHA-256 of every file
    <save>/iter_0000060.tmp-1f6c2a90/             being written; a leftover if its run was killed

A folder is named `iter_<iteration>` only after every rank has written and flushed its files and the seal lies
in it, and the tracker file names it only after that. So a process killed at any moment leaves the checkpoint before, or
the new one, never half of one:

| killed                             | found afterwards                                                        |
|------------------------------------|-------------------------------------------------------------------------|
| while writing `.tmp-`              | tracker and folder of the checkpoint before; the leftover is swept later |
| after the rename                   | the new folder is complete; the tracker names the one before: used       |
| between the two renames of a rewrite | the old folder under `.replaced-`: used, and put back by the next save  |
| while deleting an old checkpoint   | it was renamed to `.deleted-` first, so nobody takes it for a checkpoint |
"""

import contextlib
import json
import logging
import os
import re
import uuid
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Optional

import torch.distributed as dist

from megatron_dyn.training.checkpoint_disk import (
    TRACKER_NAME,
    CheckpointError,
    digest_of_json,
    file_problem,
    flush,
    remove_folder,
    tracked_iteration,
    write_flushed,
)

logger = logging.getLogger(__name__)

SEAL_NAME = "megatron_dyn.json"
COMMON_NAME = "common.pt"
FORMAT_NAME = "megatron_dyn checkpoint"
FORMAT_VERSION = 1

_COMPLETE = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"iter_(\d{7,})\.(tmp|deleted|replaced)-[0-9a-f]+")


def on_every_rank(what: str, work: Callable[[], Any]) -> list:
    """Do `work` on this rank and exchange how it went: a rank that fails must not leave the others waiting.

    Args:
        what: completes the sentence "could not ...".
        work: called once on this rank; its result must be picklable.

    Returns:
        Every rank's result, in rank order.

    Raises:
        CheckpointError: on every rank if `work` raised on any, naming each failed rank and its reason.
    """
    cause, mine = None, None
    try:
        mine = (True, work())
    except Exception as error:  # whatever it is, the other ranks have to hear of it; it is raised again below
        cause, mine = error, (False, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    failed = {rank: text for rank, (ok, text) in enumerate(answers) if not ok}
    if not failed:
        return [value for _, value in answers]
    reasons = sorted(set(failed.values()))
    ranks = {reason: [rank for rank in failed if failed[rank] == reason] for reason in reasons}
    lines = [f"{_name_ranks(ranks[reason], len(answers))}: {reason}" for reason in reasons]
    raise CheckpointError(f"could not {what}: " + "; ".join(lines)) from cause


def _name_ranks(ranks: "list[int]", world: int) -> str:
    if len(ranks) == world:
        return "every rank" if world > 1 else "rank 0"
    return "rank " + ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


class CheckpointFolder:
    """The folder given to `--save` or `--load`. Knows nothing of models; one rank calls the writing methods."""

    def __init__(self, root: "str | os.PathLike"):
        self.root = Path(root)

    # ---- reading -------------------------------------------------------------------------------------------

    def iterations(self) -> "list[int]":
        """Iterations with a complete (sealed) checkpoint, ascending."""
        found = set()
        for path in self._entries():
            name = _COMPLETE.fullmatch(path.name) or _LEFTOVER.fullmatch(path.name)
            usable = name and (name.re is _COMPLETE or name[2] == "replaced")
            if usable and (path / SEAL_NAME).is_file():
                found.add(int(name[1]))
        return sorted(found)

    def latest(self) -> Optional[int]:
        """The iteration to resume from; None when the folder holds no checkpoint.

        Raises:
            CheckpointError: the tracker is unreadable, or names a checkpoint that is not there.
        """
        tracker = self.root / TRACKER_NAME
        usable = self.iterations()
        try:
            tracked = tracked_iteration(tracker)
        except CheckpointError as error:
            raise CheckpointError(f"{error}, so it is not known where to resume. {self._way_out(usable)}") from error
        if tracked is None:
            if usable:  # killed between the rename and the first writing of the tracker
                logger.warning("%s is missing; using the newest complete checkpoint, iteration %d", tracker, usable[-1])
            return usable[-1] if usable else None
        if tracked not in usable:
            raise CheckpointError(
                f"{tracker} names iteration {tracked}, but {self._final(tracked)} is not a complete checkpoint "
                f"(no {SEAL_NAME} in it). {self._way_out(usable)}"
            )
        return tracked

    def path(self, iteration: int) -> Path:
        """Where a complete checkpoint lies (after a rewrite was killed: under its `.replaced-` name)."""
        final = self._final(iteration)
        if final.exists():
            return final
        return next(iter(sorted(self.root.glob(f"{final.name}.replaced-*"))), final)

    def read_seal(self, iteration: int) -> dict:
        """The description of a checkpoint, after checking that the seal is whole, of a known version and of this iteration.

        Raises:
            CheckpointError: naming the seal, what is wrong with it, and the older iteration that is usable.
        """
        with self.offering_an_older(iteration):
            return self._verified_seal(iteration)

    def check_files(self, iteration: int, files: "dict[str, dict]", names: Iterable[str]) -> None:
        """Compare files with the size and SHA-256 of the seal.

        Raises:
            CheckpointError: naming the first file that differs, what was found, and the older iteration that is usable.
        """
        with self.offering_an_older(iteration):
            self._verify_files(iteration, files, names)

    @contextlib.contextmanager
    def offering_an_older(self, iteration: int) -> Iterator[None]:
        """Complete the message of a CheckpointError about this checkpoint with the older one that is whole, and how to go on from it."""
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"{str(error).rstrip('.')}. {self._older(iteration)}") from error

    def _verified_seal(self, iteration: int) -> dict:
        path = self.path(iteration) / SEAL_NAME
        try:
            seal = json.loads(path.read_text(encoding="utf-8"))
            body = {key: value for key, value in seal.items() if key != "seal_sha256"}
            whole = seal.get("format") == FORMAT_NAME and "format_version" in seal
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: {self.path(iteration)} is not a complete checkpoint") from None
        except (ValueError, AttributeError, OSError) as error:
            raise CheckpointError(f"{path} is damaged ({error})") from error
        if whole and seal["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {seal['format_version']!r}; this program reads version {FORMAT_VERSION} only: "
                f"load it with the program that wrote it ({seal.get('versions')})"
            )
        if not whole or seal.get("seal_sha256") != digest_of_json(body):
            raise CheckpointError(f"{path} is damaged: its content does not match its own SHA-256")
        own = body.get("iteration")
        if type(own) is not int or own != iteration:  # a folder that was copied or renamed
            raise CheckpointError(f"{path} is of iteration {own!r}: a run that goes on from {iteration} would have other weights than it says")
        return body

    def _verify_files(self, iteration: int, files: "dict[str, dict]", names: Iterable[str]) -> None:
        folder = self.path(iteration)
        for name in names:
            if name != os.path.basename(name):
                raise CheckpointError(f"{folder / SEAL_NAME} names {name!r}, which lies outside the checkpoint")
            problem = file_problem(folder / name, files[name])
            if problem:
                raise CheckpointError(f"{folder / name} {problem}")

    # ---- writing (one rank) --------------------------------------------------------------------------------

    def begin(self, iteration: int) -> Path:
        """Remove what killed saves left behind and make the folder to write into."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.sweep()
        staging = self.root / f"{self._final(iteration).name}.tmp-{uuid.uuid4().hex[:8]}"
        staging.mkdir()
        return staging

    def seal(self, staging: Path, description: dict, files: "dict[str, dict]") -> None:
        """Write the seal: from here on the folder is complete, though not yet under its name."""
        body = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, **description, "files": files}
        body = json.loads(json.dumps(body))  # as it will be read back: tuples are lists, keys are text
        text = json.dumps({**body, "seal_sha256": digest_of_json(body)}, indent=1)
        for name in files:
            flush(staging / name)
        write_flushed(staging / SEAL_NAME, text)
        flush(staging)

    def publish(self, staging: Path, iteration: int) -> Path:
        """Give a sealed folder its name and let the tracker name it. Both steps are atomic, in this order."""
        final = self._final(iteration)
        if final.exists():
            os.rename(final, f"{final}.replaced-{uuid.uuid4().hex[:8]}")
        os.rename(staging, final)
        flush(self.root)
        fresh = self.root / f"{TRACKER_NAME}.tmp"
        fresh.unlink(missing_ok=True)
        write_flushed(fresh, str(iteration))
        os.replace(fresh, self.root / TRACKER_NAME)
        flush(self.root)
        return final

    def prune(self, iteration: int, keep_last: Optional[int]) -> "list[int]":
        """Delete all but the newest `keep_last` checkpoints up to `iteration`; later ones belong to another
        course of the run and are left alone. Returns the deleted iterations."""
        self.sweep()
        older = [i for i in self.iterations() if i <= iteration]
        doomed = older[:-keep_last] if keep_last else []
        for number in doomed:
            aside = Path(f"{self._final(number)}.deleted-{uuid.uuid4().hex[:8]}")
            os.rename(self._final(number), aside)  # first the name: half a folder must not look like a checkpoint
            remove_folder(aside)
        return doomed

    def sweep(self) -> None:
        """Remove what killed saves left, and put back a checkpoint whose rewrite was killed half-way."""
        for path in self._entries():
            leftover = _LEFTOVER.fullmatch(path.name)
            if not leftover:
                continue
            final = self._final(int(leftover[1]))
            if leftover[2] == "replaced" and not final.exists():
                os.rename(path, final)
                logger.warning("put back %s: its rewriting was interrupted", final)
                continue
            if leftover[2] == "tmp":
                logger.warning("removing %s: left by an interrupted save", path)
            remove_folder(path)

    def _entries(self) -> "list[Path]":
        return sorted(self.root.iterdir()) if self.root.is_dir() else []

    def _final(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:07d}"

    def _older(self, iteration: int) -> str:
        """Which older checkpoint is whole, and how to go on from it."""
        for number in reversed([i for i in self.iterations() if i < iteration]):
            try:
                seal = self._verified_seal(number)
                self._verify_files(number, seal["files"], seal["files"])
            except CheckpointError:
                continue
            return self._way_out([number])
        return "No older checkpoint in this folder is usable."

    def _way_out(self, usable: "list[int]") -> str:
        if not usable:
            return "No complete checkpoint was found in this folder."
        return f"Iteration {usable[-1]} is usable: to resume there, write {usable[-1]} into {self.root / TRACKER_NAME}."
