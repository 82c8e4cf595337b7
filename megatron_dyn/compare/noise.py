# SPDX-License-Identifier: Apache-2.0
"""How far apart the means of two arms may be when nothing but seeds is behind it.

With s the standard deviation over the n seeds of the reference arm and m seeds of the other arm,

    limit = t(0.975, n - 1) * s * sqrt(1 / n + 1 / m)

t is Student's quantile: arms that are alike exceed the limit in one of twenty comparisons. With three seeds each it is 3.5 s. (One s, which looks
stricter, would refuse a quarter of all arms that are alike.) The spread of the other arm does not enter: a fault in one of its seeds
must not hide behind the spread that it makes.
"""

import math
from collections.abc import Sequence

import numpy as np

FEWEST_SEEDS = 3
"""Of the reference; with fewer, s is too uncertain to judge by."""
CHANCE = 0.05
"""Of exceeding the limit by seeds alone."""


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's distribution, to six digits: found by halving, its integral by Simpson's rule (Abramowitz and Stegun 26.7.1).

    Args:
        probability: above 0.5, below 1.
        degrees: of freedom, at least 1.
    """
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    weights = np.tile([4.0, 2.0], 2000)
    weights[-1] = 1.0

    def below(angle: float) -> float:  # t = sqrt(degrees) * tan(angle) makes the range finite
        step = angle / len(weights)
        values = np.cos(step * np.arange(1, len(weights) + 1)) ** (degrees - 1)
        return 0.5 + factor * step / 3 * (1.0 + float(values @ weights))

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def deviation(values: Sequence[float] | np.ndarray) -> float | None:
    """Standard deviation over the seeds of the reference: of a number [n], or of several [n, w] together (root mean square); None with too few."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) < FEWEST_SEEDS:
        return None
    return float(np.sqrt(np.mean(np.var(values, axis=0, ddof=1))))


def noise_limit(reference: Sequence[float] | np.ndarray, other_seeds: int) -> float | None:
    """See the top of this file; None with too few seeds.

    Args:
        reference: the value for each seed of the reference, [n], or several values of each, [n, w].
        other_seeds: m.
    """
    spread = deviation(reference)
    if spread is None:
        return None
    seeds = len(reference)
    return t_quantile(1 - CHANCE / 2, seeds - 1) * spread * math.sqrt(1 / seeds + 1 / other_seeds)
