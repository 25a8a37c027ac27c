"""One client's own model, and what it says of new inputs."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from perfed import tree
from perfed.data.client import new_inputs
from perfed.engine import evaluate
from perfed.engine.server import Server
from perfed.errors import PerfedError
from perfed.method.method import Method
from perfed.model.chain import Chain, Parameters
from perfed.training.cohort import Cohort


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
