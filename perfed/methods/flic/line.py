"""FLIC for values: the anchor of a response lies on a line between two points (Rakotomamonjy et al. 2024, S3.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed import rng
from perfed.model.chain import EMBEDDING
from perfed.training.batches import Samples
from perfed.training.cohort import Cohort
from perfed.training.step import Penalty, Step, sample_losses

_RESPONSES = 16  # of a client at which the anchors' own step takes the loss of the head


@dataclass(frozen=True)
class LineAnchors:
    """Anchors ``N(m(y), scale I)`` with ``m(y) = s a + (1 - s) b``, s the response scaled from 0 to 1.

    Row 0 of the means is b, the place of the least response of all clients, row 1 is a, that of the largest. Every
    sample is a set of one, whose ``W2^2`` is ``|z - m(y)|^2`` and a constant; a mini-batch has their mean.

    Attributes:
        values: as the clients received them: ``mean`` ``(n, 2, k)``, and ``range``, the least and the largest response
            of all clients ``(n, 2)``.
        scale: covariance of an anchor: this times the identity.
        samples: J, of an anchor in the calibration.
    """

    values: Mapping[str, Tensor]
    scale: float
    samples: int

    @property
    def span(self) -> Tensor:
        """The least and the largest response, ``(n, 2)``."""
        return self.values["range"]

    def distances(self, z: Tensor, y: Tensor) -> Tensor:
        """``|z - m(y)|^2`` of ``z`` ``(n, m, k)``: ``(n, m)``."""
        found: Tensor = (z - _shares(self.span, y) @ self.values["mean"]).square().sum(-1)
        return found

    def divided(self, cohort: Cohort, samples: Samples) -> Samples:
        """``samples``: nothing is to be known of them beside their responses."""
        return samples

    def alignment(self) -> Penalty:
        """Mean of :meth:`distances` over each client's mini-batch."""

        def value(step: Step) -> Tensor:
            centres = _shares(step.select_rows(self.span), step.y) @ step.select_rows(self.values["mean"])
            return ((step.output(EMBEDDING) - centres).square().sum(-1) * step.weight).sum(1)

        return value

    def calibration(self, step: Step) -> Tensor:
        """Mean over the mini-batch of ``mean_j (g[Z_j] - y)^2`` with ``Z_j ~ N(m(y), scale I)``, ``(clients,)``."""
        centres = _shares(step.select_rows(self.span), step.y) @ step.select_rows(self.values["mean"])
        z = self._drawn(centres, rng.key(step.keys, "calibration"))
        y = step.y.flatten(1).repeat_interleave(self.samples, dim=1)
        losses = sample_losses(step.apply_after(EMBEDDING, z), y, "regression")
        total: Tensor = (losses.unflatten(1, (-1, self.samples)).mean(2) * step.weight).sum(1)
        return total

    def held(self, cohort: Cohort) -> Tensor:
        """Every client moves both points: ``(n, 2)``."""
        return torch.ones(cohort.n, 2, dtype=torch.bool, device=cohort.device)

    def pull(self, cohort: Cohort) -> Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]:
        """Gradient of the mean distance in the two points, ``2 mean_j c (m(y) - z)^T``, c = (1 - s, s).

        Of the data it needs only ``mean_j c (c, z)^T``, ``(n, 2, 2 + k)``.
        """
        samples = cohort.samples()
        z, client = cohort.features(EMBEDDING).flatten(1), cohort.client_of(samples)
        c = _shares(self.span[client], samples.y)[:, 0]
        both = torch.cat([c, z], dim=1)
        sums = both.new_zeros(cohort.n, 2, both.shape[1]).index_add_(0, client, c[:, :, None] * both[:, None])
        found = sums / cohort.num_samples[:, None, None]
        return lambda values, count: {"mean": 2 * (found[:, :, :2] @ values["mean"] - found[:, :, 2:])}

    def push(self, cohort: Cohort, values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Gradient of the mean of ``(g[Z] - y)^2`` in the two points, with the samples of step ``count``.

        At 16 responses of each client, evenly spaced in the order of its own.
        """
        samples = cohort.samples()
        parts = torch.split(samples.y.flatten(), samples.counts.tolist())
        y = torch.stack([part.sort().values[torch.linspace(0, len(part) - 1, _RESPONSES).long()] for part in parts])
        v = values["mean"].detach().clone().requires_grad_(True)
        z = self._drawn(_shares(self.span, y) @ v, cohort.key("anchor step", count))
        outputs = cohort.apply_after(EMBEDDING, z, params=cohort.received, turn=count)
        losses = sample_losses(outputs, y.repeat_interleave(self.samples, dim=1), "regression")
        (found,) = torch.autograd.grad(losses.mean(1).sum(), v)
        return {"mean": found}

    def _drawn(self, centres: Tensor, keys: Tensor) -> Tensor:
        """J samples around each of ``centres`` ``(n, m, k)``: ``(n, m J, k)``."""
        n, m, k = centres.shape
        noise = rng.normal(keys, m * self.samples * k, centres.dtype).view(n, m, self.samples, k)
        z: Tensor = centres[:, :, None] + self.scale**0.5 * noise
        return z.flatten(1, 2)


def _shares(span: Tensor, y: Tensor) -> Tensor:
    """1 - s and s of the responses ``y`` of clients whose range is ``span`` ``(n, 2)``: ``(n, m, 2)``."""
    low, high = span[:, :1], span[:, 1:]
    s = (y.reshape(len(span), -1) - low) / (high - low)
    return torch.stack([1 - s, s], dim=-1)
