# SPDX-License-Identifier: Apache-2.0
"""The answer to one question about one arm: holds, fails, not decided, or reported."""

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One question about one arm."""

    name: str
    arm: str
    seed: int | None = None
    """Where it is about one run of several."""
    holds: bool | None
    """None: not judged."""
    value: float | int | str | None
    """Where it is a difference it has its sign: the arm minus the reference."""
    threshold: float | int | str | None
    text: str
    needs: str | None = None
    """What is lacking to judge a check that counts: as long as it is, the arm is not decided. None: judged, or only ever reported."""

    @property
    def outcome(self) -> str:
        """"holds", "FAILS", "not decided" or "reported"."""
        if self.holds is None:
            return "not decided" if self.needs else "reported"
        return "holds" if self.holds else "FAILS"

    @property
    def about(self) -> str:
        """The arm, and the seed where it is of one run."""
        return self.arm if self.seed is None else f"{self.arm}, seed {self.seed}"

    def as_dict(self) -> dict:
        return {**asdict(self), "arm": self.about, "outcome": self.outcome}


def judge(name: str, arm: str, value: float, threshold: float | None, text: str, needs: str | None = None) -> Verdict:
    """Holds where the value is finite and its size at most the threshold. What is not a number fails, with a threshold or without."""
    finite = math.isfinite(value)
    holds = bool(finite and abs(value) <= threshold) if threshold is not None else None
    if not finite and (needs or threshold is not None):
        holds, needs = False, None
    return Verdict(name=name, arm=arm, holds=holds, value=value, threshold=threshold, text=text, needs=needs)
