# SPDX-License-Identifier: Apache-2.0
"""All arms against the first: the verdicts, and what they come to in a sentence an arm."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dyn.compare.alone import check_alone
from megatron_dyn.compare.arms import Arm, other_training
from megatron_dyn.compare.checks import check_training
from megatron_dyn.compare.pairs import Pairs, pairs_of
from megatron_dyn.compare.speed import report_speed, speed_sentence
from megatron_dyn.compare.verdicts import Verdict


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """What was found."""

    arms: Sequence[Arm]
    """The first is the reference."""
    pairs: list[Pairs]
    """Of each arm but the first."""
    verdicts: list[Verdict]
    with_speed: bool = True
    """False where the speeds say nothing, such as of runs that shared a machine: nothing is said of them."""
    note: str | None = None
    """The user's own words about these runs."""

    @property
    def holds(self) -> bool | None:
        """False when a check fails, None when an arm is not decided, True otherwise."""
        found = [holds for _, holds in self.headline]
        return False if False in found else None if None in found else True

    @property
    def headline(self) -> list[tuple[str, bool | None]]:
        """A sentence an arm, and whether it holds; one of the reference where something is wrong with it."""
        reference = self.arms[0]
        told = [self._of_arm(pairs) for pairs in self.pairs]
        failed = sorted({verdict.name for verdict in self.verdicts if verdict.arm == reference.name and verdict.holds is False})
        return [*told, *([(f"{reference.name}, the reference, is not sound: {', '.join(failed)} failed.", False)] if failed else [])]

    def _of_arm(self, pairs: Pairs) -> tuple[str, bool | None]:
        own = [verdict for verdict in self.verdicts if verdict.arm == pairs.arm.name]
        holds, text = _outcome(pairs, own)
        other = other_training(pairs.reference, pairs.arm)
        beside = f" They also differ in {', '.join(other)}, which changes what is learnt." if other else ""
        return f"{text}.{' ' + speed_sentence(pairs) if self.with_speed else ''}{beside}", holds


def _outcome(pairs: Pairs, verdicts: Sequence[Verdict]) -> tuple[bool | None, str]:
    arm, reference = pairs.arm.name, pairs.reference.name
    partial = pairs.steps < pairs.wanted
    where = f" on the first {pairs.steps:,} of {pairs.wanted:,} steps" if partial else ""
    failed = sorted({verdict.name for verdict in verdicts if verdict.holds is False})
    if failed:
        return False, f"{arm} does not train as {reference} does{where}: {', '.join(failed)} failed"
    judged = sum(verdict.holds is not None for verdict in verdicts)
    needs = Counter(verdict.needs for verdict in verdicts if verdict.needs)
    lacking = [f"{count} check{'s need' if count > 1 else ' needs'} {what}" for what, count in needs.items()]
    lacking += [f"seed {pair.seed} has {pair.steps:,} of {pairs.wanted:,} steps" for pair in pairs.short]
    if lacking:
        others = "1 of 1 other holds" if judged == 1 else f"{judged} of {judged} others hold"
        return None, f"{arm}: not decided: {'; '.join(lacking)} ({others}{where})"
    if partial:
        return None, f"{arm}: not decided: holds{where} ({judged} of {judged} checks)"
    return True, f"{arm} trains as {reference} does ({judged} of {judged} checks hold)"


def _unpaired(pairs: Pairs) -> list[Verdict]:
    if not pairs.unpaired:
        return []
    seeds, text = ", ".join(map(str, pairs.unpaired)), f"these seeds have no run of {pairs.reference.name} to be compared with, and are left out"
    return [Verdict(name="unpaired", arm=pairs.arm.name, holds=None, value=seeds, threshold=None, text=text)]


def compare_arms(arms: Sequence[Arm], *, peak_tflops: float | None = None, with_speed: bool = True, note: str | None = None) -> Comparison:
    """Every arm but the first against the first.

    Args:
        peak_tflops: 1e12 operations a second that a rank's device can do: model FLOPs utilisation is told beside the rates.
        with_speed: tell how fast the arms were.
        note: the user's own words about these runs.

    Raises:
        CompareError: an arm shares no seed with the reference.
    """
    found, pairs = [], [pairs_of(arms[0], arm) for arm in arms[1:]]
    for of_arm in pairs:
        found += _unpaired(of_arm) + check_training(of_arm) + (report_speed(of_arm, peak_tflops) if with_speed else [])
    found += [verdict for arm in arms for run in arm.runs.values() for verdict in check_alone(arm, run)]
    return Comparison(arms=arms, pairs=pairs, verdicts=found, with_speed=with_speed, note=note)


def compare_runs(arms: Sequence[Arm], *, peak_tflops: float | None = None) -> list[Verdict]:
    """The verdicts of `compare_arms` alone."""
    return compare_arms(arms, peak_tflops=peak_tflops).verdicts
