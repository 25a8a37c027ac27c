"""FLIC for regression: the anchor of a response lies on a line between two points (Rakotomamonjy et al. 2024, S3.1)."""

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

_RESPONSES = 16  # number of a client's responses at which the anchors' own step evaluates the loss of the head


@dataclass(frozen=True)
class LineAnchors:
    """Anchors ``N(m(y), scale I)`` with ``m(y) = s a + (1 - s) b``, s the response scaled from 0 to 1.

    Row 0 of the means is b, the point of the smallest response of all clients, row 1 is a, the point of the largest.
    Every sample forms its own set, whose ``W2^2`` is ``|z - m(y)|^2`` plus a constant; the distance of a mini-batch is
    their mean.

    Attributes:
        values: the received values: ``mean`` ``(n, 2, k)``, and ``range`` ``(n, 2)``, the smallest and the largest
            response of all clients.
        scale: the covariance of an anchor is this times the identity.
        samples: number J of samples of an anchor in the calibration.
    """

    values: Mapping[str, Tensor]
    scale: float
    samples: int

    @property
    def span(self) -> Tensor:
        """The smallest and the largest response, ``(n, 2)``."""
        return self.values["range"]

    def distances(self, z: Tensor, y: Tensor) -> Tensor:
        """Return ``|z - m(y)|^2`` of ``z`` ``(n, m, k)``: ``(n, m)``."""
        distances: Tensor = (z - _compute_shares(self.span, y) @ self.values["mean"]).square().sum(-1)
        return distances

    def mark_samples(self, cohort: Cohort, samples: Samples) -> Samples:
        """Return ``samples`` unchanged, because their responses determine their anchors."""
        return samples

    def alignment(self) -> Penalty:
        """Return a penalty: the mean of :meth:`distances` over each client's mini-batch."""

        def value(step: Step) -> Tensor:
            centres = _compute_shares(step.select_rows(self.span), step.y) @ step.select_rows(self.values["mean"])
            return ((step.output(EMBEDDING) - centres).square().sum(-1) * step.weight).sum(1)

        return value

    def calibration(self, step: Step) -> Tensor:
        """Return the mini-batch mean ``(clients,)`` of ``mean_j (g[Z_j] - y)^2`` with ``Z_j ~ N(m(y), scale I)``."""
        centres = _compute_shares(step.select_rows(self.span), step.y) @ step.select_rows(self.values["mean"])
        z = self._draw_around(centres, rng.key(step.keys, "calibration"))
        y = step.y.flatten(1).repeat_interleave(self.samples, dim=1)
        losses = sample_losses(step.apply_after(EMBEDDING, z), y, "regression")
        total: Tensor = (losses.unflatten(1, (-1, self.samples)).mean(2) * step.weight).sum(1)
        return total

    def find_present_entries(self, cohort: Cohort) -> Tensor:
        """Return which anchors a client moves, ``(n, 2)``: both points at every client."""
        return torch.ones(cohort.n, 2, dtype=torch.bool, device=cohort.device)

    def pull(self, cohort: Cohort) -> Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]:
        """Return the gradient function of the mean distance in the points, ``2 mean_j c (m(y) - z)^T``, c = (1 - s, s).

        It depends on the data only through ``mean_j c (c, z)^T``, ``(n, 2, 2 + k)``.
        """
        samples = cohort.samples()
        z, client = cohort.features(EMBEDDING).flatten(1), cohort.client_of(samples)
        c = _compute_shares(self.span[client], samples.y)[:, 0]
        c_and_z = torch.cat([c, z], dim=1)
        sums = c_and_z.new_zeros(cohort.n, 2, c_and_z.shape[1]).index_add_(0, client, c[:, :, None] * c_and_z[:, None])
        moments = sums / cohort.num_samples[:, None, None]
        return lambda values, count: {"mean": 2 * (moments[:, :, :2] @ values["mean"] - moments[:, :, 2:])}

    def push(self, cohort: Cohort, values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """Return the gradient of the mean of ``(g[Z] - y)^2`` in the two points, with the samples of step ``count``.

        The responses y are 16 quantiles of each client's responses, evenly spaced.
        """
        samples = cohort.samples()
        parts = torch.split(samples.y.flatten(), samples.counts.tolist())
        y = torch.stack([part.sort().values[torch.linspace(0, len(part) - 1, _RESPONSES).long()] for part in parts])
        v = values["mean"].detach().clone().requires_grad_(True)
        z = self._draw_around(_compute_shares(self.span, y) @ v, cohort.key("anchor step", count))
        outputs = cohort.apply_after(EMBEDDING, z, params=cohort.received, turn=count)
        losses = sample_losses(outputs, y.repeat_interleave(self.samples, dim=1), "regression")
        (gradient,) = torch.autograd.grad(losses.mean(1).sum(), v)
        return {"mean": gradient}

    def _draw_around(self, centres: Tensor, keys: Tensor) -> Tensor:
        """Return J samples around each of ``centres`` ``(n, m, k)``: ``(n, m J, k)``."""
        n, m, k = centres.shape
        noise = rng.normal(keys, m * self.samples * k, centres.dtype).view(n, m, self.samples, k)
        z: Tensor = centres[:, :, None] + self.scale**0.5 * noise
        return z.flatten(1, 2)


def _compute_shares(span: Tensor, y: Tensor) -> Tensor:
    """Return 1 - s and s of the responses ``y`` of clients with ranges ``span`` ``(n, 2)``: ``(n, m, 2)``."""
    low, high = span[:, :1], span[:, 1:]
    s = (y.reshape(len(span), -1) - low) / (high - low)
    return torch.stack([1 - s, s], dim=-1)
