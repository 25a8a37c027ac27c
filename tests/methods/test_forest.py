"""Forests across sites: trees as arrays against scikit-learn's own, weights and lines against brute force."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from engines import blobs, make, serve, train
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from perfed import rng
from perfed.client_model.export import onnx_file
from perfed.data.client import Client, Split
from perfed.data.columns import Columns, in_order
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.maths.thresholds import GOLDEN
from perfed.methods.forest import mixing, trees
from perfed.methods.forest.trees import Recipe
from perfed.model.chain import Model
from perfed.model.presets import linear
from perfed.run.run import Run
from perfed.training.plan import Plan

KEY = rng.key(0, "test")


def sample(rows=80, columns=5, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, columns)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] ** 2 + 0.3 * generator.normal(size=rows) > 0.7).astype(int)


def alone(arrays, x, depth=16):
    return trees.compute_votes({n: t[None] for n, t in arrays.items()}, torch.from_numpy(x)[None], depth)[0].numpy()


@pytest.mark.parametrize("bins", [None, 8])
@pytest.mark.parametrize("outputs", [3, None])
def test_arrays_say_what_scikit_learns_trees_say(outputs, bins):
    """Also of rows out of bag; with bins, of how many thresholds of its column each value is above, in new rows too."""
    x, y = sample()
    y = y + (x[:, 2] > 1) if outputs else (x[:, 0] * x[:, 1]).astype(np.float64)
    arrays = trees.grow_forest(x, y, Recipe(5, 20, 6, 2, bins, outputs), KEY)
    new = x if bins is None else sample(300, seed=1)[0]
    places = [trees.compute_thresholds(column, 2, bins or 1) for column in x.T]
    seeds = (rng.key(KEY, "splits", torch.arange(5)) & 0x7FFFFFFF).tolist()

    def seen(z):
        return z if bins is None else (z[:, None, :] > np.array(places).T).sum(1)

    for row, counts in enumerate(trees.draw_bootstrap(KEY, 5, len(x))):
        kind = DecisionTreeClassifier if outputs else DecisionTreeRegressor
        few = "sqrt" if outputs else 1 / 3
        tree = kind(max_leaf_nodes=20, max_depth=6, min_samples_leaf=2, max_features=few, random_state=seeds[row])
        tree.fit(seen(x), y, sample_weight=counts)
        expected = tree.predict_proba(seen(new)) if outputs else tree.predict(seen(new))[:, None]
        assert np.allclose(alone(arrays, new)[row], expected, atol=1e-6)
    assert len(np.unique(alone(arrays, new)[:, :, 0])) > 5


def test_each_tree_has_a_bootstrap_sample_of_its_own():
    counts = trees.draw_bootstrap(KEY, 400, 50)
    assert (counts.sum(1) == 50).all() and len(np.unique(counts, axis=0)) == 400
    assert abs((counts == 0).mean() - (1 - 1 / 50) ** 50) < 0.01


def test_what_is_sent_is_of_several_rows():
    """No leaf of fewer rows of its sample than the setting, and no threshold from fewer rows than twice as many."""
    x, y = sample(60)
    arrays = trees.grow_forest(x, y, Recipe(20, 30, 10, 6, 32, 2), KEY)
    at = trees.find_leaves({n: t[None] for n, t in arrays.items()}, torch.from_numpy(x)[None], 10)[0].numpy()
    for row, counts in enumerate(trees.draw_bootstrap(KEY, 20, 60)):
        _, held = np.unique(at[row][counts > 0], return_counts=True)
        assert held.min() >= 6
    inner = arrays["left"] != torch.arange(arrays["left"].shape[1])
    allowed = [{float(v) for v in trees.compute_thresholds(column, 6, 32)} for column in x.T]
    for column, threshold in zip(arrays["feature"][inner].tolist(), arrays["threshold"][inner].tolist(), strict=True):
        assert threshold in allowed[column]
    for column, cut in enumerate(allowed):
        ordered = np.sort(x[:, column].astype(np.float64)).reshape(10, 6).mean(1)
        assert sorted(cut) == pytest.approx(ordered[:-1] + GOLDEN * (ordered[1:] - ordered[:-1]), abs=1e-6)


@pytest.mark.parametrize("smallest", [1, 5])
@pytest.mark.parametrize("values", [[0.0, 1.0], [*range(30, 60)], [*np.arange(30, 60, 0.5)]])
def test_no_value_of_a_column_is_a_threshold_of_what_is_sent(values, smallest):
    """Groups of rows with the same value have that value as their mean."""
    column = np.random.default_rng(0).choice(values, 200).astype(np.float32)
    cuts = trees.compute_thresholds(column, smallest, 32).astype(np.float64)
    assert len(cuts) > 0 and np.abs(cuts[:, None] - np.array(values)).min() > 1e-3
    assert (np.diff(cuts) > 0).all() and column.min() < cuts.min() and cuts.max() < column.max()


def test_rounding_of_whole_numbers_does_not_change_what_a_forest_says():
    """Also of ages that the site has not seen, between those that it has."""
    generator = np.random.default_rng(0)
    ages = generator.integers(20, 90, (120, 3)).astype(np.float64)
    y = (ages[:, 0] - ages[:, 1] + 10 * generator.normal(size=120) > 0).astype(int)
    mean, deviation = ages.mean(0), ages.std(0)
    new = generator.integers(20, 90, (200, 3)).astype(np.float64)
    for bins in (None, 32):
        arrays = trees.grow_forest(
            ((ages - mean) / deviation).astype(np.float32),
            y,
            Recipe(40, 64, 12, 1 if bins is None else 5, bins, 2),
            KEY,
        )
        plain, less, more = (
            alone(arrays, ((new * factor - mean) / deviation).astype(np.float32)) for factor in (1, 1 - 1e-7, 1 + 1e-7)
        )
        assert (plain == less).all() and (plain == more).all()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("left", 0, "a node whose children are not behind it"),
        ("right", 10_000, "a node whose children are not behind it"),
        ("feature", 5, "a split on a column beyond the 5 common ones"),
        ("threshold", float("nan"), "a threshold that is not finite"),
        ("value", -0.5, "a leaf with no shares of classes"),
    ],
)
def test_arrays_that_are_no_trees_are_refused(name, change, said):
    x, y = sample()
    recipe = Recipe(3, 8, 5, 5, 16, 2)
    arrays = trees.grow_forest(x, y, recipe, KEY)
    both = {n: torch.stack([t, t]) for n, t in arrays.items()}
    trees.check_trees(both, 5, recipe, str)
    both[name] = both[name].clone()
    both[name][1, 2, 1 if name in ("left", "right") else 0] = change
    with pytest.raises(PerfedError, match=f"the trees of 1 have {said}"):
        trees.check_trees(both, 5, recipe, str)


def test_mixture_weights_are_the_mode():
    generator = np.random.default_rng(0)
    likelihood, before = generator.uniform(0.05, 1, (3, 40)), np.array([0.5, 0.3, 0.2])

    def loss(free):
        w = np.exp(free - free.max())
        w /= w.sum()
        return -(np.log(w @ likelihood).sum() + 7 * (before * np.log(w)).sum())

    best = minimize(loss, np.zeros(3), tol=1e-12).x
    expected = np.exp(best) / np.exp(best).sum()
    assert mixing.mixture_weights(likelihood, before, 7.0) == pytest.approx(expected, abs=1e-4)
    assert mixing.mixture_weights(likelihood, before, 1e9) == pytest.approx(before, abs=1e-6)


def test_mean_weights_are_the_nearest_on_the_simplex():
    generator = np.random.default_rng(0)
    values, y, before = generator.normal(size=(3, 30)), generator.normal(size=30), np.array([0.6, 0.4, 0.0])
    found = mixing.mean_weights(values, y, before, 5.0)
    apart = ((values[:2] - before @ values) ** 2).mean()
    tried = np.linspace(0, 1, 10_001)
    losses = [
        ((y - w * values[0] - (1 - w) * values[1]) ** 2).sum() + 5 * apart * ((w - 0.6) ** 2 + (1 - w - 0.4) ** 2)
        for w in tried
    ]
    assert found[0] == pytest.approx(tried[int(np.argmin(losses))], abs=2e-4) and found[2] == 0


def test_the_line_of_two_classes_is_that_of_a_logistic_regression():
    """With next to no prior: intercept and slope in the log odds are scikit-learn's."""
    generator = np.random.default_rng(0)
    p = generator.uniform(0.1, 0.9, 200)
    y = (generator.uniform(size=200) < p**2).astype(int)
    shift, slope = mixing.calibrated_logits(np.log(np.stack([1 - p, p], 1)), y, 1e-6)
    odds = np.log(p / (1 - p))[:, None]
    model = LogisticRegression(C=1e6, tol=1e-10).fit(odds, y)
    assert shift[1] - shift[0] == pytest.approx(model.intercept_[0], abs=1e-3)
    assert slope == pytest.approx(model.coef_[0, 0], abs=1e-3)
    still = mixing.calibrated_logits(np.log(np.stack([1 - p, p], 1)), y, 1e9)
    assert np.append(*still) == pytest.approx([0, 0, 1], abs=1e-4)


def test_the_line_of_values_is_that_of_least_squares():
    generator = np.random.default_rng(0)
    v = generator.normal(size=50)
    y = 2 + 3 * v + generator.normal(size=50)
    slope, shift = np.polyfit(v, y, 1)
    assert mixing.calibrated_values(v, y, 0.0) == pytest.approx((shift, slope))
    assert mixing.calibrated_values(v, y, 1e9)[1] == pytest.approx(1, abs=1e-6)


# The method ----------------------------------------------------------------------------------------------------


def named(sites, rows=120, seed=0):
    """Sites with columns of these names; a, b and c say the class in the same way everywhere."""
    generator, clients = np.random.default_rng(seed), []
    for site, names in sites.items():
        value = {name: generator.normal(size=2 * rows) for name in sorted({*names, "a", "b", "c"})}
        y = (value["a"] * value["b"] + 0.5 * value["c"] > 0).astype(np.int64)
        x = torch.from_numpy(np.stack([value[name] for name in names], 1)).float()
        count = rows if site != "few" else 12
        parts = [Split(x[s], torch.from_numpy(y[s])) for s in (slice(0, count), slice(rows, 2 * rows))]
        clients.append(Client(site, *parts, feature_names=tuple(names)))
    return Federation(tuple(clients), 2)


SITES = {"one": ["a", "b", "c", "noise"], "few": ["x", "c", "b", "a"], "three": ["b", "a", "c"]}


def run(federation, rounds=1, **settings):
    made = Run(
        federation,
        make("forest", **{"trees": 60, "leaves": 40, "depth": 10, **settings}),
        Model(head=linear(2)),
        name="forest",
        rounds=rounds,
        plan=Plan("stacked", threads=1),
    )
    made.execute()
    return made


def loss_at(made, site):
    client = next(c for c in made.federation if c.id == site)
    logits = made.predict(site, client.test.x)
    return float(torch.nn.functional.cross_entropy(logits, client.test.y))


def test_of_named_columns_those_are_common_that_all_sites_hold():
    """What a site lacks is 0 in its inputs, and no column of its own; what only it has is nobody else's."""
    frames = {
        "one": pd.DataFrame(
            {
                "a": [1.0, 2, 3, 4, 5, 6, 7, 8],
                "b": [8.0, 7, 6, 5, 4, 3, 2, 1],
                "x": [0.1, 0.2, 0.3, 0.5, 0.6, 0.8, 0.9, 1.3],
                "y": list("ynynynyn"),
            }
        ),
        "two": pd.DataFrame(
            {
                "a": [1.0, 2, 3, 4, 5, 6, 7, 8],
                "c": [8.0, 7, 6, 5, 4, 3, 2, 1],
                "b": [0.1, 0.2, 0.3, 0.5, 0.6, 0.8, 0.9, 1.3],
                "y": list("ynynynyn"),
            }
        ),
        "few": pd.DataFrame({"c": [1.0, 2, 3, 4, 5, 6, 7, 8], "a": [8.0, 7, 6, 5, 4, 3, 2, 1], "y": list("ynynynyn")}),
    }
    federation = Federation.from_frames(frames, target="y", columns="named")
    found = {}
    for client, common in Columns.of_clients(federation).common.items():
        names = next(c for c in federation if c.id == client).feature_names
        found[client] = [name.rpartition("__")[2] for name, shared in zip(names, common, strict=True) if shared]
    assert found == {"one": ["a"], "two": ["a"], "few": ["a"]}


@pytest.mark.long
def test_a_site_with_few_rows_learns_of_others_whatever_the_order_of_its_columns():
    federation = named(SITES)
    held = Columns({name: tuple(columns) for name, columns in SITES.items()})
    assert held.common["few"] == (False, True, True, True)
    assert Columns({"a": 3, "b": 3}).common["b"] == (True, True, True)
    assert Columns({"a": 3, "b": 2}).common["b"] == Columns({"a": ("x", "y"), "b": 2}).common["b"] == (False, False)
    assert in_order((False, True, True, True), SITES["few"]) == [3, 2, 1]
    helped, without = run(federation), run(federation, others=0.0)
    assert loss_at(helped, "few") < loss_at(without, "few") - 0.03
    few, *others = federation
    names = ["a", "x", "b", "c"]
    train, test = (
        replace(split, x=split.x[:, [SITES["few"].index(name) for name in names]]) for split in (few.train, few.test)
    )
    shuffled = replace(few, train=train, test=test, feature_names=tuple(names))
    again = run(replace(federation, clients=(shuffled, *others)))
    one = federation.clients[1]
    assert torch.allclose(helped.predict("one", one.test.x), again.predict("one", one.test.x), atol=1e-5)


@pytest.mark.long
def test_sites_without_a_common_column_predict_with_their_own_trees_alone():
    federation = named({"one": ["a", "b"], "two": ["c", "d"]})
    made = run(federation)
    assert any("no column is common to all clients" in note for note in made.notes)
    own = run(federation, others=0.0)
    for client in federation:
        assert made.predict(client.id, client.test.x).equal(own.predict(client.id, client.test.x))


def test_trees_are_sent_once():
    federation = named(SITES)
    server = serve(make("forest"), federation, model=Model(head=linear(2)), dtype=torch.float32)
    first = train(server, 1)
    before = {name: tensor.clone() for name, tensor in first.state.forests["one"].items()}
    record = server.round(2)
    assert record.bytes_up == 0 and record.bytes_down == 0
    assert all(torch.equal(server.state.forests["one"][name], tensor) for name, tensor in before.items())


@pytest.mark.long
def test_a_new_site_joins_with_trees_of_its_own_and_others():
    federation = named(SITES)
    made = run(replace(federation, clients=federation.clients[1:]))
    new = federation.clients[0]
    site = made.join(new)
    loss = -np.log(site.predict_proba(new.test.x)[np.arange(120), new.test.y]).mean()
    assert loss < loss_at(run(federation, others=0.0), "few") - 0.03
    with pytest.raises(PerfedError, match="client 'odd' has 2 of the columns on which others' trees split, not 3"):
        made.join(replace(new, id="odd", feature_names=("x", "c", "b", "z")))


@pytest.mark.long
def test_the_model_of_a_site_is_one_graph_also_as_onnx(tmp_path):
    import onnxruntime

    from perfed import load_site

    made = run(named(SITES), trees=8)
    site = made.site("few")
    x = made.federation.clients[0].test.x
    expected = made.predict("few", x).softmax(1).numpy()
    assert np.allclose(site.predict_proba(x), expected, atol=1e-6)
    assert np.allclose(load_site(site.save(tmp_path / "site")).predict_proba(x), expected, atol=1e-6)
    content, difference = onnx_file(site)
    (found,) = onnxruntime.InferenceSession(io.BytesIO(content).getvalue()).run(None, {"x": x.numpy()})
    assert np.abs(found - expected).max() < 1e-5 and difference < 1e-5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"placement": {"head": "shared"}}, "forest has no network to place; take 'head' out of placement"),
        ({"placement": {"head": "personal"}}, "forest has no network to place"),
        ({"class_weights": "balanced"}, "forest weighs all classes alike; remove class_weights"),
    ],
)
def test_what_trees_do_not_have_is_refused(settings, said):
    with pytest.raises(PerfedError, match=said):
        train(serve(make("forest", **settings), blobs()), 1)
