"""Weights of a blend of models: not negative, summing to one, with a site's weights shrunk towards those of all sites.

Each site has the outputs of K candidate models on its training rows, from models that were fitted without these rows.
The weights of all sites only need sums over rows (:meth:`Rows.compute_sums`), so a site sends these sums and nothing
about a single row. A :class:`Descent` requests them at one vector of weights after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax  # type: ignore[import-untyped]

from perfed.data.labels import Task
from perfed.maths.glm import expand_loss
from perfed.maths.simplex import simplex_qp

FloatArray = NDArray[np.float64]

PRIORS = (0.0, 10.0, 50.0, 200.0, 1000.0, float("inf"))
"""Weights of the prior, in rows, that :func:`choose_prior_rows` tries."""

BLEND_LEVEL = 0.1
"""Significance level at which :func:`guard_weights` replaces a blend by the best local model."""

RIVAL_LEVEL = 0.05
"""Significance level at which :func:`guard_weights` distinguishes a site's other local models from its best one."""

SMALLEST_WEIGHT = 0.001
"""Smaller weights are set to 0, so that a model without influence need not be kept."""

_RAREST = 1e-12  # lower bound of the probability that a candidate assigns to the true class
_STEPS, _CLOSE = 5000, 1e-6  # steps of EM, and the gap of the mean log-likelihood at which it stops
_FULL_STEP, _SHARE = (
    0.25,
    0.9,
)  # Newton decrement below which a step is taken in full; else the share of the way to the edge
_SHORTEST = 2.0**-20

EXCHANGES = 30
"""Greatest number of weight vectors at which sums are requested; usually six suffice."""


@dataclass(frozen=True)
class Sums:
    """The sums over its rows that a site sends for one vector of weights.

    Attributes:
        rows: the number of rows.
        value: the loss.
        gradient: the gradient of the loss in the weights ``(K,)``.
        hessian: ``(K, K)``.
    """

    rows: float
    value: float
    gradient: FloatArray
    hessian: FloatArray

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.rows + other.rows,
            self.value + other.value,
            self.gradient + other.gradient,
            self.hessian + other.hessian,
        )


@dataclass(frozen=True)
class Prior:
    """The weights of all sites, and the quadratic expansion of the mean loss around them.

    Attributes:
        weights: ``(K,)``.
        value: the mean loss of a row at these weights.
        gradient: the gradient of the mean loss ``(K,)``.
        hessian: ``(K, K)``.
    """

    weights: FloatArray
    value: float
    gradient: FloatArray
    hessian: FloatArray


@dataclass(frozen=True)
class Rows:
    """The outputs of K candidate models on a site's rows.

    Attributes:
        outputs: ``(n, K)``: the predicted probabilities of the true classes, or predicted values, or log hazards.
        y: ``(n,)`` values, or ``(n, 2)`` times and events; not used for classes.
        fold: ``(n,)`` the fold in which each row was held out.
    """

    outputs: FloatArray
    y: FloatArray
    fold: NDArray[np.int64]

    def select(self, mask: NDArray[np.bool_]) -> Self:
        """Return the rows at which ``mask`` is true."""
        return replace(self, outputs=self.outputs[mask], y=self.y[mask], fold=self.fold[mask])

    def compute_sums(self, weights: FloatArray) -> Sums:
        """Return the sums that the site sends for one step of the joint minimisation at ``weights`` ``(K,)``."""
        raise NotImplementedError


class Probabilities(Rows):
    """Predicted probabilities: the blend is their mixture, its loss the log loss."""

    def compute_sums(self, weights: FloatArray) -> Sums:
        """Return the log loss with its gradient and Hessian, from responsibilities (Dempster, Laird and Rubin 1977)."""
        p = self.outputs.clip(_RAREST)
        mixed = p @ weights
        ratio = p / mixed[:, None]
        return Sums(len(p), -float(np.log(mixed).sum()), -ratio.sum(0), ratio.T @ ratio)


class Values(Rows):
    """Predicted values: the blend is their weighted mean, its loss half the squared error."""

    def compute_sums(self, weights: FloatArray) -> Sums:
        """Return half the squared error with its gradient and Hessian."""
        residuals = self.outputs @ weights - self.y
        return Sums(
            len(residuals),
            0.5 * float(residuals @ residuals),
            self.outputs.T @ residuals,
            self.outputs.T @ self.outputs,
        )

    @property
    def noise(self) -> float:
        """Return half the mean squared error of the site's best candidate."""
        return 0.5 * float(((self.outputs - self.y[:, None]) ** 2).mean(0).min())


class Hazards(Rows):
    """Predicted log hazards: the blend is their weighted mean, its loss the negative log partial likelihood.

    Risk sets are formed within folds, since the models of another fold have another baseline hazard.
    """

    def compute_sums(self, weights: FloatArray) -> Sums:
        """Return the loss with its derivatives, summed over folds (Cox 1972; ties: Breslow 1974)."""
        k = self.outputs.shape[1]
        total = Sums(len(self.outputs), 0.0, np.zeros(k), np.zeros((k, k)))
        for fold in np.unique(self.fold):
            in_fold = self.fold == fold
            design = torch.from_numpy(self.outputs[in_fold] - self.outputs[in_fold].mean(0))
            eta = design @ torch.from_numpy(weights)[:, None]
            expansion = expand_loss("survival", design, eta, torch.from_numpy(self.y[in_fold]))
            total += Sums(0, float(expansion.value), expansion.gradient[:, 0].numpy(), expansion.hessian.numpy())
        return total


ROWS: dict[Task, type[Rows]] = {"classification": Probabilities, "regression": Values, "survival": Hazards}
"""The class of rows for each task."""


@dataclass(frozen=True)
class Descent:
    """The state of Newton's method on the simplex, whose steps are the solutions of quadratic programmes.

    For a mixture, a step that is far from the optimum goes only a part of the way to the boundary, so that no row's
    probability falls to less than a tenth in one step. Where the loss has not decreased, half of the step is tried.

    Attributes:
        weights: the weights ``(K,)`` with the smallest loss so far.
        mixture: whether outputs are probabilities.
        sums: the sums at these weights; ``None`` before the first evaluation.
        step: the vector from the weights to the minimum of the local quadratic model.
        length: the fraction of the step that is tried next.
        converged: whether the loss cannot be reduced further.

    Source: Nesterov 2018, Lectures on Convex Optimization, section 5.2 (self-concordant losses such as the log loss).
    """

    weights: FloatArray
    mixture: bool
    sums: Sums | None = None
    step: FloatArray | None = None
    length: float = 1.0
    converged: bool = False

    @classmethod
    def start(cls, candidates: int, *, mixture: bool) -> Self:
        """Return the state before the first step, with K equal weights."""
        return cls(np.full(candidates, 1 / candidates), mixture)

    @property
    def trial_weights(self) -> FloatArray:
        """Return the weights ``(K,)`` at which sums are needed next."""
        return self.weights if self.step is None else self.weights + self.length * self.step

    def advance(self, sums: Sums) -> Descent:
        """Return the state that follows from the sums at :attr:`trial_weights`."""
        if self.sums is not None and self.step is not None and self.length > _SHORTEST:
            slope = float(self.sums.gradient @ self.step)
            if sums.value > self.sums.value + 1e-4 * self.length * slope:
                return replace(self, length=self.length / 2)
        weights, hessian = self.trial_weights, (sums.hessian + sums.hessian.T) / 2
        step = simplex_qp(hessian / 2, sums.gradient - hessian @ weights) - weights
        length, decrement = 1.0, float(step @ hessian @ step)
        if self.mixture and decrement > _FULL_STEP**2 and step.min() < 0:
            down = step < 0
            length = min(1.0, _SHARE * float((weights[down] / -step[down]).min()))
        gain = -float(sums.gradient @ step)
        return replace(
            self, weights=weights, sums=sums, step=step, length=length, converged=gain <= 1e-10 * (1 + abs(sums.value))
        )

    @property
    def prior(self) -> Prior:
        """Return the weights, and the expansion of the mean loss around them."""
        if self.sums is None or self.sums.rows == 0:
            zeros = np.zeros((len(self.weights), len(self.weights)))
            return Prior(self.weights, 0.0, zeros[0], zeros)
        rows, sums = self.sums.rows, self.sums
        return Prior(self.weights, sums.value / rows, sums.gradient / rows, sums.hessian / rows)


def minimise_pooled_loss(sums: Callable[[FloatArray], Sums], candidates: int, *, mixture: bool) -> Prior:
    """Return the weights that minimise the loss over the rows of all sites.

    Args:
        sums: returns, for weights ``(K,)``, the results of :meth:`Rows.compute_sums` added up over sites.
        candidates: the number K of candidate models.
        mixture: whether outputs are probabilities; see :class:`Descent`.

    Example:
        >>> rows = Probabilities(np.array([[0.9, 0.1], [0.2, 0.8]]), np.zeros(2), np.zeros(2, int))
        >>> minimise_pooled_loss(rows.compute_sums, 2, mixture=True).weights.round(2).tolist()
        [0.6, 0.4]
    """
    return _minimise_loss(sums, Descent.start(candidates, mixture=mixture)).prior


def shrink_site_weights(rows: Rows, prior: Prior, prior_rows: float) -> FloatArray:
    """Return the weights ``(K,)`` of a site, shrunk towards those of all sites as by ``prior_rows`` additional rows.

    For probabilities the additional rows are pseudo-counts ``prior_rows * prior.weights`` (a Dirichlet prior).
    Otherwise they have the mean loss of all rows, which is exact for the squared error and of second order for the
    partial likelihood. For values, the site's errors count in units of its best candidate's error and the errors of all
    sites in units of the pooled blend's, which amounts to normal noise with a variance for each site: a site whose
    targets are easy to predict is not dominated by sites whose targets are not.
    """
    if np.isinf(prior_rows) or len(rows.outputs) == 0:
        return prior.weights
    if isinstance(rows, Probabilities):
        return _run_em(rows.compute_sums, prior.weights, prior_rows)
    if isinstance(rows, Values) and prior.value > 0:
        prior_rows *= rows.noise / prior.value
    return _run_newton(rows.compute_sums, prior, prior_rows)


def learn_weights(sites: Sequence[Rows], prior_rows: float) -> tuple[Prior, list[FloatArray]]:
    """Return the expansion around the weights of all sites, and the weights of each site."""
    prior = minimise_pooled_loss(
        _make_total_sums(sites), sites[0].outputs.shape[1], mixture=isinstance(sites[0], Probabilities)
    )
    return prior, [shrink_site_weights(rows, prior, prior_rows) for rows in sites]


def choose_prior_rows(sites: Sequence[Rows]) -> float:
    """Return the number of prior rows with the smallest cross-validated loss.

    The weights are learnt without one fold and evaluated on it. Losses are summed over folds and sites, so that a site
    sends one number for each of :data:`PRIORS`.
    """
    losses = np.zeros(len(PRIORS))
    for fold in np.unique(np.concatenate([rows.fold for rows in sites])):
        training_rows = [rows.select(rows.fold != fold) for rows in sites]
        test_rows = [rows.select(rows.fold == fold) for rows in sites]
        prior, _ = learn_weights(training_rows, float("inf"))
        for index, prior_rows in enumerate(PRIORS):
            weights_by_site = [shrink_site_weights(rows, prior, prior_rows) for rows in training_rows]
            losses[index] += sum(
                rows.compute_sums(w).value
                for rows, w in zip(test_rows, weights_by_site, strict=True)
                if len(rows.outputs)
            )
    return PRIORS[int(losses.argmin())]


def prepare_outputs(task: Task, y: NDArray[Any], predictions: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return the outputs ``(n, K)`` and targets of :class:`Rows`, from the targets and each candidate's predictions.

    Args:
        task: the task of the models.
        y: ``(n,)`` classes or ``(n, ...)`` values, or ``(n, 2)`` times and events.
        predictions: for each candidate, ``(n, C)`` logits, or ``(n, 1)`` or ``(n,)`` values or log hazards.
    """
    if task == "classification":
        probabilities = [softmax(prediction, axis=1)[np.arange(len(y)), y] for prediction in predictions]
        return np.stack(probabilities, 1), y.astype(np.float64)
    flat = np.stack([prediction.reshape(-1) for prediction in predictions], 1).astype(np.float64)
    return flat, y.astype(np.float64) if task == "survival" else y.reshape(-1).astype(np.float64)


def drop_small_weights(weights: FloatArray) -> FloatArray:
    """Return ``weights`` with those below :data:`SMALLEST_WEIGHT` set to 0, normalised to sum to one."""
    remaining = np.where(weights < SMALLEST_WEIGHT, 0.0, weights)
    normalised: FloatArray = remaining / remaining.sum()
    return normalised


def guard_weights(rows: Rows, weights: FloatArray, local: Sequence[int]) -> FloatArray:
    """Return ``weights``, or all weight on the site's best local model if the blend has larger errors on held-out rows.

    The best local model is that with the smallest squared error. The errors of the blend are larger if a one-sided
    signed-rank test of the rows' squared errors rejects equality at the level :data:`BLEND_LEVEL`. Ranks keep one
    distant row from hiding all others, as it can in a mean. In addition, the mean difference has to agree when the row
    that favours the blend most is left out: a blend that is slightly worse on most rows and much better on several
    serves its purpose. Very few rows never suffice to reject.

    The best of several models has smaller errors on the rows by which it was selected than on others. The level of the
    test is therefore divided by the number of local models that might be the best one (Bonferroni). These are all
    except those with larger errors than the best one by the same test at the level :data:`RIVAL_LEVEL`.

    Only blends of values are guarded. For a rare class, good probabilities have log losses that are slightly larger on
    most rows and much smaller on a few, and in survival analysis single rows have no loss.

    Args:
        rows: the rows of the site.
        weights: the weights ``(K,)`` of the site.
        local: indices of the candidates that were trained at this site only.

    Source: Wilcoxon 1945, Individual comparisons by ranking methods, Biometrics Bulletin 1(6).
    """
    if not local or not isinstance(rows, Values):
        return weights
    errors = (rows.outputs - rows.y[:, None]) ** 2
    best = min(local, key=lambda k: float(errors[:, k].sum()))
    rivals = sum(_signed_rank_p(errors[:, k] - errors[:, best]) >= RIVAL_LEVEL for k in local if k != best)
    worse = (rows.outputs @ weights - rows.y) ** 2 - errors[:, best]
    if len(worse) == 0 or worse.sum() <= worse.min() or _signed_rank_p(worse) >= BLEND_LEVEL / (1 + rivals):
        return weights
    best_only: FloatArray = np.eye(len(weights))[best]
    return best_only


def _signed_rank_p(differences: FloatArray) -> float:
    """Return the one-sided p-value of the signed-rank test that paired differences exceed 0; 1 if all are 0."""
    from scipy.stats import wilcoxon  # type: ignore[import-untyped]  # takes half a second to import

    differences = differences[differences != 0]
    return float(wilcoxon(differences, alternative="greater").pvalue) if len(differences) else 1.0


def _make_total_sums(sites: Sequence[Rows]) -> Callable[[FloatArray], Sums]:
    """Return the function that adds up the sums of all sites at given weights."""

    def sums(weights: FloatArray) -> Sums:
        first, *remaining = (rows.compute_sums(weights) for rows in sites)
        return sum(remaining, first)

    return sums


def _run_em(sums: Callable[[FloatArray], Sums], prior: FloatArray, prior_rows: float) -> FloatArray:
    """Return the weights of greatest posterior probability, by EM from the prior weights until the duality gap is
    small.
    """
    weights = 0.5 * prior + 0.5 / len(prior)
    for _ in range(_STEPS):
        site_sums = sums(weights)
        counts = prior_rows * prior - weights * site_sums.gradient
        total = prior_rows + site_sums.rows
        slopes = counts / weights.clip(1e-300)
        weights = counts / counts.sum()
        if slopes.max() <= (1 + _CLOSE) * total:
            break
    return weights


def _run_newton(sums: Callable[[FloatArray], Sums], prior: Prior, prior_rows: float) -> FloatArray:
    """Return the weights that minimise the loss of the site plus the expected loss of ``prior_rows`` additional
    rows.
    """

    def objective(weights: FloatArray) -> Sums:
        site_sums, change = sums(weights), weights - prior.weights
        slope = prior.hessian @ change
        value = site_sums.value + prior_rows * float(change @ (0.5 * slope + prior.gradient))
        gradient = site_sums.gradient + prior_rows * (slope + prior.gradient)
        return Sums(site_sums.rows, value, gradient, site_sums.hessian + prior_rows * prior.hessian)

    return _minimise_loss(objective, Descent(prior.weights, mixture=False)).weights


def _minimise_loss(loss: Callable[[FloatArray], Sums], descent: Descent) -> Descent:
    for _ in range(EXCHANGES):
        descent = descent.advance(loss(descent.trial_weights))
        if descent.converged:
            break
    return descent
