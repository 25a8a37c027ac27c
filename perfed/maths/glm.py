"""Generalised linear models at one site: loss, gradient and Hessian, and the fit around what sites share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.data.labels import Task

INTERCEPT = 1e-4
"""Pull of an intercept to 0: as good as none, and enough where a site lacks a class."""

_MOST = 100  # Newton steps
_CLOSE = 1e-10  # decrease per sample, from which on a step is the last
_SHORTEST = 2.0**-30


@dataclass(frozen=True)
class Curve:
    """The negative log-likelihood of coefficients, in the neighbourhood of a point.

    Attributes:
        value: sum over the samples.
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


def curve(task: Task, design: Tensor, eta: Tensor, y: Tensor) -> Curve:
    """Return :func:`loss` with its derivatives in the coefficients of ``design`` ``(n, p)``; arguments as there.

    Example:
        >>> ones, eta, y = torch.ones(2, 1).double(), torch.zeros(2, 1).double(), torch.tensor([0, 1])
        >>> found = curve("classification", ones, eta, y)
        >>> found.gradient.item(), found.hessian.item()
        (0.0, 0.5)
    """
    value = loss(task, eta, y)
    if task == "survival":
        return Curve(value, *_cox(design, eta, y))
    if task == "regression":
        eye = torch.eye(eta.shape[1], dtype=eta.dtype, device=eta.device)
        return Curve(value, design.T @ (eta - y.reshape(eta.shape)), torch.kron(design.T @ design, eye))
    if eta.shape[1] == 1:
        p = eta.sigmoid()
        return Curve(value, design.T @ (p - y[:, None]), design.T @ (design * p * (1 - p)))
    p, (columns, k) = eta.softmax(1), (design.shape[1], eta.shape[1])
    hessian = design.new_empty(columns, k, columns, k)
    for a in range(k):
        for b in range(k):
            weight = p[:, a] * ((1.0 if a == b else 0.0) - p[:, b])
            hessian[:, a, :, b] = design.T @ (design * weight[:, None])
    gradient = design.T @ (p - torch.nn.functional.one_hot(y, k))
    return Curve(value, gradient, hessian.reshape(columns * k, columns * k))


def _risk_sets(eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Samples from the latest time to the earliest, and the log of the sum of hazards over each one's risk set."""
    order = y[:, 0].argsort(descending=True, stable=True)
    last = _last_of_ties(y[order, 0])
    return order, torch.logcumsumexp(eta[order, 0], 0)[last]


def _last_of_ties(time: Tensor) -> Tensor:
    """Of times that descend, the last place that has the same time."""
    return torch.searchsorted(-time, -time, right=True) - 1


def _cox(design: Tensor, eta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient ``(p, 1)`` and Hessian ``(p, p)`` of the Cox partial likelihood."""
    order, risk = _risk_sets(eta, y)
    x, event, last = design[order], y[order, 1], _last_of_ties(y[order, 0])
    highest = eta.max()
    hazard = (eta[order, 0] - highest).exp()
    means = (x * hazard[:, None]).cumsum(0)[last] / (risk - highest).exp()[:, None]
    first = torch.searchsorted(-y[order, 0], -y[order, 0])  # a sample is in the risk sets of what is as late or earlier
    per_event = event * (highest - risk).exp()
    behind = per_event.flip(0).cumsum(0).flip(0)[first]
    gradient = ((event[:, None] * (means - x)).sum(0))[:, None]
    centred = means * event[:, None].sqrt()
    return gradient, x.T @ (x * (hazard * behind)[:, None]) - centred.T @ centred


# One site -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What a site's samples say of the slopes that it shares, its intercept and own columns adapted to these.

    Up to third order, the negative log-likelihood of slopes b, of which the site's intercept and own slopes are the
    best for b, is ``constant - target b + b hessian b / 2``.

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
    """A site's model around the slopes that all share.

    Attributes:
        bias: intercepts ``(k,)``; of survival 0.
        slopes: of the shared columns ``(S, k)``.
        own: of the site's own columns ``(p - S, k)``.
        loss: negative log-likelihood of all samples.
    """

    bias: Tensor
    slopes: Tensor
    own: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Site:
    """A site's samples, float64.

    Attributes:
        task: what the targets are for.
        x: ``(n, p)``, columns that are shared first.
        y: as :func:`loss` takes them.
        shared: S, how many are.
        outputs: k linear predictors.
    """

    task: Task
    x: Tensor
    y: Tensor
    shared: int
    outputs: int

    @property
    def _design(self) -> Tensor:
        """Intercept, shared columns, own columns; hazards know no intercept."""
        ones = self.x.new_full((len(self.x), 1), 0.0 if self.task == "survival" else 1.0)
        return torch.cat([ones, self.x], 1)

    def _pulls(self, of_site: Tensor, of_all: Tensor, columns: Tensor | None) -> Tensor:
        """Of each coefficient ``((1 + p) k,)``; an own column has both spreads, for it might have been shared."""
        alone = 1 / (1 / of_site + 1 / of_all)
        own = self.x.shape[1] - self.shared
        intercept = torch.as_tensor(INTERCEPT).to(of_site)
        shared = of_site.expand(self.shared) if columns is None else of_site * columns
        return torch.cat([intercept.expand(1), shared, alone.expand(own)]).repeat_interleave(self.outputs)

    def fit(
        self, weight: Tensor, of_site: Tensor, of_all: Tensor, columns: Tensor | None = None, *, newton: bool = True
    ) -> SiteFit:
        """Return the best model whose slopes are pulled to ``weight`` ``(S, k)``.

        Minimises ``loss + of_site/2 |slopes - weight|^2 + alone/2 |own|^2`` with ``1/alone = 1/of_site + 1/of_all``.

        Args:
            weight: the slopes that all share.
            of_site: pull of the site's slopes to them.
            of_all: pull of these to 0.
            columns: what ``of_site`` is multiplied with at each shared column ``(S,)``; none: 1.
            newton: whether by Newton's steps, or by L-BFGS, which needs no Hessian.
        """
        design, pulls = self._design, self._pulls(of_site, of_all, columns)
        offset = self.x[:, : self.shared] @ weight
        root = pulls.view(-1, self.outputs)[:, :1].sqrt()
        basis = None
        if newton and design.shape[1] > len(design):
            # The best coefficients are a combination of the rows: there are fewer of these than of coefficients.
            basis, triangle = torch.linalg.qr((design / root.T).T)
            design, pulls = triangle.T, torch.ones_like(pulls[: len(design) * self.outputs])
        u = self.x.new_zeros(design.shape[1], self.outputs)

        def objective(u: Tensor) -> Tensor:
            return loss(self.task, offset + design @ u, self.y) + 0.5 * (pulls * u.flatten().square()).sum()

        u = self._newton(u, objective, design, offset, pulls) if newton else _lbfgs(u, objective)
        value = loss(self.task, offset + design @ u, self.y)
        u = u if basis is None else basis @ u / root
        return SiteFit(u[0], weight + u[1 : 1 + self.shared], u[1 + self.shared :], value)

    def _newton(
        self, u: Tensor, objective: Callable[[Tensor], Tensor], design: Tensor, offset: Tensor, pulls: Tensor
    ) -> Tensor:
        """From ``u`` to the minimum of ``objective``, by steps that are halved until they go down far enough."""
        now = objective(u)
        for _ in range(_MOST):
            found = curve(self.task, design, offset + design @ u, self.y)
            gradient = found.gradient.flatten() + pulls * u.flatten()
            step = torch.cholesky_solve(gradient[:, None], cholesky(found.hessian + pulls.diag()))
            gain, length = float(gradient @ step[:, 0]), 1.0
            if gain < _CLOSE * len(self.y):
                u = u - step.view_as(u)
                break
            while (then := objective(u - length * step.view_as(u))) > now - 1e-4 * length * gain:
                length /= 2
                if length < _SHORTEST:
                    break
            if length < _SHORTEST:
                break
            u, now = u - length * step.view_as(u), then
        return u

    def summary(self, fit: SiteFit, of_site: Tensor, of_all: Tensor, columns: Tensor | None = None) -> Summary:
        """Return what the samples say of the shared slopes near those of ``fit``; arguments as there."""
        if not self.shared:  # the summary is only the loss of the fit
            pulls = self._pulls(of_site, of_all, columns)
            none = fit.slopes.new_zeros(0)
            penalty = 0.5 * (pulls * torch.cat([fit.bias[None], fit.own]).flatten().square()).sum()
            return Summary(none.new_zeros(0, 0), none, fit.loss + penalty)
        design, pulls = self._design, self._pulls(of_site, of_all, columns)
        every = torch.cat([fit.bias[None], fit.slopes, fit.own])
        found = curve(self.task, design, design @ every, self.y)
        first, last = self.outputs, (1 + self.shared) * self.outputs
        of_all_rows = torch.arange(len(pulls), device=pulls.device)
        slopes = (of_all_rows >= first) & (of_all_rows < last)
        rest = ~slopes
        cross = found.hessian[rest][:, slopes]
        factor = cholesky(found.hessian[rest][:, rest] + pulls[rest].diag())
        hessian = found.hessian[slopes][:, slopes] - cross.T @ torch.cholesky_solve(cross, factor)
        hessian = (hessian + hessian.T) / 2
        at, gradient = fit.slopes.flatten(), found.gradient.flatten()[slopes]
        value = found.value + 0.5 * (pulls[rest] * every.flatten()[rest].square()).sum()
        return Summary(hessian, hessian @ at - gradient, value - gradient @ at + 0.5 * at @ hessian @ at)


def _lbfgs(u: Tensor, objective: Callable[[Tensor], Tensor]) -> Tensor:
    """From ``u`` to the minimum of ``objective``."""
    at = u.clone().requires_grad_()
    steps = torch.optim.LBFGS(
        [at], max_iter=500, tolerance_grad=1e-9, tolerance_change=1e-14, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        steps.zero_grad()
        value = objective(at)
        value.backward()
        return value

    with torch.enable_grad():
        steps.step(closure)
    return at.detach()


def cholesky(matrix: Tensor) -> Tensor:
    """Return the Cholesky factor of a matrix that is positive but for rounding."""
    scale = matrix.diagonal().abs().max().clamp_min(1e-300)
    found, ridge = torch.linalg.cholesky_ex(matrix), 1e-14
    while bool(found.info) and ridge < 1:
        found = torch.linalg.cholesky_ex(matrix + ridge * scale * torch.eye(len(matrix)).to(matrix))
        ridge *= 100
    factor: Tensor = found.L
    return factor
