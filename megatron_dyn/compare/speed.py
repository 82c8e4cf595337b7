# SPDX-License-Identifier: Apache-2.0
"""How fast the arms were: reported, never judged."""

import numpy as np

from megatron_dyn.compare.arms import Arm
from megatron_dyn.compare.pairs import Pair, Pairs
from megatron_dyn.compare.runs import Run
from megatron_dyn.compare.verdicts import Verdict


def speed_ratios(pairs: Pairs, name: str = "tokens") -> list[float]:
    """The arm's real tokens (or "slots", "operations") a second over the reference's, seed by seed: medians over steady steps."""
    return [_rate(pair, pair.other, name) / _rate(pair, pair.reference, name) for pair in pairs.all]


def _rate(pair: Pair, run: Run, name: str) -> float:
    """On the steps that both runs have: the lengths of documents differ from step to step."""
    return run.rate(getattr(run, name), pair.steps)


def report_speed(pairs: Pairs, peak_tflops: float | None) -> list[Verdict]:
    """Ratios of medians over steady steps, the median over seeds.

    Args:
        peak_tflops: 1e12 operations a second that a rank's device can do; shows model FLOPs utilisation.
    """

    def report(name: str, value: float, text: str) -> Verdict:
        return Verdict(name=name, arm=pairs.arm.name, holds=None, value=value, threshold=None, text=text)

    used = ""
    if peak_tflops:
        shares = [rate / peak_tflops / 1e12 for rate in _medians(pairs.all, "operations", a_rank=True)]
        used = "MFU " + " to ".join(f"{share:.1%}" for share in shares) + ", "
    a_rank = pairs.all[0].reference.ranks / pairs.all[0].other.ranks
    found = [
        report("real tokens a second", float(np.median(speed_ratios(pairs))), f"times the reference's ({_rates(pairs.all, 'tokens')})"),
        report("rows a second", float(np.median(speed_ratios(pairs, "slots"))), f"times the reference's ({_rates(pairs.all, 'slots')})"),
        report("operations a second", float(np.median(speed_ratios(pairs, "operations"))) * a_rank,
               f"a rank, times the reference's ({used}{_rates(pairs.all, 'operations')} TFLOP/s a rank; attention by squared lengths)"),
    ]  # fmt: skip
    later = _held_out_at_equal_time(pairs.all)
    text = "held-out loss at equal wall time, minus the reference's (nats; negative is better)"
    return found if later is None else [*found, report("held-out loss, equal time", later, text)]


def speed_sentence(pairs: Pairs) -> str:
    """Who is how many times as fast as whom, in real tokens a second, with the spread over seeds."""
    ratios, faster, slower = speed_ratios(pairs), pairs.arm, pairs.reference
    if np.median(ratios) < 1:
        ratios, faster, slower = [1 / ratio for ratio in ratios], pairs.reference, pairs.arm
    spread = f" ({min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} seeds)" if len(ratios) > 1 else ""
    ranks = f", on {_ranks(faster)} rank{'s' if _ranks(faster) > 1 else ''} against {_ranks(slower)}" if _ranks(faster) != _ranks(slower) else ""
    if f"{np.median(ratios):.2f}" == "1.00":
        return f"{faster.name} and {slower.name} are equally fast{spread}{ranks}."
    return f"{faster.name} is {np.median(ratios):.2f} times as fast as {slower.name}{spread}{ranks}."


def _ranks(arm: Arm) -> int:
    return next(iter(arm.runs.values())).ranks


def _medians(pairs: list[Pair], name: str, *, a_rank: bool) -> tuple[float, float]:
    """A second, of the arm and of the reference, over the seeds."""
    sides = ([(pair, pair.other) for pair in pairs], [(pair, pair.reference) for pair in pairs])
    mine, theirs = (float(np.median([_rate(pair, run, name) / (run.ranks if a_rank else 1) for pair, run in side])) for side in sides)
    return mine, theirs


def _rates(pairs: list[Pair], name: str) -> str:
    """Operations in 1e12 a rank, anything else in ones."""
    mine, theirs = _medians(pairs, name, a_rank=name == "operations")
    return f"{mine / 1e12:,.3g} to {theirs / 1e12:,.3g}" if name == "operations" else f"{mine:,.0f} to {theirs:,.0f}"


def _held_out_at_equal_time(pairs: list[Pair]) -> float | None:
    """Difference of the held-out loss when the faster of the two runs had ended, interpolated in time; None where it is not known."""
    differences = []
    for pair in pairs:
        curves = []
        for run in (pair.reference, pair.other):
            clock = np.cumsum(run.seconds)
            known = np.isin(run.iteration, run.held_out_iteration)
            if known.sum() < 2:
                return None
            curves.append((clock[known], run.held_out_loss[np.isin(run.held_out_iteration, run.iteration)]))
        end = min(clock[-1] for clock, _ in curves)
        if any(clock[0] > end for clock, _ in curves):
            return None
        mine, theirs = (float(np.interp(end, clock, loss)) for clock, loss in curves)
        differences.append(theirs - mine)
    found = float(np.mean(differences))
    return found if np.isfinite(found) else None
