"""The files with scikit-learn's models of a run, and the model of a client with such an estimator."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from perfed.client_model.estimator import Estimator, read_estimator, save_estimator
from perfed.client_model.facts import describe_model
from perfed.client_model.site_model import SiteModel
from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.experiment.estimators import is_pooled
from perfed.run.directory import RunDirectory
from perfed.system import create_private_files, versions
from perfed.tables.site import table_of

FOLDER, POOLED_FILE = "estimators", "pooled.skops"
MOST = 200
"""Largest number of clients whose own models are kept; with more clients, none is."""
NOT_KEPT = f"the models are not kept, as there are more than {MOST}"
NO_SKOPS = "the models are not kept, as skops is not installed; it comes with the extra 'tables'"
ODD_TYPES = "the models are not kept, as they hold types that are not scikit-learn's own"


def keep(path: Path, name: str, models: Mapping[str, Any], ids: list[str]) -> str:
    """Save a run's fitted models in ``path``; return a note if they are not saved, otherwise an empty text.

    Args:
        path: the run's directory.
        name: the name of the baseline.
        models: the fitted models by client.
        ids: the ids of all clients, sorted.
    """
    if find_spec("skops") is None:
        return NO_SKOPS
    if is_pooled(name):
        named = {POOLED_FILE: next(iter(models.values()))} if models else {}
    elif len(models) > MOST:
        return NOT_KEPT
    else:
        named = {_name_file(ids.index(client)): model for client, model in models.items()}
    path.mkdir(parents=True, exist_ok=True)
    with create_private_files():
        are_saved = [save_estimator(plain_estimator(model), path / FOLDER / file) for file, model in named.items()]
    return "" if all(are_saved) else ODD_TYPES


def model_files(path: Path) -> list[str]:
    """Return the names of the files that :func:`keep` wrote into the directory ``path``."""
    return [f"{FOLDER}/{file.name}" for file in sorted((path / FOLDER).glob("*.skops"))]


def _name_file(place: int) -> str:
    return f"{place:06d}.skops"


def plain_estimator(model: Any) -> Any:
    """Return a Cox model as the linear model of scikit-learn that it predicts with, other models unchanged."""
    from sklearn.linear_model import LinearRegression

    from perfed.experiment.cox import Cox

    if not isinstance(model, Cox):
        return model
    line = LinearRegression(fit_intercept=False)
    line.coef_, line.intercept_, line.n_features_in_ = model.coefficients[None], np.zeros(1), len(model.coefficients)
    return line


def load_kept(path: Path, name: str, client: Client, ids: list[str]) -> Any:
    """Return the estimator of a client that :func:`keep` wrote into ``path``; no code in its file is run.

    Args:
        path: the run's directory.
        name: the name of the baseline.
        client: the client.
        ids: the ids of all clients, sorted.

    Raises:
        PerfedError: the estimator was not kept, has other inputs than the client, or its file is damaged.
    """
    file = path / FOLDER / (POOLED_FILE if is_pooled(name) else _name_file(ids.index(client.id)))
    if not file.exists():
        raise PerfedError(f"{file}: there is no model of client '{client.id}'; train again: 'perfed compare'")
    estimator = read_estimator(file)
    if estimator.n_features_in_ != int(np.prod(client.input_shape)):
        raise PerfedError(f"{file}: is of {estimator.n_features_in_} inputs, and client '{client.id}' has others")
    RunDirectory(path).refuse_damage([f"{FOLDER}/{file.name}"])
    return estimator


def estimator_site(
    name: str, fitted: Any, client: Client, federation: Federation, *, seed: int, settings: Mapping[str, Any]
) -> SiteModel:
    """Return the model of a client with an estimator that was fitted to its data, and its metrics on its test data.

    Args:
        name: the name of the baseline.
        fitted: the estimator.
        client: the client.
        federation: the federation of the client.
        seed, settings: those with which the estimator was fitted.
    """
    training_facts = {"method": name, "rounds": 0, "seed": seed, "settings": settings}
    training_facts["versions"] = versions("scikit-learn", version("scikit-learn"))
    facts = describe_model(client, federation, dtype="float32", domains=None, **training_facts)
    predictor = Estimator(plain_estimator(fitted), federation.num_classes, federation.target_scale)
    return SiteModel(facts, predictor, table_of(client), training_rows=client.train).with_metrics(client, federation)
