"""Weights of a blend: not negative, summing to one; a site's own are shrunk towards those that all learn together.

Each site has what K candidates say of its rows while these were held out. What all sites learn together needs sums
over rows alone (:meth:`Rows.sums`), so that sites can send these and nothing of a row: a :class:`Descent` asks for them
at one set of weights after the other.
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
from perfed.maths.glm import curve
from perfed.maths.simplex import simplex_qp

FloatArray = NDArray[np.float64]

PRIORS = (0.0, 10.0, 50.0, 200.0, 1000.0, float("inf"))
"""Numbers of rows that :func:`chosen_prior` tries."""

ERROR = 0.1
"""How often :func:`guarded` may be wrong at a site whose own model is as good as a blend: then that costs nothing."""

WORSE = 0.05
"""Significance level at which :func:`guarded` distinguishes a site's other local models from its best one."""

LEAST = 0.001
"""Weights below it are nought: a candidate that does not count need not be there."""

_RAREST = 1e-12  # probability that a candidate gives at least to what happened
_STEPS, _CLOSE = 5000, 1e-6  # of EM; by how much the mean log-likelihood may still grow
_NEAR, _SHARE = 0.25, 0.9  # Newton decrement below which a step is whole; else at most so much of the way to the edge
_SHORTEST = 2.0**-20

EXCHANGES = 30
"""Most sets of weights at which sums are asked for; six do as a rule."""


@dataclass(frozen=True)
class Sums:
    """What a site sends for one set of weights: sums over its rows.

    Attributes:
        rows: how many there are.
        value: the loss.
        gradient: in the weights ``(K,)``; of the log loss minus the candidates' responsibilities over the weights.
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
    """What all sites learnt together: the weights, and per row how the loss grows away from them.

    Attributes:
        weights: ``(K,)``.
        value: the mean loss at these.
        gradient: of the mean loss at these, ``(K,)``.
        hessian: ``(K, K)``.
    """

    weights: FloatArray
    value: float
    gradient: FloatArray
    hessian: FloatArray


@dataclass(frozen=True)
class Rows:
    """What K candidates say of a site's rows.

    Attributes:
        said: ``(n, K)``: of classes the probability of the right one, else values or log hazards.
        y: ``(n,)`` values, or ``(n, 2)`` times and events; of classes nothing is read of it.
        fold: ``(n,)`` with which other rows each was held out.
    """

    said: FloatArray
    y: FloatArray
    fold: NDArray[np.int64]

    def take(self, which: NDArray[np.bool_]) -> Self:
        """Return some of the rows."""
        return replace(self, said=self.said[which], y=self.y[which], fold=self.fold[which])

    def sums(self, weights: FloatArray) -> Sums:
        """Return all that leaves the site for one step of what all learn together."""
        raise NotImplementedError


class Chances(Rows):
    """Probabilities: the blend is their mixture, its loss the log loss."""

    def sums(self, weights: FloatArray) -> Sums:
        """Return responsibilities (Dempster, Laird and Rubin 1977), as the gradient has them, and their products."""
        p = self.said.clip(_RAREST)
        mixed = p @ weights
        ratio = p / mixed[:, None]
        return Sums(len(p), -float(np.log(mixed).sum()), -ratio.sum(0), ratio.T @ ratio)


class Values(Rows):
    """Values: the blend is their mean with these weights, its loss half the squared error."""

    def sums(self, weights: FloatArray) -> Sums:
        """Return Gram and cross sums, as Hessian and gradient."""
        away = self.said @ weights - self.y
        return Sums(len(away), 0.5 * float(away @ away), self.said.T @ away, self.said.T @ self.said)

    @property
    def noise(self) -> float:
        """Half the mean squared error of the site's best candidate."""
        return 0.5 * float(((self.said - self.y[:, None]) ** 2).mean(0).min())


class Hazards(Rows):
    """Log hazards: the blend is their mean with these weights, its loss the negative log partial likelihood.

    Rows are at risk beside those of the same fold alone, since another fold's models have another base line.
    """

    def sums(self, weights: FloatArray) -> Sums:
        """Return the sums over folds (Cox 1972; ties: Breslow 1974)."""
        k = self.said.shape[1]
        found = Sums(len(self.said), 0.0, np.zeros(k), np.zeros((k, k)))
        for fold in np.unique(self.fold):
            own = self.fold == fold
            design = torch.from_numpy(self.said[own] - self.said[own].mean(0))
            eta = design @ torch.from_numpy(weights)[:, None]
            at = curve("survival", design, eta, torch.from_numpy(self.y[own]))
            found += Sums(0, float(at.value), at.gradient[:, 0].numpy(), at.hessian.numpy())
        return found


ROWS: dict[Task, type[Rows]] = {"classification": Chances, "regression": Values, "survival": Hazards}
"""The rows of each task."""


@dataclass(frozen=True)
class Descent:
    """Newton's steps on the simplex, by quadratic programmes: what is known after some evaluations of a loss.

    Of a mixture a step that is far from the end goes only a part of the way to where a weight is nought: no row's
    probability falls to less than a tenth in one step. Where the loss has not gone down, half of the step is tried.

    Attributes:
        weights: ``(K,)`` with the least loss so far.
        mixture: whether what is said are probabilities.
        at: the sums there; ``None`` before the first are known.
        step: from there to where the parabola has its least.
        length: part of the step that is tried next.
        done: whether nothing is left to gain.

    Source: Nesterov 2018, Lectures on Convex Optimization, section 5.2 (of self-concordant losses, as the log loss is).
    """

    weights: FloatArray
    mixture: bool
    at: Sums | None = None
    step: FloatArray | None = None
    length: float = 1.0
    done: bool = False

    @classmethod
    def of(cls, candidates: int, *, mixture: bool) -> Self:
        """Return the beginning: K equal weights."""
        return cls(np.full(candidates, 1 / candidates), mixture)

    @property
    def trial(self) -> FloatArray:
        """The weights ``(K,)`` at which sums are needed next."""
        return self.weights if self.step is None else self.weights + self.length * self.step

    def told(self, at: Sums) -> Descent:
        """Return what is known with the sums at :attr:`trial`."""
        if self.at is not None and self.step is not None and self.length > _SHORTEST:
            slope = float(self.at.gradient @ self.step)
            if at.value > self.at.value + 1e-4 * self.length * slope:
                return replace(self, length=self.length / 2)
        weights, hessian = self.trial, (at.hessian + at.hessian.T) / 2
        step = simplex_qp(hessian / 2, at.gradient - hessian @ weights) - weights
        length, decrement = 1.0, float(step @ hessian @ step)
        if self.mixture and decrement > _NEAR**2 and step.min() < 0:
            down = step < 0
            length = min(1.0, _SHARE * float((weights[down] / -step[down]).min()))
        gain = -float(at.gradient @ step)
        return replace(self, weights=weights, at=at, step=step, length=length, done=gain <= 1e-10 * (1 + abs(at.value)))

    @property
    def prior(self) -> Prior:
        """What was learnt: the weights, and the mean loss around them."""
        if self.at is None or self.at.rows == 0:
            none = np.zeros((len(self.weights), len(self.weights)))
            return Prior(self.weights, 0.0, none[0], none)
        at = self.at
        return Prior(self.weights, at.value / at.rows, at.gradient / at.rows, at.hessian / at.rows)


def pooled_weights(sums: Callable[[FloatArray], Sums], candidates: int, *, mixture: bool) -> Prior:
    """Return the weights with the least loss over the rows of all sites.

    Args:
        sums: of all sites, for weights ``(K,)``: the sums of what :meth:`Rows.sums` gives.
        candidates: K.
        mixture: whether what is said are probabilities; see :class:`Descent`.

    Example:
        >>> rows = Chances(np.array([[0.9, 0.1], [0.2, 0.8]]), np.zeros(2), np.zeros(2, int))
        >>> pooled_weights(rows.sums, 2, mixture=True).weights.round(2).tolist()
        [0.6, 0.4]
    """
    return _least(sums, Descent.of(candidates, mixture=mixture)).prior


def site_weights(rows: Rows, prior: Prior, prior_rows: float) -> FloatArray:
    """Return a site's own weights ``(K,)``, as if ``prior_rows`` more rows of it had said what all sites' rows say.

    Of probabilities these are pseudo-counts ``prior_rows * prior.weights`` (a Dirichlet prior); else the mean loss of
    all rows, exact for the squared error, and to second order for the partial likelihood. Of values the site's errors
    count in units of its best candidate's, the others' in units of the pooled blend's: normal noise with a variance of
    the site. So a site whose targets can be told exactly is not drowned by what others cannot tell.
    """
    if np.isinf(prior_rows) or len(rows.said) == 0:
        return prior.weights
    if isinstance(rows, Chances):
        return _em(rows.sums, prior.weights, prior_rows)
    if isinstance(rows, Values) and prior.value > 0:
        prior_rows *= rows.noise / prior.value
    return _newton(rows.sums, prior, prior_rows)


def learnt(sites: Sequence[Rows], prior_rows: float) -> tuple[Prior, list[FloatArray]]:
    """Return what all sites learn together, and each one's own weights."""
    prior = pooled_weights(_of_all(sites), sites[0].said.shape[1], mixture=isinstance(sites[0], Chances))
    return prior, [site_weights(rows, prior, prior_rows) for rows in sites]


def chosen_prior(sites: Sequence[Rows]) -> float:
    """Return the number of rows for the prior whose weights, learnt without a fold, have the least loss on that fold.

    The loss is summed over folds and sites, so that sites send one number for each of :data:`PRIORS`.
    """
    found = np.zeros(len(PRIORS))
    for fold in np.unique(np.concatenate([rows.fold for rows in sites])):
        others = [rows.take(rows.fold != fold) for rows in sites]
        held = [rows.take(rows.fold == fold) for rows in sites]
        prior, _ = learnt(others, float("inf"))
        for number, prior_rows in enumerate(PRIORS):
            own = [site_weights(rows, prior, prior_rows) for rows in others]
            found[number] += sum(rows.sums(w).value for rows, w in zip(held, own, strict=True) if len(rows.said))
    return PRIORS[int(found.argmin())]


def evidence(task: Task, y: NDArray[Any], said: Sequence[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return what :class:`Rows` are made of, of targets and what each candidate says of them.

    Args:
        task: of the targets.
        y: ``(n,)`` classes or ``(n, ...)`` values, or ``(n, 2)`` times and events.
        said: of each candidate ``(n, C)`` logits, or ``(n, 1)`` or ``(n,)`` values or log hazards.
    """
    if task == "classification":
        chances = [softmax(one, axis=1)[np.arange(len(y)), y] for one in said]
        return np.stack(chances, 1), y.astype(np.float64)
    flat = np.stack([one.reshape(-1) for one in said], 1).astype(np.float64)
    return flat, y.astype(np.float64) if task == "survival" else y.reshape(-1).astype(np.float64)


def few(weights: FloatArray) -> FloatArray:
    """Return ``weights`` without those below :data:`LEAST`."""
    kept = np.where(weights < LEAST, 0.0, weights)
    total: FloatArray = kept / kept.sum()
    return total


def guarded(rows: Rows, weights: FloatArray, own: Sequence[int]) -> FloatArray:
    """Return a site's ``weights``, or those of its best own model alone where the blend errs more at its held-out rows.

    The best own model is that with the least squared error. The blend errs more where the signed-rank test of the rows'
    squared errors says so: one-sided, with :data:`ERROR`. In ranks one far row cannot hide all others, as it can in a
    mean. The mean of all rows but that which speaks most for the blend has to agree: what is a little worse on most
    rows and much better on several is what a blend is for. Too few rows can say nothing.

    The best of several models has smaller errors on the rows by which it was selected than on others. The level of the
    test is therefore divided by the number of local models that might be the best one (Bonferroni). These are all
    except those with larger errors than the best one by the same test at the level :data:`WORSE`.

    Of values alone. Where a class is rare, log losses that are a little more on most rows and much less on a few are
    what good probabilities have; and survival has no losses of single rows.

    Args:
        rows: of the site.
        weights: ``(K,)``, learnt there.
        own: which of the K candidates are models of the site alone.

    Source: Wilcoxon 1945, Individual comparisons by ranking methods, Biometrics Bulletin 1(6).
    """
    if not own or not isinstance(rows, Values):
        return weights
    errors = (rows.said - rows.y[:, None]) ** 2
    best = min(own, key=lambda k: float(errors[:, k].sum()))
    rivals = sum(_signed_rank_p(errors[:, k] - errors[:, best]) >= WORSE for k in own if k != best)
    worse = (rows.said @ weights - rows.y) ** 2 - errors[:, best]
    if len(worse) == 0 or worse.sum() <= worse.min() or _signed_rank_p(worse) >= ERROR / (1 + rivals):
        return weights
    alone: FloatArray = np.eye(len(weights))[best]
    return alone


def _signed_rank_p(differences: FloatArray) -> float:
    """Return the one-sided p-value of the signed-rank test that paired differences exceed 0; 1 if all are 0."""
    from scipy.stats import wilcoxon  # type: ignore[import-untyped]  # takes half a second to import

    differences = differences[differences != 0]
    return float(wilcoxon(differences, alternative="greater").pvalue) if len(differences) else 1.0


def _of_all(sites: Sequence[Rows]) -> Callable[[FloatArray], Sums]:
    def sums(weights: FloatArray) -> Sums:
        first, *others = (rows.sums(weights) for rows in sites)
        return sum(others, first)

    return sums


def _em(sums: Callable[[FloatArray], Sums], prior: FloatArray, prior_rows: float) -> FloatArray:
    """The most probable weights, by EM from the prior ones; the duality gap says when they are near enough."""
    weights = 0.5 * prior + 0.5 / len(prior)
    for _ in range(_STEPS):
        at = sums(weights)
        counts = prior_rows * prior - weights * at.gradient
        total = prior_rows + at.rows
        slopes = counts / weights.clip(1e-300)
        weights = counts / counts.sum()
        if slopes.max() <= (1 + _CLOSE) * total:
            break
    return weights


def _newton(sums: Callable[[FloatArray], Sums], prior: Prior, prior_rows: float) -> FloatArray:
    """The weights of least loss from the prior ones, with what ``prior_rows`` more rows would say."""

    def objective(weights: FloatArray) -> Sums:
        at, away = sums(weights), weights - prior.weights
        slope = prior.hessian @ away
        value = at.value + prior_rows * float(away @ (0.5 * slope + prior.gradient))
        gradient = at.gradient + prior_rows * (slope + prior.gradient)
        return Sums(at.rows, value, gradient, at.hessian + prior_rows * prior.hessian)

    return _least(objective, Descent(prior.weights, mixture=False)).weights


def _least(loss: Callable[[FloatArray], Sums], descent: Descent) -> Descent:
    for _ in range(EXCHANGES):
        descent = descent.told(loss(descent.trial))
        if descent.done:
            break
    return descent
