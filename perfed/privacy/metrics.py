"""Evaluation metrics with differential privacy: noisy means over a client's test rows, each clipped to a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch

from perfed.data.federation import Federation
from perfed.data.labels import Task
from perfed.data.target_scale import TargetScale
from perfed.engine.evaluate import Metrics, Outputs, summed_clients
from perfed.engine.metrics import ALWAYS, METRICS
from perfed.errors import PerfedError
from perfed.plugins import bare_name
from perfed.privacy.accountant import Releases
from perfed.rng import Noise, key, round_to_grid

ALL_SITES = "all sites"
"""The key, in place of a client, of a mean that is only known over all clients."""
_INHERENT_BOUNDS = {"accuracy": 1.0}
_UNIT_POWERS = {"mse": 2, "mae": 1}  # powers of the targets' standard deviation
_DEFAULT_METRICS = tuple(name for (name,) in ALWAYS.values() if METRICS[name].rows is not None)


class EvaluationPlan(NamedTuple):
    """The metrics besides the default metrics of a task, and the rounds after which metrics are released."""

    metrics: Sequence[str] = ()
    rounds: Sequence[int] = ()


NO_EVALUATIONS = EvaluationPlan()
"""A plan in which no round is evaluated."""


@dataclass(frozen=True)
class NoisyMetrics:
    """The metrics that are released with noise, the noise, and the rounds after which they are released.

    Each metric of an evaluated round is one Gaussian mechanism. If rows are protected, one test row changes a mean over
    n rows by at most ``bound / n``; training does not spend a test row's budget, since it is no training row. If
    clients are protected, a client changes its mean by at most the bound.

    Attributes:
        names: metrics besides the default metric of the task.
        unit: the protected unit, ``"sample"`` or ``"client"``.
        noise: z, the standard deviation of the noise over what one row (or client) can change.
        bound: largest contribution of a row to losses and errors, see :meth:`compute_bounds`.
        rounds: rounds that the plan evaluates.
        shares: the fewest clients in a sum, if clients are protected and the server only sees sums: each client adds a
            share of the noise.
    """

    names: tuple[str, ...]
    unit: str
    noise: float
    bound: float
    rounds: tuple[int, ...]
    shares: int = 0

    @property
    def releases_per_round(self) -> int:
        """The number of releases of an evaluated round."""
        return 1 + len(self.names)

    def count_releases(self, evaluations: int) -> Releases:
        """Return the releases of so many evaluations."""
        return Releases(self.releases_per_round).repeat(evaluations)

    def count_evaluations(self, rounds: int) -> int:
        """Return the number of evaluated rounds if training ends after ``rounds``; the last one is always evaluated."""
        if rounds == 0:
            return 0
        return sum(number <= rounds for number in self.rounds) + (rounds not in self.rounds)

    def compute_bounds(self, task: Task, num_classes: int | None, scale: TargetScale | None) -> dict[str, float]:
        """Return the largest contribution of one row to each metric, in the unit of the metric.

        The bound is 1 for the accuracy, 1 for the Brier score of two classes and 2 of more, and ``bound`` for other
        losses. Bounds of errors are multiplied by the targets' standard deviation (mae) or by its square (mse).
        """
        names = dict.fromkeys((*ALWAYS[task], *self.names))
        inherent = {**_INHERENT_BOUNDS, "brier": 1.0 if num_classes == 2 else 2.0}
        std = 1.0 if scale is None else max(scale.std)
        return {name: inherent.get(name, self.bound * std ** _UNIT_POWERS.get(name, 0)) for name in names}

    def noise_deviation(self, bound: float, rows: int) -> float:
        """Return the standard deviation of the noise on one client's mean over ``rows`` rows."""
        sensitivity = bound / rows if self.unit == "sample" else bound
        return self.noise * sensitivity / sqrt(self.shares or 1)

    def add_noise(self, outputs: Outputs, bounds: Mapping[str, float], source: Noise) -> dict[str, float]:
        """Return the metrics of one client's model with noise; the same source always gives the same noise.

        Args:
            outputs: outputs of the model for the client's test rows, in the unit of the data.
            bounds: bounds of the metrics (:meth:`compute_bounds`).
            source: source of the noise.
        """
        normals = source.draw(key(0, "metrics"), len(bounds), torch.float64).tolist()
        means = compute_clipped_means(outputs, bounds)
        rows = len(outputs.y)
        noisy_means = {
            name: means[name] + self.noise_deviation(bound, rows) * normal
            for (name, bound), normal in zip(bounds.items(), normals, strict=True)
        }
        if not source.secret:
            return noisy_means
        scales = torch.tensor([self.noise_deviation(bound, rows) for bound in bounds.values()], dtype=torch.float64)
        rounded_means = round_to_grid(torch.tensor([*noisy_means.values()], dtype=torch.float64), scales)
        return dict(zip(noisy_means, rounded_means.tolist(), strict=True))

    def describe_noise(self, federation: Federation, split: str, recent: Sequence[Metrics]) -> dict[str, Any]:
        """Return the noise multiplier, and the standard deviation of the noise in the reported means.

        Args:
            federation: the clients, whose numbers of rows determine the noise.
            split: the evaluated split.
            recent: each client's metrics in the evaluated rounds whose mean is reported. A key may also be a group of
                clients of which only the mean is known.

        Returns:
            ``noise``: the multiplier; ``sd``: standard deviations by metric and by client, or for :data:`ALL_SITES`.
        """
        rows = {client.id: len(data) for client in federation if (data := client.split(split)) is not None}
        evaluations: dict[str, int] = {}
        for name in (name for metrics in recent for name in metrics):
            evaluations[name] = evaluations.get(name, 0) + 1
        sd: dict[str, dict[str, float]] = {}
        bounds = self.compute_bounds(federation.task, federation.num_classes, federation.target_scale)
        for metric, bound in bounds.items():
            deviations = {}
            for name, count in evaluations.items():
                members = summed_clients(name) or [name]
                variance = sum(self.noise_deviation(bound, rows[client]) ** 2 for client in members) / len(members) ** 2
                deviations[name] = sqrt(variance / count)
            if any(summed_clients(name) for name in evaluations):
                deviations = {ALL_SITES: sqrt(sum(deviation**2 for deviation in deviations.values())) / len(deviations)}
            sd[metric] = deviations
        return {"noise": self.noise, "sd": sd}


def compute_clipped_means(outputs: Outputs, bounds: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each metric over rows, with the contribution of each row clipped from 0 to the metric's bound.

    A row for which the model's output is not a number contributes the bound.
    """
    means = {}
    for name, bound in bounds.items():
        compute_rows = METRICS[name].rows
        assert compute_rows is not None
        row_values = np.nan_to_num(compute_rows(outputs.y, outputs.outputs), nan=bound, posinf=bound)
        means[name] = float(np.clip(row_values, 0.0, bound).mean())
    return means


def check_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics that are released besides the default metric of the task.

    Args:
        metrics: names of metrics in the evaluation settings.

    Raises:
        PerfedError: if a metric has no mechanism; names it.
    """
    allowed = [name for name, metric in METRICS.items() if metric.rows is not None]
    for name in metrics:
        if bare_name(name) not in allowed:
            raise PerfedError(
                f"evaluation: '{name}' has no mechanism under privacy.metrics = 'noisy' because it is not a mean over "
                f"rows; allowed: {', '.join(allowed)}"
            )
    return tuple(name for name in metrics if name not in _DEFAULT_METRICS)
