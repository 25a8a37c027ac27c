"""The metrics: how each is computed, in which unit it is shown, and which direction is the better one."""

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
"""From targets ``(samples, ...)`` and outputs ``(samples, ...)`` to a number; NaN where it is not defined."""


Rows = Callable[[NDArray[Any], NDArray[np.float64]], NDArray[np.float64]]
"""From targets and outputs to a number for each sample."""


@dataclass(frozen=True)
class Metric:
    """What is known of a metric besides its name.

    Attributes:
        higher_is_better: else lower is.
        unit: that is shown; empty for plain numbers, ``%`` for a fraction of 1 that is shown in percent.
        task: that it is for; ``None``: any.
        score: how it is computed; ``None`` where it comes from elsewhere.
        rows: each sample's own part ``(samples,)``, of which the metric is the mean; ``None`` where it is no mean.
        probabilities: whether it takes outputs for logits, and not only the largest of them.
        module: that registered it.
        decimals: of differences; ``None`` where their size is that of the data, or not known.
        of_model: whether it is computed of the model itself, and not of what it says (:mod:`perfed.engine.gap`).
        span: the least and the largest value that it can have.
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
        """Whether it is a fraction of 1 that is shown in percent."""
        return self.unit == "%"

    @property
    def own(self) -> bool:
        """Whether it is the user's own."""
        return self.module != __name__

    @property
    def scale(self) -> float:
        """From the metric's own unit to the one that is shown."""
        return 100.0 if self.percent else 1.0

    @property
    def direction(self) -> int:
        """1 where higher is better, else -1."""
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
        """Where :func:`perfed.engine.evaluate.spread` has the worst client."""
        return "min" if self.higher_is_better else "max"

    @property
    def tenth_worst(self) -> str:
        """Where :func:`perfed.engine.evaluate.spread` has what a tenth of the clients do not do better than."""
        return "p10" if self.higher_is_better else "p90"

    @property
    def best(self) -> str:
        """Where :func:`perfed.engine.evaluate.spread` has the best client."""
        return "max" if self.higher_is_better else "min"


_FRACTION = (0.0, 1.0)
_LARGEST = sys.float_info.max
_ERROR = (0.0, _LARGEST)
METRICS: Registry[Metric] = Registry("metric", lambda item: item.module)
"""Metrics by name: perfed's, and what :func:`metric` has made known."""
METRICS |= {
    "accuracy": Metric(True, "%", "classification", scores.accuracy, rows=scores.right, span=_FRACTION),
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
"""Metrics that a task always has; runs are compared by the first that they have."""


def metric(name: str, *, direction: Literal["higher", "lower"], unit: str = "") -> Callable[[Score], Score]:
    """Decorator: make a function of one's own known as the metric ``name``, for ``evaluation.metrics``.

    The function gets the targets ``(samples,)`` (survival: ``(samples, 2)``) and what a client's model says of these
    samples, logits ``(samples, C)``, values or log hazards ``(samples, 1)``, as numpy arrays, and returns a number; NaN
    where it is not defined, as for a client without cases: such clients are left out.

    Args:
        name: in settings and results.
        direction: which values are better, "higher" or "lower" ones.
        unit: that is shown behind values; "%" for a fraction of 1 that is shown in percent.

    Raises:
        PerfedError: the name is taken by perfed or by another module, or cannot be one; another direction.

    Example:
        >>> @metric("cost-of-errors", direction="lower", unit="EUR")
        ... def cost(y, outputs):
        ...     return float((10.0 * (y != outputs.argmax(1))).mean())
        >>> shown("cost-of-errors", cost(np.array([0, 1]), np.array([[2.0, 1.0], [2.0, 1.0]])))
        'cost-of-errors 5 EUR'
    """
    if direction not in ("higher", "lower"):
        raise PerfedError(f"metric '{name}': direction = {direction!r} is not allowed; allowed: higher, lower")
    if not name or any(sign in name for sign in " ,:/_"):
        raise PerfedError(f"metric '{name}' is no name; allowed are letters, digits and '-'")

    def add(function: Score) -> Score:
        if name in METRICS:  # upper and lower case are told apart
            METRICS.check_free(name, function.__module__)
        higher, module = direction == "higher", function.__module__
        METRICS[name] = Metric(higher, unit, score=function, probabilities=True, module=module)
        return function

    return add


def chosen(given: str) -> tuple[str, Metric]:
    """The metric that a setting names; ``module:NAME`` imports the module first, which registers it.

    Raises:
        PerfedError: there is none, or it is not one that can be asked for.
    """
    name = import_registered(given, "metric")
    METRICS.check_registration(given, name)
    allowed = [known for known, item in METRICS.items() if item.score is not None or item.of_model]
    if name not in allowed:
        hint = suggest_name(name, allowed)
        raise PerfedError(f"unknown metric '{given}'{hint}; allowed: {', '.join(allowed)}, or module:NAME")
    return name, METRICS[name]


def computed(name: str, y: NDArray[Any], outputs: NDArray[np.float64]) -> float | None:
    """A metric of some samples; ``None`` where it is not defined, NaN where outputs are no numbers.

    Raises:
        PerfedError: a function of the user's own fails; names its file and line.
    """
    score = METRICS[name].score
    assert score is not None
    rows = outputs.reshape(len(y), -1)
    if np.isnan(rows).any() or np.isinf(rows.max(1)).any():  # of some classes logits may be -inf
        return float("nan")
    with report_user_errors():
        value = float(score(y, outputs))
    return None if np.isnan(value) else value


@dataclass(frozen=True)
class Scoring:
    """What is measured of each client's own model.

    Attributes:
        metrics: names of metrics beside those that the task always has.
        held: whether a client predicts among the classes that it has training samples of; metrics of predictions
            among all classes are then called ``METRIC_all``.
        scale: what the targets were standardised by.
    """

    metrics: tuple[str, ...] = ()
    held: bool = False
    scale: TargetScale | None = None

    def in_units(self, values: Tensor) -> Tensor:
        """Targets or predictions ``(samples, ...)`` in the unit of the data."""
        return values if self.scale is None else self.scale.up(values)


def metrics_of(
    y: NDArray[Any], outputs: NDArray[np.float64], task: Task, num_classes: int | None, more: Sequence[str] = ()
) -> dict[str, float]:
    """``accuracy``, for two classes also ``auc``; ``mse`` for regression; ``c-index`` for survival; and ``more``.

    Those that are not defined for the samples are left out.

    Args:
        y: ``(samples, ...)``, targets.
        outputs: ``(samples, C)``, the largest is the prediction; or values, or log hazards.
        task: what the targets are for.
        num_classes: C; ``None`` where targets are no labels.
        more: names of further metrics.
    """
    found = {name: computed(name, y, outputs) for name in dict.fromkeys((*ALWAYS[task], *more))}
    if num_classes == 2 and "auc" not in found:
        found["auc"] = computed("auc", y, outputs[:, :2])
    return {name: value for name, value in found.items() if value is not None}


def own_metrics(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What other processes must know of those of ``names`` that are the user's own, to show their values."""
    own = {name: METRICS[name] for name in names if METRICS[name].own}
    return {name: {"higher_is_better": item.higher_is_better, "unit": item.unit} for name, item in own.items()}


def recall(own: Mapping[str, Mapping[str, Any]]) -> None:
    """Know again what :func:`own_metrics` told, unless this process has such a metric itself."""
    for name, known in own.items():
        METRICS.setdefault(name, Metric(bool(known["higher_is_better"]), str(known["unit"]), module=""))


def main_metric(names: Mapping[str, Any], compare_by: str = "") -> str | None:
    """Return the one of ``names`` that runs are compared by; None where there is none.

    That is ``compare_by`` (the setting ``evaluation.compare_by``) where it was measured; else accuracy, mean squared
    error or C-index; else the first.
    """
    wanted = bare_name(compare_by)
    if wanted in names:
        return wanted
    return next((name for (name,) in ALWAYS.values() if name in names), next(iter(names), None))


def metric_of(name: str) -> Metric:
    """The metric ``name``; ``accuracy_after``, in lines of ``rounds.jsonl``, and ``accuracy_all`` are accuracies.

    Raises:
        PerfedError: there is none.
    """
    try:
        return METRICS[name.removesuffix("_after").removesuffix("_all")]
    except KeyError:
        raise PerfedError(f"unknown metric '{name}'; known: {', '.join(METRICS)}") from None


def shown(name: str, value: float) -> str:
    """A metric with its name and unit.

    Example:
        >>> shown("accuracy", 0.9284), shown("mse", 0.01234)
        ('accuracy 92.8 %', 'mse 0.01234')
    """
    known = metric_of(name)
    number = f"{known.scale * value:.1f}" if known.percent else f"{value:.4g}"
    return f"{name} {number}{known.unit and ' ' + known.unit}"
