"""FedAMP as PFLlib's program has it, beside perfed's (the paper's), on its Fashion-MNIST of two classes a client.

``python benchmarks/fedamp_pfllib.py [ROUNDS]`` prints both accuracies after each round. The program departs from Huang
et al. 2021 in three ways: a client goes on from its own model, not from the cloud's u_i; the others' weights are not
divided where their sum passes 1 (with 20 models that are alike its own is -18); and the pull is ``lam / (2 alpha)``
times the distance to u_i, not its square: a gradient of length 1/2, however far u_i is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import perfed
from perfed.experiment.board import find_board
from perfed.method.exchange import Clients, Reply, ServerState, each
from perfed.methods.fedamp import FedAMP
from perfed.model.chain import STAGES, Parameters
from perfed.training.cohort import Cohort
from perfed.training.step import Step, mean_loss


@perfed.register("fedamp-pfllib")
class FedAMPOfPFLlib(FedAMP):
    """FedAMP by the rules of PFLlib's program."""

    def round(self, server: ServerState, clients: Clients) -> None:
        """Every client takes part; its model and the cloud's go to it."""
        models = {name: torch.stack([server.models[i][name] for i in clients.ids]) for name in server.shared}
        weights = self.unscaled(models) if clients.round > 1 else torch.eye(len(clients.ids))
        cloud = {name: torch.einsum("ij,j...->i...", weights.to(t), t) for name, t in models.items()}
        rows = {i: {name: t[row] for name, t in cloud.items()} for row, i in enumerate(clients.ids)}
        own = {i: dict(server.models[i]) for i in clients.ids}
        reply = clients.train(self.train, cloud=each(rows), own=each(own))
        server.models = {
            i: {name: t[row].clone() for name, t in reply.shared.items()} for row, i in enumerate(reply.ids)
        }

    def unscaled(self, models: Parameters) -> Tensor:
        """xi, whose rows sum to one with a negative own weight where the others' pass it."""
        flat = torch.cat([models[name].flatten(1).double() for name in sorted(models)], 1)
        others = self.alpha / self.sigma * torch.exp(-torch.cdist(flat, flat).square() / self.sigma)
        others.fill_diagonal_(0)
        return others + torch.diag(1 - others.sum(1))

    def train(self, cohort: Cohort, cloud: dict[str, Any], own: Any = None) -> Reply:
        """An epoch from the client's own model with the pull towards u_i."""
        cohort.load(own)

        def pulled(step: Step) -> Tensor:
            moves = [(step.params[name] - step.of(cloud[name])).flatten(1) for name in cohort.shared_parameters]
            distance: Tensor = torch.linalg.vector_norm(torch.cat(moves, 1), dim=1)
            return mean_loss(step) + self.lam / (2 * self.alpha) * distance

        cohort.fit(STAGES, epochs=self.local_epochs, loss=pulled)
        return Reply(shared=cohort.shared())


def main(rounds: int = 10) -> None:
    """Both on the board's protocol, in turns of one thread."""
    protocol = find_board("pfllib-fashion-pathological").experiment
    for method in ("fedamp-pfllib", "fedamp"):
        settings = {"method": method, "rounds": rounds, "plan": {"engine": "sequential", "threads": 1}}

        def say(number: int, _: int, mean: float | None, method: str = method) -> None:
            print(f"{method}, round {number}: {100 * (mean or 0):.2f}", flush=True)

        perfed.start(perfed.validate({**protocol, **settings})).execute(say)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
