"""FedHeNN: models of any architecture, whose features are made alike on common inputs."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perfed import rng
from perfed.errors import PerfedError
from perfed.maths.divergence import compute_cka
from perfed.method.declared import FederationInfo
from perfed.method.exchange import Clients, Reply, ServerState
from perfed.method.registry import register
from perfed.methods.local import Local
from perfed.model.chain import STAGES
from perfed.model.placement import PER_DOMAIN
from perfed.training.cohort import Cohort
from perfed.training.step import Penalty, Step


@register("fedhenn", title="FedHeNN", differs="features")
class FedHeNN(Local):
    """Local models that minimise ``f(w) + eta (1 - CKA(K_i, K))`` for the mean kernel K (Makhija et al. 2022).

    This is the variant in FLIC's experiments (Rakotomamonjy et al. 2024): every round draws new N(0, 1) inputs, the
    same for all clients but truncated to each client's shape; K_i is the Gram matrix of the head's inputs for them. A
    round has two exchanges: the kernels of the received models, then local training towards their mean. Common inputs
    are evaluated in evaluation mode. CKA is centred; the authors of FLIC used it without centring and with the opposite
    sign, which hardly mattered at their eta.
    """

    needs_mean: ClassVar[str] = "FedHeNN's common kernel is a mean of similarities"

    eta: float = Field(0.1, ge=0, description="weight of the alignment of kernels")
    points: int = Field(100, ge=2, description="number of common inputs per round")

    def check(self, server: ServerState, info: FederationInfo) -> None:
        """Refuse per-domain stages before the head, because the common inputs have no domain."""
        if PER_DOMAIN in {stage: place for stage, place in self.placement.items() if stage != "head"}.values():
            raise PerfedError(
                "fedhenn compares the head's inputs for samples without a domain; only the head can be per-domain"
            )
        super().check(server, info)

    def round(self, server: ServerState, clients: Clients) -> None:
        """Compute the clients' kernels and their mean, then train locally."""
        key = clients.key("common inputs")
        kernels = clients.run(self.kernels, key=key).kernel
        clients.train(self.train_aligned, key=key, kernel=kernels.mean(0))

    def kernels(self, cohort: Cohort, key: Tensor) -> Reply:
        """Return K_i ``(n, points, points)``."""
        return Reply(
            kernel=_compute_gram(cohort.forward(self.inputs(cohort, key), stages=cohort.chain.stages_before("head")))
        )

    def train_aligned(self, cohort: Cohort, key: Tensor, kernel: Tensor) -> Reply:
        """Train all stages together, aligned to the mean kernel of the clients."""
        if self.eta:
            cohort.penalties = [*cohort.penalties, self._make_penalty(cohort, self.inputs(cohort, key), kernel)]
        cohort.fit(STAGES, epochs=self.local_epochs)
        return Reply()

    def inputs(self, cohort: Cohort, key: Tensor) -> Tensor:
        """Return the common inputs ``(n, points, ...)``; every entry depends only on the key and its position.

        A smaller shape contains the first entries of a larger one.
        """
        shape, key = cohort.samples().x.shape[1:], key.to(cohort.device)
        keys = rng.key(key[:, None], torch.arange(self.points, device=key.device))
        for size in shape[:-1]:
            keys = rng.key(keys.unsqueeze(-1), torch.arange(size, device=key.device))
        x = rng.normal(keys, shape[-1], cohort.dtype)
        lengths = torch.tensor([client.input_shape[-1] for client in cohort.clients], device=key.device)
        within = torch.arange(shape[-1], device=key.device) < lengths[:, None]
        return x * within.view(-1, *[1] * len(shape), shape[-1])

    def _make_penalty(self, cohort: Cohort, x: Tensor, kernel: Tensor) -> Penalty:
        def value(step: Step) -> Tensor:
            evaluation_step, z = step.in_evaluation_mode(), step.select_rows(x)
            for stage in step.chain.stages_before("head"):
                z = evaluation_step.apply(stage, z)
            return self.eta * (1 - compute_cka(_compute_gram(z), step.select_rows(kernel)))

        return value


def _compute_gram(features: Tensor) -> Tensor:
    flat = features.flatten(2)
    return flat @ flat.transpose(1, 2)
