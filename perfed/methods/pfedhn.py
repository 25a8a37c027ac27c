"""pFedHN: a hypernetwork on the server writes every client's model."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed import rng
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState, each
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES, Chain, Parameters
from perfed.model.placement import PERSONAL, SHARED, Placement
from perfed.training.cohort import Cohort

_MIN_EMBEDDING_SIZE = 4  # Random vectors with fewer dimensions are often nearly parallel.


@register("pfedhn", title="pFedHN")
class PFedHN(Method):
    """Models generated from client embeddings by a hypernetwork on the server (Shamsian et al. 2021, Algorithm 1).

    ``theta_i = h(v_i; phi)``: hidden layers with ReLU, then one linear layer per parameter tensor of the model. The
    client trains theta_i to theta~_i. With ``d_i = theta_i - theta~_i`` the server takes the steps ``phi <- phi - alpha
    mean_i (d theta_i / d phi)^T d_i`` and ``v_i <- v_i - alpha (d theta_i / d v_i)^T d_i``; with one client per round
    they are those of the paper. Only the embeddings of the round's clients change.

    Departures: the server uses plain SGD, without the momentum, weight decay and clipping of the authors' program; with
    fewer than 12 clients embeddings have 4 entries, more than the authors' 1 + clients // 4. The biases of the output
    layers are ``shared`` and start as the model's own initial values; their weights start normal with variance 1 /
    (hidden size x fan-in of the generated layer), hidden layers as in He et al. 2015, and embeddings standard normal.
    Generated models thus start as the usual initial model plus a change of the same scale. Buffers (batch-norm
    statistics) are personal, not generated; personal parameters stay at the client.
    """

    needs_mean: ClassVar[str] = "pFedHN's hypernetwork follows a sum of the clients' gradients"
    moves_shared: ClassVar[bool] = False
    fits_unused: ClassVar[str] = ""
    joins: ClassVar[str | None] = None

    hyper_lr: float = Field(0.01, ge=0, description="learning rate alpha of hypernetwork and embeddings")
    hidden_layers: int = Field(3, ge=1, description="hidden layers of the hypernetwork")
    hidden_size: int = Field(100, ge=1, description="width of the hidden layers")
    embedding_size: int | None = Field(
        None, ge=1, description="size of an embedding; default 1 + clients // 4, at least 4"
    )

    def places(self, chain: Chain) -> dict[str, Placement]:
        """Return the placement as for every method, but with personal buffers instead of shared ones."""
        buffers = dict(chain.named_buffers())
        placement = super().places(chain)
        return {n: PERSONAL if n in buffers and place == SHARED else place for n, place in placement.items()}

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``hypernetwork``, without its output biases, which are ``shared``, and the table of ``embeddings``."""
        return {
            "hypernetwork": ParameterSet("server", init=self._init_hypernetwork),
            "embeddings": ParameterSet("table", init=self._init_embedding),
        }

    def _embedding_length(self, info: FederationInfo) -> int:
        return self.embedding_size or max(_MIN_EMBEDDING_SIZE, 1 + len(info.ids) // 4)

    def _init_embedding(self, info: FederationInfo, key: Tensor) -> Parameters:
        return {"vector": rng.normal(key, self._embedding_length(info), info.dtype)}

    def _init_hypernetwork(self, info: FederationInfo, key: Tensor) -> Parameters:
        info.shared_parameters("pfedhn generates the shared parameters")
        parameters: Parameters = {}

        def add_normal(name: str, rows: int, columns: int, variance: float) -> None:
            values = rng.normal(rng.key(key, name), rows * columns, info.dtype)
            parameters[name] = values.view(rows, columns) * variance**0.5

        width = self._embedding_length(info)
        for layer in range(self.hidden_layers):
            add_normal(f"hidden{layer}.weight", self.hidden_size, width, 2 / width)
            parameters[f"hidden{layer}.bias"] = torch.zeros(self.hidden_size, dtype=info.dtype)
            width = self.hidden_size
        for name in info.shared:
            add_normal(f"output.{name}", prod(info.shape(name)), width, 1 / (width * _fan_in(name, info)))
        return parameters

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, clients: Clients) -> None:
        """Generate the models, run one exchange, then take the step on hypernetwork and embeddings."""
        reply = clients.train(self.train, generated=self.models(server, clients.ids))
        self.step(server, reply.ids, reply.change)

    def models(self, server: ServerState, ids: Sequence[str]) -> Any:
        """Return the generated model of each client, as a payload."""
        vectors = torch.stack([server.embeddings[client]["vector"] for client in ids])
        theta = self.generate(server.shared, server.hypernetwork, vectors)
        return each({client: {n: t[row] for n, t in theta.items()} for row, client in enumerate(ids)})

    def generate(self, biases: Parameters, hypernetwork: Parameters, vectors: Tensor) -> Parameters:
        """Return ``h(v_i; phi)`` for ``vectors`` ``(clients, size)``: parameters ``(clients, ...)`` by name."""
        z = vectors
        for layer in range(self.hidden_layers):
            z = torch.relu(z @ hypernetwork[f"hidden{layer}.weight"].T + hypernetwork[f"hidden{layer}.bias"])
        # Sorted, because the order of work must not depend on whether the run was resumed.
        return {n: biases[n] + (z @ hypernetwork[f"output.{n}"].T).view(-1, *biases[n].shape) for n in sorted(biases)}

    def step(self, server: ServerState, ids: Sequence[str], change: Parameters) -> None:
        """Take one step along the vector-Jacobian products with ``change``, ``theta_i - theta~_i`` of ``ids``."""
        biases, network = _make_leaves(server.shared), _make_leaves(server.hypernetwork)
        vectors = torch.stack([server.embeddings[client]["vector"] for client in ids]).requires_grad_(True)
        theta = self.generate(biases, network, vectors)
        gradients = torch.autograd.grad(
            list(theta.values()),
            [*biases.values(), *network.values(), vectors],
            [change[name] / len(ids) for name in theta],
        )
        new = [
            t - self.hyper_lr * g for t, g in zip((*biases.values(), *network.values()), gradients[:-1], strict=True)
        ]
        server.shared = {name: t.detach() for name, t in zip(biases, new, strict=False)}
        server.hypernetwork = {name: t.detach() for name, t in zip(network, new[len(biases) :], strict=True)}
        # The mean divides by the number of clients, but an embedding belongs to a single client.
        new_vectors = (vectors - self.hyper_lr * len(ids) * gradients[-1]).detach()
        rows = {client: {"vector": new_vectors[row]} for row, client in enumerate(ids)}
        server.embeddings = {**server.embeddings, **rows}

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return every client's generated model."""
        return {"generated": self.models(server, list(server.embeddings))}

    # Clients -----------------------------------------------------------------------------------------------

    def train(self, cohort: Cohort, generated: Parameters) -> Reply:
        """Train all stages together, starting at the generated model."""
        cohort.load(generated)
        cohort.fit(STAGES, epochs=self.local_epochs)
        change = {name: generated[name] - tensor for name, tensor in cohort.shared().items()}
        return Reply(change=change)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Load the model that the hypernetwork generates for the client."""
        cohort.load(payload["generated"])


def _make_leaves(values: Parameters) -> Parameters:
    return {name: tensor.detach().clone().requires_grad_(True) for name, tensor in values.items()}


def _fan_in(name: str, info: FederationInfo) -> int:
    """Return the number of inputs of each unit of the layer with the tensor ``name``; its size for a norm layer."""
    shape = info.shared[name]
    layer = info.shared.get(name.rpartition(".")[0] + ".weight", shape)
    return max(1, prod(layer[1:]) if len(layer) > 1 else prod(shape))
