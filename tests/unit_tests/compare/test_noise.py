# SPDX-License-Identifier: Apache-2.0
"""What seeds explain: against tables, and by drawing arms that are alike."""

import numpy as np
import pytest

from megatron_dyn.compare.noise import deviation, noise_limit, t_quantile

TABLE = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 30: 2.04227}  # Abramowitz and Stegun, table 26.10, 97.5%


@pytest.mark.parametrize("degrees", TABLE)
def test_students_quantile_is_that_of_the_tables(degrees):
    assert t_quantile(0.975, degrees) == pytest.approx(TABLE[degrees], abs=6e-5 * TABLE[degrees])


@pytest.mark.parametrize("seeds, others", [(3, 3), (5, 2)])
def test_one_in_twenty_arms_that_are_alike_is_refused(seeds, others):
    draws = np.random.default_rng(1).normal(3.0, 0.02, size=(20_000, seeds + others))
    apart = np.abs(draws[:, :seeds].mean(axis=1) - draws[:, seeds:].mean(axis=1))
    factor = noise_limit(draws[0, :seeds], others) / deviation(draws[0, :seeds])  # the same for all draws
    refused = np.mean(apart > factor * draws[:, :seeds].std(axis=1, ddof=1))
    assert refused == pytest.approx(0.05, abs=0.006)
    assert np.mean(apart > draws[:, :seeds].std(axis=1, ddof=1)) > 0.2, "one standard deviation would refuse many more"


def test_several_values_share_one_spread_and_two_seeds_say_nothing():
    values = np.array([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    assert deviation(values) == pytest.approx(np.sqrt(0.5))
    assert noise_limit(values[:2], 3) is None
