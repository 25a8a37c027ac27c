"""Runs without rounds, of scikit-learn's models and of blends: what they share, how they are scored and written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.engine.evaluate import Metrics, Outputs, by_domain, client_table, sample_counts, summarise
from perfed.engine.metrics import METRICS, chosen, metrics_of
from perfed.experiment.config import Experiment
from perfed.run import predictions
from perfed.run.callbacks.results import holdings
from perfed.run.directory import RunDirectory
from perfed.run.summary import outline
from perfed.training.plan import Plan


class RunWithoutRounds:
    """Base of the runs that train no method; with ``execute``, ``site`` and ``join`` an
    :class:`~perfed.run.any_run.AnyRun`.
    """

    rounds: ClassVar[int] = 0
    done: ClassVar[int] = 0
    resumed: ClassVar[None] = None
    notes: ClassVar[tuple[str, ...]] = ()

    experiment: Experiment

    @property
    def seed(self) -> int:
        """The seed of the experiment."""
        return self.experiment.seed

    @cached_property
    def plan(self) -> Plan:
        """The plan of the experiment, of which only the number of threads matters here."""
        return self.experiment.plan.build()


@dataclass
class Judged:
    """What models say of the clients' samples, as it comes in.

    Attributes:
        experiment: of which the seed and the evaluation count.
        federation: the clients.
        probable: whether the models have probabilities, where they are of classes.
        metrics: of each client that was judged.
    """

    experiment: Experiment
    federation: Federation
    probable: bool = True
    metrics: Metrics = field(default_factory=dict)
    _outputs: list[Outputs] = field(default_factory=list)

    def add(self, client: Client, y: NDArray[Any], said: NDArray[np.float64]) -> None:
        """Judge what was ``said`` of a client's samples with targets ``y``, both in the unit of the data."""
        federation, split = self.federation, client.split(self.experiment.evaluation.split)
        assert isinstance(split, Split)
        self.metrics[client.id] = metrics_of(y, said, federation.task, federation.num_classes, self.names)
        domain = None if split.domain is None else split.domain.numpy()
        if domain is not None or not self.too_many:
            self._outputs.append(Outputs(np.repeat(np.array([client.id]), len(y)), domain, y, said))

    @cached_property
    def too_many(self) -> bool:
        """Whether what is said is too much to be kept."""
        return predictions.too_many(self.federation, self.experiment.evaluation.split)

    @property
    def names(self) -> list[str]:
        """The metrics asked for that the models can have: not every one has probabilities."""
        names = (chosen(given)[0] for given in self.experiment.evaluation.measured)
        said = (name for name in names if not METRICS[name].of_model)
        return [name for name in said if self.probable or not METRICS[name].probabilities]

    def finish(self, name: str, path: Path | None, files: Sequence[str] = (), **more: Any) -> dict[str, Any]:
        """Write ``config.toml``, ``clients.csv``, predictions of every sample, ``summary.json``, and their checksums.

        Args:
            name: of the row.
            path: where they go; ``None`` writes nothing.
            files: names of further files in ``path`` that are written already, for the checksums.
            more: what the summary has beside what was run, 0 rounds and the metrics.

        Returns:
            The summary.
        """
        evaluation, federation = self.experiment.evaluation, self.federation
        weights = None if evaluation.weights == "uniform" else sample_counts(federation, evaluation.split)
        found = summarise(self.metrics, weights)
        domains, of_clients = by_domain(self._outputs, federation, self.names) if federation.num_domains else ({}, {})
        first = outline(name, federation, evaluation.split, self.experiment.seed, 0, found, domains)
        summary = {**first, **more}
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
            directory = RunDirectory(path)
            directory.write_config(self.experiment.model_copy(update={"method": name}).to_toml())
            # There is one number, in the column of the moment that the methods beside it report.
            moments = (self.metrics, {}) if evaluation.when == "before" else ({}, self.metrics)
            directory.write_clients(*client_table(federation, evaluation.split, *moments, {}, {}, of_clients))
            if not self.too_many:
                rows = predictions.arrays_of(self._outputs, federation, evaluation.split)
                directory.write_arrays(predictions.FOLDER, 0, rows)
            directory.write_holdings(holdings(federation))
            directory.write_summary(summary)
            directory.seal(files)
        return summary
