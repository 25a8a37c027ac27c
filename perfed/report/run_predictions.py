"""The predictions of one run, reduced to the values that reports use.

The outputs of many runs together may not fit into memory, and every file of a run is read only once. The predictions
are therefore reduced while the run is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from sys import intern
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp, softmax  # type: ignore[import-untyped]

from perfed.engine.metrics import compute_metric, metric_of
from perfed.plugins import POOLED, SKLEARN
from perfed.run.predictions import Predictions

ENOUGH_ROWS = 5
"""The smallest number of test rows of a site for which equal predictions count; fewer rows may agree by chance.
"""

MOST_GROUPS = 100
"""Largest number of groups of rows for the jackknife of a metric that is not a mean over rows."""

_TOLERANCE = 1e-6
_CERTAIN = (0.0, 1.0, float(np.log(np.finfo(np.float64).tiny)))  # outputs of models without doubts, and logarithms

Arrays = tuple[NDArray[Any], ...]
Values = NDArray[np.float64]
Probabilities = tuple[Values, NDArray[np.bool_]]
"""Probabilities ``(rows,)`` of an event, and whether it occurred."""


@dataclass(frozen=True)
class SitePredictions:
    """The predictions of a run for the test rows of a site.

    Attributes:
        mark: a number that depends on the inputs of the rows.
        metric: the name of the metric.
        parts: for each reported evaluation the values of the metric ``(rows,)`` if it is a mean over rows, otherwise
            the targets and outputs of the rows.
    """

    mark: int
    metric: str
    parts: tuple[Arrays, ...]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.parts[0][0])

    @cached_property
    def value(self) -> float:
        """The metric of all rows; NaN if it is undefined."""
        return self._compute_metric(np.ones(self.rows, dtype=bool))

    def reproduces(self, reported: float) -> bool:
        """Return whether the metric of all rows equals the one that the run reported."""
        return bool(np.isclose(self.value, reported, rtol=1e-6, atol=1e-9))

    @cached_property
    def by_row(self) -> tuple[Values, Values]:
        """The contribution of each row (or group of rows), whose weighted mean is the metric, and its number of rows.

        If the metric is not a mean over rows, the contributions are the jackknife's pseudo-values
        G m - (G - 1) m_(-g) of G groups (Tukey 1958); NaN if the metric is undefined without a group.
        """
        if metric_of(self.metric).rows is not None:
            return np.asarray(np.mean([rows for (rows,) in self.parts], axis=0)), np.ones(self.rows)
        groups = -(-self.rows // -(-self.rows // MOST_GROUPS))
        group_of_row = np.arange(self.rows) % groups
        sizes = np.bincount(group_of_row).astype(np.float64)
        times = self.rows / sizes
        without = np.array([self._compute_metric(group_of_row != group) for group in range(groups)])
        return times * self.value - (times - 1) * without, sizes

    def _compute_metric(self, rows: NDArray[np.bool_]) -> float:
        """Return the metric of some of the rows, averaged over the evaluations; NaN if it is undefined."""
        if metric_of(self.metric).rows is not None:
            return float(np.mean([values[rows].mean() for (values,) in self.parts]))
        if not rows.any():
            return np.nan
        values = [compute_metric(self.metric, y[rows], outputs[rows].astype(np.float64)) for y, outputs in self.parts]
        return float(np.mean([np.nan if value is None else value for value in values]))


@dataclass(frozen=True)
class _Evaluation:
    """The reduced predictions of one evaluation; arrays of sites take much less memory than one object per site."""

    sites: dict[str, int]
    ends: NDArray[np.int64]
    marks: NDArray[np.uint32]
    arrays: Arrays

    def select_site(self, site: str) -> Arrays:
        number = self.sites[site]
        return tuple(array[self.ends[number - 1] if number else 0 : self.ends[number]] for array in self.arrays)


@dataclass(frozen=True)
class RunPredictions:
    """The predictions of a finished run for the test rows of all sites.

    Attributes:
        metric: the metric to which the predictions are reduced; ``None`` if the run measured none.
        constant: whether the predictions are the same for all rows, by site with :data:`ENOUGH_ROWS` rows or more.
        probabilities: the probabilities of each evaluation; an empty list if the outputs are no probabilities.
        evaluations: the reduced predictions of each evaluation.
    """

    metric: str | None = None
    constant: dict[str, bool] = field(default_factory=dict)
    probabilities: list[Probabilities] = field(default_factory=list)
    evaluations: list[_Evaluation] = field(default_factory=list)

    @classmethod
    def from_evaluations(cls, evaluations: Iterable[Predictions], method: str, metric: str | None) -> RunPredictions:
        """Return the predictions of the reported evaluations of a run in reduced form.

        Each evaluation is needed only while it is reduced, so that ``evaluations`` may be a generator.

        Args:
            evaluations: the predictions of each evaluation.
            method: the method of the run.
            metric: the metric by which runs are compared.
        """
        reduced = cls(metric)
        for predictions in evaluations:
            sites = {intern(site): number for number, site in enumerate(predictions.ids)}
            arrays = () if metric is None else _reduce_predictions(predictions, metric)
            reduced.evaluations.append(_Evaluation(sites, np.cumsum(predictions.counts), predictions.marks, arrays))
            for site, is_constant in _find_constant(predictions).items():
                reduced.constant[intern(site)] = reduced.constant.get(site, True) and is_constant
            probabilities = _compute_probabilities(predictions, method)
            reduced.probabilities.extend([] if probabilities is None else [probabilities])
        return reduced

    @property
    def marks(self) -> tuple[tuple[str, int], ...]:
        """The id and mark of each site in the last evaluation."""
        return tuple(pair for e in self.evaluations[-1:] for pair in zip(e.sites, e.marks.tolist(), strict=True))

    def at_site(self, site: str) -> SitePredictions | None:
        """Return the predictions for the test rows of a site; ``None`` if there are none."""
        evaluations = [evaluation for evaluation in self.evaluations if site in evaluation.sites]
        if self.metric is None or not evaluations:
            return None
        mark = int(evaluations[-1].marks[evaluations[-1].sites[site]])
        return SitePredictions(mark, self.metric, tuple(evaluation.select_site(site) for evaluation in evaluations))


def _reduce_predictions(predictions: Predictions, metric: str) -> Arrays:
    """Return a metric's values by row if it is a mean over rows; otherwise targets and outputs, in float32 if exact."""
    values_of_rows = metric_of(metric).rows
    if values_of_rows is not None:
        return (values_of_rows(predictions.targets, predictions.outputs),)
    with np.errstate(over="ignore"):
        short = predictions.outputs.astype(np.float32)
    exact = np.array_equal(short, predictions.outputs, equal_nan=True)
    return predictions.targets, short if exact else predictions.outputs


def _compute_probabilities(predictions: Predictions, method: str) -> Probabilities | None:
    """Return the probabilities of an event and whether it occurred; ``None`` if the outputs are no probabilities.

    For two classes the event is the second class; for more classes it is that the predicted class is right.
    """
    y, outputs = predictions.targets, predictions.outputs
    if not np.issubdtype(y.dtype, np.integer) or outputs.ndim != 2 or outputs.shape[1] < 2:
        return None
    if method.startswith((SKLEARN, POOLED)) and not np.allclose(logsumexp(outputs, axis=1), 0.0, atol=1e-6):
        return None  # a model of scikit-learn without probabilities
    p = softmax(outputs, axis=1)
    return (p[:, 1].copy(), y == 1) if outputs.shape[1] == 2 else (p.max(1), outputs.argmax(1) == y)


def _find_constant(predictions: Predictions) -> dict[str, bool]:
    """Return whether the predictions are the same for all rows, by site with enough rows."""
    labels = predictions.targets if np.issubdtype(predictions.targets.dtype, np.integer) else None
    outputs = predictions.outputs.reshape(len(predictions.outputs), -1)
    return {
        site: _is_constant(outputs[rows], None if labels is None else labels[rows])
        for site, _, rows in predictions.sites()
        if rows.stop - rows.start >= ENOUGH_ROWS
    }


def _is_constant(outputs: Values, labels: NDArray[np.int64] | None) -> bool:
    """Return whether all rows of ``outputs`` ``(rows, C)`` are equal; logits count by their probabilities.

    Certain outputs (probabilities 0 and 1) are not counted if all rows have the predicted class.
    """
    values = outputs if labels is None else log_softmax(outputs, axis=1)
    finite = np.isfinite(values)
    filled = np.where(finite, values, 0.0)
    if (finite != finite[0]).any() or np.ptp(filled, axis=0).max() > _TOLERANCE * np.abs(filled).max():
        return False
    if labels is None or (labels != labels[0]).any() or int(outputs[0].argmax()) != labels[0]:
        return True
    certain = np.isin(outputs[0][np.isfinite(outputs[0])], _CERTAIN).all() and outputs[0].min() < outputs[0].max()
    return not (certain or values[0].max() == 0.0)
