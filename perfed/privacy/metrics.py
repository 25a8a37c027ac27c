"""Metrics of evaluation that may leave: means over a client's test rows, each row's part cut to a bound, and noise."""

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

POOLED = "all sites"
"""In the place of a client where only the mean over all of them is known."""
_INHERENT = {"accuracy": 1.0}
_UNITS = {"mse": 2, "mae": 1}  # powers of the targets' standard deviation
_OWN = tuple(name for (name,) in ALWAYS.values() if METRICS[name].rows is not None)


class Measured(NamedTuple):
    """Metrics beside those that a task always has, and the rounds after which they are taken."""

    metrics: Sequence[str] = ()
    rounds: Sequence[int] = ()


UNMEASURED = Measured()
"""No rounds are evaluated."""


@dataclass(frozen=True)
class NoisyMetrics:
    """Which metrics leave with noise, how much, and after which rounds.

    The metrics of an evaluated round are one Gaussian mechanism each. Where rows are protected, a test row changes the
    mean over n of them by at most ``bound / n``. It is no training row, so that training costs it nothing. Where
    clients are, a client changes its own mean by at most the bound.

    Attributes:
        names: beside the one that the task always has.
        unit: that is protected.
        noise: z, in units of what a row (a client) can change.
        bound: most that a row counts in losses and errors, see :meth:`bounds`.
        rounds: that are evaluated, by the plan.
        shares: fewest clients in a sum where the server sees sums alone and clients are protected: each adds a share.
    """

    names: tuple[str, ...]
    unit: str
    noise: float
    bound: float
    rounds: tuple[int, ...]
    shares: int = 0

    @property
    def each(self) -> int:
        """Releases of an evaluated round."""
        return 1 + len(self.names)

    def releases(self, evaluations: int) -> Releases:
        """Return what is told when metrics leave so often."""
        return Releases(self.each).times(evaluations)

    def evaluations(self, rounds: int) -> int:
        """Return how many rounds are evaluated where training ends after ``rounds``: the last one always is."""
        if rounds == 0:
            return 0
        return sum(number <= rounds for number in self.rounds) + (rounds not in self.rounds)

    def bounds(self, task: Task, num_classes: int | None, scale: TargetScale | None) -> dict[str, float]:
        """Return by metric the most that one row counts, in the unit of the metric.

        1 of the accuracy; 1 of Brier's score of two classes, 2 of more; of other losses the bound. Errors are bounded
        in units of the targets' standard deviation (mae) or of its square (mse).
        """
        own = dict.fromkeys((*ALWAYS[task], *self.names))
        inherent = {**_INHERENT, "brier": 1.0 if num_classes == 2 else 2.0}
        std = 1.0 if scale is None else max(scale.std)
        return {name: inherent.get(name, self.bound * std ** _UNITS.get(name, 0)) for name in own}

    def sd(self, bound: float, rows: int) -> float:
        """Return the standard deviation of the noise on one client's mean over ``rows`` rows."""
        changes = bound / rows if self.unit == "sample" else bound
        return self.noise * changes / sqrt(self.shares or 1)

    def told(self, outputs: Outputs, bounds: Mapping[str, float], source: Noise) -> dict[str, float]:
        """Return the metrics of one client's model with noise; what ``source`` draws is the same each time.

        Args:
            outputs: what the model says of the client's test rows, in the unit of the data.
            bounds: of the metrics (:meth:`bounds`).
            source: where noise comes from.
        """
        drawn = source.draw(key(0, "metrics"), len(bounds), torch.float64).tolist()
        exact = cut_means(outputs, bounds)
        rows = len(outputs.y)
        noisy = {n: exact[n] + self.sd(b, rows) * normal for (n, b), normal in zip(bounds.items(), drawn, strict=True)}
        if not source.secret:
            return noisy
        scales = torch.tensor([self.sd(bound, rows) for bound in bounds.values()], dtype=torch.float64)
        rounded = round_to_grid(torch.tensor([*noisy.values()], dtype=torch.float64), scales)
        return dict(zip(noisy, rounded.tolist(), strict=True))

    def deviations(self, federation: Federation, split: str, recent: Sequence[Metrics]) -> dict[str, Any]:
        """Return what a summary says of the noise: its multiplier, and its deviation in what is reported.

        Args:
            federation: the clients, of which the numbers of rows count.
            split: that is evaluated.
            recent: each client's metrics in the evaluated rounds whose mean is reported; or in the place of clients
                groups of them of which the mean alone is known.

        Returns:
            ``noise``; ``sd``: by metric and client, or :data:`POOLED`.
        """
        rows = {client.id: len(data) for client in federation if (data := client.split(split)) is not None}
        times: dict[str, int] = {}
        for one in (name for found in recent for name in found):
            times[one] = times.get(one, 0) + 1
        sd: dict[str, dict[str, float]] = {}
        for metric, bound in self.bounds(federation.task, federation.num_classes, federation.target_scale).items():
            of = {}
            for name, count in times.items():
                members = summed_clients(name) or [name]
                variance = sum(self.sd(bound, rows[client]) ** 2 for client in members) / len(members) ** 2
                of[name] = sqrt(variance / count)
            if any(summed_clients(name) for name in times):
                of = {POOLED: sqrt(sum(own**2 for own in of.values())) / len(of)}
            sd[metric] = of
        return {"noise": self.noise, "sd": sd}


def cut_means(outputs: Outputs, bounds: Mapping[str, float]) -> dict[str, float]:
    """Return by metric the mean over rows of what each counts, from 0 to the metric's bound.

    A row of which a model says no number counts the bound.
    """
    found = {}
    for name, bound in bounds.items():
        of_rows = METRICS[name].rows
        assert of_rows is not None
        each = np.nan_to_num(of_rows(outputs.y, outputs.outputs), nan=bound, posinf=bound)
        found[name] = float(np.clip(each, 0.0, bound).mean())
    return found


def check_measured(measured: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics that leave beside the one that the task always has.

    Args:
        measured: names, as settings have them.

    Raises:
        PerfedError: one has no mechanism; names it.
    """
    allowed = [name for name, known in METRICS.items() if known.rows is not None]
    for given in measured:
        if bare_name(given) not in allowed:
            raise PerfedError(
                f"evaluation: '{given}' has no mechanism under privacy.metrics = 'noisy', for it is no mean over rows; "
                f"allowed: {', '.join(allowed)}"
            )
    return tuple(name for name in measured if name not in _OWN)
