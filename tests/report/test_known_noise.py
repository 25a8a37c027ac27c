"""Intervals where metrics had noise of a known size: how often they hold, and that they are no narrower than it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from perfed.report.intervals import estimate_gain


def test_one_mean_with_noise_has_the_interval_of_the_noise():
    found = estimate_gain(np.array([[0.1]]), np.ones(1), noise=np.array([[0.04]]))
    assert (found.low, found.high) == pytest.approx((0.1 - 0.2 * norm.ppf(0.975), 0.1 + 0.2 * norm.ppf(0.975)))
    assert estimate_gain(np.array([[0.1]]), np.ones(1)).low is None


def test_sites_that_agree_by_chance_have_no_interval_below_the_noise():
    gains, noise = np.array([[0.1, 0.1001, 0.0999]]), np.full((1, 3), 0.04)
    narrow, found = estimate_gain(gains, np.ones(3)), estimate_gain(gains, np.ones(3), noise=noise)
    assert narrow.low > 0.09 and found.low == pytest.approx(0.1 - norm.ppf(0.975) * 0.2 / 3**0.5)


@pytest.mark.long
@pytest.mark.parametrize("clients", [1, 4])
def test_intervals_hold_in_95_of_100_cases(clients):
    """Clients differ by 0.1, the noise is 0.2, and the truth is their mean of 0.3 (of one client its own value)."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(2000):
        own = 0.3 + 0.1 * generator.normal(size=(1, clients)) * (clients > 1)
        noisy = own + 0.2 * generator.normal(size=own.shape)
        found = estimate_gain(noisy, np.ones(clients), noise=np.full(own.shape, 0.04))
        held += found.low <= 0.3 <= found.high
    assert 0.94 <= held / 2000 <= 0.985
