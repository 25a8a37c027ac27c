"""Thresholds of trees: between the same training rows as before, and on no number that a further row may hold."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.tree import DecisionTreeRegressor, ExtraTreeRegressor

from perfed.maths.thresholds import distinct_values, place_between, separate_values


def tree_on(x, kind=DecisionTreeRegressor):
    """Return a tree that is as deep as the rows allow, with noise as its target."""
    return kind(random_state=0).fit(x, np.random.default_rng(1).normal(size=len(x)))


@pytest.mark.parametrize("kind", [DecisionTreeRegressor, ExtraTreeRegressor])
@pytest.mark.parametrize("step", [1.0, 0.1, 0.25])
def test_rows_near_a_grid_point_fall_on_the_side_of_that_point(step, kind):
    """Whole numbers, tenths and quarters, standardised as a site standardises them."""
    generator = np.random.default_rng(0)
    ages = generator.choice(np.arange(200, 900), (300, 2)) * step
    mean, deviation = ages.mean(0), ages.std(0)
    x = ((ages - mean) / deviation).astype(np.float32)
    fitted = tree_on(x, kind)
    leaves = fitted.apply(x)
    separate_values(fitted.tree_, distinct_values(x))
    assert (fitted.apply(x) == leaves).all()
    grid = np.stack([np.arange(150, 950) * step] * 2, 1)
    exact = fitted.apply(((grid - mean) / deviation).astype(np.float32))
    for factor in (1 - 1e-7, 1 + 1e-7):
        assert (fitted.apply(((grid * factor - mean) / deviation).astype(np.float32)) == exact).all()


def test_thresholds_between_whole_numbers_are_no_decimal_numbers():
    low = np.arange(0.0, 100.0)
    for decimals in (1, 2):
        scaled = place_between(low, low + 1) * 10**decimals
        assert np.abs(scaled - scaled.round()).min() > 0.1


@pytest.mark.parametrize("steps", range(1, 200))
def test_the_distance_to_a_grid_shrinks_no_faster_than_its_steps_grow(steps):
    """Of fractions with the denominator n none is nearer to the golden ratio than 0.38 / n^2 (Hurwitz)."""
    (threshold,) = place_between(np.zeros(1), np.array([float(steps)]))
    assert abs(threshold - round(threshold)) > 0.38 / steps - 1e-4


def test_neighbouring_numbers_stay_apart():
    low = np.array([1.0, -3.5, 1e6])
    high = np.nextafter(low.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    threshold = place_between(low, high)
    assert (low <= threshold).all() and (threshold < high).all()
