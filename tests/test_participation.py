from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError
from scipy import stats

from perfed.participation import Participation

IDS = [f"c{i}" for i in range(10)]


def test_the_right_number_of_different_clients_in_sorted_order():
    for rate, count in [(0.1, 1), (0.05, 1), (0.3, 3), (0.39, 3), (0.7, 7), (0.999, 9), (1.0, 10)]:
        chosen = Participation(rate=rate).choose(IDS, 0, 1, 50)
        assert len(chosen) == len(set(chosen)) == count and chosen == sorted(chosen) and set(chosen) <= set(IDS)


def test_the_last_round_is_for_everybody_unless_asked_otherwise():
    assert Participation(rate=0.2).choose(IDS, 0, 50, 50) == IDS
    assert len(Participation(rate=0.2).choose(IDS, 0, 49, 50)) == 2
    assert len(Participation(rate=0.2, last_round="sampled").choose(IDS, 0, 50, 50)) == 2


def test_the_choice_depends_on_seed_and_round_but_not_on_the_order_of_the_ids():
    policy = Participation(rate=0.3)
    choices = {tuple(policy.choose(IDS, seed, round_, 99)) for seed in range(5) for round_ in range(1, 5)}
    assert len(choices) > 10
    assert policy.choose(IDS, 3, 4, 99) == policy.choose(IDS[::-1], 3, 4, 99)


def test_every_client_is_as_likely_as_any_other():
    policy = Participation(rate=0.2)
    counts = Counter(c for seed in range(2) for round_ in range(500) for c in policy.choose(IDS, seed, round_, 999))
    assert sum(counts.values()) == 2000
    assert stats.chisquare([counts[c] for c in IDS]).pvalue > 1e-3
    pairs = Counter(tuple(policy.choose(IDS, 7, round_, 9999)) for round_ in range(1000))
    assert len(pairs) == 45  # every pair occurs


@pytest.mark.parametrize(
    "wrong", [{"rate": 0.0}, {"rate": 1.5}, {"rate": -1.0}, {"last_round": "none"}, {"ratio": 1.0}]
)
def test_impossible_policies_are_refused(wrong):
    with pytest.raises(ValidationError):
        Participation(**wrong)
