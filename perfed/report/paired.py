"""A metric of every client and seed by method, paired differences of them, and tests over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import Metric
from perfed.privacy.metrics import ALL_SITES
from perfed.report.run_results import ClientValues, RunResults, list_methods, main_metric


@dataclass(frozen=True)
class ClientTable:
    """A metric of each client and seed.

    Attributes:
        sites: the ids of the clients.
        seeds: the seeds.
        weights: the weights of the clients in means over them.
        rows: the numbers of test rows of the clients, ``(clients,)``; infinite if the runs lack them.
        of_method: the values of the metric ``(seeds, clients)`` by method, NaN for missing values.
        noise: the variances ``(seeds, clients)`` of the noise that clients added to their metrics, by method.
    """

    sites: list[str]
    seeds: list[int]
    weights: NDArray[np.float64]
    rows: NDArray[np.float64]
    of_method: dict[str, NDArray[np.float64]]
    noise: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def pooled(self) -> bool:
        """Whether only the mean over all clients is known, which takes the place of a single client."""
        return self.sites == [ALL_SITES]

    def noise_of(self, method: str, base: str) -> NDArray[np.float64] | None:
        """Return the variances ``(seeds, clients)`` of the noise in :meth:`gains`; ``None`` if there is no noise."""
        variances = [self.noise[name] for name in (method, base) if name in self.noise]
        return sum(variances) if variances else None  # type: ignore[return-value]

    @classmethod
    def from_runs(cls, runs: Sequence[RunResults], metric: str | None = None) -> ClientTable:
        """Return the table of the finished runs that measured ``metric``, by default the main metric."""
        metric = metric or main_metric(runs)
        candidates = [
            (run, run.clients.select_metric(metric)) for run in runs if run.summary and run.clients and metric
        ]
        measured = [
            (run, _pool_if_noisy(run, clients, str(metric))) for run, clients in candidates if clients is not None
        ]
        seeds = sorted({run.seed for run, _ in measured})
        sites = sorted({site for _, clients in measured for site in clients.ids})
        column = {site: number for number, site in enumerate(sites)}
        weights, rows = np.ones(len(sites)), np.full(len(sites), np.inf)
        values: dict[str, NDArray[np.float64]] = {}
        noise: dict[str, NDArray[np.float64]] = {}
        for method in list_methods([run for run, _ in measured]):
            values[method] = np.full((len(seeds), len(sites)), np.nan)
        for run, clients in measured:
            columns = [column[site] for site in clients.ids]
            values[run.method][seeds.index(run.seed), columns] = clients.reported
            weights[columns] = 1.0 if clients.weights is None else clients.weights
            rows[columns] = (clients.samples or {}).get("n_test", np.inf)
            if deviations := _read_deviations(run, str(metric)):
                variances = noise.setdefault(run.method, np.zeros((len(seeds), len(sites))))
                variances[seeds.index(run.seed), columns] = [deviations.get(site, 0.0) ** 2 for site in clients.ids]
        return cls(
            sites,
            seeds,
            weights,
            rows,
            {method: array for method, array in values.items() if np.isfinite(array).any()},
            noise,
        )

    def mean(self, method: str) -> float:
        """Return the mean over clients and seeds."""
        values = self.of_method[method]
        finite = np.isfinite(values)
        return float(np.average(values[finite], weights=(finite * self.weights)[finite]))

    def shrink_to_mean(self, method: str, extra_rows: float) -> NDArray[np.float64]:
        """Return the mean over the seeds at each client, ``(clients,)``, shrunk towards the mean over all clients.

        Each client counts as if it had ``extra_rows`` more rows with that mean. NaN if the method was not measured.
        """
        values = self.of_method[method]
        finite = np.isfinite(values)
        means = np.where(finite, values, 0.0).sum(0) / np.where(finite.any(0), finite.sum(0), np.nan)
        share = extra_rows / (extra_rows + self.rows)
        return np.asarray(means + share * (self.mean(method) - means))

    def gains(self, method: str, base: str, metric: Metric) -> NDArray[np.float64]:
        """Return the gains of ``method`` over ``base``, ``(seeds, clients)``, positive if it is better."""
        return metric.direction * (self.of_method[method] - self.of_method[base])


def _read_deviations(run: RunResults, metric: str) -> dict[str, float]:
    """Return the standard deviations of the noise in a metric, by client or :data:`ALL_SITES`; empty without noise."""
    privacy = (run.summary and run.summary.privacy) or {}
    return dict(privacy.get("noisy_metrics", {}).get("sd", {}).get(metric, {}))


def _pool_if_noisy(run: RunResults, clients: ClientValues, metric: str) -> ClientValues:
    """Return the values of the clients; a single one for all clients if the run has only the mean over them."""
    if ALL_SITES not in _read_deviations(run, metric):
        return clients
    assert run.summary is not None
    mean = np.array([run.summary.spreads[metric].mean if metric in run.summary.spreads else np.nan])
    return replace(clients, ids=(ALL_SITES,), before=mean, after=mean, weights=None, measured=None, samples=None)


EXACT = 50
"""The largest number of clients with a difference for which the p-value is exact; above, it is approximate."""


def paired_p(differences: NDArray[np.float64]) -> float | None:
    """Return the two-sided p-value of Wilcoxon's signed-rank test over clients; None if fewer than two were measured.

    Each client's differences ``(seeds, clients)`` are averaged over the seeds, so that a client counts once. Clients
    without a difference have a rank and no sign (Pratt 1959). With at most :data:`EXACT` clients all patterns of
    signs are counted, also with ties and zeros: five clients that all gain have 2 / 2^5 = .0625, so that fewer than six
    clients never have a significant difference.
    """
    finite = np.isfinite(differences)
    means = np.where(finite, differences, 0.0).sum(0)[finite.any(0)] / finite.sum(0)[finite.any(0)]
    if len(means) < 2:
        return None
    means = means.round(12)  # differences that only rounding tells apart are ties
    if not means.any():
        return 1.0
    if len(means) > EXACT:
        from scipy import stats  # type: ignore[import-untyped]

        return float(stats.wilcoxon(means, zero_method="pratt", method="approx").pvalue)
    return _compute_exact_p(means)


def _compute_exact_p(means: NDArray[np.float64]) -> float:
    """Return the share of all sign patterns whose rank sum is at least as far from the middle as that of ``means``."""
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    double_ranks = np.rint(2 * rankdata(abs(means))).astype(int)[means != 0]  # integers, also for ties
    probabilities = np.ones(1)  # of each doubled sum of the positive ranks
    for rank in double_ranks:
        probabilities = (np.pad(probabilities, (0, rank)) + np.pad(probabilities, (rank, 0))) / 2
    middle = double_ranks.sum() / 2
    is_extreme = abs(np.arange(len(probabilities)) - middle) >= abs(double_ranks[means[means != 0] > 0].sum() - middle)
    return min(1.0, float(probabilities[is_extreme].sum()))


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the p-values, adjusted for multiple comparisons by the method of Holm (1979); ``None`` remains ``None``.

    Example:
        >>> holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": None})
        {'a': 0.03, 'b': 0.06, 'c': 0.06, 'd': None}
    """
    ordered = sorted((p, name) for name, p in p_values.items() if p is not None)
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    largest = 0.0
    for rank, (p, name) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - rank) * p))
        adjusted[name] = largest
    return adjusted
