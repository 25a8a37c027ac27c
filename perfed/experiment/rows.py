"""Runs without rounds (of scikit-learn models and of blends): shared attributes, evaluation and files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perfed.client_model.site_model import SiteModel
from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.engine.evaluate import Metrics, Outputs, client_table, compute_domain_metrics, sample_counts, summarise
from perfed.engine.metrics import METRICS, find_metric, metrics_of
from perfed.experiment.config import Experiment
from perfed.run import predictions
from perfed.run.callbacks.progress import Progress
from perfed.run.callbacks.results import describe_holdings
from perfed.run.directory import RunDirectory
from perfed.run.run import Run
from perfed.run.summary import build_outline
from perfed.training.plan import Plan


class RunWithoutRounds(ABC):
    """Base class of the runs of scikit-learn models and of blends, with the interface of :class:`~perfed.run.run.Run`.

    Attributes:
        name: the name of the baseline or blend.
        experiment: the experiment.
        federation: the clients.
        path: the directory of the results; ``None`` writes nothing.
    """

    rounds: ClassVar[int] = 0
    done: ClassVar[int] = 0
    resumed: ClassVar[None] = None
    notes: ClassVar[tuple[str, ...]] = ()

    name: str
    experiment: Experiment
    federation: Federation
    path: Path | None

    @property
    def seed(self) -> int:
        """The seed of the experiment."""
        return self.experiment.seed

    @cached_property
    def plan(self) -> Plan:
        """The plan of the experiment, of which only the number of threads matters here."""
        return self.experiment.plan.build()

    @abstractmethod
    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Fit the models or weights, write the results, and return the summary.

        Args:
            progress: called with the number of clients that are done, the number of all clients, and the mean accuracy
                if it is known.
        """

    @abstractmethod
    def site(self, client: str, trust: bool = False) -> SiteModel:
        """Return the model of a client, or of a site that has joined; ``trust``: whether its files may run code."""

    @abstractmethod
    def join(self, client: Client, rounds: int | None = None) -> SiteModel:
        """Return the model of a new client, after ``rounds`` of training (default: as many as the run has done)."""


AnyRun = Run | RunWithoutRounds
"""A run of a method, of scikit-learn models or of a blend: it is executed, and then has a model for each client."""


@dataclass
class Judged:
    """The metrics and predictions of models on the clients' samples, collected client by client.

    Attributes:
        experiment: the experiment, whose seed and evaluation settings are used.
        federation: the clients.
        probable: whether classifiers predict probabilities.
        metrics: the metrics of each client that was added.
    """

    experiment: Experiment
    federation: Federation
    probable: bool = True
    metrics: Metrics = field(default_factory=dict)
    _outputs: list[Outputs] = field(default_factory=list)

    def add(self, client: Client, y: NDArray[Any], outputs: NDArray[np.float64]) -> None:
        """Compute the metrics of a client from its targets and a model's outputs, both in the unit of the data."""
        federation, split = self.federation, client.split(self.experiment.evaluation.split)
        assert isinstance(split, Split)
        self.metrics[client.id] = metrics_of(y, outputs, federation.task, federation.num_classes, self.names)
        domain = None if split.domain is None else split.domain.numpy()
        if domain is not None or not self.too_many:
            self._outputs.append(Outputs(np.repeat(np.array([client.id]), len(y)), domain, y, outputs))

    @cached_property
    def too_many(self) -> bool:
        """Whether there are too many predictions to store them."""
        return predictions.exceeds_limit(self.federation, self.experiment.evaluation.split)

    @property
    def names(self) -> list[str]:
        """The requested metrics that can be computed; some need probabilities, which not every model predicts."""
        names = (find_metric(metric)[0] for metric in self.experiment.evaluation.requested_metrics)
        of_outputs = (name for name in names if not METRICS[name].of_model)
        return [name for name in of_outputs if self.probable or not METRICS[name].probabilities]

    def finish(self, name: str, path: Path | None, files: Sequence[str] = (), **entries: Any) -> dict[str, Any]:
        """Write ``config.toml``, ``clients.csv``, predictions of every sample, ``summary.json``, and their checksums.

        Args:
            name: the name of the row.
            path: the directory; ``None`` writes nothing.
            files: names of files in ``path`` that are written already, for the checksums.
            entries: further entries of the summary.

        Returns:
            The summary.
        """
        evaluation, federation = self.experiment.evaluation, self.federation
        weights = None if evaluation.weights == "uniform" else sample_counts(federation, evaluation.split)
        client_metrics = summarise(self.metrics, weights)
        domains, of_clients = (
            compute_domain_metrics(self._outputs, federation, self.names) if federation.num_domains else ({}, {})
        )
        first = build_outline(name, federation, evaluation.split, self.experiment.seed, 0, client_metrics, domains)
        summary = {**first, **entries}
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            directory = RunDirectory(path)
            directory.write_config(self.experiment.model_copy(update={"method": name}).to_toml())
            # A model has one value of each metric: in the column (before or after local training) of the methods.
            moments = (self.metrics, {}) if evaluation.when == "before" else ({}, self.metrics)
            directory.write_clients(*client_table(federation, evaluation.split, *moments, {}, {}, of_clients))
            if not self.too_many:
                rows = predictions.build_arrays(self._outputs, federation, evaluation.split)
                directory.write_arrays(predictions.FOLDER, 0, rows)
            directory.write_holdings(describe_holdings(federation))
            directory.write_summary(summary)
            directory.seal(files)
        return summary
