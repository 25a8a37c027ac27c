"""A mixture is the weighted mean of its models, also after it was saved, whatever the models are."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from engines import blobs, network
from site_models import done, frames
from sklearn.linear_model import LinearRegression, LogisticRegression

from perfed import Federation, load_site
from perfed.client_model.mixture import mix_models
from perfed.client_model.site_model import SiteModel
from perfed.errors import PerfedError
from perfed.experiment.kept_models import estimator_site

WEIGHTS = 0.25, 0.75


@cache
def table() -> Federation:
    tables = {name: frame.drop(columns="race") for name, frame in frames().items()}
    return Federation.from_frames(tables, target="sick", columns="union")


def estimator_model(federation: Federation) -> SiteModel:
    client, fitted = federation.clients[0], LinearRegression()
    if federation.num_classes is not None:
        fitted = LogisticRegression()
    fitted.fit(client.train.x.flatten(1).numpy(), client.train.y.numpy().ravel())
    return estimator_site("sklearn:linear", fitted, client, federation, seed=0, settings={})


def network_model(federation: Federation) -> SiteModel:
    return done("local", federation, network(federation.num_outputs)).site(federation.ids[0])


@pytest.mark.long
def test_a_saved_estimator_predicts_the_same(tmp_path):
    rows = frames()["north"].drop(columns=["sick", "race"])
    model = estimator_model(table())
    again = load_site(model.save(tmp_path / "north"))
    np.testing.assert_array_equal(again.predict_proba(rows), model.predict_proba(rows))
    assert again.facts == model.facts and list(again.predict(rows)) == list(model.predict(rows))
    client = table().clients[0]
    fitted = LogisticRegression().fit(client.train.x.numpy(), client.train.y.numpy())
    np.testing.assert_allclose(
        again.outputs(*again.check_inputs(client.train.x)), fitted.predict_proba(client.train.x.numpy()), rtol=1e-5
    )


def test_a_saved_estimator_predicts_in_the_unit_of_the_data(tmp_path):
    federation = blobs((20, 12), regression=True, test=9).standardised()
    x = federation.clients[0].test.x
    model = estimator_model(federation)
    np.testing.assert_array_equal(load_site(model.save(tmp_path / "c0")).predict(x), model.predict(x))


@pytest.mark.long
@pytest.mark.parametrize("first", ["estimator", "network"])
def test_a_mixture_of_a_table_is_the_weighted_mean_also_after_it_was_saved(first, tmp_path):
    models = {"estimator": estimator_model(table()), "network": network_model(table())}
    parts = dict(sorted(models.items(), reverse=first == "network"))
    mixture, rows = mix_models(parts, WEIGHTS, seed=3), frames()["north"].drop(columns=["sick", "race"])
    expected = sum(weight * part.predict_proba(rows) for weight, part in zip(WEIGHTS, parts.values(), strict=True))
    np.testing.assert_allclose(mixture.predict_proba(rows), expected, atol=1e-7)
    again = load_site(mixture.save(tmp_path / "north"))
    np.testing.assert_array_equal(again.predict_proba(rows), mixture.predict_proba(rows))
    assert again.facts == mixture.facts and again.facts["weights"] == dict(zip(parts, WEIGHTS, strict=True))
    assert again.facts["seed"] == 3 and list(again.classes_) == ["no", "yes"]


@pytest.mark.long
def test_models_with_other_inputs_are_not_mixed():
    parts = {"table": network_model(table()), "arrays": network_model(blobs((12, 9)))}
    with pytest.raises(PerfedError, match="site 'north': the models of a blend have different inputs or classes"):
        mix_models(parts, WEIGHTS)


@pytest.mark.long
@pytest.mark.parametrize("file", ["parts/0/model.skops", "parts/1/network.pt2", "table.zip"])
def test_a_damaged_or_missing_file_of_a_mixture_is_one_line(file, tmp_path):
    parts = {"estimator": estimator_model(table()), "network": network_model(table())}
    folder = mix_models(parts, WEIGHTS).save(tmp_path / "north")
    content = (folder / file).read_bytes()
    for damage in (content[:40], None):
        (folder / file).unlink()
        if damage is not None:
            (folder / file).write_bytes(damage)
        with pytest.raises(PerfedError) as error:
            load_site(folder)
        assert "\n" not in str(error.value) and str(folder) in str(error.value)
        (folder / file).write_bytes(content)
    load_site(folder)
