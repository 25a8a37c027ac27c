"""What ``rounds.jsonl`` and ``summary.json`` hold, checked when they are read back."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


def _null_to_nan(value: Any) -> Any:
    return float("nan") if value is None else value


# JSON has no NaN or infinity: a loss that became one is written as null.
Number = Annotated[float, BeforeValidator(_null_to_nan)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Evaluation(_Strict):
    """The settings in the ``[evaluation]`` table of a run that reports use."""

    last: int
    who: str
    when: str
    split: str
    weights: str = ""
    metrics: list[str] = []


class _CustomMetric(_Strict):
    higher_is_better: bool
    unit: str


def _check_evaluation(table: dict[str, Any]) -> dict[str, Any]:
    if table:
        _Evaluation.model_validate(table)
    return table


def _check_custom_metrics(metrics: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for metric in metrics.values():
        _CustomMetric.model_validate(metric)
    return metrics


class Spread(_Strict):
    """The distribution of a metric over the clients; accuracy is a fraction of 1. Older results have no ``p90``."""

    mean: Number
    std: Number
    min: Number
    p10: Number
    p90: Number | None = None
    max: Number


class _MetricsRecord(_Strict):
    metrics: dict[str, Spread] | None = None
    accuracy: Spread | None = None

    @property
    def spreads(self) -> dict[str, Spread]:
        """The spread of every metric by name, accuracy first."""
        first = {"accuracy": self.accuracy} if self.accuracy else {}
        return first | (self.metrics or {})


class Round(_MetricsRecord):
    """One line of ``rounds.jsonl``; metrics only in the rounds that were evaluated."""

    round: int
    train_loss: Number | None = None
    training_seconds: float | None = None
    virtual_time: float | None = None
    exchanges: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None


class Target(_Strict):
    """When a run first reached a mean accuracy, a fraction of 1; None where it never did."""

    accuracy: float
    round: int | None
    virtual_time: float | None
    training_seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None


class Summary(_MetricsRecord):
    """``summary.json`` of a finished run."""

    method: str
    dataset: str
    seed: int
    rounds: int
    wall_seconds: float
    training_seconds: float | None = None
    virtual_time: float | None = None
    targets: list[Target] | None = None
    domains: dict[str, dict[str, Number]] = {}
    domain_samples: dict[str, int] = {}
    untrained_domains: list[str] = []
    settings: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    notes: list[str] = []
    lost_rounds: list[int] = []
    versions: dict[str, Any] = {}
    oracle_accuracy: float | None = None
    privacy: dict[str, Any] | None = None
    evaluation: Annotated[dict[str, Any], AfterValidator(_check_evaluation)] = {}
    own_metrics: Annotated[dict[str, dict[str, Any]], AfterValidator(_check_custom_metrics)] = {}
