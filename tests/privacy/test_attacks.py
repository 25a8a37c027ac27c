"""Attacks on what leaves: far better than chance without privacy, near it with."""

from __future__ import annotations

import json

import attacks
import numpy as np
import pytest
from attacks import ATTACKS, attacked, rows_by

from perfed.privacy.settings import Privacy


@pytest.mark.long
def test_a_row_is_found_in_fedrep_s_body_and_not_in_a_private_one():
    attack = rows_by(attacks.by_span)
    assert attack(attacked("fedrep", 0)) > 0.99
    strong = Privacy(noise=8.0, delta=1e-3)  # epsilon 2.2
    assert 0.35 < attack(attacked("fedrep", 0, strong)) < 0.65


@pytest.mark.long
def test_who_knows_all_others_finds_a_client_s_labels_without_noise_and_not_with_it():
    name, settings = attacks.FLIC
    for noise, low, high in ((1e-9, 0.99, 1.0), (4.0, 0.3, 0.7)):
        of = attacked(name, 0, Privacy(unit="client", noise=noise, delta=1e-3), **settings)
        assert low <= attacks.labels_by_residue(of) <= high


def test_questions_are_of_the_same_labels_and_no_row_is_asked_twice():
    asked = attacks.questions(3)
    for client in asked.federation:
        x, y = asked.x[client.id], asked.y[client.id]
        assert (x[: attacks.ROWS].to(client.train.x) == client.train.x).all()
        for label in y.unique():
            assert (y[: attacks.ROWS] == label).sum() == (y[attacks.ROWS :] == label).sum()
        assert not (x[: attacks.ROWS, None] == x[None, attacks.ROWS :]).all(2).any()


@pytest.mark.long
def test_every_attack_is_better_than_chance_without_privacy_and_falls_with_it():
    kept = json.loads(attacks.KEPT.read_text())["areas"]
    found = attacks.areas([0, 1])
    assert [*kept] == [*found] == [*ATTACKS]
    for name, of in found.items():
        plain, private = np.mean(of["plain"]), np.mean(of["private"])
        assert plain > 0.56, name
        assert private < plain - 0.02 and (private < 0.65 or name.startswith("labels")), name
        for what, areas in of.items():
            assert areas == pytest.approx(kept[name][what][:2], abs=0.02), f"{name}: python benchmarks/attacks.py"
