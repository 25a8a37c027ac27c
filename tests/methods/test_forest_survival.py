"""Forests on times and events: risks and weights by plain loops, lifelines and a search; what others' trees bring."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
import pytest
import torch
from engines import make
from lifelines import CoxPHFitter, NelsonAalenFitter
from lifelines.statistics import logrank_test
from lifelines.utils import concordance_index
from scipy.optimize import minimize, minimize_scalar

from perfed import rng
from perfed.client_model.export import onnx_file
from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.maths import glm
from perfed.methods.forest import hazards, trees
from perfed.methods.forest.boosting import Steps, boost_trees
from perfed.methods.forest.trees import Recipe
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.run.run import Run
from perfed.training.plan import Plan

KEY = rng.key(0, "test")


def weibull(rows, seed=0, names="abcd"):
    """Times whose risk is of a product and of a distance from the middle: a Cox model sees neither."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, len(names))).astype(np.float32)
    a, b, c = (x[:, names.index(name)] for name in "abc")
    time = (generator.exponential(size=rows) / np.exp(2 * a * b + 1.5 * np.abs(c))) ** (1 / 1.5)
    censored = generator.exponential(2 * np.median(time), rows)
    y = np.stack([np.minimum(time, censored), time <= censored], 1).astype(np.float64)
    return x, np.column_stack([y[:, 0].round(3) + 1e-3, y[:, 1]])  # with ties


def test_expected_events_are_the_cumulative_hazard():
    x, y = weibull(60)
    fitted = NelsonAalenFitter(nelson_aalen_smoothing=False).fit(y[:, 0], y[:, 1])
    expected = fitted.cumulative_hazard_at_times(y[:, 0]).to_numpy()
    assert hazards.expected_events(y, np.zeros(60)) == pytest.approx(expected)
    risk = np.exp(x[:, 0].astype(np.float64))
    breslow = [
        own * sum(e / risk[y[:, 0] >= t].sum() for t, e in y if t <= time)
        for own, time in zip(risk, y[:, 0], strict=True)
    ]
    assert hazards.expected_events(y, np.log(risk)) == pytest.approx(breslow)
    assert sum(breslow) == pytest.approx(y[:, 1].sum())


def deviance(y, leaves):
    """Of hazards that are proportional between leaves: LeBlanc and Crowley's, by a loop."""
    expected, total = hazards.expected_events(y, np.zeros(len(y))), 0.0
    for leaf in np.unique(leaves):
        own = leaves == leaf
        if (seen := y[own, 1].sum()) == 0:
            return np.inf
        total -= seen * np.log(seen / expected[own].sum())
    return total


def test_the_first_split_is_the_best_of_all_by_brute_force_and_the_leaves_have_its_risks():
    x, y = weibull(80)
    y[:5] = [1e-6, 0.0]  # who is gone before the first event says nothing
    arrays = trees.grow_forest(x[:, :1], y, Recipe(1, 2, 1, 10, None, None, True), KEY)
    counts = trees.draw_bootstrap(KEY, 1, 80)[0]
    rows = np.repeat(np.arange(80), counts)
    # E is of all rows, whatever the sample: what the brute force weighs is the site's own hazard.
    expected = hazards.expected_events(y, np.zeros(80))
    tried = {}
    for cut in np.unique(x[rows, 0])[:-1]:
        parts = [rows[x[rows, 0] <= cut], rows[x[rows, 0] > cut]]
        if min(len(np.unique(part[expected[part] > 0])) for part in parts) >= 10:
            seen = [(y[part, 1].sum(), expected[part].sum()) for part in parts]
            if min(seen)[0]:
                tried[cut] = -sum(o * np.log(o / e) for o, e in seen)
    best = min(tried, key=tried.get)
    cut = float(arrays["threshold"][0, 0])
    assert (x[:, 0] <= cut).sum() == (x[:, 0] <= best).sum()
    for child, part in (("left", x[rows, 0] <= cut), ("right", x[rows, 0] > cut)):
        leaf, own = int(arrays[child][0, 0]), rows[part]
        assert arrays["value"][0, leaf, 0] == pytest.approx((1 + y[own, 1].sum()) / (1 + expected[own].sum()), rel=1e-5)


def test_the_split_of_two_groups_is_one_that_a_log_rank_test_sees():
    """Of two columns, one of which tells the times, that one is split on."""
    x, y = weibull(200)
    group = np.abs(x[:, 2]) > 0.7
    inputs = np.stack([group, x[:, 3] > 0], 1).astype(np.float32)
    p = [logrank_test(y[g, 0], y[~g, 0], y[g, 1], y[~g, 1]).p_value for g in (inputs[:, 0] > 0, inputs[:, 1] > 0)]
    assert p[0] < 1e-3 < p[1]
    assert deviance(y, inputs[:, 0]) < deviance(y, inputs[:, 1])
    arrays = trees.grow_forest(inputs, y, Recipe(20, 3, 1, 5, None, None, True), KEY)
    risks = arrays["value"][arrays["feature"][:, 0] == 0]
    split = arrays["left"][arrays["feature"][:, 0] == 0][:, 0] > 0
    assert split.any() and (risks[split][:, 2, 0] > risks[split][:, 1, 0]).all()


def test_without_an_event_nothing_is_grown_and_nothing_is_weighed():
    x, y = weibull(30)
    y[:, 1] = 0
    arrays = trees.grow_forest(x, y, Recipe(3, 8, 4, 2, None, None, True), KEY)
    assert (arrays["value"] == 1).all() and (arrays["left"][:, 0] == 0).all()
    said, before = np.random.default_rng(0).normal(size=(2, 30)), np.array([0.7, 0.3])
    assert hazards.hazard_weights(said, y, before, 5.0) == pytest.approx(before)
    assert hazards.hazard_slope(said[0], y, 5.0) == pytest.approx(1)


def test_weights_and_slope_are_the_mode():
    x, y = weibull(80)
    said = np.stack([x[:, 0] * x[:, 1], np.abs(x[:, 2]), x[:, 3]]).astype(np.float64)
    before = np.array([0.5, 0.3, 0.2])
    apart = said - before @ said
    # Curvature by differences, in steps along what sets each source apart.
    curvature = np.mean(
        [
            (hazards.cox_loss(before @ said + h, y) + hazards.cox_loss(before @ said - h, y))
            - 2 * hazards.cox_loss(before @ said, y)
            for h in 1e-3 * apart
        ]
    ) / (1e-6 * 80)

    def loss(free):
        w = np.exp(free - free.max())
        w /= w.sum()
        return hazards.cox_loss(w @ said, y) + 7 * curvature / 2 * ((w - before) ** 2).sum()

    best = minimize(loss, np.zeros(3), tol=1e-10).x
    expected = np.exp(best) / np.exp(best).sum()
    assert hazards.hazard_weights(said, y, before, 7.0) == pytest.approx(expected, abs=2e-3)
    assert hazards.hazard_weights(said, y, before, 1e9) == pytest.approx(before, abs=1e-6)
    assert hazards.hazard_weights(said, y, np.array([0.5, 0.5, 0]), 7.0)[2] == 0
    slope = minimize_scalar(lambda b: hazards.cox_loss(b * said[0], y) + 3 / 2 * (b - 1) ** 2).x
    assert hazards.hazard_slope(said[0], y, 3.0) == pytest.approx(slope, abs=1e-4)
    y[:, 0] += 1e-6 * np.arange(80)  # no ties, which lifelines takes by Efron
    table = pd.DataFrame({"h": said[0], "time": y[:, 0], "event": y[:, 1]})
    plain = CoxPHFitter().fit(table, "time", "event").params_["h"]
    assert hazards.hazard_slope(said[0], y, 1e-9) == pytest.approx(plain, abs=1e-4)


@pytest.mark.long
def test_boosting_goes_down_the_gradient_of_the_partial_likelihood():
    x, y = weibull(120)
    score = torch.from_numpy(x[:, :1].astype(np.float64)).requires_grad_()
    glm.loss("survival", score, torch.from_numpy(y)).backward()
    expected = hazards.expected_events(y, x[:, 0].astype(np.float64))
    assert y[:, 1] - expected == pytest.approx(-score.grad[:, 0].numpy(), abs=1e-9)
    x, y = weibull(500)
    arrays = boost_trees(x, y, np.zeros((500, 1)), Steps(60, 0.2, 2, 5, None, survival=True), KEY)
    new, there = weibull(300, seed=1)
    single = {name: tensor[None] for name, tensor in arrays.items()}
    risk = trees.compute_votes(single, torch.from_numpy(new)[None], 2)[0].sum(0)[:, 0].double().numpy()
    assert concordance_index(there[:, 0], -risk, there[:, 1]) > 0.6
    assert hazards.cox_loss(risk, there) < hazards.cox_loss(np.zeros(300), there) - 10


@pytest.mark.parametrize("risk", [0.0, float("inf")])
def test_a_risk_that_is_none_is_refused(risk):
    recipe = Recipe(2, 4, 3, 5, 8, None, True)
    arrays = {name: tensor[None].clone() for name, tensor in trees.grow_forest(*weibull(60), recipe, KEY).items()}
    trees.check_trees(arrays, 4, recipe, str)
    arrays["value"][0, 1, 0] = risk
    with pytest.raises(PerfedError, match="the trees of 0 have a leaf with no risk above 0"):
        trees.check_trees(arrays, 4, recipe, str)


# The method ----------------------------------------------------------------------------------------------------

SITES = {"one": "abcd", "few": "dcba", "three": "bac"}


def federation():
    clients = []
    for number, (site, names) in enumerate(SITES.items()):
        x, y = (torch.from_numpy(part) for part in weibull(500, seed=number, names=names))
        count = 30 if site == "few" else 250
        parts = [Split(x[rows], y[rows]) for rows in (slice(0, count), slice(250, 500))]
        clients.append(Client(site, *parts, feature_names=tuple(names)))
    return Federation(tuple(clients), None, survival=True)


def run(name="forest", **settings):
    method = make(name, **{"trees": 40, "leaves": 40, "depth": 10, **settings})
    made = Run(federation(), method, Model(head=linear(1)), name=name, rounds=1, plan=Plan("stacked", threads=1))
    made.execute()
    return made


def c_indices(made):
    found = {}
    for client in made.federation:
        risk = made.predict(client.id, client.test.x)[:, 0]
        found[client.id] = concordance_index(client.test.y[:, 0], -risk, client.test.y[:, 1])
    return found


def cox(client):
    table = pd.DataFrame(client.train.x.numpy()).rename(columns=str)
    table = table.assign(time=client.train.y[:, 0].numpy(), event=client.train.y[:, 1].numpy())
    hazard = client.test.x.numpy() @ CoxPHFitter(penalizer=0.1).fit(table, "time", "event").params_.to_numpy()
    return concordance_index(client.test.y[:, 0], -hazard, client.test.y[:, 1])


@pytest.mark.long
def test_forests_see_what_a_cox_model_does_not_and_a_site_with_few_rows_learns_of_others():
    helped, without = c_indices(run()), c_indices(run(others=0.0))
    for client in federation():
        assert helped[client.id] > cox(client) + 0.05
    assert helped["few"] > without["few"] + 0.03


@pytest.mark.long
def test_boosting_from_the_others_score_is_better_where_there_are_rows():
    still, boost = c_indices(run("boost", stages=1, shrinkage=1e-6)), c_indices(run("boost"))
    assert boost["one"] > still["one"] and boost["few"] > still["few"] - 0.03


@pytest.mark.long
@pytest.mark.parametrize("name", ["forest", "boost"])
def test_a_site_of_survival_joins_predicts_and_is_one_graph(name, tmp_path):
    import onnxruntime

    from perfed import load_site

    made = run(name, trees=8)
    client = made.federation.clients[0]
    expected = made.predict(client.id, client.test.x).numpy()
    site = made.site(client.id)
    assert np.allclose(
        load_site(site.save(tmp_path / "site")).predict(client.test.x).reshape(-1, 1), expected, atol=1e-5
    )
    content, difference = onnx_file(site)
    (found,) = onnxruntime.InferenceSession(io.BytesIO(content).getvalue()).run(None, {"x": client.test.x.numpy()})
    assert np.abs(found - expected).max() < 1e-4 and difference < 1e-4
    again = made.join(Client("new", client.train, client.test, feature_names=client.feature_names))
    risk = again.predict(client.test.x).reshape(-1)
    assert concordance_index(client.test.y[:, 0], -risk, client.test.y[:, 1]) > 0.55
