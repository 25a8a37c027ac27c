"""Privacy of rows with noise of its own for each client, as the authors of two tables have it; perfed has one."""

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
from perfed.training.cohort import Cohort
from perfed.training.private import PrivateTraining
from perfed.training.step import Loss, Penalty, Step


@dataclass(frozen=True)
class TrainingByClient(PrivateTraining):
    """Noise of its own for each client of a cohort, in its order; ``noise`` is that of counts."""

    noises: tuple[float, ...] = ()

    def gradients(self, loss: Loss, step: Step, params: Parameters, count: int) -> tuple[Tensor, Parameters]:
        """The gradients of private training with the noise of the clients in ``step``."""
        own = torch.tensor(self.noises, dtype=step.weight.dtype)[torch.from_numpy(step.rows)]
        return PrivateTraining(self.clip, cast(Any, own), poisson=self.poisson).gradients(loss, step, params, count)


class NoiseByClient(SamplePrivacy):
    """Privacy of rows with a noise multiplier for each client, by id."""

    noises: dict[str, float] = Field({}, description="z of each client")

    def loss(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty | None:
        """Nothing is added: the cohort's training gets the noises of its clients."""
        own = tuple(self.noises[client] for client in cohort.ids)
        cohort.private = TrainingByClient(self.clip, self.noise, self.rows, self.poisson, noises=own)
        return None


def with_noises(method: Method, noises: Mapping[str, float], clip: float, *, counts: float, poisson: bool) -> Method:
    """The method in private, with a noise multiplier for each client, by id, and one for numbers of rows."""
    entries = ("shared", "num_samples")
    own = NoiseByClient(clip=clip, noise=counts, poisson=poisson, entries=entries, noises=dict(noises))
    return method.model_copy(update={"extensions": (own, *method.extensions)})


def rdp_noise(epsilon: float, delta: float, rate: float, steps: int, orders: Sequence[float]) -> float:
    """The noise multiplier with which so many Poisson samples at ``rate`` cost ``epsilon``, by Renyi divergences."""

    def over(noise: float) -> float:
        accountant, event = RdpAccountant(list(orders)), GaussianDpEvent(noise)
        accountant.compose(event if rate >= 1 else PoissonSampledDpEvent(rate, event), steps)
        return float(accountant.get_epsilon(delta)) - epsilon

    return float(brentq(over, 0.2, 500, xtol=1e-3))
