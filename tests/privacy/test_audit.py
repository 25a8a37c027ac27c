"""The bound of an audit: against the tail by brute force, randomised response, and closed forms."""

from __future__ import annotations

from fractions import Fraction
from math import comb, exp, log

import numpy as np
import pytest

from perfed.errors import PerfedError
from perfed.privacy.audit import Audit, guess


def p_value(m: int, r: int, v: int, odds: int, delta: Fraction) -> Fraction:
    """The theorem's two terms in exact fractions, epsilon = log(odds)."""
    q = Fraction(odds, odds + 1)
    chance = [comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    worst = max((Fraction(2, i) * sum(chance[v - i : v]) for i in range(1, v + 1)), default=Fraction(0))
    return min(Fraction(1), sum(chance[v:], Fraction(0)) + worst * m * delta)


@pytest.mark.parametrize("odds", [1, 3, 20])
@pytest.mark.parametrize("delta", [Fraction(0), Fraction(1, 1000), Fraction(1, 20)])
def test_the_probability_is_that_of_the_theorem_by_brute_force(odds, delta):
    for m, r in ((1, 1), (9, 5), (30, 30)):
        for v in range(r + 1):
            found = Audit(m, r, v).p_value(log(odds), float(delta))
            assert found == pytest.approx(float(p_value(m, r, v, odds, delta)), rel=1e-9, abs=1e-15)


def test_perfect_guesses_give_a_logarithm_and_chance_gives_nothing():
    for r in (1, 10, 1000):
        right = 0.05 ** (1 / r)  # right**r is 5 %
        expected = max(0.0, log(right / (1 - right)))
        assert Audit(2000, r, r).epsilon() == pytest.approx(expected, abs=2e-4)
    assert Audit(1000, 1000, 500).epsilon() == 0.0
    assert Audit(1000, 0, 0).epsilon() == 0.0
    assert Audit(1000, 1000, 1000).epsilon(1e-2) < 0.6  # ten rows may be given away whole
    assert Audit(1000, 1000, 1000).epsilon(0.5) == 0.0


def randomised(epsilon: float, delta: float, m: int, draw: np.random.Generator) -> Audit:
    """Each canary is told with probability delta, else by a coin that is right with odds of ``exp(epsilon)``."""
    included = draw.random(m) < 0.5
    told = draw.random(m) < delta
    right = draw.random(m) < 1 / (1 + exp(-epsilon))
    said = np.where(told | right, included, ~included)
    return Audit(m, m, int((said == included).sum()))


@pytest.mark.long
@pytest.mark.parametrize("epsilon, delta", [(0.5, 0.0), (2.0, 0.0), (1.0, 1e-4)])
def test_randomised_response_is_bounded_by_its_epsilon_and_approached(epsilon, delta):
    draw = np.random.default_rng(0)
    found = [randomised(epsilon, delta, 400, draw).epsilon(delta) for _ in range(200)]
    assert sum(bound > epsilon for bound in found) <= 18  # 5 % of 200 are 10; more than 18 in 1 of 200
    bounds = [randomised(epsilon, delta / m, m, draw).epsilon(delta / m) for m in (100, 3_000, 100_000)]
    assert bounds[0] < bounds[1] < bounds[2] <= epsilon + 0.03
    assert bounds[2] == pytest.approx(epsilon, abs=0.05)


@pytest.mark.long
def test_without_delta_the_bound_is_exact_and_so_wrong_in_5_percent():
    draw, epsilon, m = np.random.default_rng(1), 1.0, 1000
    above = sum(randomised(epsilon, 0.0, m, draw).epsilon() > epsilon for _ in range(300))
    assert 3 <= above <= 27


def test_guesses_are_made_of_the_ends():
    scores = np.array([0.1, 5.0, -3.0, 4.0, -4.0, 0.0])
    included = np.array([False, True, True, True, False, False])
    assert guess(scores, included, 4) == Audit(6, 4, 3)
    assert guess(scores, included, 6) == Audit(6, 6, 4)
    assert guess(scores, included, 3) == Audit(6, 3, 3)  # one low, two high
    assert guess(scores, included, 0) == Audit(6, 0, 0)


def test_bad_input_gets_one_line():
    for call in (
        lambda: Audit(5, 6, 1),
        lambda: Audit(5, 4, -1),
        lambda: Audit(5, 4, 3).epsilon(confidence=1.0),
        lambda: Audit(5, 4, 3).epsilon(delta=2.0),
        lambda: Audit(5, 4, 3).p_value(-1.0),
        lambda: guess(np.zeros(3), np.zeros(4, dtype=bool), 2),
        lambda: guess(np.full(3, np.nan), np.zeros(3, dtype=bool), 2),
        lambda: guess(np.zeros(3), np.zeros(3, dtype=bool), 4),
    ):
        with pytest.raises(PerfedError, match="audit: ") as error:
            call()
        assert "\n" not in str(error.value)
