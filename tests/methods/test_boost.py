"""Boosting from a given score: scikit-learn's steps, as many as held-out rows want, and better than either alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import make
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from test_forest import SITES, named

from perfed import rng
from perfed.methods.forest import trees
from perfed.methods.forest.boosting import Steps, boost_trees
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.run.run import Run
from perfed.training.plan import Plan

KEY = rng.key(0, "test")


def steps_on(arrays, x, depth):
    single = {name: tensor[None] for name, tensor in arrays.items()}
    return trees.compute_votes(single, torch.from_numpy(x)[None], depth)[0].sum(0).numpy()


def data(rows=200):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 4)).astype(np.float32)
    return x, generator.normal(size=rows), generator


@pytest.mark.long
def test_values_are_boosted_as_scikit_learn_boosts_what_is_left():
    """Boosting y from a start is boosting y minus the start from nothing."""
    x, noise, generator = data()
    y, start = x[:, 0] * x[:, 1] + x[:, 2] + 0.1 * noise, generator.normal(size=(200, 1))
    arrays = boost_trees(x, y, start, Steps(30, 0.2, 2, 5, None), KEY)
    number = int((arrays["value"] != 0).any(-1).any(-1).sum())
    assert number > 10
    model = GradientBoostingRegressor(
        n_estimators=number, learning_rate=0.2, max_depth=2, min_samples_leaf=5, init="zero"
    ).fit(x, y - start[:, 0])
    assert steps_on(arrays, x, 2)[:, 0] == pytest.approx(model.predict(x), abs=1e-4)


@pytest.mark.long
def test_two_classes_from_even_odds_are_those_of_scikit_learn():
    """Of two scores each moves by as much: their difference is scikit-learn's one."""
    x, noise, generator = data()
    y = (x[:, 0] * x[:, 1] + x[:, 2] + 0.3 * noise > 0).astype(int)
    arrays = boost_trees(x, y, np.zeros((200, 2)), Steps(30, 0.1, 2, 5, 2), KEY)
    number = int((arrays["value"] != 0).any(-1).any(-1).sum()) // 2
    assert number > 10
    model = GradientBoostingClassifier(
        n_estimators=number, learning_rate=0.1, max_depth=2, min_samples_leaf=5, init="zero"
    ).fit(x, y)
    new = generator.normal(size=(100, 4)).astype(np.float32)
    found = steps_on(arrays, new, 2)
    assert np.mean((found[:, 1] > found[:, 0]) == model.predict(new)) > 0.97
    assert np.corrcoef(found[:, 1] - found[:, 0], model.decision_function(new))[0, 1] > 0.98


@pytest.mark.long
def test_where_the_start_leaves_nothing_to_learn_there_are_no_steps():
    x, noise, _ = data()
    arrays = boost_trees(x, noise, np.zeros((200, 1)), Steps(30, 0.3, 3, 5, None), KEY)
    assert (arrays["value"] == 0).all()
    one = boost_trees(x[:1], noise[:1], np.zeros((1, 1)), Steps(30, 0.3, 3, 1, None), KEY)
    assert (one["value"] == 0).all()


def losses(name, **settings):
    settings = {"trees": 60, "leaves": 40, "depth": 10, **settings}
    method, federation = make(name, **settings), named(SITES, rows=150)
    run = Run(federation, method, Model(head=linear(2)), name=name, rounds=1, plan=Plan("stacked", threads=1))
    run.execute()
    found = {}
    for client in federation:
        logits = run.predict(client.id, client.test.x)
        found[client.id] = float(torch.nn.functional.cross_entropy(logits, client.test.y))
    return found


@pytest.mark.long
def test_a_site_is_better_off_than_with_the_others_score_alone():
    still, boost = losses("boost", stages=1, shrinkage=1e-6), losses("boost", stages=60)
    assert np.mean(list(boost.values())) < np.mean(list(still.values())) - 0.01
    assert boost["few"] < still["few"] + 0.02  # whose few rows change little
