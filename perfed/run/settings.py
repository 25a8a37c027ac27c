"""Settings of a run: what is evaluated and when, and which embedded samples are kept."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from perfed.engine.metrics import find_metric
from perfed.settings import LISTED, STRICT, exclude_default


class Evaluation(BaseModel):
    """Which accuracy is reported.

    Attributes:
        every: evaluate after every so many rounds, and after the last.
        split: on which data.
        who: all clients, or the round's participants.
        when: ``"before"`` local training: the model a client would start its next round with (received parameters,
            own personal ones, after ``personalise``); ``"after"``: as local training left it, before aggregation.
        last: the summary is the mean over this many last rounds (all of them are evaluated); 1: the last round.
        weights: ``"uniform"`` mean over clients, or weighted by their number of ``"samples"`` in the split.
        targets: mean accuracies (fractions); the summary says when each was first reached in an evaluated round.
        metrics: names of metrics (:data:`perfed.engine.metrics.METRICS`, or ``module:NAME``) beside those that the
            task always has: accuracy, loss and for two classes auc; mse; c-index and loss.
        compare_by: the metric that methods are compared by, in verdicts, tables and searches; it is measured without
            being in ``metrics``. Empty: accuracy, mse or c-index; in comparisons on tables with classes log-loss.
        classes: ``"all"``, or ``"held"``: a client predicts among the classes that it has training samples of. Where
            that makes a difference, metrics of predictions among all classes are there too, as ``METRIC_all``.
        stop: ``"last"``: a client's model is that of the last round. ``"validated"``: that of the evaluated round with
            the least loss on the client's validation data, and training ends when nobody has improved in ``patience``
            evaluations. ``"targets"``: training ends with the evaluated round that has reached the last of ``targets``.
        patience: see ``stop``.

    Example:
        >>> evaluation = Evaluation(every=5, last=3, targets=[0.8, 0.9])  # for Run(..., evaluation=evaluation)
        >>> evaluation.split, evaluation.targets
        ('test', (0.8, 0.9))
    """

    model_config = STRICT

    every: int = Field(10, ge=1)
    split: Literal["test", "validation", "train"] = "test"
    who: Literal["all", "participants"] = "all"
    when: Literal["before", "after"] = "before"
    last: int = Field(1, ge=1)
    weights: Literal["uniform", "samples"] = "uniform"
    targets: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], LISTED] = ()
    metrics: Annotated[tuple[str, ...], LISTED] = Field((), exclude_if=exclude_default(()))
    compare_by: str = Field("", exclude_if=exclude_default(""))
    classes: Literal["all", "held"] = Field("all", exclude_if=exclude_default("all"))
    stop: Literal["last", "validated", "targets"] = Field("last", exclude_if=exclude_default("last"))
    patience: int = Field(5, ge=1, exclude_if=exclude_default(5))

    def is_due(self, number: int, rounds: int) -> bool:
        """Return whether round ``number`` of ``rounds`` rounds is evaluated."""
        return number % self.every == 0 or number > rounds - self.last

    @property
    def requested_metrics(self) -> tuple[str, ...]:
        """The names of the metrics that are computed in addition to those of the task."""
        return tuple(dict.fromkeys((*self.metrics, *filter(None, [self.compare_by]))))

    @field_validator("compare_by")
    @classmethod
    def _check_compare_by(cls, value: str) -> str:
        if value and find_metric(value)[1].of_model:
            raise ValueError(f"'{value}' is of models and not of what they say; methods are not compared by it")
        return value

    @field_validator("metrics")
    @classmethod
    def _check_metric_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            find_metric(name)
        return value

    @property
    def one_model_each(self) -> bool:
        """Whether what is reported is of one model of each client."""
        return (self.who, self.when, self.last) == ("all", "before", 1)

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if self.stop != "last" and not self.one_model_each:
            allowed = "who = 'all', when = 'before', last = 1"
            raise ValueError(f"stop = '{self.stop}' takes one model of each client: {allowed}")
        if self.stop == "targets" and not self.targets:
            raise ValueError("stop = 'targets' needs targets")
        return self

    @field_validator("targets")
    @classmethod
    def _check_unique(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) < len(value):
            raise ValueError("must name each accuracy once")
        return value


class Blend(BaseModel):
    """How the row ``blend`` mixes the others at each site.

    Attributes:
        folds: of the training samples, inside which each candidate is trained and judged.
        prior_rows: a site's weights are learnt as if it had so many more rows, which say what all sites' rows say;
            ``"cv"``: as many as make the folds' own loss least.
        candidates: what a deployed study mixes; in simulations ``--methods`` names them. Empty: it mixes nothing.
    """

    model_config = STRICT

    folds: int = Field(5, ge=2, le=100)
    prior_rows: Annotated[float, Field(ge=0)] | Literal["cv"] = 50.0
    candidates: Annotated[tuple[str, ...], LISTED] = Field((), exclude_if=exclude_default(()))


class Snapshots(BaseModel):
    """Arrays kept for the report.

    Attributes:
        clients: the first so many clients are those whose embedded samples are kept.
        rounds: after which these are kept (0: the start).
        split: which samples these are.
        losses: whether the training loss of each local epoch of the same clients is kept, of all rounds.
        shown: rounds in which what methods show (weights of combined heads) is kept; none: those that are evaluated.
    """

    model_config = STRICT

    clients: int = Field(3, ge=0)
    rounds: Annotated[tuple[NonNegativeInt, ...], LISTED] = ()
    split: Literal["train", "test"] = Field("train", exclude_if=exclude_default("train"))
    losses: bool = Field(False, exclude_if=exclude_default(False))
    shown: Annotated[tuple[PositiveInt, ...], LISTED] = Field((), exclude_if=exclude_default(()))

    def keeps_round(self, number: int, evaluated: bool) -> bool:
        """Return whether the arrays that methods show in round ``number`` are stored."""
        return number in self.shown if self.shown else evaluated
