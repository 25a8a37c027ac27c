"""Audits from outside: what one run lets the server see never proves more than was spent, and much without noise."""

from __future__ import annotations

import json

import audit
import pytest
from audit import CLIP, DELTA, METHODS, Sizes

from perfed.privacy.settings import Privacy

SMALL = Sizes(clients=2, canaries=400, guesses=100, rounds=3, rows=30)
QUICK = ("fedavg",)


def proven(name, noise, seed=0, **how):
    """Right guesses, the epsilon that they prove, and that of the accountant."""
    unit = METHODS[name][0]
    privacy = Privacy(unit=unit, noise=noise, delta=DELTA, clip=CLIP[unit])
    found, spent = audit.audit(name, privacy, SMALL, seed, **how)
    return found.correct, found.epsilon(DELTA), spent


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in METHODS])
def test_a_run_proves_less_than_was_spent_and_more_than_that_without_noise(name):
    little, much = (5.0, 12.0) if name.startswith("flic-hl") else (1.5, 4.0)
    correct, bound, spent = proven(name, little)
    assert bound < spent < 7
    if name != "flic-hl anchors":  # of which sums of many rows leave, and signs alone
        assert correct > 65 and bound > 0.3  # of 100 guesses; the run gives something away
    _, bound, spent = proven(name, much)
    assert bound < spent < 2.3
    correct, bound, _ = proven(name, much, switched_off=True)
    assert correct > 97 and bound > spent + 0.5


@pytest.mark.long
def test_a_canary_that_is_out_has_zeros():
    for unit in ("sample", "client"):
        made = audit.federation(unit, SMALL, seed=1)
        assert 150 < made.included.sum() < 250 and len(set(made.home)) == (2 if unit == "sample" else 400)
        by_id = {client.id: client.train for client in made.federation}
        for number in range(0, 400, 37):
            rows = by_id[made.home[number]].x
            there = (rows == made.x[number].to(rows)).all(1).any()
            assert bool(there) == made.included[number]


@pytest.mark.long
def test_ten_runs_never_prove_more_than_was_spent():
    found = [proven("fedrep", 6.0, seed) for seed in range(10)]
    assert all(bound <= spent < 1.5 for _, bound, spent in found)


def test_the_kept_audits_are_as_the_page_says():
    rows = json.loads(audit.KEPT.read_text())["rows"]
    assert {(row["method"], row["unit"]) for row in rows} == {(name, unit) for name, (unit, _) in METHODS.items()}
    for row in rows:
        assert min(row["bounds"]) > 3.4 > row["epsilon"] if row["off"] else max(row["bounds"]) < row["epsilon"], row
