"""Rehearsals of a study on synthetic tables, which determine what the server may request and the sites may reply."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from perfed.data.federation import Federation
from perfed.data.labels import Task
from perfed.engine.initial import Initialiser
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, read
from perfed.method.method import Method
from perfed.privacy.apply import PrivateMethod
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.dry_run import ExchangeSettings, derive_allow_list

_ROWS, _COLUMNS = 40, 4


def build_private_method(study: Experiment) -> PrivateMethod | None:
    """Return the study's method as it runs under ``[privacy]`` at real sites, or ``None`` without that table.

    Raises:
        PerfedError: the method sends something that has no privacy mechanism, or the server would have to select by
            metrics, which stay at the sites.
    """
    if study.privacy is None:
        return None
    for key, is_set in (
        ("stop = 'validated'", study.evaluation.stop == "validated"),
        ("targets", study.evaluation.targets),
    ):
        if is_set:
            raise PerfedError(f"evaluation.{key}: under [privacy] losses and metrics stay at the sites; leave it out")
    if study.privacy.metrics == "noisy":
        _check_noisy_metrics(study)
    return study.in_private(len(study.data.options["files"]))


def _check_noisy_metrics(study: Experiment) -> None:
    """Refuse settings under which noisy metrics are not means over the test rows that the privacy plan counts."""
    evaluation, setting = study.evaluation, "privacy.metrics = 'noisy'"
    if get_task(study) == "survival":
        raise PerfedError(f"{setting}: no metric of survival is a mean over rows; leave it out")
    requirements = [("split", "test", "training and validation rows are counted in training")]
    requirements += [("when", "before", "models of a site's own are measured before the next round")]
    if study.secure_aggregation is not None:
        requirements += [("weights", "uniform", "under masks each site has the same weight")]
    for key, expected, reason in requirements:
        if getattr(evaluation, key) != expected:
            actual = getattr(evaluation, key)
            raise PerfedError(f"evaluation.{key} = '{actual}': with {setting} {reason}; allowed: {expected}")


def build_method(study: Experiment) -> Method:
    """Return the study's method as the server and the sites run it.

    Raises:
        PerfedError: under the same conditions as in :func:`build_private_method`.
    """
    private = build_private_method(study)
    return study.built_method if private is None else private.method


def list_sent_entries(study: Experiment) -> list[str]:
    """Return the names of all entries in a site's replies during a study, as ``entry`` or ``entry/part/...``.

    Raises:
        PerfedError: the method does not support such a federation or model.

    Example:
        >>> from perfed import validate
        >>> data = {"name": "tables", "files": ["a", "b"], "target": "ill"}
        >>> list_sent_entries(validate({"method": "fedavg", "rounds": 1, "data": data, "model": {"head": "linear"}}))
        ['shared/head.weight', 'shared/head.bias', 'num_samples']
    """
    return rehearse_study(study.to_toml()).entry_names


@lru_cache(maxsize=4)
def rehearse_study(study: str, task: Task | None = None) -> AllowList:
    """Rehearse a study on a synthetic table, and return what a site answers in it.

    The table has four columns, and two classes if the task is classification.

    Args:
        study: the study as TOML.
        task: the task; ``None`` for that of the study.

    Raises:
        PerfedError: the method does not support such a federation or model.
    """
    experiment = read(study, "the study")
    federation = _make_synthetic_federation(experiment, task)
    model, secure = experiment.model_for(federation), experiment.secure_aggregation
    initialiser = Initialiser(build_method(experiment), model, experiment.seed, experiment.torch_dtype, secure=secure)
    protocol = build_exchange_settings(experiment, federation.num_domains)
    try:
        return derive_allow_list(federation.clients[0], initialiser.info(federation), initialiser, protocol)
    except PerfedError as error:
        raise PerfedError(f"a rehearsal on synthetic tables failed: {error}") from None


def build_exchange_settings(study: Experiment, domains: int) -> ExchangeSettings:
    """Return the study's settings of exchanges that do not depend on the method, for ``domains`` domains."""
    evaluation = study.evaluation
    return ExchangeSettings(
        rounds=study.rounds,
        sites=len(study.data.options["files"]),
        domains=domains,
        participation=study.build_participation(),
        split=evaluation.split,
        validated=evaluation.stop == "validated",
        metrics=evaluation.requested_metrics,
        scores_held_classes=evaluation.classes == "held",
        noisy=study.privacy is not None and study.privacy.metrics == "noisy",
    )


def get_task(study: Experiment) -> Task | None:
    """Return the task of the study, or ``None`` if only the tables determine it."""
    data = study.data.options
    task: Task = data["task"]
    return "survival" if data["event"] else None if data["task"] == "auto" else task


def _make_synthetic_federation(study: Experiment, task: Task | None) -> Federation:
    """Return a federation of one synthetic site that matches the data settings of the study."""
    data = study.data.options
    federation = make_synthetic_site(
        task or get_task(study) or "classification", _COLUMNS, domains=bool(data["domain"])
    )
    federation = replace(federation, scaled_inputs=data["columns"] != "own")
    if data["columns"] != "named":
        return federation
    return replace(federation, clients=tuple(replace(client, held=(True,) * (_COLUMNS - 1)) for client in federation))


def make_synthetic_site(task: Task, columns: int, classes: int = 2, *, domains: bool = False) -> Federation:
    """Return a federation of one synthetic site with ``columns`` columns, and ``classes`` classes if there are any."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_ROWS, columns)).astype(np.float32)
    y: Any = {
        "classification": np.arange(_ROWS) % classes,
        "regression": x.sum(1),
        "survival": np.stack([np.exp(x[:, 0]), np.arange(_ROWS) % 2], axis=1),
    }[task]
    site: dict[str, Any] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    if domains:
        domain = np.arange(_ROWS) // 2 % 2
        site |= {"domain_train": domain, "domain_test": domain}
    return Federation.from_arrays(
        {"made up": site}, task=task, num_classes=classes if task == "classification" else None
    )
