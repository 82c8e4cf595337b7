# SPDX-License-Identifier: Apache-2.0
"""A mapped file that must stay what it was when it was opened.

| while it is read, the file is   | reading from the map would give                | what happens                                                  |
|---------------------------------|------------------------------------------------|---------------------------------------------------------------|
| cut                             | a bus error: the process dies without a word   | CorpusError, unless it is cut in the last tenth of a second   |
| overwritten in place            | other tokens than planned, rank by rank        | CorpusError                                                   |
| touched, content the same       | the same tokens                                | nothing                                                       |
| deleted, or replaced by a rename | the file that was opened: it lives with the map | nothing                                                       |
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from megatron_dyn.corpus.errors import CorpusError

_INTERVAL_SECS = 0.1  # a look is one call of the operating system, and documents are read by the thousand


class SteadyFile:
    """Looks now and then whether a file has changed.

    Args:
        path: The file, as it was opened a moment ago.
        same_content: Whether the content is still the one it was opened with; asked when the time of change is another.
    """

    def __init__(self, path: Path, same_content: Callable[[], bool]):
        self._path = path
        self._same_content = same_content
        self._opened = os.stat(path)
        self._changed_at = self._opened.st_mtime_ns
        self._next_look = 0.0

    def look(self) -> None:
        """Call before reading.

        Raises:
            CorpusError: It is not what it was.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._check()
        self._next_look = now + _INTERVAL_SECS  # only where nothing was wrong: who asks again is refused again

    def _check(self) -> None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CorpusError(f"{self._path} cannot be read any more ({error.strerror}): its file system may be gone") from error
        if (found.st_dev, found.st_ino) != (self._opened.st_dev, self._opened.st_ino):
            return
        if found.st_size != self._opened.st_size:
            raise CorpusError(
                f"{self._path} had {self._opened.st_size} bytes when the run opened it and has {found.st_size} now: something writes to it. "
                "Restore it and resume from the last checkpoint; write a new corpus beside the old one, and never over it"
            )
        if found.st_mtime_ns != self._changed_at:
            if not self._same_content():
                raise CorpusError(
                    f"{self._path} was overwritten while the run reads it: its documents are others than those planned. Restore it and resume "
                    "from the last checkpoint; write a new corpus beside the old one, and never over it"
                )
            self._changed_at = found.st_mtime_ns
