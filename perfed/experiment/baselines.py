"""Baselines without a federation: one scikit-learn model per client, trained on the client's own samples alone."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from numpy.typing import NDArray
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.svm import SVC
from torch import Tensor

from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.data.labels import Task
from perfed.engine.evaluate import (
    Metrics,
    Outputs,
    by_domain,
    client_table,
    few_samples,
    sample_counts,
    summarise,
    with_extremes,
)
from perfed.engine.metrics import METRICS, chosen, metrics_of
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment
from perfed.machine import installed_version
from perfed.plugins import SKLEARN
from perfed.run.directory import RunDirectory
from perfed.run.run import Progress

# From a seed to the model for classes, and for values; None where scikit-learn has none of that kind.
_Maker = Callable[[int], Any] | None
_MODELS: dict[str, tuple[_Maker, _Maker]] = {
    "logistic": (lambda seed: LogisticRegression(max_iter=1000), None),
    "ridge": (None, lambda seed: Ridge()),
    "svc": (lambda seed: SVC(), None),
    "random-forest": (
        lambda seed: RandomForestClassifier(random_state=seed),
        lambda seed: RandomForestRegressor(random_state=seed),
    ),
}


def is_baseline(name: str) -> bool:
    """Whether ``name`` stands for scikit-learn models and not for a method."""
    return name.startswith(SKLEARN)


def baseline_names() -> list[str]:
    """Names of all baselines."""
    return [SKLEARN + name for name in _MODELS]


def check_baseline(name: str) -> None:
    """Raise a :class:`PerfedError` that says what is allowed, unless there is a baseline called ``name``."""
    if name not in baseline_names():
        raise PerfedError(f"unknown scikit-learn model '{name}'; allowed: {', '.join(baseline_names())}")


@dataclass(frozen=True)
class Baseline:
    """One scikit-learn model per client: no federation, no rounds, no bytes.

    The models have scikit-learn's own defaults (logistic regression may take 1000 iterations) and the run's seed. They
    are trained on the arrays that the methods get, images flattened; nothing is scaled that the data set has not
    scaled. A client with samples of a single class always says that class.

    Attributes:
        name: one of :func:`baseline_names`.
        experiment: of which the seed, the data and the evaluation's split and weights count.
        federation: the clients.
        path: where the results go; ``None`` writes nothing.

    Raises:
        PerfedError: no such baseline, none for such targets, inputs that are token ids, or nobody to be evaluated.
    """

    name: str
    experiment: Experiment
    federation: Federation
    path: Path | None = None
    rounds: int = 0

    def __post_init__(self) -> None:
        check_baseline(self.name)
        self._new_model()
        data, split = self.federation.name, self.experiment.evaluation.split
        if self.federation.words is not None:
            raise PerfedError(f"{self.name}: the inputs of data set '{data}' are token ids, which are no features")
        if not sample_counts(self.federation, split):
            raise PerfedError(f"evaluation.split = '{split}': no client has such data")

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train and evaluate every client's model; write ``config.toml``, ``clients.csv`` and ``summary.json``.

        ``progress`` is called after each client with its number and how many there are.

        Returns:
            The summary: 0 rounds, and the metrics of a run but ``loss``, since not every model has probabilities.
        """
        started = time.perf_counter()
        metrics: Metrics = {}
        outputs: list[Outputs] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, client in enumerate(self.federation, 1):
                self._evaluate(client, metrics, outputs)
                if progress is not None:
                    progress(number, len(self.federation), None)
        stopped = sum(issubclass(warning.category, ConvergenceWarning) for warning in caught)
        notes = [f"{stopped} of the models did not converge"] if stopped else []
        return self._finish(metrics, outputs, time.perf_counter() - started, notes)

    def _evaluate(self, client: Client, metrics: Metrics, outputs: list[Outputs]) -> None:
        split = client.split(self.experiment.evaluation.split)
        if split is None:
            return
        model = self.fitted(client)
        y, predicted = split.y.numpy(), _outputs(model, _rows(split.x), self.federation.num_classes)
        if (scale := self.federation.target_scale) is not None:
            y, predicted = scale.up(split.y).numpy(), scale.up(torch.from_numpy(predicted)).numpy()
        metrics[client.id] = metrics_of(y, predicted, *self._kind)
        if split.domain is not None:
            outputs.append(Outputs(np.repeat(np.array([client.id]), len(y)), split.domain.numpy(), y, predicted))

    @property
    def _kind(self) -> tuple[Task, int | None, list[str]]:
        """The task, and the metrics asked for that need no probabilities, which not every model has."""
        names = (chosen(given)[0] for given in self.experiment.evaluation.metrics)
        return self.federation.task, self.federation.num_classes, [n for n in names if not METRICS[n].probabilities]

    def fitted(self, client: Client) -> Any:
        """The scikit-learn model of one client, trained."""
        y = client.train.y.numpy()
        single = self.federation.num_classes is not None and len(np.unique(y)) == 1
        model = DummyClassifier() if single else self._new_model()
        return model.fit(_rows(client.train.x), y.ravel() if y.shape[1:] == (1,) else y)

    def _new_model(self) -> Any:
        if self.federation.survival:
            raise PerfedError(f"{self.name} is not for survival, which these data are; no baseline is")
        regression = self.federation.num_classes is None
        make = _MODELS[self.name.removeprefix(SKLEARN)][regression]
        if make is None:
            allowed = [SKLEARN + name for name, makers in _MODELS.items() if makers[regression] is not None]
            kind = "a regression" if regression else "a classification"
            raise PerfedError(f"{self.name} is not for {kind}, which these data are; allowed: {', '.join(allowed)}")
        return make(self.experiment.seed)

    def _finish(self, metrics: Metrics, outputs: list[Outputs], seconds: float, notes: list[str]) -> dict[str, Any]:
        evaluation, federation = self.experiment.evaluation, self.federation
        weights = None if evaluation.weights == "uniform" else sample_counts(federation, evaluation.split)
        found = summarise(metrics, weights)
        domains, of_clients = by_domain(outputs, federation, self._kind[2]) if outputs else ({}, {})
        sizes = federation.domain_samples(evaluation.split)
        by_name = {"domains": with_extremes(domains, few_samples(sizes)), "domain_samples": sizes}
        summary = {
            "method": self.name,
            "dataset": federation.name,
            "seed": self.experiment.seed,
            "rounds": 0,
            "metrics": found,
            **({"accuracy": found["accuracy"]} if "accuracy" in found else {}),
            **(by_name if domains else {}),
            "wall_seconds": seconds,
            "training_seconds": seconds,
            "settings": self._new_model().get_params(),
            "notes": notes,
            "versions": {
                "perfed": installed_version(),
                "scikit-learn": sklearn.__version__,
                "python": platform.python_version(),
            },
        }
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            directory = RunDirectory(self.path)
            directory.write_config(self.experiment.model_copy(update={"method": self.name}).to_toml())
            # There is one number, in the column of the moment that the methods beside it report.
            moments = (metrics, {}) if evaluation.when == "before" else ({}, metrics)
            directory.write_clients(*client_table(federation, evaluation.split, *moments, {}, {}, of_clients))
            directory.write_summary(summary)
        return summary


def start_baseline(name: str, experiment: Experiment, *, data_dir: Path | None = None, path: Path) -> Baseline:
    """The baseline ``name`` on the experiment's data."""
    return Baseline(name, experiment, experiment.data.load(experiment.seed, data_dir), path)


def _rows(x: Tensor) -> NDArray[Any]:
    """One row of features per sample, ``(samples, features)``, as scikit-learn wants them."""
    return x.flatten(1).numpy()


def _outputs(model: Any, x: NDArray[Any], num_classes: int | None) -> NDArray[np.float64]:
    """``(samples, C)`` whose largest is what the model predicts, for two classes by how much; or values."""
    predicted = model.predict(x)
    if num_classes is None:
        return np.asarray(predicted, dtype=np.float64)
    found = np.zeros((len(x), num_classes))
    if num_classes == 2 and len(model.classes_) == 2:
        decides = hasattr(model, "decision_function")
        found[:, 1] = model.decision_function(x) if decides else model.predict_proba(x)[:, 1] - 0.5
    else:
        found[np.arange(len(x)), predicted] = 1.0
    return found
