"""The metrics: in which unit they are shown, and which direction is the better one."""

from __future__ import annotations

from dataclasses import dataclass

from perfed.errors import PerfedError


@dataclass(frozen=True)
class Metric:
    """What is known of a metric besides its name.

    Attributes:
        higher_is_better: else lower is.
        percent: whether it is a fraction of 1 that is shown in percent.
    """

    higher_is_better: bool
    percent: bool = False

    @property
    def scale(self) -> float:
        """From the metric's own unit to the one that is shown."""
        return 100.0 if self.percent else 1.0

    @property
    def unit(self) -> str:
        """The unit that is shown; empty for plain numbers."""
        return "%" if self.percent else ""

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


METRICS = {
    "accuracy": Metric(higher_is_better=True, percent=True),
    "auc": Metric(higher_is_better=True),
    "loss": Metric(higher_is_better=False),
    "mse": Metric(higher_is_better=False),
}


def metric_of(name: str) -> Metric:
    """The metric ``name``; ``accuracy_after``, in lines of ``rounds.jsonl``, is an accuracy.

    Raises:
        PerfedError: there is none.
    """
    try:
        return METRICS[name.removesuffix("_after")]
    except KeyError:
        raise PerfedError(f"unknown metric '{name}'; known: {', '.join(METRICS)}") from None


def shown(name: str, value: float) -> str:
    """A metric with its name and unit.

    Example:
        >>> shown("accuracy", 0.9284), shown("mse", 0.01234)
        ('accuracy 92.8 %', 'mse 0.01234')
    """
    metric = metric_of(name)
    number = f"{metric.scale * value:.1f} {metric.unit}" if metric.percent else f"{value:.4g}"
    return f"{name} {number}"
