"""Generalised linear models at one site: loss, gradient and Hessian, and the fit around what sites share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.data.labels import Task

INTERCEPT = 1e-4
"""Pull of an intercept to 0, which is negligible except where a site lacks a class."""

_MOST = 100  # Newton steps
_CLOSE = 1e-10  # a step that decreases the loss per sample by less than this is the last one
_SHORTEST = 2.0**-30


@dataclass(frozen=True)
class LossExpansion:
    """The second-order expansion of the negative log-likelihood of coefficients around a point.

    Attributes:
        value: the sum over the samples.
        gradient: ``(p, k)`` for p columns and k linear predictors.
        hessian: ``(p k, p k)``; predictors vary fastest.
    """

    value: Tensor
    gradient: Tensor
    hessian: Tensor


def loss(task: Task, eta: Tensor, y: Tensor) -> Tensor:
    """Return the negative log-likelihood of all samples, a scalar.

    Args:
        task: classification, regression (half the squared error) or survival (Cox, ties by Breslow).
        eta: linear predictors ``(n, k)``; with one predictor, classification is logistic.
        y: labels ``(n,)``, values ``(n, k)``, or times and events ``(n, 2)``.
    """
    if task == "regression":
        return 0.5 * (eta - y.reshape(eta.shape)).square().sum()
    if task == "survival":
        order, risk = _risk_sets(eta, y)
        return (y[order, 1] * (risk - eta[order, 0])).sum()
    if eta.shape[1] == 1:
        return (torch.nn.functional.softplus(eta[:, 0]) - y * eta[:, 0]).sum()
    return torch.nn.functional.cross_entropy(eta, y, reduction="sum")


def expand_loss(task: Task, design: Tensor, eta: Tensor, y: Tensor) -> LossExpansion:
    """Return :func:`loss` with its derivatives in the coefficients of ``design`` ``(n, p)``.

    The arguments are those of :func:`loss`.

    Example:
        >>> ones, eta, y = torch.ones(2, 1).double(), torch.zeros(2, 1).double(), torch.tensor([0, 1])
        >>> expansion = expand_loss("classification", ones, eta, y)
        >>> expansion.gradient.item(), expansion.hessian.item()
        (0.0, 0.5)
    """
    value = loss(task, eta, y)
    if task == "survival":
        return LossExpansion(value, *_differentiate_cox(design, eta, y))
    if task == "regression":
        eye = torch.eye(eta.shape[1], dtype=eta.dtype, device=eta.device)
        return LossExpansion(value, design.T @ (eta - y.reshape(eta.shape)), torch.kron(design.T @ design, eye))
    if eta.shape[1] == 1:
        p = eta.sigmoid()
        return LossExpansion(value, design.T @ (p - y[:, None]), design.T @ (design * p * (1 - p)))
    p, (columns, k) = eta.softmax(1), (design.shape[1], eta.shape[1])
    hessian = design.new_empty(columns, k, columns, k)
    for a in range(k):
        for b in range(k):
            weight = p[:, a] * ((1.0 if a == b else 0.0) - p[:, b])
            hessian[:, a, :, b] = design.T @ (design * weight[:, None])
    gradient = design.T @ (p - torch.nn.functional.one_hot(y, k))
    return LossExpansion(value, gradient, hessian.reshape(columns * k, columns * k))


def _risk_sets(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of samples from the latest time to the earliest, and the log of the total hazard of each risk
    set.
    """
    order = y[:, 0].argsort(descending=True, stable=True)
    last = _last_of_ties(y[order, 0])
    return order, torch.logcumsumexp(eta[order, 0], 0)[last]


def _last_of_ties(time: Tensor) -> Tensor:
    """Return, for each of several descending times, the last position with the same time."""
    return torch.searchsorted(-time, -time, right=True) - 1


def _differentiate_cox(design: Tensor, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient ``(p, 1)`` and Hessian ``(p, p)`` of the negative log Cox partial likelihood."""
    order, risk = _risk_sets(eta, y)
    x, event, last = design[order], y[order, 1], _last_of_ties(y[order, 0])
    highest = eta.max()
    hazard = (eta[order, 0] - highest).exp()
    means = (x * hazard[:, None]).cumsum(0)[last] / (risk - highest).exp()[:, None]
    first = torch.searchsorted(-y[order, 0], -y[order, 0])  # a sample is at risk at all earlier or equal times
    per_event = event * (highest - risk).exp()
    behind = per_event.flip(0).cumsum(0).flip(0)[first]
    gradient = ((event[:, None] * (means - x)).sum(0))[:, None]
    centred = means * event[:, None].sqrt()
    return gradient, x.T @ (x * (hazard * behind)[:, None]) - centred.T @ centred


# One site -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The negative log-likelihood of a site as a quadratic function of the slopes that sites share.

    For shared slopes b, with the site's intercept and local slopes at their optimum for b, the negative log-likelihood
    is ``constant - target b + b hessian b / 2`` up to third order.

    Attributes:
        hessian: ``(S k, S k)``, zero for columns that do not vary at the site.
        target: ``(S k,)``.
        constant: a scalar.
    """

    hessian: Tensor
    target: Tensor
    constant: Tensor


@dataclass(frozen=True)
class SiteFit:
    """A site's model, fitted around the slopes that all sites share.

    Attributes:
        bias: intercepts ``(k,)``; 0 for survival.
        slopes: the slopes of the shared columns ``(S, k)``.
        local: the slopes of columns that only this site has ``(p - S, k)``.
        loss: the negative log-likelihood of all samples.
    """

    bias: Tensor
    slopes: Tensor
    local: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Site:
    """A site's samples in float64.

    Attributes:
        task: the task of the model.
        x: ``(n, p)``, with shared columns first.
        y: the targets, as in :func:`loss`.
        shared: the number S of shared columns.
        outputs: the number k of linear predictors.
    """

    task: Task
    x: Tensor
    y: Tensor
    shared: int
    outputs: int

    @property
    def _design_matrix(self) -> Tensor:
        """Return the columns of the intercept (0 for survival), then the shared and the local columns."""
        ones = self.x.new_full((len(self.x), 1), 0.0 if self.task == "survival" else 1.0)
        return torch.cat([ones, self.x], 1)

    def _coefficient_pulls(self, site_pull: Tensor, shared_pull: Tensor, columns: Tensor | None) -> Tensor:
        """Return the pull of each coefficient ``((1 + p) k,)``.

        A local slope has both variances, as if it were shared.
        """
        local_pull = 1 / (1 / site_pull + 1 / shared_pull)
        local = self.x.shape[1] - self.shared
        intercept = torch.as_tensor(INTERCEPT).to(site_pull)
        shared = site_pull.expand(self.shared) if columns is None else site_pull * columns
        return torch.cat([intercept.expand(1), shared, local_pull.expand(local)]).repeat_interleave(self.outputs)

    def fit(
        self,
        weight: Tensor,
        site_pull: Tensor,
        shared_pull: Tensor,
        columns: Tensor | None = None,
        *,
        newton: bool = True,
    ) -> SiteFit:
        """Return the model with the smallest penalised loss, whose slopes are pulled to ``weight`` ``(S, k)``.

        Minimises ``loss + site_pull/2 |slopes - weight|^2 + pull/2 |local|^2`` with ``1/pull = 1/site_pull +
        1/shared_pull``.

        Args:
            weight: the slopes that all sites share.
            site_pull: the pull of the site's slopes to ``weight``.
            shared_pull: the pull of the shared slopes to 0.
            columns: factors ``(S,)`` of ``site_pull`` at the shared columns; ``None`` for 1.
            newton: whether to use Newton's method, or L-BFGS, which needs no Hessian.
        """
        design, pulls = self._design_matrix, self._coefficient_pulls(site_pull, shared_pull, columns)
        offset = self.x[:, : self.shared] @ weight
        root = pulls.view(-1, self.outputs)[:, :1].sqrt()
        basis = None
        if newton and design.shape[1] > len(design):
            # The optimal coefficients are a combination of the rows, which are fewer than the coefficients.
            basis, triangle = torch.linalg.qr((design / root.T).T)
            design, pulls = triangle.T, torch.ones_like(pulls[: len(design) * self.outputs])
        u = self.x.new_zeros(design.shape[1], self.outputs)

        def objective(u: Tensor) -> Tensor:
            return loss(self.task, offset + design @ u, self.y) + 0.5 * (pulls * u.flatten().square()).sum()

        u = self._minimise_newton(u, objective, design, offset, pulls) if newton else _minimise_lbfgs(u, objective)
        value = loss(self.task, offset + design @ u, self.y)
        u = u if basis is None else basis @ u / root
        return SiteFit(u[0], weight + u[1 : 1 + self.shared], u[1 + self.shared :], value)

    def _minimise_newton(
        self, u: Tensor, objective: Callable[[Tensor], Tensor], design: Tensor, offset: Tensor, pulls: Tensor
    ) -> Tensor:
        """Return the minimum of ``objective`` by Newton steps from ``u``, halved until they decrease it
        sufficiently.
        """
        value = objective(u)
        for _ in range(_MOST):
            expansion = expand_loss(self.task, design, offset + design @ u, self.y)
            gradient = expansion.gradient.flatten() + pulls * u.flatten()
            step = torch.cholesky_solve(gradient[:, None], factorise_cholesky(expansion.hessian + pulls.diag()))
            gain, length = float(gradient @ step[:, 0]), 1.0
            if gain < _CLOSE * len(self.y):
                u = u - step.view_as(u)
                break
            while (next_value := objective(u - length * step.view_as(u))) > value - 1e-4 * length * gain:
                length /= 2
                if length < _SHORTEST:
                    break
            if length < _SHORTEST:
                break
            u, value = u - length * step.view_as(u), next_value
        return u

    def summary(self, fit: SiteFit, site_pull: Tensor, shared_pull: Tensor, columns: Tensor | None = None) -> Summary:
        """Return the quadratic expansion of the loss in the shared slopes around those of ``fit``.

        The pulls are those of :meth:`fit`.
        """
        if not self.shared:  # the summary is only the loss of the fit
            pulls = self._coefficient_pulls(site_pull, shared_pull, columns)
            empty = fit.slopes.new_zeros(0)
            penalty = 0.5 * (pulls * torch.cat([fit.bias[None], fit.local]).flatten().square()).sum()
            return Summary(empty.new_zeros(0, 0), empty, fit.loss + penalty)
        design, pulls = self._design_matrix, self._coefficient_pulls(site_pull, shared_pull, columns)
        coefficients = torch.cat([fit.bias[None], fit.slopes, fit.local])
        expansion = expand_loss(self.task, design, design @ coefficients, self.y)
        first, last = self.outputs, (1 + self.shared) * self.outputs
        positions = torch.arange(len(pulls), device=pulls.device)
        slopes = (positions >= first) & (positions < last)
        nuisance = ~slopes
        cross = expansion.hessian[nuisance][:, slopes]
        factor = factorise_cholesky(expansion.hessian[nuisance][:, nuisance] + pulls[nuisance].diag())
        hessian = expansion.hessian[slopes][:, slopes] - cross.T @ torch.cholesky_solve(cross, factor)
        hessian = (hessian + hessian.T) / 2
        shared_slopes, gradient = fit.slopes.flatten(), expansion.gradient.flatten()[slopes]
        value = expansion.value + 0.5 * (pulls[nuisance] * coefficients.flatten()[nuisance].square()).sum()
        return Summary(
            hessian,
            hessian @ shared_slopes - gradient,
            value - gradient @ shared_slopes + 0.5 * shared_slopes @ hessian @ shared_slopes,
        )


def _minimise_lbfgs(u: Tensor, objective: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the minimum of ``objective`` by L-BFGS from ``u``."""
    point = u.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [point],
        max_iter=500,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def evaluate_with_gradient() -> Tensor:
        optimiser.zero_grad()
        value = objective(point)
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(evaluate_with_gradient)
    return point.detach()


def factorise_cholesky(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor of a matrix that is positive definite up to rounding, with a ridge where it is not."""
    scale = matrix.diagonal().abs().max().clamp_min(1e-300)
    result, ridge = torch.linalg.cholesky_ex(matrix), 1e-14
    while bool(result.info) and ridge < 1:
        result = torch.linalg.cholesky_ex(matrix + ridge * scale * torch.eye(len(matrix)).to(matrix))
        ridge *= 100
    factor: Tensor = result.L
    return factor
