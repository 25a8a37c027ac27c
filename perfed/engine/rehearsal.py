"""Trial of a method on made-up rows, before the training on real rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.engine.initial import Initialiser
from perfed.engine.server import Server
from perfed.method.declared import FederationInfo
from perfed.participation.settings import Participation
from perfed.training.plan import Plan

_MIN_ROWS, _MAX_CLIENTS = 16, 64
_TRIAL_CLIENTS = 3


def check_sums_suffice(federation: Federation, initialiser: Initialiser) -> None:
    """Check that the server of a method needs only sums of replies, by a trial round on made-up rows.

    There is no trial if the inputs are words, which cannot be made up; the first round of the run raises the error.

    Args:
        federation: the federation; the trial uses the shapes of the inputs and targets of its first client.
        initialiser: the method, model and seed.

    Raises:
        SingleReplies: the server needs the replies of single clients.
    """
    if federation.words is not None:
        return
    info = initialiser.info(federation)
    count = min(len(federation), _TRIAL_CLIENTS)
    trial = make_up_federation(federation.clients[0], info, clients=count, domains=federation.num_domains)
    server = Server(trial, initialiser, Plan("stacked", threads=1), Participation(), 1)
    server.prepare()
    server.round(1)


def make_up_federation(client: Client, info: FederationInfo, *, clients: int, domains: int) -> Federation:
    """Return a federation of made-up rows whose clients all have every class and every domain.

    Args:
        client: the client whose shapes of inputs and targets, and whose shared columns, all clients get.
        info: the task and the number of classes.
        clients: the number of clients, of which at most 64 are created.
        domains: the number of domains; 0 for data without domains.
    """
    rng, train = np.random.default_rng(0), client.train
    rows = max(_MIN_ROWS, 2 * (info.num_classes or 0), 2 * domains)
    arrays: dict[str, Mapping[str, Any]] = {}
    for number in range(min(clients, _MAX_CLIENTS)):
        x = rng.normal(size=(rows, *train.input_shape)).astype(np.float32)
        y: Any = rng.normal(size=(rows, *train.target_shape)).astype(np.float32)
        if info.task == "classification":
            y = np.arange(rows) % (info.num_classes or 2)
        elif info.task == "survival":
            y = np.stack([np.exp(x.reshape(rows, -1)[:, 0]), np.arange(rows) % 2], axis=1)
        splits: dict[str, Any] = {}
        for split in ("train", "validation", "test"):
            splits |= {f"x_{split}": x, f"y_{split}": y}
            if domains:
                splits[f"domain_{split}"] = np.arange(rows) // 2 % domains
        arrays[f"{number:06d}"] = splits
    federation = Federation.from_arrays(arrays, task=info.task, num_classes=info.num_classes)
    with_shared_columns = tuple(replace(made_up, held=client.held) for made_up in federation)
    return replace(federation, name="made-up rows", clients=with_shared_columns, scaled_inputs=info.scaled_inputs)
