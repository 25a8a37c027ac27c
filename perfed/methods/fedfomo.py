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
    """Each client's own mixture of others' models, by how much each helps (Zhang et al. 2021, eq. 3-4, Algorithm 1).

    ``theta_i <- theta_i_old + sum_j w_j (theta_j - theta_i_old)`` with ``w_j`` proportional to
    ``max(0, (L_i(theta_i_old) - L_i(theta_j)) / |theta_j - theta_i_old|)``; ``theta_i_old`` is the client's model
    before its latest local training; its model after that training is a candidate, next to the downloaded ones. If
    nothing helps, the client goes back to ``theta_i_old``. ``L_i`` is the loss on the client's validation split, or on
    its training split where it has none. Distances count trainable parameters; buffers are combined as well.

    The server keeps every client's latest model. It sends those that client i's row of the preference matrix P likes
    best; in each place, with probability ``epsilon``, a random one instead. P accumulates the weights of each round
    before the ``max``, scaled to absolute sum 1 (the authors' program divides by their sum, which may be near 0).
    Before evaluation a client combines what P likes best now. Personal parameters are neither sent nor combined.
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
        """Tables on the server: latest ``models``, rows of P; ``own`` (latest) and ``old`` model on the client."""
        return {
            "models": ParameterSet("table", like="shared"),
            "preferences": ParameterSet("table", init=_indifferent),
            "own": ParameterSet("client", like="shared"),
            "old": ParameterSet("client", like="shared"),
        }

    # Server ------------------------------------------------------------------------------------------------

    def round(self, server: ServerState, clients: Clients) -> None:
        """Choose and send models, one exchange, then keep the clients' new models and update P."""
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * (clients.round - 1))
        sent = self.choose(server, clients.ids, clients.key("downloads"), epsilon)
        reply = clients.train(self.train, models=_stacked(server, sent))
        place = {client: position for position, client in enumerate(server.preferences)}
        models, preferences = dict(server.models), dict(server.preferences)
        for row, client in enumerate(reply.ids):
            models[client] = {name: tensor[row].clone() for name, tensor in reply.model.items()}
            liked = preferences[client]["weights"].clone()
            liked[[place[other] for other in sent[client]]] += reply.gains[row]
            preferences[client] = {"weights": liked, "uploaded": torch.ones_like(preferences[client]["uploaded"])}
        server.models, server.preferences = models, preferences

    def choose(self, server: ServerState, ids: Sequence[str], key: Tensor, epsilon: float) -> dict[str, list[str]]:
        """Whose models each of ``ids`` is sent: the same number for all, of clients that have taken part."""
        place = {client: position for position, client in enumerate(server.preferences)}
        pool = [client for client, row in server.preferences.items() if row["uploaded"]]
        others = {client: [other for other in pool if other != client] for client in ids}
        count = min(self.downloads, *(len(found) for found in others.values()))
        sent: dict[str, list[str]] = {}
        for client, found in others.items():
            mine = rng.key(key, client)
            liked = server.preferences[client]["weights"].tolist()
            shuffled = [
                found[j] for j in rng.draw_permutation(rng.random_bits(rng.key(mine, "order"), len(found))).tolist()
            ]
            best = sorted(shuffled, key=lambda other: -liked[place[other]])
            sent[client] = []
            for explore in (rng.uniform(rng.key(mine, "explore"), count) < epsilon).tolist():
                source = shuffled if explore else best
                sent[client].append(next(other for other in source if other not in sent[client]))
        return sent

    def download(self, server: ServerState) -> dict[str, Any]:
        """The models that P likes best."""
        sent = self.choose(server, list(server.preferences), rng.key(0, "evaluation"), 0.0)
        return {"models": _stacked(server, sent)}

    # Clients -----------------------------------------------------------------------------------------------

    def train(self, cohort: Cohort, models: Parameters) -> Reply:
        """Combine, then train all stages together."""
        gains = self.combine(cohort, models)
        cohort.state["old"] = {name: tensor.clone() for name, tensor in cohort.shared().items()}
        cohort.fit(STAGES, epochs=self.local_epochs)
        cohort.state["own"] = cohort.shared()
        scale = gains.abs().sum(1, keepdim=True)
        gains = torch.where(scale > 0, gains / scale, 0.0)[:, 1:]
        return Reply(model=cohort.shared(), gains=gains)

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """Combine the models that came with the client's own."""
        self.combine(cohort, payload["models"])

    def combine(self, cohort: Cohort, models: Parameters) -> Tensor:
        """Load the combined model; returns the weights before ``max`` and scaling, own model first, ``(n, 1 + M)``."""
        old, own = cohort.state["old"], cohort.state["own"]
        candidates = {
            n: torch.cat([t.unsqueeze(1), models[n]], 1) if models else t.unsqueeze(1) for n, t in own.items()
        }
        gains = improvement(cohort, old, candidates)
        positive = gains.clamp_min(0)
        total = positive.sum(1, keepdim=True)
        weights = torch.where(total > 0, positive / total, 0.0)
        combined = {}
        for name, start in old.items():
            moves = candidates[name] - start.unsqueeze(1)
            integer = not start.is_floating_point()
            combined[name] = own[name] if integer else start + torch.einsum("nm,nm...->n...", weights, moves)
        cohort.load(combined)
        return gains


def improvement(cohort: Cohort, old: Parameters, candidates: Parameters) -> Tensor:
    """``(L(old) - L(candidate)) / |candidate - old|`` of ``candidates`` ``(n, M, ...)``; 0 where both are equal."""
    everything = {name: torch.cat([start.unsqueeze(1), candidates[name]], 1) for name, start in old.items()}
    losses = _held_out_losses(cohort, everything)
    squares = [
        (candidates[name] - old[name].unsqueeze(1)).flatten(2).square().sum(2) for name in cohort.shared_parameters
    ]
    distance = torch.stack(squares).sum(0).sqrt()
    return torch.where(distance > 0, (losses[:, :1] - losses[:, 1:]) / distance, 0.0)


def _held_out_losses(cohort: Cohort, bank: Parameters) -> Tensor:
    """Losses ``(n, bank)`` on the validation split, of clients without one on the training split."""
    held = torch.from_numpy(cohort.samples("validation").counts > 0).to(cohort.device)
    if held.all():
        return cohort.losses(bank, "validation")
    return torch.where(held[:, None], cohort.losses(bank, "validation"), cohort.losses(bank))


def _stacked(server: ServerState, sent: dict[str, list[str]]) -> Any:
    """The models of the clients in ``sent``, ``(M, ...)`` for each receiver; nothing at all if M is 0."""
    return each(
        {
            client: {name: torch.stack([server.models[o][name] for o in others]) for name in server.shared if others}
            for client, others in sent.items()
        }
    )


def _indifferent(info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
    info.shared_parameters("fedfomo combines the shared parameters")
    return {"weights": torch.zeros(len(info.ids), dtype=info.dtype), "uploaded": torch.tensor(False)}
