"""The scale of input columns inside a generalised linear model, so that its fit does not depend on their units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from perfed.data.labels import Task
from perfed.maths.glm import SiteFit, Summary

_CONSTANT = 1e-10  # deviation, as a share of the largest value, up to which a column counts as constant
_UNINFORMATIVE = 1e-12  # curvature, as a share of the largest at any site, up to which a site says nothing of a column


@dataclass(frozen=True)
class ColumnScale:
    """The transformation ``(x - mean) / deviation`` of a site's columns, and its inverse for a model fitted on them.

    Attributes:
        mean: ``(p,)``.
        deviation: ``(p,)``, positive.
        constant: ``(p,)``, columns that do not vary in the training rows and whose scaled values are 0.
    """

    mean: Tensor
    deviation: Tensor
    constant: Tensor

    @classmethod
    def keep_units(cls, x: Tensor) -> Self:
        """Return the transformation that leaves the columns of ``x`` as they are."""
        zeros = x.new_zeros(x.shape[1])
        return cls(zeros, zeros + 1, zeros.bool())

    @classmethod
    def from_rows(cls, x: Tensor, shared: Tensor) -> Self:
        """Return the transformation that centres training rows and divides them by a scale.

        Args:
            x: training rows ``(n, p)``.
            shared: the scale of the first columns; 0, and the columns beyond its length, stand for a scale that is not
                known yet, in place of which the deviation of the rows is used.
        """
        mean, deviation = x.mean(0), x.std(0, correction=0)
        constant = deviation <= _CONSTANT * x.abs().amax(0)
        scale = torch.cat([shared, shared.new_zeros(x.shape[1] - len(shared))])
        deviation = torch.where(constant, torch.ones_like(deviation), deviation)
        return cls(mean, torch.where(scale > 0, scale, deviation), constant)

    def transform(self, x: Tensor) -> Tensor:
        """Return the scaled rows ``(n, p)``."""
        return ((x - self.mean) / self.deviation).masked_fill(self.constant, 0)

    def restore_fit(self, fit: SiteFit, *, intercept: bool) -> SiteFit:
        """Return the model of unscaled columns that is the same as ``fit`` of scaled ones.

        Args:
            fit: its slopes are those of the first columns, its own those of the others.
            intercept: whether the model has one, which then absorbs the means.
        """
        shared = len(fit.slopes)
        slopes = fit.slopes / self.deviation[:shared, None]
        others = fit.own / self.deviation[shared:, None]
        shift = self.mean @ torch.cat([slopes, others]) if intercept else 0.0
        return replace(fit, bias=fit.bias - shift, slopes=slopes, own=others)

    def restore_summary(self, summary: Summary, outputs: int) -> Summary:
        """Return what ``summary`` says of slopes of scaled columns as a statement about those of unscaled ones."""
        shared = len(summary.target) // outputs
        return scale_summary(summary, 1 / self.deviation[:shared].repeat_interleave(outputs))


def scale_summary(summary: Summary, scale: Tensor) -> Summary:
    """Return the same summary, of slopes that are multiplied by ``scale`` ``(S k,)``."""
    return replace(summary, hessian=summary.hessian / scale[:, None] / scale[None, :], target=summary.target / scale)


def shared_scale(task: Task, summaries: Sequence[Summary], freedom: Sequence[float], outputs: int) -> Tensor:
    """Return the scale ``(S,)`` of the columns that sites share, 0 for a column of which no site says anything.

    It is the square root of the mean curvature of a row's loss in the column's slopes, in units of the curvature in
    that of a column of variance 1 at equal probabilities of the classes. For values it is the deviation within sites.

    Args:
        task: of the targets.
        summaries: of each site, of slopes of unscaled columns.
        freedom: of each site, its samples less the intercept, times its outputs.
        outputs: k linear predictors.

    Example:
        >>> x = torch.tensor([[-2.0], [0.0], [2.0]]).double()
        >>> shared_scale("regression", [Summary(x.T @ x, torch.zeros(1), torch.tensor(0.0))], [2.0], 1).tolist()
        [2.0]
    """
    curvature = torch.stack([summary.hessian.diagonal().view(-1, outputs).sum(1) for summary in summaries])
    informative = curvature > _UNINFORMATIVE * curvature.amax(0).clamp_min(0)
    rows = (curvature.new_tensor(freedom)[:, None] * informative).sum(0) * _curvature_of_a_row(task, outputs)
    return torch.where(rows > 0, (curvature * informative).sum(0) / rows, 0).sqrt()


def _curvature_of_a_row(task: Task, outputs: int) -> float:
    """Return the curvature of a row's loss in one of the slopes, at a value of 1 and equal probabilities."""
    if task != "classification":
        return 1.0
    classes = max(2, outputs)
    return (classes - 1) / classes**2
