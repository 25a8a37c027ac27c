"""FedDBE: FedAvg whose features lose their bias, which each client remembers and adds again."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.registry import register
from perfed.methods.fedavg import FedAvg
from perfed.model.chain import STAGES, Model, Shape
from perfed.model.placement import PERSONAL, SHARED, Placement
from perfed.training.cohort import Cohort
from perfed.training.step import Step, mean_loss


class BiasMemory(nn.Module):
    """A layer that adds the client's bias to the features, and stores the means that the regularisation compares."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape))
        self.mean, self.consensus = nn.Buffer(torch.zeros(shape)), nn.Buffer(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``(batch, ...)`` with the bias added."""
        return x + self.bias


@register("feddbe", title="FedDBE")
class FedDBE(FedAvg):
    """Domain bias eliminator around FedAvg (Zhang et al. 2023, NeurIPS, "Eliminating Domain Bias", section 4).

    A client's head receives ``f(x) + b_i``. Its bias memory b_i starts at 0, is trained with the model, and never
    leaves the client. Local training minimises ``loss + kappa MSE(m_i, m)``, where ``m_i <- (1 - mu) m_i + mu
    mean(f(x))`` follows the mini-batches (from 0 in every round) and m is the consensus of the clients. Once before the
    first round every client trains a copy of the initial model for ``local_epochs`` without bias and regularisation; m
    is the mean of the copies' features over all samples. The authors' program uses half of kappa, and computes m from
    the m_i of the last mini-batches instead of from all samples.
    """

    layer_placement: ClassVar[dict[str, Placement]] = {"head.0.*": PERSONAL, "head.0.consensus": SHARED}
    fits_unused: ClassVar[str] = "train"

    kappa: float = Field(50.0, ge=0, description="weight of the mean regularisation (paper: 50 for its CNN)")
    mu: float = Field(1.0, gt=0, le=1, description="how far the mean of features moves to that of a mini-batch")

    def adapt(self, model: Model) -> Model:
        """Return the model with the bias memory before the head."""
        return model.insert_before_head(lambda shape, outputs: BiasMemory(shape), "feddbe shifts the head's inputs")

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Compute the consensus: the mean of the features over all clients' samples."""
        reply = clients.run(self.first_means, shared=server.shared)
        current = {name: server.shared[name] for name in reply.means}
        server.shared = {**server.shared, **clients.mean(reply.means, reply.num_samples, current=current)}

    def first_means(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Return the mean of each client's features after training a copy of the model."""
        cohort.load(shared)
        copy = {name: tensor.clone() for name, tensor in cohort.model.items()}
        cohort.fit(
            [n for n in cohort.trainable_names(STAGES) if n != "head.0.bias"], epochs=self.local_epochs, params=copy
        )
        means = [part.mean(0) for part in cohort.representation(params=copy).split(cohort.samples().counts.tolist())]
        return Reply(means={"head.0.consensus": torch.stack(means)}, num_samples=cohort.num_samples)

    def train(self, cohort: Cohort, shared: dict[str, Any]) -> Reply:
        """Train model and bias memory together, with the regularised loss."""
        cohort.load(shared)
        cohort.model["head.0.mean"] = torch.zeros_like(cohort.model["head.0.mean"])
        cohort.fit(STAGES, epochs=self.local_epochs, loss=self.loss)
        return Reply(shared=cohort.shared(), num_samples=cohort.num_samples)

    def loss(self, step: Step) -> Tensor:
        """Return ``loss(head(f + b)) + kappa MSE(m_i, m)``."""
        features, mean = step.representation(), step.params["head.0.mean"]
        moving_mean = (1 - self.mu) * mean + self.mu * torch.einsum("nb,nb...->n...", step.weight, features)
        mean.copy_(moving_mean.detach())
        return mean_loss(step) + self.kappa * (moving_mean - step.params["head.0.consensus"]).flatten(1).square().mean(
            1
        )
