"""What a study's method sends, found by letting it work on made-up rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from perfed.data.federation import Federation
from perfed.data.labels import Task
from perfed.engine.engine import InProcessEngine
from perfed.engine.host import Done, Work
from perfed.engine.server import Server
from perfed.engine.setup import Setup
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment
from perfed.participation.invitation import Invitation
from perfed.participation.settings import Participation
from perfed.training.plan import Plan

_ROWS, _COLUMNS = 40, 4


class _Noting(InProcessEngine):
    """Notes the entries of every reply, as they would be sent."""

    def __init__(self, federation: Federation, setup: Setup, plan: Plan) -> None:
        super().__init__(federation, setup, plan)
        self.noted: dict[str, None] = {}

    def perform(self, works: Iterable[Work], invitation: Invitation | None = None) -> Iterator[Done]:
        for done in super().perform(works, invitation):
            self.noted |= dict.fromkeys(_names(done.reply(0)))
            yield done


def entries_sent(study: Experiment) -> list[str]:
    """Names of all that a site's replies hold in the preparation and a round: ``entry``, or ``entry/part/...``.

    Raises:
        PerfedError: the method refuses such a federation or model.

    Example:
        >>> from perfed import validate
        >>> data = {"name": "tables", "files": ["a", "b"], "target": "ill"}
        >>> entries_sent(validate({"method": "fedavg", "rounds": 1, "data": data, "model": {"head": "linear"}}))
        ['shared/head.weight', 'shared/head.bias', 'num_samples']
    """
    federation = _made_up(study)
    model = study.build_model(federation.num_outputs)
    setup = Setup(study.built_method, model, study.seed, study.torch_dtype)
    try:
        server = Server(federation, setup, Plan("stacked"), Participation(), rounds=1, engine=_Noting)
        server.prepare()
        server.round(1)
    except PerfedError as error:
        raise PerfedError(f"tried on made-up tables: {error}") from None
    assert isinstance(server.engine, _Noting)
    return list(server.engine.noted)


def task_of(study: Experiment) -> Task | None:
    """The task, where it is known before a table is read."""
    data = study.data.options
    given: Task = data["task"]
    return "survival" if data["event"] else None if data["task"] == "auto" else given


def _made_up(study: Experiment) -> Federation:
    rng, data = np.random.default_rng(0), study.data.options
    task = task_of(study) or "classification"
    clients: dict[str, dict[str, Any]] = {}
    for site in data["files"]:
        x = rng.normal(size=(_ROWS, _COLUMNS)).astype(np.float32)
        y: Any = {
            "classification": np.arange(_ROWS) % 2,
            "regression": x.sum(1),
            "survival": np.stack([np.exp(x[:, 0]), np.arange(_ROWS) % 2], axis=1),
        }[task]
        clients[site] = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
        if data["domain"]:
            domain = np.arange(_ROWS) // 2 % 2
            clients[site] |= {"domain_train": domain, "domain_test": domain}
    return Federation.from_arrays(clients, task=task)


def _names(reply: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, value in reply.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{path}{name}/")
        elif not isinstance(value, Tensor) or value.numel():
            yield f"{path}{name}"
