# SPDX-License-Identifier: Apache-2.0
"""The request to stop. Imports nothing heavy, so that a launch script can listen before the seconds that torch takes to load."""

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Remembers that the process was asked to end (SIGTERM, SIGUSR1, or Ctrl-C once), so that the loop can save first.

    A scheduler sends SIGTERM (Slurm's `--signal` also SIGUSR1) and kills some time later; the loop looks once a step, and all ranks stop
    after the same one. Asked before the first step, they go on to it and leave with what they loaded. A second Ctrl-C
    interrupts at once (below torchrun it arrives as SIGTERM, and the step is finished).
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, signum: int, frame: object) -> None:
        if signum == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
