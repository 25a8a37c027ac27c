"""Partitions by label as tables of counts: against counting by hand, at the extremes, and in bounded time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy.stats import kstest

from perfed.data.partition import label_skew
from perfed.data.partition.dirichlet import draw_dirichlet_counts, draw_inner_dirichlet_counts
from perfed.data.partition.label_skew import (
    apportion,
    assign_groups,
    consecutive_groups,
    divide_samples,
    dominant_weights,
    draw_client_classes,
    draw_sizes,
    scale_counts,
)
from perfed.errors import PerfedError

BALANCED = np.full(10, 6000)


# Groups, sizes, rounding -------------------------------------------------------------------------------------


def test_groups_are_blocks_or_interleaved():
    assert assign_groups(6, 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert assign_groups(6, 3, "interleaved").tolist() == [0, 1, 2, 0, 1, 2]
    assert np.bincount(assign_groups(20, 3, "interleaved")).tolist() == [7, 7, 6]
    with pytest.raises(PerfedError, match=r"clients = 20 cannot be cut into 3 equal groups; use a multiple of 3, or"):
        assign_groups(20, 3)


def test_sizes_are_drawn_from_the_set():
    sizes = draw_sizes([300, 600, 1200], 3000, seed=0)
    assert np.array_equal(sizes, draw_sizes([300, 600, 1200], 3000, seed=0))
    for choice in (300, 600, 1200):
        assert abs(np.mean(sizes == choice) - 1 / 3) < 0.04
    assert set(draw_sizes([600], 5, seed=0)) == {600}


@pytest.mark.parametrize("spread", [0.5, 1.5])
def test_sizes_are_log_normal_around_their_median(spread):
    sizes = draw_sizes([10_000], 4000, spread=spread, seed=0)
    assert kstest(np.log(sizes), "norm", (np.log(10_000), spread)).pvalue > 0.05
    shares = divide_samples(40_000_000, 4000, spread=spread, seed=0)
    assert shares.sum() == 40_000_000
    assert kstest(np.log(shares / np.median(shares)), "norm", (0, spread)).pvalue > 0.05
    assert draw_sizes([2], 1000, spread=3.0, seed=0).min() == divide_samples(1001, 1000, spread=3.0, seed=0).min() == 1


def largest_remainder(weights: np.ndarray, size: int) -> list[int]:
    """By hand, for weights without ties."""
    quota = weights / weights.sum() * size
    counts = [int(q) for q in quota]
    for label in sorted(range(len(quota)), key=lambda k: counts[k] - quota[k])[: size - sum(counts)]:
        counts[label] += 1
    return counts


def test_apportioning_is_by_largest_remainders():
    rng = np.random.default_rng(0)
    weights, sizes = rng.dirichlet(np.ones(7), size=50), rng.integers(1, 500, 50)
    counts = apportion(weights, sizes, seed=0)
    assert counts.tolist() == [largest_remainder(w, n) for w, n in zip(weights, sizes, strict=True)]
    assert np.array_equal(counts.sum(axis=1), sizes)


def test_ties_are_broken_at_random_and_whole_shares_are_exact():
    counts = apportion(np.ones((400, 10)), np.full(400, 13), seed=0)
    assert set(counts.ravel()) == {1, 2} and set(counts.sum(axis=1)) == {13}
    assert 80 < (counts == 2).sum(axis=0).min() <= (counts == 2).sum(axis=0).max() < 165  # no class is favoured
    exact = apportion(dominant_weights(10, np.arange(5), consecutive_groups(10), 20.0), np.full(5, 600), seed=0)
    assert exact[0].tolist() == [172, 172, 172, *[12] * 7]  # what the authors' program makes of 20 % and 600


@pytest.mark.parametrize("share", [False, True])
def test_the_other_split_is_rounded_from_the_same_table(share):
    rng = np.random.default_rng(1)
    counts = rng.multinomial(50, rng.dirichlet(np.ones(10)), size=300)
    there, other = counts.sum(axis=0) + 5, rng.integers(200, 400, 10)
    scaled = scale_counts(counts, there, other, share=share, seed=0)
    quota = counts * other / there
    assert (scaled >= np.floor(quota)).all() and (scaled <= np.ceil(quota)).all()
    assert (np.abs(scaled.sum(axis=1) - quota.sum(axis=1)) < 1).mean() > 0.95
    assert scaled.sum(axis=1).min() >= 1
    if not share:
        assert (scaled.sum(axis=0) <= other).all()
    assert np.array_equal(scaled, scale_counts(counts, there, other, share=share, seed=0))


def test_the_other_split_uses_all_its_samples_if_the_first_does():
    counts = np.array([[30, 0], [30, 60]])
    scaled = scale_counts(counts, np.array([60, 60]), np.array([10, 10]), share=False, seed=0)
    assert scaled.tolist() == [[5, 0], [5, 10]]
    tiny = scale_counts(np.ones((3, 2), int), np.array([3, 3]), np.array([2, 2]), share=False, seed=0)
    assert tiny.sum(axis=1).min() == 1 and (tiny.sum(axis=0) <= 2).all()
    none = scale_counts(counts, np.array([60, 60]), np.array([0, 10]), share=False, seed=0)
    assert none[:, 0].tolist() == [0, 0]


# iid ---------------------------------------------------------------------------------------------------------


def test_iid_is_a_draw_without_replacement():
    counts = label_skew.draw_iid_counts(BALANCED, np.full(100, 600), seed=0)
    assert set(counts.sum(axis=1)) == {600} and counts.sum(axis=0).tolist() == [6000] * 10
    # Hypergeometric variance: 600 x 0.1 x 0.9 x (1 - 600 / 60000).
    assert counts.mean() == 60 and 45 < counts.var() < 62
    assert np.array_equal(counts, label_skew.draw_iid_counts(BALANCED, np.full(100, 600), seed=0))
    assert not np.array_equal(counts, label_skew.draw_iid_counts(BALANCED, np.full(100, 600), seed=1))


def test_iid_with_more_samples_than_there_are_uses_all_equally():
    counts = label_skew.draw_iid_counts(np.array([10, 30]), np.full(6, 20), seed=0)
    assert set(counts.sum(axis=1)) == {20} and counts.sum(axis=0).tolist() == [30, 90]


# Dominant classes --------------------------------------------------------------------------------------------


def test_the_paper_groups():
    assert consecutive_groups(10) == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8], [8, 9, 0]]
    for num_classes in range(2, 30):
        assert {label for group in consecutive_groups(num_classes) for label in group} == set(range(num_classes))


@pytest.mark.parametrize("uniform", [0, 20, 50, 80, 100])
def test_dominant_classes_have_their_share(uniform):
    group = assign_groups(20, 5)
    weights = dominant_weights(10, group, consecutive_groups(10), uniform)
    counts = apportion(weights, np.full(20, 600), seed=0)
    for client in range(20):
        dominant = consecutive_groups(10)[client // 4]
        by_hand = np.full(10, 6 * uniform / 10)
        by_hand[dominant] += 2 * (100 - uniform)
        assert np.abs(counts[client] - by_hand).max() < 1 and counts[client].sum() == 600
    if uniform == 0:
        assert ((counts > 0).sum(axis=1) == 3).all()
    if uniform == 100:
        assert (counts == 60).all()


@pytest.mark.parametrize(
    ("groups", "uniform", "says"),
    [
        ([[0, 1]], -1, "uniform = -1 is not allowed; it must be a percentage, 0 to 100"),
        ([[0, 1]], 100.5, "uniform = 100.5"),
        ([[0, 1]], float("nan"), "uniform = nan"),
        ([[]], 20, r"dominant_classes: group 0 is \[\]"),
        ([[0, 0]], 20, r"dominant_classes: group 0 is \[0, 0\]; it must be different classes of 0 to 3"),
        ([[0, 4]], 20, r"group 0 is \[0, 4\]"),
        ([[-1]], 20, r"group 0 is \[-1\]"),
    ],
)
def test_dominant_classes_that_cannot_be(groups, uniform, says):
    with pytest.raises(PerfedError, match=says):
        dominant_weights(4, np.zeros(3, int), groups, uniform)


# Pathological ------------------------------------------------------------------------------------------------


def test_clustered_clients_of_a_group_hold_the_same_consecutive_classes():
    held = draw_client_classes(10, assign_groups(20, 5), [3, 3, 5, 5, 8], clustered=True, seed=0)
    expected = [[0, 1, 2], [3, 4, 5], [0, 6, 7, 8, 9], [1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7, 8, 9]]
    assert [np.flatnonzero(row).tolist() for row in held] == [classes for classes in expected for _ in range(4)]


def test_random_clients_draw_their_own_classes_evenly():
    group, each = assign_groups(100, 5), np.array([3, 3, 5, 5, 8])
    held = draw_client_classes(10, group, each.tolist(), clustered=False, seed=0)
    assert np.array_equal(held.sum(axis=1), each[group])
    for number in range(5):
        own = held[group == number]
        assert len(np.unique(own, axis=0)) > 10
        assert own.sum(axis=0).max() - own.sum(axis=0).min() <= 1
    assert np.array_equal(held, draw_client_classes(10, group, each.tolist(), clustered=False, seed=0))
    assert not np.array_equal(held, draw_client_classes(10, group, each.tolist(), clustered=False, seed=1))
    with pytest.raises(PerfedError, match="classes_per_client = 11 is more than the 10 classes"):
        draw_client_classes(10, group, [3, 3, 5, 5, 11], clustered=True, seed=0)


def test_holders_share_a_class_equally():
    held = draw_client_classes(10, np.zeros(33, int), [4], clustered=False, seed=2)
    there = np.arange(100, 200, 10)
    counts = label_skew.divide_classes(there, held, seed=0)
    assert np.array_equal(counts > 0, held) and np.array_equal(counts.sum(axis=0), there)
    for label in range(10):
        own = counts[held[:, label], label]
        assert own.max() - own.min() <= 1
    with pytest.raises(PerfedError, match=r"class 0 has 3 samples for the \d+ clients that hold it; use fewer clients"):
        label_skew.divide_classes(np.array([3, *[100] * 9]), held, seed=0)


# Dirichlet ---------------------------------------------------------------------------------------------------


def test_dirichlet_uses_every_sample_and_has_the_variance_of_its_concentration():
    for concentration in (0.5, 1.0, 20.0):
        shares = []
        for seed in range(200):
            counts = draw_dirichlet_counts(BALANCED, 10, concentration, min_samples=1, seed=seed)
            assert np.array_equal(counts.sum(axis=0), BALANCED) and counts.min() >= 0
            shares.append(counts / BALANCED)
        # A share of Dir_m(b) has mean 1 / m and variance (1 / m) (1 - 1 / m) / (m b + 1).
        variance = 0.1 * 0.9 / (10 * concentration + 1)
        assert np.mean(shares) == pytest.approx(0.1)
        assert np.var(shares) == pytest.approx(variance, rel=0.1)


def test_extreme_concentrations():
    even = draw_dirichlet_counts(BALANCED, 10, 1e6, seed=0)
    assert np.abs(even - 600).max() < 10
    lonely = draw_dirichlet_counts(np.full(100, 600), 10, 1e-6, min_samples=1, seed=0)
    assert (lonely == 600).sum() == 100 and (lonely > 0).sum() == 100  # one client has all of a class


def test_dirichlet_redraws_until_everyone_has_enough():
    plain = [draw_dirichlet_counts(BALANCED, 50, 0.3, min_samples=1, seed=seed).sum(axis=1).min() for seed in range(10)]
    enough = [
        draw_dirichlet_counts(BALANCED, 50, 0.3, min_samples=150, seed=seed).sum(axis=1).min() for seed in range(10)
    ]
    assert min(plain) < 150 <= min(enough)
    assert np.array_equal(
        draw_dirichlet_counts(BALANCED, 50, 0.3, seed=3), draw_dirichlet_counts(BALANCED, 50, 0.3, seed=3)
    )


def test_dirichlet_gives_up_in_bounded_time_and_says_what_to_change():
    start = time.monotonic()
    says = r"in 500 draws with concentration = 0.05 some client of 500 .* fewer than 10 samples \(at best 0\); use a la"
    with pytest.raises(PerfedError, match=says):
        draw_dirichlet_counts(BALANCED, 500, 0.05, seed=0)
    with pytest.raises(PerfedError, match=r"7 clients with at least 10 samples each need 70, but there are 60"):
        draw_dirichlet_counts(np.array([30, 30]), 7, 1.0, seed=0)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("concentration", [0.0, -1.0, float("nan")])
def test_concentrations_must_be_positive(concentration):
    with pytest.raises(PerfedError, match=r"concentration = .* is not allowed; it must be above 0"):
        draw_dirichlet_counts(BALANCED, 10, concentration, seed=0)
    with pytest.raises(PerfedError, match="it must be above 0"):
        draw_inner_dirichlet_counts(BALANCED, np.full(5, 10), concentration, seed=0)


@pytest.mark.long
def test_inner_dirichlet_draws_each_clients_distribution():
    for concentration in (0.2, 5.0):
        counts = draw_inner_dirichlet_counts(np.full(10, 10**6), np.full(2000, 1000), concentration, seed=0)
        assert set(counts.sum(axis=1)) == {1000}
        assert np.var(counts / 1000) == pytest.approx(0.1 * 0.9 / (10 * concentration + 1), rel=0.1)


def test_inner_dirichlet_goes_on_with_other_classes_where_one_is_used_up():
    there = np.array([5, 50, 500])
    counts = draw_inner_dirichlet_counts(there, np.full(5, 111), 0.1, seed=0)  # every sample is needed
    assert np.array_equal(counts.sum(axis=0), there) and set(counts.sum(axis=1)) == {111}
    shared = draw_inner_dirichlet_counts(there, np.full(50, 400), 1e-6, share=True, seed=0)
    assert set(shared.sum(axis=1)) == {400} and (shared <= there).all()
    with pytest.raises(PerfedError, match="560 samples are asked for, but there are 555"):
        draw_inner_dirichlet_counts(there, np.full(5, 112), 1.0, seed=0)


def test_a_thousand_clients_are_quick():
    start = time.monotonic()
    weights = dominant_weights(62, assign_groups(1000, 5), consecutive_groups(62)[:5], 20.0)
    counts = apportion(weights, np.full(1000, 50), seed=0)
    scale_counts(counts, counts.sum(axis=0), counts.sum(axis=0) // 5, share=False, seed=0)
    draw_inner_dirichlet_counts(np.full(62, 1000), np.full(1000, 50), 0.5, seed=0)
    assert time.monotonic() - start < 10
