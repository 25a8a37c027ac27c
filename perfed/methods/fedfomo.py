"""FedFomo: every client combines the models of those clients that help it on its own validation data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed import rng
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.exchange import Clients, Reply, ServerState, each
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.model.chain import STAGES, Parameters
from perfed.training.cohort import Cohort


@register("fedfomo", title="FedFomo")
class FedFomo(Method):
    """A mixture of other clients' models for each client (Zhang et al. 2021, eq. 3-4, Algorithm 1).

    ``theta_i <- theta_i_old + sum_j w_j (theta_j - theta_i_old)`` with ``w_j`` proportional to ``max(0,
    (L_i(theta_i_old) - L_i(theta_j)) / |theta_j - theta_i_old|)``; ``theta_i_old`` is the client's model before its
    latest local training. The candidates are its model after that training and the downloaded models. If no candidate
    has a smaller loss, the client returns to ``theta_i_old``. ``L_i`` is the loss on the client's validation split, or
    on its training split if it has no validation split. Distances include trainable parameters only; buffers are
    combined as well.

    The server stores every client's latest model. It sends client i the models with the largest entries in row i of the
    preference matrix P; each of them is replaced with probability ``epsilon`` by a random one. P accumulates the
    weights of each round before the ``max``, scaled to absolute sum 1 (the authors' program divides by their sum, which
    may be near 0). Before evaluation a client combines the models that P currently prefers. Personal parameters are
    neither sent nor combined.
    """

    needs_mean: ClassVar[str] = "FedFomo sends clients each other's models and averages none"
    moves_shared: ClassVar[bool] = False
    uses_validation: ClassVar[bool] = True
    fits_unused: ClassVar[str] = ""
    joins: ClassVar[str | None] = None

    downloads: int = Field(5, ge=0, description="models M sent to each client per round (fewer if fewer exist)")
    epsilon: float = Field(0.3, ge=0, le=1, description="probability that a sent model is chosen at random")
    epsilon_decay: float = Field(0.05, ge=0, description="decrease of epsilon per round (authors' program)")

    def sets(self) -> dict[str, ParameterSet]:
        """Return the server's tables and the client's models.

        ``models`` and ``preferences`` are tables with every client's latest model and row of P; ``own`` and ``old`` are
        the client's latest model and ``theta_i_old``.
        """
        return {
            "models": ParameterSet("table", like="shared"),
            "preferences": ParameterSet("table", init=_init_preferences),
            "own": ParameterSet("client", like="shared"),
            "old": ParameterSet("client", like="shared"),
        }

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, clients: Clients) -> None:
        """Choose and send models, run one exchange, store the clients' new models and update P."""
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * (clients.round - 1))
        sources = self.choose(server, clients.ids, clients.key("downloads"), epsilon)
        reply = clients.train(self.train, models=_stack_models(server, sources))
        position = {client: number for number, client in enumerate(server.preferences)}
        models, preferences = dict(server.models), dict(server.preferences)
        for row, client in enumerate(reply.ids):
            models[client] = {name: tensor[row].clone() for name, tensor in reply.model.items()}
            weights = preferences[client]["weights"].clone()
            weights[[position[other] for other in sources[client]]] += reply.gains[row]
            preferences[client] = {"weights": weights, "uploaded": torch.ones_like(preferences[client]["uploaded"])}
        server.models, server.preferences = models, preferences

    def choose(self, server: ServerState, ids: Sequence[str], key: Tensor, epsilon: float) -> dict[str, list[str]]:
        """Return the ids of the clients whose models each of ``ids`` receives.

        All clients receive the same number of models, of clients that have taken part. In each place of the list the
        best remaining client is replaced with probability ``epsilon`` by a random one.
        """
        position = {client: number for number, client in enumerate(server.preferences)}
        pool = [client for client, row in server.preferences.items() if row["uploaded"]]
        candidates = {client: [other for other in pool if other != client] for client in ids}
        count = min(self.downloads, *(len(pool_of_client) for pool_of_client in candidates.values()))
        sent: dict[str, list[str]] = {}
        for client, pool_of_client in candidates.items():
            client_key = rng.key(key, client)
            weights = server.preferences[client]["weights"].tolist()
            shuffled = [
                pool_of_client[j]
                for j in rng.draw_permutation(
                    rng.random_bits(rng.key(client_key, "order"), len(pool_of_client))
                ).tolist()
            ]
            ranked = sorted(shuffled, key=lambda other: -weights[position[other]])
            sent[client] = []
            for explore in (rng.uniform(rng.key(client_key, "explore"), count) < epsilon).tolist():
                source = shuffled if explore else ranked
                sent[client].append(next(other for other in source if other not in sent[client]))
        return sent

    def download(self, server: ServerState) -> dict[str, Any]:
        """Return the models that P prefers."""
        sources = self.choose(server, list(server.preferences), rng.key(0, "evaluation"), 0.0)
        return {"models": _stack_models(server, sources)}

    # Clients -----------------------------------------------------------------------------------------------

    def train(self, cohort: Cohort, models: Parameters) -> Reply:
        """Combine models, then train all stages together."""
        gains = self.combine(cohort, models)
        cohort.state["old"] = {name: tensor.clone() for name, tensor in cohort.shared().items()}
        cohort.fit(STAGES, epochs=self.local_epochs)
        cohort.state["own"] = cohort.shared()
        scale = gains.abs().sum(1, keepdim=True)
        gains = torch.where(scale > 0, gains / scale, 0.0)[:, 1:]
        return Reply(model=cohort.shared(), gains=gains)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Combine the received models with the client's own."""
        self.combine(cohort, payload["models"])

    def combine(self, cohort: Cohort, models: Parameters) -> Tensor:
        """Load the combined model.

        Returns:
            The weights before ``max`` and scaling, ``(n, 1 + M)``; the first column belongs to the client's own model.
        """
        old, latest = cohort.state["old"], cohort.state["own"]
        candidates = {
            n: torch.cat([t.unsqueeze(1), models[n]], 1) if models else t.unsqueeze(1) for n, t in latest.items()
        }
        gains = scaled_gains(cohort, old, candidates)
        positive = gains.clamp_min(0)
        total = positive.sum(1, keepdim=True)
        weights = torch.where(total > 0, positive / total, 0.0)
        combined = {}
        for name, start in old.items():
            moves = candidates[name] - start.unsqueeze(1)
            integer = not start.is_floating_point()
            combined[name] = latest[name] if integer else start + torch.einsum("nm,nm...->n...", weights, moves)
        cohort.load(combined)
        return gains


def scaled_gains(cohort: Cohort, old: Parameters, candidates: Parameters) -> Tensor:
    """Return ``(L(old) - L(candidate)) / |candidate - old|`` of candidates ``(n, M, ...)``; 0 if both are equal."""
    bank = {name: torch.cat([start.unsqueeze(1), candidates[name]], 1) for name, start in old.items()}
    losses = _held_out_losses(cohort, bank)
    squares = [
        (candidates[name] - old[name].unsqueeze(1)).flatten(2).square().sum(2) for name in cohort.shared_parameters
    ]
    distance = torch.stack(squares).sum(0).sqrt()
    return torch.where(distance > 0, (losses[:, :1] - losses[:, 1:]) / distance, 0.0)


def _held_out_losses(cohort: Cohort, bank: Parameters) -> Tensor:
    """Return losses ``(n, bank)`` on the validation split, or on the training split of clients without one."""
    has_validation = torch.from_numpy(cohort.samples("validation").counts > 0).to(cohort.device)
    if has_validation.all():
        return cohort.losses(bank, "validation")
    return torch.where(has_validation[:, None], cohort.losses(bank, "validation"), cohort.losses(bank))


def _stack_models(server: ServerState, sources: dict[str, list[str]]) -> Any:
    """Return the models of the clients in ``sources``, ``(M, ...)`` for each receiver; an empty payload if M is 0."""
    return each(
        {
            client: {
                name: torch.stack([server.models[o][name] for o in source_ids]) for name in server.shared if source_ids
            }
            for client, source_ids in sources.items()
        }
    )


def _init_preferences(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    info.shared_parameters("fedfomo combines the shared parameters")
    return {"weights": torch.zeros(len(info.ids), dtype=info.dtype), "uploaded": torch.tensor(False)}
