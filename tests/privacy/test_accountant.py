"""Epsilon against closed forms and against Opacus' accountants, and the noise that is found."""

from __future__ import annotations

import warnings

import pytest
from gaussian import closed_form
from opacus.accountants import PRVAccountant, RDPAccountant
from pydantic import ValidationError

from perfed.privacy.accountant import Releases, compute_epsilon, find_noise_multiplier
from perfed.privacy.settings import Privacy


@pytest.mark.parametrize(
    "noise, releases, delta", [(2.0, 1, 1e-3), (1.0, 5, 1e-5), (8.5, 200, 1e-3), (30.0, 1000, 1e-6)]
)
def test_full_participation_is_the_closed_form(noise, releases, delta):
    assert compute_epsilon(noise, Releases(releases), delta) == pytest.approx(
        closed_form(releases / noise**2, delta), rel=2e-3
    )
    assert compute_epsilon(noise, Releases(releases), delta) >= closed_form(releases / noise**2, delta) - 1e-6


@pytest.mark.long
@pytest.mark.parametrize("noise, rate, steps", [(1.0, 0.02, 500), (2.0, 0.1, 200), (0.8, 0.01, 2000)])
def test_poisson_sampling_is_that_of_opacus(noise, rate, steps):
    mine = compute_epsilon(noise, Releases(sampled=steps, rate=rate), 1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bounds = {}
        for accountant in (PRVAccountant(), RDPAccountant()):
            for _ in range(steps):
                accountant.step(noise_multiplier=noise, sample_rate=rate)
            bounds[type(accountant).__name__] = accountant.get_epsilon(delta=1e-5)
    assert mine == pytest.approx(bounds["PRVAccountant"], rel=0.02)
    assert mine < bounds["RDPAccountant"]  # a looser bound of the same


@pytest.mark.long
def test_without_sampling_nothing_is_amplified_and_nothing_told_costs_nothing():
    assert compute_epsilon(3.0, Releases(sampled=50, rate=0.1), 1e-5) < compute_epsilon(3.0, Releases(50), 1e-5) / 3
    assert compute_epsilon(3.0, Releases(sampled=50, rate=1.0), 1e-5) == pytest.approx(
        compute_epsilon(3.0, Releases(50), 1e-5), rel=1e-3
    )
    assert compute_epsilon(1.0, Releases(), 1e-5) == 0.0
    assert compute_epsilon(0.0, Releases(1), 1e-5) == float("inf")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("budget, releases", [(6.0, Releases(200)), (1.5, Releases(3, sampled=400, rate=0.05))])
def test_noise_is_the_least_that_keeps_the_budget(budget, releases):
    noise = find_noise_multiplier(budget, 1e-3, releases)
    assert compute_epsilon(noise, releases, 1e-3) <= budget < compute_epsilon(0.99 * noise, releases, 1e-3)


@pytest.mark.parametrize(
    "given",
    [
        {"epsilon": -1.0},
        {"epsilon": 0.0},
        {"delta": 0.0},
        {"delta": 1.0},
        {"clip": 0.0},
        {"unit": "row"},
        {"noise": -1.0},
    ],
)
def test_bad_budgets_are_refused(given):
    with pytest.raises(ValidationError):
        Privacy(**{"epsilon": 1.0, "delta": 1e-3, **given})


def test_settings_say_what_is_missing():
    with pytest.raises(ValidationError, match="privacy needs epsilon, noise or both"):
        Privacy(delta=1e-3)
    with pytest.raises(ValidationError, match="draws rows"):
        Privacy(unit="client", epsilon=1.0, delta=1e-3, sampling="poisson")
