"""Gradient boosting from an initial score with small trees."""

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
from perfed.methods.forest.trees import Recipe, make_empty_trees, write_tree

_FOLDS = 5
_MIN_CURVATURE = 1e-9  # smallest curvature of a leaf


@dataclass(frozen=True)
class Steps:
    """The settings of boosting.

    Attributes:
        most: largest number of stages; in classification a stage has a tree for each class.
        rate: factor of a step.
        depth, smallest: depth of a tree, and fewest rows in its leaves.
        outputs: C classes; ``None`` for regression and survival.
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
        """The recipe of arrays that are large enough for all trees of all stages."""
        return Recipe(self.most * (self.outputs or 1), 2**self.depth, self.depth, self.smallest, None, self.outputs)


def boost_trees(x: NDArray[Any], y: NDArray[Any], start: FloatArray, steps: Steps, key: Tensor) -> dict[str, Tensor]:
    """Grow trees whose sum, added to ``start``, is a better score; five folds select the number of stages, maybe 0.

    Args:
        x: ``(rows, columns)``.
        y: ``(rows,)`` labels or values, or ``(rows, 2)`` times and events.
        start: ``(rows, C)`` logits, or ``(rows, 1)`` values or log risks, of models that were fitted without these
            rows.
        steps: the settings.
        key: key of the random folds.

    Returns:
        :data:`~perfed.methods.forest.trees.Arrays` whose ``value`` is a step in each of the C scores.

    Source: Friedman 2001, Annals of Statistics 29, algorithms 2 and 6; of survival Ridgeway 1999, Computing Science and
    Statistics 31.
    """
    order = rng.draw_permutation(rng.random_bits(key, len(x))).numpy()
    fold = np.empty(len(x), dtype=int)
    fold[order] = np.arange(len(x)) % _FOLDS
    losses = np.zeros(steps.most + 1)
    for number in range(min(_FOLDS, len(x)) if len(x) > 1 else 0):
        held_out = fold == number
        losses += _grow_stages(
            x[~held_out], y[~held_out], start[~held_out], steps, (x[held_out], y[held_out], start[held_out])
        )[1]
    stages = int(np.argmin(losses))  # the smallest of equal ones
    arrays = make_empty_trees(steps.recipe, torch.from_numpy(x[:0]).dtype)
    arrays["value"].zero_()
    trees = _grow_stages(x, y, start, replace(steps, most=stages))[0]
    for row, (tree, value) in enumerate(trees):
        write_tree({name: array[row] for name, array in arrays.items()}, tree, tree.threshold, value)
    return arrays


def _grow_stages(
    x: NDArray[Any],
    y: NDArray[Any],
    start: FloatArray,
    steps: Steps,
    evaluation_rows: tuple[NDArray[Any], NDArray[Any], FloatArray] | None = None,
) -> tuple[list[tuple[Any, FloatArray]], FloatArray]:
    """Return every stage's trees with their steps, and the loss of the evaluation rows after 0, 1, ... stages."""
    from sklearn.tree import DecisionTreeRegressor

    score, trees, values = start.copy(), [], distinct_values(x)
    evaluated = None if evaluation_rows is None else (evaluation_rows[0], evaluation_rows[1], evaluation_rows[2].copy())
    losses = [] if evaluated is None else [_compute_loss(evaluated[2], evaluated[1], steps, score, y)]
    for _ in range(steps.most):
        residual, curvature = _compute_gradient(score, y, steps)
        for output in range(score.shape[1]):
            fitted = DecisionTreeRegressor(max_depth=steps.depth, min_samples_leaf=steps.smallest, random_state=0)
            fitted.fit(x, residual[:, output])
            separate_values(fitted.tree_, values)
            nodes = fitted.tree_.node_count
            leaves = fitted.apply(x)
            curvature_sums = np.bincount(leaves, curvature[:, output], nodes).clip(_MIN_CURVATURE)
            value = np.zeros((nodes, score.shape[1]))
            value[:, output] = steps.rate * _compute_steps(
                np.bincount(leaves, residual[:, output], nodes), curvature_sums, steps
            )
            score[:, output] += value[leaves, output]
            if evaluated is not None:
                evaluated[2][:, output] += value[fitted.apply(evaluated[0]), output]
            trees.append((fitted.tree_, value))
        if evaluated is not None:
            losses.append(_compute_loss(evaluated[2], evaluated[1], steps, score, y))
    return trees, np.array(losses)


def _softmax(score: FloatArray) -> FloatArray:
    p = np.exp(score - score.max(1, keepdims=True))
    probabilities: FloatArray = p / p.sum(1, keepdims=True)
    return probabilities


def _compute_gradient(score: FloatArray, y: NDArray[Any], steps: Steps) -> tuple[FloatArray, FloatArray]:
    """Return minus the gradient of the loss in each score, and the curvature."""
    if steps.survival:  # martingale residuals; the curvature is that for a fixed cumulative hazard
        expected = expected_events(y, score[:, 0])[:, None]
        return y[:, 1:] - expected, expected
    outputs = steps.outputs
    if outputs is None:
        return y[:, None] - score, np.ones_like(score)
    p = _softmax(score)
    # Friedman 2001, equation 32: of C scores, one is too many.
    return np.eye(outputs)[y] - p, p * (1 - p) * (outputs / max(1, outputs - 1))


def _compute_steps(residual: NDArray[Any], curvature: FloatArray, steps: Steps) -> FloatArray:
    """Return the step of each leaf from sums over its rows: Newton's step, or log (1 + O) / (1 + E) for survival."""
    # Newton's step is unbounded if few events were expected.
    step: FloatArray = np.log1p(residual / (1 + curvature)) if steps.survival else residual / curvature
    return step


def _compute_loss(
    score: FloatArray, y: NDArray[Any], steps: Steps, training_score: FloatArray, training_y: NDArray[Any]
) -> float:
    """Return the sum over rows of the squared error or the cross-entropy; for survival the rows' part of the Cox loss.

    That is the loss of all rows minus that of the rows on which the trees were grown.

    Source: Verweij and van Houwelingen 1993, Statistics in Medicine 12.
    """
    if steps.survival:
        scores = np.concatenate([training_score, score])[:, 0]
        return cox_loss(scores, np.concatenate([training_y, y])) - cox_loss(training_score[:, 0], training_y)
    if steps.outputs is None:
        return float(((y[:, None] - score) ** 2).sum())
    return float(-np.log(_softmax(score)[np.arange(len(y)), y].clip(1e-12)).sum())
