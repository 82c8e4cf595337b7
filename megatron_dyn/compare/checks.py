# SPDX-License-Identifier: Apache-2.0
"""Does an arm train as the reference does? Each check with its number and its limit.

Two kinds of comparison:

- *exact*: both in fp32 with the same pieces. Sums are taken in another order, nothing else: 1e-5 at every step; the worst seed counts.
- *noise*: anything else. Rounding differs from the first step on and grows as training does; what counts is that the means over the seeds
  of the arms do not part by more than seeds explain (`noise.py`). With fewer than three seeds of the reference arm, what needs it is
  not decided.

A run that trains on other data ("concat-chunk") is judged by its held-out loss alone.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from megatron_dyn.compare.noise import FEWEST_SEEDS, deviation, noise_limit
from megatron_dyn.compare.pairs import LAST_PART, Pair, Pairs, final_loss, window_differences, window_means
from megatron_dyn.compare.runs import Run
from megatron_dyn.compare.verdicts import Verdict, judge

EXACT_LOSS = 1e-5
"""Largest relative difference of a step's loss between exact arms."""
EXACT_NORM = 1e-4
"""The same of the gradient's norm, which squares what the loss averages."""
ROUNDED_LOSS = {"bf16": 2e-3, "fp8": 1e-2}
"""Largest relative difference of the first step's loss: same weights, same documents, rounding alone."""
ROUNDED_NORM = {"bf16": 3e-2, "fp8": 1e-1}
LEAST_CORRELATION = 0.99
MOST_NORM_RATIO = 1.05


def is_exact(pairs: Pairs) -> bool:
    """Whether every step must agree."""
    return _precisions(pairs) == {"fp32"} and not has_other_data(pairs)


def has_other_data(pairs: Pairs) -> bool:
    """Whether the steps of the two arms hold other pieces of the documents."""
    return any("concat-chunk" in (run.setting("data.microbatching") for run in (pair.reference, pair.other)) for pair in pairs.all)


def check_training(pairs: Pairs) -> list[Verdict]:
    """All checks of an arm."""
    other_data, exact, precisions = has_other_data(pairs), is_exact(pairs), _precisions(pairs)
    found = [_same_documents(pairs), _are_numbers(pairs)]
    if not other_data:
        worst = "fp8" if "fp8" in precisions else "bf16" if "bf16" in precisions else None
        found += [_first_step(pairs, worst), _first_gradient(pairs, worst)]
        found += [_pointwise(pairs) if exact else _parted(pairs), _correlation(pairs), _norms(pairs)]
    return [*found, _final(pairs, exact, judged=not other_data), _held_out(pairs, exact, alone=other_data), _drops(pairs, other_data)]


def _precisions(pairs: Pairs) -> set[str]:
    return {run.precision for pair in pairs.all for run in (pair.reference, pair.other)}


def _over(pairs: Sequence[Pair], value: Callable[[Pair], float]) -> float:
    """The worst pair's value; NaN, which is worse, where one is."""
    values = [value(pair) for pair in pairs]
    return math.nan if any(math.isnan(found) for found in values) else max(values, key=abs)


def _same_documents(pairs: Pairs) -> Verdict:
    other, corpus = 0, 0
    for pair in pairs.all:
        other += sum(a != b for a, b in zip(pair.reference.digests, pair.other.digests))
        corpus += pair.reference.about["documents"]["train"] != pair.other.about["documents"]["train"]
    steps = sum(pair.steps for pair in pairs.all)
    if corpus:
        return judge("documents", pairs.arm.name, corpus, 0, "trained on other documents (another corpus)")
    return judge("documents", pairs.arm.name, other, 0, f"{other} of {steps} steps hold other documents, or in another order")


def _are_numbers(pairs: Pairs) -> Verdict:
    """One run alone without a number fails; both, at the same steps, leave nothing to judge there."""
    one, both = 0, 0
    for pair in pairs.all:
        mine, theirs = pair.reference.lost[: pair.steps], pair.other.lost[: pair.steps]
        one, both = one + int((mine != theirs).sum()), both + int((mine & theirs).sum())
    if both and not one:
        text = f"{both} steps have no finite loss in both runs: nothing is compared there"
        return Verdict(name="finite", arm=pairs.arm.name, holds=None, value=both, threshold=0, text=text, needs="a finite loss at every step")
    text = f"steps without a finite loss, {one} of them in one of the two runs alone" if one else "every step has a finite loss"
    return judge("finite", pairs.arm.name, one + both, 0, text)


def _first_step(pairs: Pairs, rounded: str | None) -> Verdict:
    value = _over(pairs.all, lambda pair: abs(pair.relative("loss")[0]) if len(pair.relative("loss")) else math.nan)
    limit = ROUNDED_LOSS[rounded] if rounded else EXACT_LOSS
    return judge("first loss", pairs.arm.name, value, limit, "relative difference of the first step's loss: the same weights and documents")


def _first_gradient(pairs: Pairs, rounded: str | None) -> Verdict:
    value = _over(pairs.all, lambda pair: abs(pair.relative("grad_norm")[0]) if len(pair.relative("grad_norm")) else math.nan)
    limit = ROUNDED_NORM[rounded] if rounded else EXACT_NORM
    return judge("first gradient", pairs.arm.name, value, limit, "relative difference of the norm of the first step's gradient")


def _pointwise(pairs: Pairs) -> Verdict:
    value = _over(pairs.all, lambda pair: float(np.abs(pair.relative("loss")).max(initial=0.0)) if len(pair.relative("loss")) else math.nan)
    text = f"largest relative difference of a loss over {max(pair.steps for pair in pairs.all)} steps"
    return judge("every loss", pairs.arm.name, value, EXACT_LOSS, text)


def _judged_by_noise(name: str, pairs: Pairs, difference: float, reference: Sequence, text: str) -> Verdict:
    """Against what the values of the reference's seeds (one or several each) allow."""
    if pairs.short:
        text += f"; without {_seeds(pairs.short)}, cut short"
    limit = noise_limit(reference, len(pairs.whole))
    if limit is None:
        return judge(
            name, pairs.arm.name, difference, None, f"{text}; not judged: the noise floor needs {FEWEST_SEEDS} seeds of the reference, "
            f"{len(reference)} have these steps", needs=f"{FEWEST_SEEDS} seeds of the reference",
        )  # fmt: skip
    spread = deviation(reference)
    in_deviations = f"; {abs(difference) / spread:.1f} standard deviations" if spread else ""
    return judge(name, pairs.arm.name, difference, limit, f"{text}, against what the reference's seeds explain{in_deviations}")


def _seeds(pairs: Sequence[Pair]) -> str:
    return f"seed{'s' if len(pairs) > 1 else ''} {', '.join(str(pair.seed) for pair in pairs)}"


def noise_of_windows(pairs: Pairs) -> float | None:
    """The limit of the differences of window means (nats); None with too few seeds."""
    return noise_limit([window_means(run, pairs.steps) for run in pairs.reference_runs], len(pairs.whole))


def _parted(pairs: Pairs) -> Verdict:
    """The mean difference over windows of steps, the worst window: noise of single steps averages out, parting does not."""
    apart = window_differences(pairs)
    worst = float(apart[np.argmax(np.abs(apart))])  # argmax takes a NaN, if there is one
    seeds = [window_means(run, pairs.steps) for run in pairs.reference_runs]
    return _judged_by_noise("every loss", pairs, worst, seeds, "largest mean difference of the loss over a tenth of the steps (nats)")


def _final(pairs: Pairs, exact: bool, *, judged: bool) -> Verdict:
    text = f"mean loss over the last {LAST_PART:.0%} of the steps, minus the reference's (nats)"
    if exact:
        return _worst("final loss", pairs, [(final_loss(p.other, p.steps), final_loss(p.reference, p.steps)) for p in pairs.all], text)
    value = float(np.mean([final_loss(pair.other, pairs.steps) - final_loss(pair.reference, pairs.steps) for pair in pairs.whole]))
    if not judged:
        return judge("final loss", pairs.arm.name, value, None, text + "; not judged: other data")
    return _judged_by_noise("final loss", pairs, value, [final_loss(run, pairs.steps) for run in pairs.reference_runs], text)


def _worst(name: str, pairs: Pairs, values: list[tuple[float, float]], text: str) -> Verdict:
    """Of (other, reference) of each seed, the one that is farthest apart for its size."""
    differences = [(other - mine, EXACT_LOSS * abs(mine)) for other, mine in values]
    value, limit = max(differences, key=lambda found: abs(found[0]) / found[1] if found[1] and math.isfinite(found[0]) else math.inf)
    return judge(name, pairs.arm.name, value, limit, text + ("; the worst seed" if len(values) > 1 else ""))


def _held_out(pairs: Pairs, exact: bool, *, alone: bool) -> Verdict:
    """At equal real tokens: the same documents a step make that the same iteration.

    Args:
        alone: nothing else tells whether this arm trains well.
    """

    def at(run: Run, iteration: int) -> float:
        return float(run.held_out_loss[run.held_out_iteration == iteration][0])

    compared = pairs.all if exact else pairs.whole
    common = [set(pair.reference.held_out_iteration.tolist()) & set(pair.other.held_out_iteration.tolist()) for pair in compared]
    if not exact:  # a mean over seeds is of one iteration
        common = [set.intersection(*common)] * len(compared)
    last = [(pair, max(iterations)) for pair, iterations in zip(compared, common) if iterations]
    if not last:
        needs = "a held-out loss of both runs at one iteration" if alone else None
        text = "not both were evaluated at one iteration"
        return Verdict(name="held-out loss", arm=pairs.arm.name, holds=None, value=None, threshold=None, text=text, needs=needs)
    newest = max(iteration for _, iteration in last)
    text = f"held-out loss at equal real tokens, iteration {newest}, minus the reference's (nats)"
    values = [(at(pair.other, iteration), at(pair.reference, iteration)) for pair, iteration in last]
    if exact:
        return _worst("held-out loss", pairs, values, text)
    evaluated = [at(run, newest) for run in pairs.reference.runs.values() if newest in run.held_out_iteration]
    return _judged_by_noise("held-out loss", pairs, float(np.mean([other - mine for other, mine in values])), evaluated, text)


def _correlation(pairs: Pairs) -> Verdict:
    def shortfall(pair: Pair) -> float:
        mine, theirs = pair.reference.loss[: pair.steps], pair.other.loss[: pair.steps]
        both = np.isfinite(mine) & np.isfinite(theirs)
        if both.sum() < 3 or not np.std(mine[both]) or not np.std(theirs[both]):
            return math.nan
        return 1 - float(np.corrcoef(mine[both], theirs[both])[0, 1])

    found = [value for value in map(shortfall, pairs.whole) if not math.isnan(value)]
    if not found:
        return Verdict(name="correlation", arm=pairs.arm.name, holds=None, value=None, threshold=None, text="too few different losses")
    value = 1 - max(found)
    return Verdict(
        name="correlation", arm=pairs.arm.name, holds=value >= LEAST_CORRELATION, value=value, threshold=LEAST_CORRELATION,
        text="smallest correlation of the losses",
    )  # fmt: skip


def _norms(pairs: Pairs) -> Verdict:
    def ratio(pair: Pair) -> float:
        relative = pair.relative("grad_norm")
        return float(np.exp(abs(np.median(np.log1p(relative))))) if len(relative) else math.nan

    text = "median ratio of the gradient norms, the larger over the smaller"
    return judge("gradient norm", pairs.arm.name, _over(pairs.whole, ratio), MOST_NORM_RATIO, text)


def _drops(pairs: Pairs, other_data: bool) -> Verdict:
    names = [name for name in pairs.all[0].reference.policy_counts if not (other_data and name == "split-documents")]
    differing = sorted(
        {name for pair in pairs.all if len(pair.reference.iteration) == len(pair.other.iteration) for name in names
         if pair.reference.policy_counts[name] != pair.other.policy_counts[name]}
    )  # fmt: skip
    text = f"differ in {', '.join(differing)}" if differing else "split, truncated, dropped and empty documents are the same"
    return judge("left out", pairs.arm.name, len(differing), 0, text)
