"""What a study's server asks of sites and what they reply, found by rehearsing it on made-up tables."""

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


def private_in(study: Experiment) -> PrivateMethod | None:
    """The study's method under ``[privacy]``, as real sites run it; ``None`` without that table.

    Raises:
        PerfedError: something leaves that has no mechanism, or the server would choose by metrics, which do not leave.
    """
    if study.privacy is None:
        return None
    for key, given in (
        ("stop = 'validated'", study.evaluation.stop == "validated"),
        ("targets", study.evaluation.targets),
    ):
        if given:
            raise PerfedError(f"evaluation.{key}: under [privacy] losses and metrics stay at the sites; leave it out")
    if study.privacy.metrics == "noisy":
        _check_noisy(study)
    return study.in_private(len(study.data.options["files"]))


def _check_noisy(study: Experiment) -> None:
    """Refuse metrics with noise that are of other models or rows than is counted, or of no rows one by one."""
    evaluation, said = study.evaluation, "privacy.metrics = 'noisy'"
    if task_of(study) == "survival":
        raise PerfedError(f"{said}: no metric of survival is a mean over rows; leave it out")
    allowed = [("split", "test", "training and validation rows are counted in training")]
    allowed += [("when", "before", "models of a site's own are measured before the next round")]
    if study.secure_aggregation is not None:
        allowed += [("weights", "uniform", "under masks each site has the same weight")]
    for key, value, why in allowed:
        if getattr(evaluation, key) != value:
            given = getattr(evaluation, key)
            raise PerfedError(f"evaluation.{key} = '{given}': with {said} {why}; allowed: {value}")


def method_of(study: Experiment) -> Method:
    """The study's method as server and sites run it.

    Raises:
        PerfedError: as :func:`private_in`.
    """
    private = private_in(study)
    return study.built_method if private is None else private.method


def entries_sent(study: Experiment) -> list[str]:
    """Names of all that a site's replies hold, from the preparation to the end: ``entry``, or ``entry/part/...``.

    Raises:
        PerfedError: the method refuses such a federation or model.

    Example:
        >>> from perfed import validate
        >>> data = {"name": "tables", "files": ["a", "b"], "target": "ill"}
        >>> entries_sent(validate({"method": "fedavg", "rounds": 1, "data": data, "model": {"head": "linear"}}))
        ['shared/head.weight', 'shared/head.bias', 'num_samples']
    """
    return allowed_in(study.to_toml()).entry_names


@lru_cache(maxsize=4)
def allowed_in(study: str, task: Task | None = None) -> AllowList:
    """What a site answers in the study, a TOML text, where its table has four columns, and two classes if any.

    ``task``: in place of what the study says.

    Raises:
        PerfedError: the method refuses such a federation or model.
    """
    experiment = read(study, "the study")
    federation = _made_up(experiment, task)
    model, secure = experiment.model_for(federation), experiment.secure_aggregation
    initialiser = Initialiser(method_of(experiment), model, experiment.seed, experiment.torch_dtype, secure=secure)
    protocol = protocol_of(experiment, federation.num_domains)
    try:
        return derive_allow_list(federation.clients[0], initialiser.info(federation), initialiser, protocol)
    except PerfedError as error:
        raise PerfedError(f"tried on made-up tables: {error}") from None


def protocol_of(study: Experiment, domains: int) -> ExchangeSettings:
    """What the study says of exchanges besides its method, where there are so many domains."""
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


def task_of(study: Experiment) -> Task | None:
    """The task, where it is known before a table is read."""
    data = study.data.options
    given: Task = data["task"]
    return "survival" if data["event"] else None if data["task"] == "auto" else given


def _made_up(study: Experiment, task: Task | None) -> Federation:
    """One site of the study."""
    data = study.data.options
    made = made_up_site(task or task_of(study) or "classification", _COLUMNS, domains=bool(data["domain"]))
    made = replace(made, scaled_inputs=data["columns"] != "own")
    if data["columns"] != "named":
        return made
    return replace(made, clients=tuple(replace(client, held=(True,) * (_COLUMNS - 1)) for client in made))


def made_up_site(task: Task, columns: int, classes: int = 2, *, domains: bool = False) -> Federation:
    """One site with so many columns, and so many classes if any."""
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
