"""A metric of every client and seed by method, paired differences of them, and tests over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import Metric
from perfed.privacy.metrics import POOLED
from perfed.report.run_results import ClientValues, RunResults, main_metric, methods_of


@dataclass(frozen=True)
class ClientTable:
    """A metric of each client: arrays ``(seeds, clients)`` by method, NaN where it is not known.

    Attributes:
        weights: of the clients in means over them.
        rows: of the clients that they were tested on, ``(clients,)``; infinite where a run does not say.
        noise: variances ``(seeds, clients)`` by method of noise that was added to metrics before they left the clients.
    """

    sites: list[str]
    seeds: list[int]
    weights: NDArray[np.float64]
    rows: NDArray[np.float64]
    of_method: dict[str, NDArray[np.float64]]
    noise: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def pooled(self) -> bool:
        """Whether the mean over all clients is known alone, in the place of one client."""
        return self.sites == [POOLED]

    def noise_of(self, method: str, base: str) -> NDArray[np.float64] | None:
        """Variances ``(seeds, clients)`` of the noise in :meth:`gains`; ``None`` where there is none."""
        found = [self.noise[name] for name in (method, base) if name in self.noise]
        return sum(found) if found else None  # type: ignore[return-value]

    @classmethod
    def of(cls, runs: Sequence[RunResults], metric: str | None = None) -> ClientTable:
        """That of the finished runs that measured clients by ``metric``; the main one if none is given."""
        metric = metric or main_metric(runs)
        asked = [(run, run.clients.by(metric)) for run in runs if run.summary and run.clients and metric]
        there = [(run, _known(run, clients, str(metric))) for run, clients in asked if clients is not None]
        seeds = sorted({run.seed for run, _ in there})
        sites = sorted({site for _, clients in there for site in clients.ids})
        column = {site: number for number, site in enumerate(sites)}
        weights, rows, found = np.ones(len(sites)), np.full(len(sites), np.inf), {}
        noise: dict[str, NDArray[np.float64]] = {}
        for method in methods_of([run for run, _ in there]):
            found[method] = np.full((len(seeds), len(sites)), np.nan)
        for run, clients in there:
            columns = [column[site] for site in clients.ids]
            found[run.method][seeds.index(run.seed), columns] = clients.reported
            weights[columns] = 1.0 if clients.weights is None else clients.weights
            rows[columns] = (clients.samples or {}).get("n_test", np.inf)
            if of := _deviations(run, str(metric)):
                own = noise.setdefault(run.method, np.zeros((len(seeds), len(sites))))
                own[seeds.index(run.seed), columns] = [of.get(site, 0.0) ** 2 for site in clients.ids]
        return cls(
            sites, seeds, weights, rows, {method: own for method, own in found.items() if np.isfinite(own).any()}, noise
        )

    def mean(self, method: str) -> float:
        """Over clients and seeds."""
        values = self.of_method[method]
        there = np.isfinite(values)
        return float(np.average(values[there], weights=(there * self.weights)[there]))

    def shrunk(self, method: str, worth: float) -> NDArray[np.float64]:
        """The mean over the seeds at each client, ``(clients,)``, as if ``worth`` more rows had the mean over all.

        NaN where the method was not measured.
        """
        values = self.of_method[method]
        there = np.isfinite(values)
        own = np.where(there, values, 0.0).sum(0) / np.where(there.any(0), there.sum(0), np.nan)
        share = worth / (worth + self.rows)
        return np.asarray(own + share * (self.mean(method) - own))

    def gains(self, method: str, base: str, known: Metric) -> NDArray[np.float64]:
        """By how much ``method`` is better than ``base``, ``(seeds, clients)``."""
        return known.direction * (self.of_method[method] - self.of_method[base])


def _deviations(run: RunResults, metric: str) -> dict[str, float]:
    """Of the noise in a metric, by client or :data:`POOLED`, as the run's summary has it; empty where there is none."""
    privacy = (run.summary and run.summary.privacy) or {}
    return dict(privacy.get("noisy_metrics", {}).get("sd", {}).get(metric, {}))


def _known(run: RunResults, clients: ClientValues, metric: str) -> ClientValues:
    """What is known of the clients: of all of them as one, where the run has the mean over them alone."""
    if POOLED not in _deviations(run, metric):
        return clients
    assert run.summary is not None
    mean = np.array([run.summary.spreads[metric].mean if metric in run.summary.spreads else np.nan])
    return replace(clients, ids=(POOLED,), before=mean, after=mean, weights=None, measured=None, samples=None)


EXACT = 50
"""Up to so many clients with a difference the p-value is exact; beyond, the normal approximation is."""


def paired_p(differences: NDArray[np.float64]) -> float | None:
    """Return the two-sided p-value of Wilcoxon's signed-rank test over clients; None where fewer than two have one.

    Each client's differences ``(seeds, clients)`` are averaged over the seeds, so that a client counts once. Clients
    without a difference have a rank and no sign (Pratt 1959). Up to :data:`EXACT` clients all signs are counted, ties
    and zeros included: five clients that all gain have 2 / 2^5 = .0625, so that fewer than six are never significant.
    """
    there = np.isfinite(differences)
    means = np.where(there, differences, 0.0).sum(0)[there.any(0)] / there.sum(0)[there.any(0)]
    if len(means) < 2:
        return None
    means = means.round(12)  # differences that only rounding tells apart are ties
    if not means.any():
        return 1.0
    if len(means) > EXACT:
        from scipy import stats  # type: ignore[import-untyped]

        return float(stats.wilcoxon(means, zero_method="pratt", method="approx").pvalue)
    return _exact_p(means)


def _exact_p(means: NDArray[np.float64]) -> float:
    """Share of all sign patterns whose rank sum lies as far from the middle as that of ``means``."""
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    twice = np.rint(2 * rankdata(abs(means))).astype(int)[means != 0]  # whole numbers, also of ties
    likely = np.ones(1)  # of each twice the sum of the positive ranks
    for rank in twice:
        likely = (np.pad(likely, (0, rank)) + np.pad(likely, (rank, 0))) / 2
    middle = twice.sum() / 2
    far = abs(np.arange(len(likely)) - middle) >= abs(twice[means[means != 0] > 0].sum() - middle)
    return min(1.0, float(likely[far].sum()))


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """The p-values made larger so that all of them can be read at once (Holm 1979); None stays None.

    Example:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None})
        {'a': 0.03, 'b': 0.06, 'c': 0.06, 'd': None}
    """
    known = sorted((p, name) for name, p in p_values.items() if p is not None)
    found: dict[str, float | None] = dict.fromkeys(p_values)
    largest = 0.0
    for place, (p, name) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - place) * p))
        found[name] = largest
    return found
