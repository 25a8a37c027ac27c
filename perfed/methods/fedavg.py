"""Federated averaging, with a proximal term (FedProx), and with an optimiser at the server (FedAdam, ...)."""

from __future__ import annotations

from typing import Any, ClassVar

from perfed.maths.aggregate import Average, average_weights
from perfed.method.disclosure import PARAMETERS, ROWS, Disclosure
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.method import Method
from perfed.method.registry import register
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.extensions.server_optimizer import ServerOptimizer
from perfed.model.chain import STAGES
from perfed.training.cohort import Cohort


@register(
    "fedprox",
    title="FedProx",
    extensions=(Proximal,),
    summary="FedAvg with a proximal term to the received model in local training (Li et al. 2020, Algorithm 2)",
    differs="nothing",
)
@register(
    "fedadam",
    title="FedAdam",
    extensions=(ServerOptimizer,),
    summary="FedAvg whose server takes Adam's steps along the mean change (Reddi et al. 2021, Algorithm 2)",
    differs="nothing",
)
@register(
    "fedyogi",
    title="FedYogi",
    extensions=(ServerOptimizer,),
    defaults={"server_optimizer": "yogi"},
    summary="FedAvg whose server takes Yogi's steps along the mean change (Reddi et al. 2021, Algorithm 2)",
    differs="nothing",
)
@register(
    "fedadagrad",
    title="FedAdagrad",
    extensions=(ServerOptimizer,),
    defaults={"server_optimizer": "adagrad", "beta1": 0.0},
    summary="FedAvg whose server takes Adagrad's steps along the mean change (Reddi et al. 2021, Algorithm 2)",
    differs="nothing",
)
@register("fedavg", title="FedAvg", differs="nothing")
class FedAvg(Method):
    """Federated averaging: mean of the clients' models weighted by n_i (McMahan et al. 2017, Algorithm 1)."""

    needs_mean: ClassVar[str] = ""
    disclosure: ClassVar[Disclosure | None] = Disclosure({"shared": PARAMETERS, "num_samples": ROWS})

    average: Average = "samples"

    def round(self, server: ServerState, clients: Clients) -> None:
        """Run E local epochs from the global model, then compute the weighted mean."""
        reply = clients.train(self.train, shared=server.shared)
        server.shared = clients.mean(
            reply.shared, average_weights(reply.num_samples, self.average), current=server.shared
        )

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train all stages together, starting at the server's model."""
        cohort.load(shared)
        cohort.fit(STAGES, epochs=self.local_epochs)
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)
