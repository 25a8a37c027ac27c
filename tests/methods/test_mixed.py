"""Mixed between its two ends: a model per site, and one for all but for intercepts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from data_files import schools
from engines import blobs, serve, train
from sklearn.linear_model import LogisticRegression, Ridge

from perfed import Federation, Model, PerfedError, Run, linear
from perfed.methods.mixed import Mixed
from perfed.testing import checks

MUCH, LITTLE = 1e9, 1e-9


def federation(task="binary", sizes=(40, 25, 60), departure=0.5, seed=0, p=4, factor=1.0, shift=0.0):
    """Normal inputs, multiplied by ``factor`` and moved by ``shift`` once the targets have been drawn."""
    generator = np.random.default_rng(seed)
    truth, clients = generator.normal(size=(p, 3)), {}
    for i, n in enumerate(sizes):
        n_all = n + 200
        x = generator.normal(size=(n_all, p))
        eta = x @ (truth + departure * generator.normal(size=truth.shape)) + generator.normal(size=3)
        gumbel = generator.gumbel(size=eta.shape)
        y = {
            "binary": (eta[:, 0] > generator.logistic(size=n_all)).astype(int),
            "multinomial": (eta + gumbel).argmax(1),
            "regression": eta[:, :1] + generator.normal(size=(n_all, 1)),
            "survival": np.column_stack([generator.exponential(np.exp(-eta[:, 0])), generator.integers(0, 2, n_all)]),
        }[task]
        x = factor * x + shift
        clients[f"c{i}"] = {"x_train": x[:n], "y_train": y[:n], "x_test": x[n:], "y_test": y[n:]}
    return Federation.from_arrays(clients, task="survival" if task == "survival" else None)


def fitted(data, rounds=8, **settings):
    return train(serve(Mixed(**settings), data, model=Model(head=linear(data.num_outputs))), rounds)


def outputs(server):
    """What each client's own model says of its test rows."""
    (cohort,) = server.own_models(server.federation.ids, 99)
    said = server.method.predict(cohort, torch.stack([client.test.x for client in cohort.clients]))
    return said[[cohort.ids.index(client) for client in server.federation.ids]]


@pytest.mark.parametrize("task", ["binary", "multinomial"])
def test_with_no_shared_slopes_it_is_a_logistic_regression_per_site(task):
    data = federation(task)
    for client, found in zip(data, outputs(fitted(data, shared_pull=MUCH, site_pull=2.0)), strict=True):
        expected = LogisticRegression(C=0.5, tol=1e-10, max_iter=5000).fit(client.train.x, client.train.y)
        assert found.softmax(1).numpy() == pytest.approx(expected.predict_proba(client.test.x), abs=1e-4)


@pytest.mark.parametrize("task", ["binary", "multinomial"])
def test_with_no_departures_it_is_one_model_with_an_intercept_for_each_site(task):
    data, far = federation(task), 1e3  # an indicator as large as this is as good as not penalised
    count = len(data)

    def stacked(split):
        rows = [(np.asarray(client.split(split).x), far * np.eye(count)[i]) for i, client in enumerate(data)]
        return np.concatenate([np.column_stack([x, np.tile(one, (len(x), 1))]) for x, one in rows])

    y = np.concatenate([client.train.y for client in data])
    model = LogisticRegression(C=0.5, fit_intercept=False, solver="newton-cg", tol=1e-10, max_iter=5000)
    expected = model.fit(stacked("train"), y).predict_proba(stacked("test"))
    found = outputs(fitted(data, shared_pull=2.0, site_pull=MUCH)).flatten(0, 1)
    assert found.softmax(1).numpy() == pytest.approx(expected, abs=1e-4)


def test_of_values_it_is_ridge_regression_per_site():
    data = federation("regression")
    for client, found in zip(data, outputs(fitted(data, shared_pull=MUCH, site_pull=3.0)), strict=True):
        expected = Ridge(3.0).fit(client.train.x, client.train.y).predict(client.test.x)
        assert found.numpy().ravel() == pytest.approx(expected.ravel(), abs=1e-4)


def test_of_survival_it_is_a_cox_model_per_site():
    lifelines, pandas = pytest.importorskip("lifelines"), pytest.importorskip("pandas")
    data = federation("survival")
    for client, found in zip(data, outputs(fitted(data, shared_pull=MUCH, site_pull=LITTLE)), strict=True):
        table = pandas.DataFrame(np.column_stack([client.train.x, client.train.y])).rename(columns=str)
        slopes = lifelines.CoxPHFitter().fit(table, "4", "5").params_.to_numpy()
        assert found.numpy().ravel() == pytest.approx(client.test.x.numpy() @ slopes, abs=1e-3)


def test_values_have_the_best_linear_unbiased_prediction_of_a_mixed_model():
    data = federation("regression", sizes=(12, 9, 15))
    server = fitted(data, rounds=1, shared_pull=0.5, site_pull=2.0)
    rows = [(c.train.x.numpy(), c.train.y.numpy().ravel()) for c in data]
    x, y = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    site = np.repeat(np.arange(len(rows)), [len(own) for own, _ in rows])
    same = site[:, None] == site
    covariance = np.eye(len(y)) + x @ x.T / 0.5 + same * (x @ x.T) / 2.0
    ones = np.eye(len(rows))[site]
    inverse = np.linalg.inv(covariance)
    bias = np.linalg.solve(ones.T @ inverse @ ones, ones.T @ inverse @ y)
    residual = inverse @ (y - ones @ bias)
    for i, (client, found) in enumerate(zip(data, outputs(server), strict=True)):
        slopes = x.T @ residual / 0.5 + x[site == i].T @ residual[site == i] / 2.0
        expected = bias[i] + client.test.x.numpy() @ slopes
        assert found.numpy().ravel() == pytest.approx(expected, abs=1e-3)


@pytest.mark.long
def test_of_schools_it_is_the_mixed_model_of_statsmodels():
    """Fixed slopes and levels of schools, random departures of one variance; by restricted maximum likelihood."""
    models = pytest.importorskip("statsmodels.regression.mixed_linear_model")
    x, y, rows = schools([0, 1, 5, 7, 8])
    clients = {f"{one:03d}": {"x_train": x[own], "y_train": y[own][:, None]} for one, own in enumerate(rows)}
    found = fitted(Federation.from_arrays(clients), 4, shared_pull=1e-7).sets["pooled"]
    levels, names = np.column_stack(rows).astype(float), [f"x{column}" for column in range(x.shape[1])]
    departures = models.VCSpec(["departure"], [[names] * len(rows)], [[x[own] for own in rows]])
    model = models.MixedLM(y, np.column_stack([levels, x]), groups=np.column_stack(rows).argmax(1), exog_vc=departures)
    expected = model.fit(reml=True, method="powell")
    assert float(found["of_site"]) == pytest.approx(expected.scale / expected.vcomp[0], rel=0.02)
    assert found["weight"].numpy().ravel() == pytest.approx(expected.fe_params[len(rows) :], abs=1e-3)


@pytest.mark.long
def test_five_rounds_are_as_good_as_thirty():
    data = federation("multinomial")
    for settings in ({}, {"shared_pull": 1.0, "site_pull": 5.0}):
        assert torch.allclose(outputs(fitted(data, 5, **settings)), outputs(fitted(data, 30, **settings)), atol=0.02)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", ["binary", "multinomial", "regression", "survival"])
def test_without_hessians_it_goes_to_the_same_models(task):
    data, settings = federation(task), {"shared_pull": 3.0, "site_pull": 0.5}
    found = outputs(fitted(data, 40, solver="gradient", **settings))
    assert torch.allclose(found, outputs(fitted(data, 20, **settings)), atol=1e-3)


def test_too_many_columns_for_a_hessian_are_refused_with_a_way_out():
    x = np.random.default_rng(0).normal(size=(6, 4001))
    data = Federation.from_arrays({"wide": {"x_train": x, "y_train": np.arange(6) % 2}})
    with pytest.raises(PerfedError, match="solver=gradient"):
        fitted(data, 1)
    assert torch.isfinite(fitted(data, 1, solver="gradient").sets["pooled"]["weight"]).all()


@pytest.mark.long
@pytest.mark.parametrize("departure", [0.1, 2.0])
def test_sharing_pays_where_sites_are_alike_and_does_not_hurt_where_they_are_not(departure):
    def loss(**settings):
        losses = []
        for seed in range(4):
            data = federation("binary", sizes=(15,) * 8, departure=departure, seed=seed, p=8)
            values = fitted(data, **settings).evaluate("test").values()
            losses.append(np.mean([value["accuracy"] for value in values]))
        return 1 - np.mean(losses)

    found, alone = loss(), loss(shared_pull=MUCH, site_pull=1.0)
    assert found < alone - 0.04 if departure < 1 else found < alone + 0.015


@pytest.mark.long
def test_the_pull_to_what_is_shared_is_weaker_where_sites_differ():
    pulls = [
        float(fitted(federation("binary", sizes=(200,) * 6, departure=d)).sets["pooled"]["of_site"]) for d in (0.05, 1)
    ]
    assert pulls[1] < 5 < 50 < pulls[0]


def test_a_site_in_which_a_column_does_not_vary_has_no_say_in_its_slope():
    data = federation("binary", sizes=(40, 25))
    settings = {"shared_pull": 1.0, "site_pull": 3.0}
    x = np.zeros((30, 4))
    blind = {"blind": {"x_train": x, "y_train": np.arange(30) % 2, "x_test": x, "y_test": np.arange(30) % 2}}
    arrays = {c.id: {"x_train": c.train.x, "y_train": c.train.y, "x_test": c.test.x, "y_test": c.test.y} for c in data}
    weights = [
        fitted(Federation.from_arrays({**arrays, **more}), **settings).sets["pooled"]["weight"] for more in ({}, blind)
    ]
    assert torch.allclose(*weights, atol=1e-8)


VARIED = ("columns", "sites", "both")
UNITS = {
    "small": (0.01, 0.0),
    "large": (1e4, 0.0),
    "of each column": (np.array([0.01, 1e4, 1.0, 37.0]), 0.0),
    "not from 0": (np.array([0.01, 1e4, 1.0, 37.0]), np.array([3.0, -2e4, 7.0, 100.0])),
}


def centred(predictions):
    """Predictions of values and log hazards less their mean at each site, as hazards are known but for a factor."""
    return predictions - predictions.mean(1, keepdim=True)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("task", ["binary", "multinomial", "regression", "survival"])
def test_models_do_not_depend_on_the_units_of_columns(task, units):
    factor, shift = UNITS[units]
    expected, found = (
        outputs(fitted(federation(task, **changed), 4)) for changed in ({}, {"factor": factor, "shift": shift})
    )
    change = centred if task == "survival" else torch.Tensor.clone
    assert torch.allclose(change(found), change(expected), atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"site_pull": "both"}, {"solver": "gradient"}], ids=str)
def test_nor_do_they_with_other_settings(settings):
    factor, shift = UNITS["not from 0"]
    expected, found = (
        outputs(fitted(federation("binary", factor=f, shift=s), 4, **settings))
        for f, s in ((1.0, 0.0), (factor, shift))
    )
    assert torch.allclose(found, expected, atol=1e-5)  # L-BFGS stops a little earlier or later


@pytest.mark.long
def test_nor_does_a_site_that_joins_or_that_has_other_columns_than_the_rest():
    def said(factor):
        *first, late = federation("binary", sizes=(40, 25, 60, 50), factor=factor)
        run = Run(
            replace(federation("binary"), clients=tuple(first)),
            Mixed(),
            Model(head=linear(2)),
            rounds=4,
            dtype=torch.float64,
        )
        run.execute()
        return np.asarray(run.join(late).predict_proba(late.test.x))

    def alone(factor):
        narrow = federation("binary", sizes=(30,), p=3, seed=5, factor=factor)
        wide = federation("binary", sizes=(40,), factor=factor)
        clients = (*wide, replace(narrow.clients[0], id="narrow"))
        (cohort,) = fitted(replace(wide, clients=clients), 2).own_models(["c0"], 99)
        return cohort.model["head.weight"][0]

    assert said(1e3) == pytest.approx(said(1.0), abs=1e-6)
    assert (alone(1e3) * 1e3).numpy() == pytest.approx(alone(1.0).numpy(), abs=1e-6)


def test_empirical_pulls_are_those_of_columns_with_a_deviation_of_1_within_sites():
    data = federation("regression", factor=np.array([0.01, 1e4, 1.0, 37.0]))
    server = fitted(data, 3)
    x = [np.asarray(client.train.x) for client in data]
    squares = sum(((own - own.mean(0)) ** 2).sum(0) for own in x)
    deviation = np.sqrt(squares / sum(len(own) - 1 for own in x))
    same = federation("regression", factor=np.array([0.01, 1e4, 1.0, 37.0]) / deviation)
    pulls = {
        name: float(server.sets["pooled"][key]) for name, key in (("shared_pull", "of_all"), ("site_pull", "of_site"))
    }
    assert torch.allclose(outputs(server), outputs(fitted(same, 3, **pulls)), atol=1e-6)


@pytest.mark.parametrize("pull", ["shared_pull", "site_pull"])
def test_a_pull_that_is_a_number_is_in_the_units_of_the_inputs(pull):
    """The other one is found as well in small units as in large ones, beyond the range for standardised columns."""
    found = [fitted(federation("regression", factor=f), 3, **{pull: 2.0 * f**2}) for f in (1.0, 1e-3, 1e4)]
    for one in found[1:]:
        assert torch.allclose(outputs(one), outputs(found[0]), atol=1e-6)


def test_a_column_that_varies_in_no_training_row_changes_no_prediction():
    data = federation("binary")
    arrays = {}
    for client in data:
        x, x_test = (np.column_stack([part.x, np.full(len(part.x), 1e6)]) for part in (client.train, client.test))
        x_test[:, -1] = np.arange(len(x_test))
        arrays[client.id] = {"x_train": x, "y_train": client.train.y, "x_test": x_test, "y_test": client.test.y}
    found = outputs(fitted(Federation.from_arrays(arrays), 4))
    assert torch.allclose(found, outputs(fitted(data, 4)), atol=1e-6)


@pytest.mark.parametrize("columns", ["named", "common"])
def test_the_columns_of_tables_are_not_scaled_again(columns):
    """Empirical pulls are those of the inputs as they are."""
    pandas = pytest.importorskip("pandas")
    frames = {
        client.id: pandas.DataFrame(np.asarray(client.train.x), columns=list("abcd")).assign(y=client.train.y.numpy())
        for client in federation("regression")
    }
    data = Federation.from_frames(frames, target="y", columns=columns)
    found = fitted(data, 3).sets["pooled"]
    same = fitted(data, 3, shared_pull=float(found["of_all"]), site_pull=float(found["of_site"])).sets["pooled"]
    assert torch.allclose(found["weight"], same["weight"], atol=1e-6)


def factors(server):
    """Found pulls of departures of each site and column."""
    sets = server.sets
    columns = sets["pooled"].get("columns", torch.ones(4)).numpy()
    sites = [float(row["of_site"]) for _, row in sorted(sets.get("factor", {}).items())] or np.ones(len(sets["said"]))
    return float(sets["pooled"]["of_site"]) * np.outer(sites, columns)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("site_pull", VARIED)
def test_with_factors_and_no_shared_slopes_it_is_a_logistic_regression_with_a_strength_for_each_column(site_pull):
    data = federation("binary", departure=1.0)
    server = fitted(data, shared_pull=MUCH, site_pull=site_pull)
    found = factors(server)
    assert len(np.unique(found.round(9))) == {"columns": 4, "sites": 3, "both": 12}[site_pull]
    for client, said, pulls in zip(data, outputs(server), found, strict=True):
        x, x_test = (np.asarray(part.x) / np.sqrt(pulls) for part in (client.train, client.test))
        expected = LogisticRegression(C=1.0, tol=1e-10, max_iter=5000).fit(x, client.train.y)
        assert said.softmax(1).numpy() == pytest.approx(expected.predict_proba(x_test), abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("site_pull", VARIED)
def test_with_factors_sites_that_say_the_same_get_one_model(site_pull):
    one, *_ = federation("regression", sizes=(60,))
    arrays = {"x_train": one.train.x, "y_train": one.train.y, "x_test": one.test.x, "y_test": one.test.y}
    data, rest = Federation.from_arrays({f"c{i}": arrays for i in range(3)}), {"shared_pull": 1.0}
    found, expected = (outputs(fitted(data, 4, site_pull=pull, **rest)) for pull in (site_pull, MUCH))
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("site_pull", "departure"), [("columns", (2, 0, 0, 0)), ("sites", ((2,), *[(0.05,)] * 7))])
def test_factors_pay_where_columns_or_sites_differ(site_pull, departure):
    def error(seed, pull):
        generator = np.random.default_rng(seed)
        truth, clients = generator.normal(size=4), {}
        for i, depart in enumerate(np.broadcast_to(departure, (8, 4))):
            x = generator.normal(size=(212, 4))
            y = x @ (truth + depart * generator.normal(size=4)) + generator.normal(size=212)
            clients[f"c{i}"] = {"x_train": x[:12], "y_train": y[:12], "x_test": x[12:], "y_test": y[12:]}
        server = fitted(Federation.from_arrays(clients, task="regression"), 2, site_pull=pull)
        return np.mean([value["mse"] for value in server.evaluate("test").values()])

    gains = [error(seed, "empirical") - error(seed, site_pull) for seed in range(6)]
    assert np.mean(gains) > 0.03 and np.mean(gains) > 2 * np.std(gains) / 6**0.5


def test_what_a_site_sends_is_the_same_whatever_varies():
    def sent(pull):
        server = fitted(federation("binary"), 1, site_pull=pull)
        return {name: value.shape for name, value in server.sets["said"]["c0"].items()}

    assert sent("both") == sent("empirical")


@pytest.mark.long
def test_with_factors_engines_agree():
    checks.check_engines(lambda **given: Mixed(**{**given, "site_pull": "both"}))


@pytest.mark.long
def test_with_factors_a_resumed_run_ends_with_the_same_bits():
    checks.check_resumed_run(lambda **given: Mixed(**{**given, "site_pull": "both"}))


@pytest.mark.long
def test_a_site_that_joins_gets_the_factors_of_columns():
    data = federation("binary", sizes=(40, 25, 60, 50), departure=1.0)
    *first, late = data
    method = Mixed(shared_pull=MUCH, site_pull="both")
    run = Run(replace(data, clients=tuple(first)), method, Model(head=linear(2)), rounds=8)
    run.execute()
    site = run.join(late)
    pulls = factors(run.server)[0] / float(run.server.sets["factor"]["c0"]["of_site"])
    x, x_test = (np.asarray(part.x) / np.sqrt(pulls) for part in (late.train, late.test))
    expected = LogisticRegression(C=1.0, tol=1e-10, max_iter=5000).fit(x, late.train.y).predict_proba(x_test)
    assert np.asarray(site.predict_proba(late.test.x)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"class_weights": "balanced"}, "class_weights"),
        ({"site_pull": -1.0}, "site_pull"),
        ({"site_pull": "x"}, "site_pull"),
        ({"site_pull": "columns", "solver": "gradient"}, "site_pull = 'columns'.*Hessians.*'empirical' or a number"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        fitted(blobs(), rounds=1, **settings)


def test_the_last_stage_must_be_linear():
    with pytest.raises(PerfedError, match="head=linear"):
        train(serve(Mixed(), blobs(), model=Model(head=lambda shape: torch.nn.LSTM(shape[0], 3))), 1)
