"""FLIC for values: the anchor of a response lies on a line between two points (Rakotomamonjy et al. 2024, S3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed import rng
from perfed.model.chain import Parameters
from perfed.training.cohort import Cohort
from perfed.training.step import Penalty, Step, sample_losses

_RESPONSES = 16  # at which the anchors' own step takes the loss of the head


@dataclass(frozen=True)
class Line:
    """Anchors ``N(m(y), scale I)`` with ``m(y) = s a + (1 - s) b``, s the response between the least and the largest.

    The two points are the anchors: row 0 is b, of the least response of all clients, row 1 is a, of the largest.

    Attributes:
        span: the least and the largest response of all clients, ``(n, 2)``.
        stage: whose outputs are aligned.
        scale: covariance of an anchor: this times the identity.
        samples: J, of an anchor in the calibration.
    """

    span: Tensor
    stage: str
    scale: float
    samples: int

    def shares(self, span: Tensor, y: Tensor) -> Tensor:
        """1 - s and s of responses ``(n, m)``: ``(n, m, 2)``."""
        low, high = span[:, :1], span[:, 1:]
        s = (y - low) / (high - low)
        return torch.stack([1 - s, s], dim=-1)

    def distances(self, means: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """``|z - m(y)|^2`` of ``z`` ``(n, m, k)``: ``(n, m)``; ``W2^2`` of a set of one, less its constant."""
        return (z - self.shares(self.span, y) @ means).square().sum(-1)

    def alignment(self, means: Tensor) -> Penalty:
        """Mean of :meth:`distances` over each client's mini-batch; ``means`` is ``(n, 2, k)``."""

        def value(step: Step) -> Tensor:
            centres = self.shares(step.of(self.span), _responses(step.y)) @ step.of(means)
            return ((step.output(self.stage) - centres).square().sum(-1) * step.weight).sum(1)

        return value

    def calibration(self, step: Step, means: Tensor) -> Tensor:
        """Mean over the mini-batch of ``mean_j (g[Z_j] - y)^2`` with ``Z_j ~ N(m(y), scale I)``, ``(clients,)``."""
        y, own = step.y, step.of(means)
        centres = self.shares(step.of(self.span), _responses(y)) @ own
        return self._loss(step, centres, y, rng.key(step.keys, "calibration"), step.weight)

    def _loss(self, step: Step, centres: Tensor, y: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
        n, responses, k = centres.shape
        noise = rng.normal(keys, responses * self.samples * k, centres.dtype).view(n, responses, self.samples, k)
        z = (centres[:, :, None] + self.scale**0.5 * noise).flatten(1, 2)
        losses = sample_losses(step.after(self.stage, z), y.repeat_interleave(self.samples, dim=1), None)
        return (losses.view(n, responses, -1).mean(2) * weight).sum(1)

    def moments(self, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """``mean_j c c^T`` ``(n, 2, 2)`` and ``mean_j c z^T`` ``(n, 2, k)`` of the clients' samples, c = (1 - s, s).

        All that the gradient of the alignment in the two points needs of the data.
        """
        samples = cohort.samples()
        z, client = cohort.features(self.stage).flatten(1), cohort.client_of(samples)
        c = self.shares(self.span[client], _responses(samples.y)[:, None])[:, 0]
        counts = cohort.num_samples[:, None, None]
        square = c.new_zeros(cohort.n, 2, 2).index_add_(0, client, c[:, :, None] * c[:, None])
        both = z.new_zeros(cohort.n, 2, z.shape[1]).index_add_(0, client, c[:, :, None] * z[:, None])
        return square / counts, both / counts

    def gradient(self, cohort: Cohort, means: Tensor, received: Parameters, keys: Tensor, turn: int) -> Tensor:
        """Of the head's loss on samples of the anchors, in the two points ``(n, 2, k)``, by the parameters ``received``.

        At 16 responses of each client, evenly spaced among its own: the mean over more says nothing else.
        """
        samples = cohort.samples()
        rows = [torch.linspace(0, int(m) - 1, _RESPONSES).round().long() for m in samples.counts]
        parts = torch.split(_responses(samples.y), samples.counts.tolist())
        y = torch.stack([part.sort().values[at.to(part.device)] for part, at in zip(parts, rows, strict=True)])
        v = means.detach().clone().requires_grad_(True)
        n, _, k = v.shape
        noise = rng.normal(keys, _RESPONSES * self.samples * k, v.dtype).view(n, _RESPONSES, self.samples, k)
        z = ((self.shares(self.span, y) @ v)[:, :, None] + self.scale**0.5 * noise).flatten(1, 2)
        outputs = cohort.after(self.stage, z, params=received, turn=turn)
        losses = sample_losses(outputs, y.repeat_interleave(self.samples, dim=1), None)
        (found,) = torch.autograd.grad(losses.mean(1).sum(), v)
        return found


def _responses(y: Tensor) -> Tensor:
    """One value per sample: of ``(..., 1)`` targets the value."""
    return y.squeeze(-1) if y.ndim > 1 and y.shape[-1] == 1 and y.ndim != 2 else y
