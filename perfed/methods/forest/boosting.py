"""Gradient boosting from a given score: small trees, each a step against the gradient of the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed import rng
from perfed.maths.thresholds import distinct_values, separate_values
from perfed.methods.forest.hazards import cox_loss, expected_events
from perfed.methods.forest.mixing import FloatArray
from perfed.methods.forest.trees import Recipe, no_trees, write

_FOLDS = 5
_FLAT = 1e-9  # least curvature of a leaf


@dataclass(frozen=True)
class Steps:
    """How far boosting goes.

    Attributes:
        most: stages; of classes a stage is a tree for each.
        rate: what a step is multiplied by.
        depth, smallest: of a tree, and fewest rows of its leaves.
        outputs: C classes; ``None`` for values, and for risks.
        survival: whether the score is a log risk.
    """

    most: int
    rate: float
    depth: int
    smallest: int
    outputs: int | None
    survival: bool = False

    @property
    def recipe(self) -> Recipe:
        """How all trees of all stages are grown."""
        return Recipe(self.most * (self.outputs or 1), 2**self.depth, self.depth, self.smallest, None, self.outputs)


def boosted(x: NDArray[Any], y: NDArray[Any], start: FloatArray, steps: Steps, key: Tensor) -> dict[str, Tensor]:
    """Grow trees whose sum, added to ``start``, is a better score; as many stages as five folds say, perhaps none.

    Args:
        x: ``(rows, columns)``.
        y: ``(rows,)`` labels or values, or ``(rows, 2)`` times and events.
        start: ``(rows, C)`` logits, or ``(rows, 1)`` values or log risks, that do not come from these rows.
        steps: how far it goes.
        key: of the folds.

    Returns:
        :data:`~perfed.methods.forest.trees.Arrays` whose ``value`` is a step in each of the C scores.

    Source: Friedman 2001, Annals of Statistics 29, algorithms 2 and 6; of survival
        Ridgeway 1999, Computing Science and Statistics 31.
    """
    order = rng.draw_permutation(rng.random_bits(key, len(x))).numpy()
    fold = np.empty(len(x), dtype=int)
    fold[order] = np.arange(len(x)) % _FOLDS
    losses = np.zeros(steps.most + 1)
    for held in range(min(_FOLDS, len(x)) if len(x) > 1 else 0):
        out = fold == held
        losses += _stages(x[~out], y[~out], start[~out], steps, (x[out], y[out], start[out]))[1]
    number = int(np.argmin(losses))  # the first: where nothing tells, none
    found = no_trees(steps.recipe, torch.from_numpy(x[:0]).dtype)
    found["value"].zero_()
    kept = _stages(x, y, start, replace(steps, most=number))[0]
    for row, (tree, value) in enumerate(kept):
        write({name: array[row] for name, array in found.items()}, tree, tree.threshold, value)
    return found


def _stages(
    x: NDArray[Any],
    y: NDArray[Any],
    start: FloatArray,
    steps: Steps,
    judged: tuple[NDArray[Any], NDArray[Any], FloatArray] | None = None,
) -> tuple[list[tuple[Any, FloatArray]], FloatArray]:
    """Every stage's trees with their steps, and the loss of ``judged`` rows after 0, 1, ... stages."""
    from sklearn.tree import DecisionTreeRegressor

    score, trees, values = start.copy(), [], distinct_values(x)
    others = None if judged is None else (judged[0], judged[1], judged[2].copy())
    losses = [] if others is None else [_loss(others[2], others[1], steps, score, y)]
    for _ in range(steps.most):
        residual, curvature = _gradient(score, y, steps)
        for output in range(score.shape[1]):
            fitted = DecisionTreeRegressor(max_depth=steps.depth, min_samples_leaf=steps.smallest, random_state=0)
            fitted.fit(x, residual[:, output])
            separate_values(fitted.tree_, values)
            nodes = fitted.tree_.node_count
            at = fitted.apply(x)
            down = np.bincount(at, curvature[:, output], nodes).clip(_FLAT)
            value = np.zeros((nodes, score.shape[1]))
            value[:, output] = steps.rate * _best(np.bincount(at, residual[:, output], nodes), down, steps)
            score[:, output] += value[at, output]
            if others is not None:
                others[2][:, output] += value[fitted.apply(others[0]), output]
            trees.append((fitted.tree_, value))
        if others is not None:
            losses.append(_loss(others[2], others[1], steps, score, y))
    return trees, np.array(losses)


def _probabilities(score: FloatArray) -> FloatArray:
    p = np.exp(score - score.max(1, keepdims=True))
    found: FloatArray = p / p.sum(1, keepdims=True)
    return found


def _gradient(score: FloatArray, y: NDArray[Any], steps: Steps) -> tuple[FloatArray, FloatArray]:
    """Minus the gradient of the loss in each score, and its curvature there."""
    if steps.survival:  # martingale residuals; the curvature is that with the cumulative hazard as it is
        expected = expected_events(y, score[:, 0])[:, None]
        return y[:, 1:] - expected, expected
    outputs = steps.outputs
    if outputs is None:
        return y[:, None] - score, np.ones_like(score)
    p = _probabilities(score)
    # Friedman 2001, equation 32: of C scores, one is too many.
    return np.eye(outputs)[y] - p, p * (1 - p) * (outputs / max(1, outputs - 1))


def _best(residual: NDArray[Any], curvature: FloatArray, steps: Steps) -> FloatArray:
    """The whole step of each leaf, of sums over its rows: Newton's; of survival log (1 + O) / (1 + E)."""
    # Newton's step has no bound where few events were expected.
    found: FloatArray = np.log1p(residual / (1 + curvature)) if steps.survival else residual / curvature
    return found


def _loss(score: FloatArray, y: NDArray[Any], steps: Steps, grown: FloatArray, grown_y: NDArray[Any]) -> float:
    """Sum over rows of the squared error or of the cross-entropy; of survival what the rows add to the Cox loss.

    That is the loss of all rows less that of those which the trees were grown on.

    Source: Verweij and van Houwelingen 1993, Statistics in Medicine 12.
    """
    if steps.survival:
        both = np.concatenate([grown, score])[:, 0]
        return cox_loss(both, np.concatenate([grown_y, y])) - cox_loss(grown[:, 0], grown_y)
    if steps.outputs is None:
        return float(((y[:, None] - score) ** 2).sum())
    return float(-np.log(_probabilities(score)[np.arange(len(y)), y].clip(1e-12)).sum())
