"""One client's own model, and what it says of new inputs."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed import tree
from perfed.data.federation import Client, Federation, new_inputs
from perfed.engine import evaluate
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.model.chain import Chain, Parameters
from perfed.run.card import data_facts, metrics_with_intervals, today, versions
from perfed.run.client_module import ClientModule
from perfed.run.directory import plain
from perfed.run.site import SiteModel, traced
from perfed.training.cohort import Cohort

_EXAMPLES = 3  # samples that a model is traced with


def predict(
    server: Server, name: str, client: str, round_: int, x: Any, domain: Tensor | NDArray[Any] | None
) -> Tensor:
    """See :meth:`perfed.run.run.Run.predict`; ``name`` is the method's, ``round_`` the last one."""
    cohort, method, federation = _own(server, client, round_), server.method, server.federation
    if method.changes_data:
        raise PerfedError(f"{name} projects a client's samples together; it has no model for new ones")
    inputs, ids = new_inputs(server.clients[client], x, domain, federation.num_domains)
    if ids is None and (method.needs_domains or cohort.per_domain):
        raise PerfedError(f"{name} needs the domain of every sample")
    cohort.domain = None if ids is None else ids[None].to(cohort.device)
    trained = federation.domains_in("train")
    return evaluate.predict(method, cohort, inputs[None].to(cohort.device, cohort.dtype), trained)[0]


def site(server: Server, name: str, client: str, round_: int) -> SiteModel:
    """See :meth:`perfed.run.run.Run.site`; ``name`` is the method's, ``round_`` the last one."""
    cohort, method, federation = _own(server, client, round_), server.method, server.federation
    if method.changes_data:
        raise PerfedError(f"{name} projects a client's samples together; it has no model for new ones")
    own, takes_domain = server.clients[client], method.needs_domains or bool(cohort.per_domain)
    shape = own.input_shape
    module = ClientModule(method, cohort, federation.domains_in("train"), federation.num_classes).cpu()
    example = torch.zeros(_EXAMPLES, *shape, dtype=cohort.dtype)
    program = traced(module, client, example, torch.zeros(_EXAMPLES, dtype=torch.int64) if takes_domain else None)
    domains = [federation.domain_name(m) for m in range(federation.num_domains)]
    names, table = own.feature_names or [f"x{j}" for j in range(prod(shape))], own.table
    facts = {
        "site": client,
        "method": name,
        "dataset": federation.name,
        "rounds": max(round_, 0),
        "seed": server.seed,
        "classes": federation.classes,
        "features": names,
        "columns": None if table is None else [{"name": c.name, "kind": c.kind} for c in table.columns],
        "input_shape": shape,
        "dtype": str(cohort.dtype).removeprefix("torch."),
        "domains": domains if takes_domain else None,
        "data": data_facts(own, federation),
        "settings": method.all_settings,
        "versions": versions(),
        "date": today(),
    }
    made = SiteModel(program, plain(facts), table)
    return replace(made, facts={**made.facts, "metrics": plain(_measured(made, own, federation))})


def _measured(model: SiteModel, client: Client, federation: Federation) -> dict[str, Any]:
    """Metrics with intervals on the client's test data; empty where it has none."""
    test = client.split("test")
    if test is None:
        return {}
    return metrics_with_intervals(test, model.outputs(*model.checked(test.x, test.domain)), federation.num_classes)


def modules(server: Server, name: str, client: str, round_: int) -> tuple[Chain, Parameters]:
    """See :meth:`perfed.run.run.Run.model`; ``name`` is the method's, ``round_`` the last one."""
    cohort, method = _own(server, client, round_), server.method
    if type(method).predict is not Method.predict or method.changes_data or cohort.per_domain:
        raise PerfedError(f"{name} predicts with more than one chain of modules; use predict() of the run")
    kept = cohort.chain
    parameters = tree.row_of(cohort.model, 0, {key: tensor.shape for key, tensor in kept.tensors().items()})
    chain = server.model.build(kept.input_shape).to(cohort.dtype)
    chain.load_state_dict(parameters)
    return chain.eval(), parameters


def _own(server: Server, client: str, round_: int) -> Cohort:
    """The client alone, with the model that evaluation uses."""
    if client not in server.clients:
        raise PerfedError(f"unknown client '{client}'; ids are: {', '.join([*server.clients][:5])}, ...")
    (cohort,) = server.own_models([client], round_)
    return cohort
