"""The registry of metrics: how each is computed, its unit, and which direction is better."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from perfed.data.labels import Task
from perfed.data.target_scale import TargetScale
from perfed.engine import scores
from perfed.errors import PerfedError, suggest_name
from perfed.plugins import Registry, bare_name, import_registered, report_user_errors

Score = Callable[[NDArray[Any], NDArray[np.float64]], float]
"""Computes a metric from targets ``(samples, ...)`` and outputs ``(samples, ...)``; NaN if it is not defined."""


Rows = Callable[[NDArray[Any], NDArray[np.float64]], NDArray[np.float64]]
"""Computes a number for each sample from targets and outputs."""


@dataclass(frozen=True)
class Metric:
    """A metric and its properties.

    Attributes:
        higher_is_better: whether higher values are better.
        unit: the displayed unit; empty for plain numbers, ``%`` for a fraction of 1 that is displayed in percent.
        task: the task of the metric; ``None`` for any task.
        score: computes the metric; ``None`` if it is not computed from targets and outputs.
        rows: computes each sample's value ``(samples,)``, whose mean is the metric; ``None`` if it is not such a mean.
        probabilities: whether the metric uses probabilities (the softmax of the logits), not only the predicted class.
        module: the module that registered the metric.
        decimals: the number of decimals of differences; ``None`` if their scale depends on the data or is unknown.
        of_model: whether the metric is computed from the model itself rather than from its outputs
            (:mod:`perfed.engine.gap`).
        span: the smallest and the largest possible value.
    """

    higher_is_better: bool
    unit: str = ""
    task: Task | None = None
    score: Score | None = None
    probabilities: bool = False
    module: str = "perfed.engine.metrics"
    rows: Rows | None = None
    decimals: int | None = None
    of_model: bool = False
    span: tuple[float, float] = (-inf, inf)

    @property
    def percent(self) -> bool:
        """Whether the metric is a fraction of 1 that is displayed in percent."""
        return self.unit == "%"

    @property
    def is_user_defined(self) -> bool:
        """Whether the metric was registered by a module of the user."""
        return self.module != __name__

    @property
    def scale(self) -> float:
        """The factor that converts values to the displayed unit."""
        return 100.0 if self.percent else 1.0

    @property
    def direction(self) -> int:
        """The sign of an improvement: 1 if higher values are better, otherwise -1."""
        return 1 if self.higher_is_better else -1

    @property
    def shown_span(self) -> tuple[float, float]:
        """The smallest and the largest value in the displayed unit."""
        return (self.scale * self.span[0], self.scale * self.span[1])

    @property
    def widest(self) -> float:
        """The largest possible difference between two values of the metric, which may be infinite."""
        return self.span[1] - self.span[0]

    @property
    def worst(self) -> str:
        """The key of the worst client's value in the result of :func:`perfed.engine.evaluate.spread`."""
        return "min" if self.higher_is_better else "max"

    @property
    def tenth_worst(self) -> str:
        """The key of the percentile of the worst tenth of the clients in :func:`perfed.engine.evaluate.spread`."""
        return "p10" if self.higher_is_better else "p90"

    @property
    def best(self) -> str:
        """The key of the best client's value in the result of :func:`perfed.engine.evaluate.spread`."""
        return "max" if self.higher_is_better else "min"


_FRACTION = (0.0, 1.0)
_LARGEST = sys.float_info.max
_ERROR = (0.0, _LARGEST)
METRICS: Registry[Metric] = Registry("metric", lambda item: item.module)
"""Metrics by name: those of perfed and those that :func:`metric` has registered."""
METRICS |= {
    "accuracy": Metric(True, "%", "classification", scores.accuracy, rows=scores.is_correct, span=_FRACTION),
    "balanced-accuracy": Metric(True, "%", "classification", scores.balanced_accuracy, span=_FRACTION),
    "auc": Metric(True, "", "classification", scores.auc, probabilities=True, decimals=4, span=_FRACTION),
    "average-precision": Metric(
        True, "", "classification", scores.average_precision, probabilities=True, decimals=4, span=_FRACTION
    ),
    "f1": Metric(True, "", "classification", scores.f1, decimals=4, span=_FRACTION),
    "loss": Metric(False, decimals=4, span=(0.0, inf)),  # infinite where a model rules out a sample's class
    "log-loss": Metric(
        False,
        "",
        "classification",
        scores.log_loss,
        probabilities=True,
        rows=scores.log_losses,
        decimals=4,
        span=_ERROR,
    ),
    "brier": Metric(
        False,
        "",
        "classification",
        scores.brier,
        probabilities=True,
        rows=scores.brier_losses,
        decimals=4,
        span=(0.0, 2.0),
    ),
    "calibration-error": Metric(
        False, "%", "classification", scores.calibration_error, probabilities=True, span=_FRACTION
    ),
    "generalisation-gap": Metric(False, "", "classification", of_model=True, decimals=4),
    "mse": Metric(False, "", "regression", scores.mse, rows=scores.squared_errors, span=_ERROR),
    "mae": Metric(False, "", "regression", scores.mae, rows=scores.absolute_errors, span=_ERROR),
    "r2": Metric(True, "", "regression", scores.r2, decimals=4, span=(-_LARGEST, 1.0)),
    "c-index": Metric(True, "", "survival", scores.c_index, decimals=4, span=_FRACTION),
}
ALWAYS: dict[Task, tuple[str, ...]] = {
    "classification": ("accuracy",),
    "regression": ("mse",),
    "survival": ("c-index",),
}
"""The metrics that are always computed for a task; runs are compared by the first of them."""


def metric(name: str, *, direction: Literal["higher", "lower"], unit: str = "") -> Callable[[Score], Score]:
    """Return a decorator that registers a function as the metric ``name``, for ``evaluation.metrics``.

    The function receives numpy arrays: the targets ``(samples,)`` (survival: ``(samples, 2)``) of a client's samples,
    and the outputs of the client's model for them, which are logits ``(samples, C)``, values, or log hazards
    ``(samples, 1)``. It returns a number, or NaN if the metric is not defined, for example for a client without cases;
    such clients are left out.

    Args:
        name: the name in settings and results.
        direction: which values are better, "higher" or "lower" ones.
        unit: the unit that is displayed after values; "%" for a fraction of 1 that is displayed in percent.

    Raises:
        PerfedError: the name is not valid, or perfed or another module uses it already, or the direction is not
            allowed.

    Example:
        >>> @metric("cost-of-errors", direction="lower", unit="EUR")
        ... def cost(y, outputs):
        ...     return float((10.0 * (y != outputs.argmax(1))).mean())
        >>> describe_metric("cost-of-errors", cost(np.array([0, 1]), np.array([[2.0, 1.0], [2.0, 1.0]])))
        'cost-of-errors 5 EUR'
    """
    if direction not in ("higher", "lower"):
        raise PerfedError(f"metric '{name}': direction = {direction!r} is not allowed; allowed: higher, lower")
    if not name or any(sign in name for sign in " ,:/_"):
        raise PerfedError(f"metric '{name}' is not a valid name; allowed are letters, digits and '-'")

    def add(function: Score) -> Score:
        if name in METRICS:  # names are case-sensitive
            METRICS.check_free(name, function.__module__)
        higher, module = direction == "higher", function.__module__
        METRICS[name] = Metric(higher, unit, score=function, probabilities=True, module=module)
        return function

    return add


def find_metric(setting: str) -> tuple[str, Metric]:
    """Return the name and the metric that a setting names; ``module:NAME`` first imports the module.

    Raises:
        PerfedError: there is no such metric, or it cannot be requested.
    """
    name = import_registered(setting, "metric")
    METRICS.check_registration(setting, name)
    allowed = [key for key, item in METRICS.items() if item.score is not None or item.of_model]
    if name not in allowed:
        hint = suggest_name(name, allowed)
        raise PerfedError(f"unknown metric '{setting}'{hint}; allowed: {', '.join(allowed)}, or module:NAME")
    return name, METRICS[name]


def compute_metric(name: str, y: NDArray[Any], outputs: NDArray[np.float64]) -> float | None:
    """Compute the metric ``name`` of some samples.

    Returns:
        The value; ``None`` if the metric is not defined for the samples, NaN if outputs are NaN or infinite.

    Raises:
        PerfedError: a user-defined metric fails; the message names its file and line.
    """
    score = METRICS[name].score
    assert score is not None
    rows = outputs.reshape(len(y), -1)
    if np.isnan(rows).any() or np.isinf(rows.max(1)).any():  # the logits of some classes may be -inf
        return float("nan")
    with report_user_errors():
        value = float(score(y, outputs))
    return None if np.isnan(value) else value


@dataclass(frozen=True)
class Scoring:
    """The settings with which each client's personalised model is evaluated.

    Attributes:
        metrics: names of metrics in addition to those that are always computed for the task.
        held: whether a client predicts only among the classes of its training samples; metrics of predictions among all
            classes then have the names ``METRIC_all``.
        scale: the scale with which the targets were standardised.
    """

    metrics: tuple[str, ...] = ()
    held: bool = False
    scale: TargetScale | None = None

    def in_units(self, values: Tensor) -> Tensor:
        """Return targets or predictions ``(samples, ...)`` in the unit of the data."""
        return values if self.scale is None else self.scale.up(values)


def metrics_of(
    y: NDArray[Any], outputs: NDArray[np.float64], task: Task, num_classes: int | None, extra: Sequence[str] = ()
) -> dict[str, float]:
    """Return the values of metrics on some samples, by name.

    The metrics are those that are always computed for the task (``accuracy`` and, for two classes, ``auc``; ``mse``;
    ``c-index``) and ``extra``. Metrics that are not defined for the samples are left out.

    Args:
        y: the targets, ``(samples, ...)``.
        outputs: logits ``(samples, C)``, values or log hazards.
        task: the task.
        num_classes: C; ``None`` if the targets are not labels.
        extra: names of further metrics.
    """
    values = {name: compute_metric(name, y, outputs) for name in dict.fromkeys((*ALWAYS[task], *extra))}
    if num_classes == 2 and "auc" not in values:
        values["auc"] = compute_metric("auc", y, outputs[:, :2])
    return {name: value for name, value in values.items() if value is not None}


def describe_user_metrics(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the direction and unit of the user-defined metrics among ``names``, by name.

    A process without the user's module needs them to display values.
    """
    user_metrics = {name: METRICS[name] for name in names if METRICS[name].is_user_defined}
    return {name: {"higher_is_better": item.higher_is_better, "unit": item.unit} for name, item in user_metrics.items()}


def register_described_metrics(descriptions: Mapping[str, Mapping[str, Any]]) -> None:
    """Register the metrics of :func:`describe_user_metrics`, except those that this process has already."""
    for name, description in descriptions.items():
        METRICS.setdefault(name, Metric(bool(description["higher_is_better"]), str(description["unit"]), module=""))


def main_metric(names: Mapping[str, Any], compare_by: str = "") -> str | None:
    """Return the metric among ``names`` by which runs are compared; ``None`` if there are no names.

    It is ``compare_by`` (the setting ``evaluation.compare_by``) if it was measured; otherwise accuracy, mean squared
    error or C-index; otherwise the first name.
    """
    name = bare_name(compare_by)
    if name in names:
        return name
    return next((name for (name,) in ALWAYS.values() if name in names), next(iter(names), None))


def metric_of(name: str) -> Metric:
    """Return the metric ``name``, ignoring the suffixes ``_after`` (in lines of ``rounds.jsonl``) and ``_all``.

    Raises:
        PerfedError: there is no such metric.
    """
    try:
        return METRICS[name.removesuffix("_after").removesuffix("_all")]
    except KeyError:
        raise PerfedError(f"unknown metric '{name}'; known: {', '.join(METRICS)}") from None


def describe_metric(name: str, value: float) -> str:
    """Return the text of a metric's value, with its name and unit.

    Example:
        >>> describe_metric("accuracy", 0.9284), describe_metric("mse", 0.01234)
        ('accuracy 92.8 %', 'mse 0.01234')
    """
    item = metric_of(name)
    number = f"{item.scale * value:.1f}" if item.percent else f"{value:.4g}"
    return f"{name} {number}{item.unit and ' ' + item.unit}"
