"""Models of scikit-learn stay with their run: what is read back says what was fitted, and damage is one line."""

from __future__ import annotations

import stat
from dataclasses import replace

import numpy as np
import pytest
import skops.io
from engines import blobs
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from perfed.client_model.estimator import outputs_of, read_estimator, save_estimator
from perfed.client_model.export import export, onnx_file
from perfed.errors import PerfedError
from perfed.experiment import kept_models
from perfed.experiment.config import validate
from perfed.experiment.sklearn_run import SklearnRun
from perfed.testing.federations import make_survival_data

TABLE = {"method": "local", "rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}}
NAMES = ("logistic", "random-forest", "gradient-boosting", "svc", "majority")
VALUES = ("ridge", "random-forest", "gradient-boosting", "mean")


def finished(name, federation, path):
    run = SklearnRun(name, validate(TABLE), federation, path)
    run.execute()
    return run, SklearnRun(name, validate(TABLE), federation, path)


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, "pooled"])
def test_classifiers_are_read_back_as_they_were(name, tmp_path):
    full = "pooled:logistic" if name == "pooled" else f"sklearn:{name}"
    federation = blobs((30, 24, 20), labels=[[0, 1, 2], [0, 2], [0, 1, 2]], test=25)
    run, kept = finished(full, federation, tmp_path / "run")
    for client in federation:
        site, x = kept.site(client.id), client.test.x.numpy()
        fitted = run.fitted(client)
        assert site.predict(x).tolist() == outputs_of(fitted, x, 3).argmax(1).tolist()
        if site.has_probabilities:
            found = site.predict_proba(x)
            assert np.allclose(found[:, fitted.classes_], fitted.predict_proba(x), atol=1e-6)
            assert np.allclose(found.sum(1), 1)
        else:
            with pytest.raises(PerfedError, match=f"site '{client.id}': sklearn:svc has no probabilities"):
                site.predict_proba(x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", VALUES)
def test_values_are_read_back_in_their_own_unit(name, tmp_path):
    federation = blobs((30, 24), regression=True, test=25).standardised()
    run, kept = finished(f"sklearn:{name}", federation, tmp_path / "run")
    for client in federation:
        x = client.test.x.numpy()
        expected = federation.target_scale.mean[0] + federation.target_scale.std[0] * run.fitted(client).predict(x)
        assert np.allclose(kept.site(client.id).predict(x).ravel(), expected.ravel(), atol=1e-5)


@pytest.mark.long
def test_a_cox_model_is_kept_as_its_coefficients(tmp_path):
    federation = make_survival_data()
    run, kept = finished("sklearn:cox", federation, tmp_path / "run")
    for client in federation:
        x = client.test.x.numpy()
        assert np.allclose(kept.site(client.id).predict(x), run.fitted(client).predict(x), atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["logistic", "random-forest", "gradient-boosting"])
def test_onnx_says_the_same_also_of_classes_that_a_site_does_not_hold(name, tmp_path):
    import onnxruntime

    federation = blobs((30, 24), labels=[[0, 1, 2], [0, 2]], test=25)
    _, kept = finished(f"sklearn:{name}", federation, tmp_path / "run")
    site = kept.site("c1")
    content, difference = onnx_file(site)
    x = federation.clients[1].test.x.float().numpy()
    (found,) = onnxruntime.InferenceSession(content).run(None, {"x": x})
    assert found.shape == (25, 3) and np.allclose(found, site.predict_proba(x), atol=1e-5) and difference < 1e-5
    with pytest.raises(PerfedError, match=f"sklearn:{name} has no network of torch's; allowed: --format onnx"):
        export(site, tmp_path / "site.pt2", "pt2")


@pytest.mark.long
def test_files_are_for_their_user_alone_and_hold_no_code(tmp_path):
    federation = blobs((30,))
    _, kept = finished("sklearn:random-forest", federation, tmp_path / "run")
    (file,) = (tmp_path / "run" / "estimators").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    model = read_estimator(file)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(PerfedError, match=r"000000.skops: is damaged, or no model of scikit-learn \(") as error:
        kept.site("c0")
    assert "\n" not in str(error.value)
    odd = make_pipeline(FunctionTransformer(finished), model)
    assert not save_estimator(odd, tmp_path / "odd.skops") and not (tmp_path / "odd.skops").exists()
    skops.io.dump(odd, tmp_path / "odd.skops")
    with pytest.raises(PerfedError, match=r"odd\.skops: is damaged, or no model"):
        read_estimator(tmp_path / "odd.skops")
    skops.io.dump({"a": 1}, tmp_path / "odd.skops")
    with pytest.raises(PerfedError, match=r"no model of scikit-learn \(it does not predict\)"):
        read_estimator(tmp_path / "odd.skops")


def test_a_new_site_joins_with_a_model_of_its_own_rows(tmp_path):
    """The same as scikit-learn's own fit on the training rows of the new site; nothing of the run changes."""
    whole = blobs((30, 24, 20), test=25)
    clients = whole.clients
    run, again = finished("sklearn:logistic", replace(whole, clients=clients[:2]), tmp_path / "run")
    expected = LogisticRegression(max_iter=1000).fit(clients[2].train.x.numpy(), clients[2].train.y.numpy())
    x = clients[2].test.x.numpy()
    for one in (run, again):
        assert np.allclose(one.join(clients[2]).predict_proba(x), expected.predict_proba(x), atol=1e-6)
    again.join(clients[2]).save(tmp_path / "run" / "joined" / "c2")
    assert np.allclose(again.site("c2").predict_proba(x), expected.predict_proba(x), atol=1e-6)
    with pytest.raises(PerfedError, match="unknown client 'x'; ids are: c0, c1; joined: c2"):
        again.site("x")
    pooled = SklearnRun("pooled:logistic", validate(TABLE), whole)
    with pytest.raises(PerfedError, match="pooled:logistic: no site can join"):
        pooled.join(clients[2])


@pytest.mark.parametrize("name", ["sklearn:logistic", "pooled:logistic"])
def test_a_run_in_memory_has_the_models_that_a_run_in_a_directory_has(name, tmp_path):
    federation = blobs((30, 24), test=25)
    _, kept = finished(name, federation, tmp_path / "run")
    memory = SklearnRun(name, validate(TABLE), federation)
    for client in federation:
        assert (memory.site(client.id).predict(client.test.x) == kept.site(client.id).predict(client.test.x)).all()


@pytest.mark.long
def test_trees_that_lead_elsewhere_are_refused(tmp_path):
    federation = blobs((30,))
    run, kept = finished("sklearn:random-forest", federation, tmp_path / "run")
    (file,) = (tmp_path / "run" / "estimators").iterdir()
    model = run.fitted(federation.clients[0])
    model.estimators_[3].tree_.children_left[0] = 10**6
    assert save_estimator(model, file)
    with pytest.raises(PerfedError, match="a tree leads to a node that it does not have"):
        kept.site("c0")


def test_what_is_not_there_is_said(tmp_path):
    federation = blobs((30, 20))
    _, kept = finished("sklearn:logistic", federation, tmp_path / "run")
    with pytest.raises(PerfedError, match="unknown client 'x'; ids are: c0, c1"):
        kept.site("x")
    (tmp_path / "run" / "estimators" / "000001.skops").unlink()
    with pytest.raises(PerfedError, match=r"000001\.skops: there is no model of client 'c1'"):
        kept.site("c1")
    with pytest.raises(PerfedError, match=r"is of 4 inputs, and client 'c0' has others"):
        SklearnRun("sklearn:logistic", validate(TABLE), blobs((30, 20), dims=(5,)), tmp_path / "run").site("c0")


def test_notes_say_why_models_are_not_kept(tmp_path, monkeypatch):
    federation = blobs((30, 20))
    monkeypatch.setattr(kept_models, "MOST", 1)
    summary = SklearnRun("sklearn:logistic", validate(TABLE), federation, tmp_path / "many").execute()
    assert kept_models.NOT_KEPT in summary["notes"] and not (tmp_path / "many" / "estimators").exists()
    monkeypatch.setattr(kept_models, "find_spec", lambda name: None)
    summary = SklearnRun("sklearn:logistic", validate(TABLE), federation, tmp_path / "none").execute()
    assert kept_models.NO_SKOPS in summary["notes"] and not (tmp_path / "none" / "estimators").exists()
