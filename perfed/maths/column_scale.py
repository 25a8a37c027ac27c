"""The scale of input columns inside a generalised linear model, so that its fit does not depend on their units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from perfed.data.labels import Task
from perfed.maths.glm import SiteFit, Summary

_CONSTANT = 1e-10  # deviation over the largest absolute value, up to which a column counts as constant
_UNINFORMATIVE = 1e-12  # curvature over the largest one of all sites, up to which a site is uninformative


@dataclass(frozen=True)
class ColumnScale:
    """The transformation ``(x - mean) / deviation`` of a site's columns, and its inverse for a model fitted on them.

    Attributes:
        mean: the means of the columns ``(p,)``.
        deviation: their scales ``(p,)``, positive.
        constant: a mask ``(p,)`` of columns that do not vary in the training rows; their scaled values are 0.
    """

    mean: Tensor
    deviation: Tensor
    constant: Tensor

    @classmethod
    def keep_units(cls, x: Tensor) -> Self:
        """Return the identity transformation for the columns of ``x``."""
        zeros = x.new_zeros(x.shape[1])
        return cls(zeros, zeros + 1, zeros.bool())

    @classmethod
    def from_rows(cls, x: Tensor, shared: Tensor) -> Self:
        """Return the transformation that centres training rows and divides them by a scale.

        Args:
            x: training rows ``(n, p)``.
            shared: scales of the first columns. Where it is 0, and for columns beyond its length, the standard
                deviation of the rows is used.
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
        """Return the model of unscaled columns that is equivalent to ``fit``, a model of scaled columns.

        Args:
            fit: a fit whose ``slopes`` belong to the first columns and whose ``local`` slopes belong to the others.
            intercept: whether the model has an intercept, which then absorbs the means.
        """
        shared = len(fit.slopes)
        slopes = fit.slopes / self.deviation[:shared, None]
        local_slopes = fit.local / self.deviation[shared:, None]
        shift = self.mean @ torch.cat([slopes, local_slopes]) if intercept else 0.0
        return replace(fit, bias=fit.bias - shift, slopes=slopes, local=local_slopes)

    def restore_summary(self, summary: Summary, outputs: int) -> Summary:
        """Return ``summary``, which is about slopes of scaled columns, in terms of slopes of unscaled columns."""
        shared = len(summary.target) // outputs
        return scale_summary(summary, 1 / self.deviation[:shared].repeat_interleave(outputs))


def scale_summary(summary: Summary, scale: Tensor) -> Summary:
    """Return ``summary`` in terms of slopes that are multiplied by ``scale`` ``(S k,)``."""
    return replace(summary, hessian=summary.hessian / scale[:, None] / scale[None, :], target=summary.target / scale)


def shared_scale(task: Task, summaries: Sequence[Summary], freedom: Sequence[float], outputs: int) -> Tensor:
    """Return the scales ``(S,)`` of the columns that sites share; 0 for a column about which no site is informative.

    A scale is the square root of the mean curvature of a row's loss in the column's slopes, divided by the curvature
    for a column of variance 1 at equal class probabilities. For regression it is the standard deviation within sites.

    Args:
        task: the task of the model.
        summaries: the summary of each site, in terms of slopes of unscaled columns.
        freedom: the degrees of freedom of each site: its samples less one for the intercept, times its outputs.
        outputs: the number k of linear predictors.

    Example:
        >>> x = torch.tensor([[-2.0], [0.0], [2.0]]).double()
        >>> shared_scale("regression", [Summary(x.T @ x, torch.zeros(1), torch.tensor(0.0))], [2.0], 1).tolist()
        [2.0]
    """
    curvature = torch.stack([summary.hessian.diagonal().view(-1, outputs).sum(1) for summary in summaries])
    informative = curvature > _UNINFORMATIVE * curvature.amax(0).clamp_min(0)
    rows = (curvature.new_tensor(freedom)[:, None] * informative).sum(0) * _row_curvature(task, outputs)
    return torch.where(rows > 0, (curvature * informative).sum(0) / rows, 0).sqrt()


def _row_curvature(task: Task, outputs: int) -> float:
    """Return the curvature of a row's loss in one of the slopes, at a value of 1 and equal probabilities."""
    if task != "classification":
        return 1.0
    classes = max(2, outputs)
    return (classes - 1) / classes**2
