"""Privacy of rows with noise of its own for each client, by id, as the authors of two tables have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from pydantic import Field
from scipy.optimize import brentq  # type: ignore[import-untyped]
from torch import Tensor

from perfed.method.method import Method
from perfed.model.chain import Parameters
from perfed.privacy.sample import SamplePrivacy
from perfed.rng import PLAIN, Noise
from perfed.training.cohort import Cohort
from perfed.training.private import PrivateTraining
from perfed.training.step import Loss, Penalty, Step


class OneNoise(Noise):
    """The same numbers for all clients: those of the first."""

    def draw(self, keys: Tensor, count: int, dtype: torch.dtype = torch.float32, *, once: bool = False) -> Tensor:
        """Numbers ``(clients, count)``."""
        return super().draw(keys[:1], count, dtype, once=once).repeat(len(keys), 1)


@dataclass(frozen=True)
class TrainingByClient(PrivateTraining):
    """Noise of its own for each client of a cohort, in its order; ``noise`` is that of counts.

    ``factors`` are what each client's noisy gradients are multiplied by.
    """

    own_noises: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()

    def gradients(self, loss: Loss, step: Step, params: Parameters, count: int) -> tuple[Tensor, Parameters]:
        """The gradients of private training with the noise of the clients in ``step``."""
        rows = torch.from_numpy(step.rows)
        noise, factor = (torch.tensor(of, dtype=step.weight.dtype)[rows] for of in (self.own_noises, self.factors))
        training = PrivateTraining(self.clip, cast(Any, noise), poisson=self.poisson, source=self.source)
        losses, noisy = training.compute_gradients(loss, step, params, count)
        return losses, {name: g * factor.view(-1, *[1] * (g.ndim - 1)) for name, g in noisy.items()}


class NoiseByClient(SamplePrivacy):
    """Privacy of rows with a noise multiplier for each client, by id."""

    by_id: dict[str, float] = Field({}, description="z of each client")
    factors: dict[str, float] = Field({}, description="of a client's gradients; those that are not named: 1")
    one: bool = Field(False, description="whether all clients draw the same noise")

    def loss(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty | None:
        """Nothing is added: the cohort's training gets the noises of its clients."""
        noises = tuple(self.by_id[client] for client in cohort.ids)
        factors = tuple(self.factors.get(client, 1.0) for client in cohort.ids)
        cohort.private = TrainingByClient(
            self.clip,
            self.noise,
            self.rows,
            self.poisson,
            OneNoise() if self.one else PLAIN,
            own_noises=noises,
            factors=factors,
        )
        return None


def privately_by_client(method: Method, own: NoiseByClient) -> Method:
    """The method in private, with a noise multiplier for each client; ``noise`` of ``own`` is that of counts."""
    own = own.model_copy(update={"entries": ("shared", "num_samples")})
    return method.model_copy(update={"extensions": (own, *method.extensions)})


def rdp_noise(
    budget: float, delta: float, rate: float, steps: int, orders: Sequence[float], *, whole: int = 0
) -> float:
    """The noise multiplier with which so many Poisson samples at ``rate`` cost ``budget``, by Renyi divergences.

    ``whole`` releases of all rows with the same noise go with them.
    """

    def over(noise: float) -> float:
        accountant, event = RdpAccountant(list(orders)), GaussianDpEvent(noise)
        accountant.compose(event if rate >= 1 else PoissonSampledDpEvent(rate, event), steps)
        if whole:
            accountant.compose(event, whole)
        return float(accountant.get_epsilon(delta)) - budget

    return float(brentq(over, 0.2, 500, xtol=1e-3))
