# SPDX-License-Identifier: Apache-2.0
"""Where this rank stands: marks on the way through a run, for the watch over the job and for messages of errors.

One process is one rank, so there is one `PROGRESS`, as there is one log. A mark costs a microsecond: making one small object.
"""

import time
from dataclasses import asdict, dataclass, field

PATIENCE = 10.0
"""How many times longer work may take that is long by nature: starting, the first step (which compiles), saving."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the last mark said."""

    phase: str = "starting"
    step: int | None = None
    """Step of the run being made (1 is the first); None before there is one."""
    microbatch: int | None = None
    """Position in this rank's microbatches, of the last forward pass that began (0 is the first)."""
    num_microbatches: int | None = None
    rows: int | None = None
    """T of that microbatch."""
    marks: int = 0
    """Marks so far."""
    patience: float = PATIENCE
    """How many stall time-outs may pass before the next mark."""
    at: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        """Seconds since the mark."""
        return time.monotonic() - self.at

    def as_dict(self) -> dict:
        """Plain values for other ranks, with the age in place of this host's clock."""
        values = asdict(self) | {"age": self.age}
        del values["at"]
        return values


class JobEnded(RuntimeError):
    """The watch has ended the job: nothing more is computed or saved."""


class Progress:
    """Takes marks from the main thread; any thread may read `standing`, or end the run."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget every mark: a run begins."""
        self.standing = Standing()
        self._step: int | None = None
        self._num_microbatches: int | None = None
        self._warm = False
        self._ended: str | None = None

    def end(self, why: str) -> None:
        """Let the main thread get no further than its next mark, which raises `JobEnded`."""
        self._ended = why

    def mark(self, phase: str, *, patient: bool = False) -> None:
        """Say what begins now.

        Args:
            phase: What, in the words of a message ("saving", "the forward pass").
            patient: It may take `PATIENCE` times longer than other work before the next mark.
        """
        self._set(phase, patient, None, None)

    def begin_step(self, step: int, num_microbatches: int | None = None) -> None:
        """A step of training starts; its microbatches are marked as they go."""
        self._step, self._num_microbatches = step, num_microbatches
        self._set("the step", False, None, None)

    def forward(self, microbatch: int, rows: int) -> None:
        """The forward pass of a microbatch of T = `rows` starts."""
        self._set("forward and backward", False, microbatch, rows)

    def end_step(self) -> None:
        """The step is done. After the first, everything is compiled, and steps are ordinary work."""
        self._warm = True
        self._set("between steps", False, None, None)

    def _set(self, phase: str, patient: bool, microbatch: int | None, rows: int | None) -> None:
        if self._ended is not None:
            raise JobEnded(self._ended)
        self.standing = Standing(
            phase=phase,
            step=self._step,
            microbatch=microbatch,
            num_microbatches=self._num_microbatches,
            rows=rows,
            marks=self.standing.marks + 1,
            patience=PATIENCE if patient or not self._warm else 1.0,
        )


PROGRESS = Progress()
