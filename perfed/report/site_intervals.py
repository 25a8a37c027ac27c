"""The interval of the gain at a single site, over its test rows and the seeds, from the predictions of the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import metric_of
from perfed.plugins import POOLED
from perfed.report.against import needs_no_federation
from perfed.report.intervals import (
    ComparisonCounts,
    Gain,
    Variance,
    VarianceComponents,
    count_discoveries,
    pool_variances,
)
from perfed.report.paired import ClientTable
from perfed.report.run_predictions import SitePredictions
from perfed.report.run_results import RunResults

MOST_COLUMNS = 40
"""Largest number of sites times methods from which the variance between seeds is estimated, to limit the time."""

Values = NDArray[np.float64]
Cells = dict[int, tuple[SitePredictions, SitePredictions]]
"""The predictions of a method and of the method it is compared with at a site, by the index of the seed."""


def row_intervals(
    runs: Sequence[RunResults],
    values: ClientTable,
    metric: str,
    pairs: Mapping[str, tuple[str, str]],
    counts: ComparisonCounts,
) -> dict[str, Gain]:
    """Return gains at single sites with 95 % intervals over the site's test rows and the seeds.

    Test rows that are the same with every seed have an effect that does not average out over the seeds. If each seed
    has other test rows, the rows of each seed are a separate sample. One row without a difference is added, so that a
    few rows that agree by chance do not yield an interval of length 0.

    The variance between seeds is pooled over all sites and all methods that could have been chosen there
    (:func:`perfed.report.intervals.pool_variances`), since two or three seeds of one site are too few for an estimate.

    The intervals are corrected for the choice of the methods and for the number of sites. If Benjamini and Hochberg's
    procedure (1995) selects s of n sites, every interval has the error 5 % s / n (at least 5 % / n), so that exactly
    the intervals of the selected sites exclude 0 (Benjamini and Yekutieli 2005). If no method differs, some site shows
    a gain or a loss in 5 % of the comparisons.

    Args:
        runs: the finished runs, some of which kept predictions.
        values: the metric of each client, as the runs reported it.
        metric: the name of the metric.
        pairs: the method and the method it is compared with, by site.
        counts: the numbers of methods from which the two were chosen.

    Returns:
        The gains by site. A site is omitted if predictions of some seed are missing, belong to other rows for the two
        methods, or do not reproduce the reported metric, or if the metric is undefined without some rows.
    """
    candidates = _list_methods(values, pairs)
    predictions = {(run.method, run.seed): run.predictions_by(metric) for run in runs if run.method in candidates}
    components: dict[tuple[str, str], VarianceComponents] = {}
    federated = [candidate for candidate in candidates if not needs_no_federation(candidate)]
    for site, (method, base) in pairs.items():
        site_predictions = {run: all_sites.at_site(site) for run, all_sites in predictions.items()}
        for candidate in dict.fromkeys([method, *federated][: max(1, MOST_COLUMNS // len(pairs))]):
            cells = _match_predictions(site_predictions, values, site, (candidate, base))
            component = _estimate_row_components(cells, metric, len(values.seeds)) if cells else None
            if component is not None:
                gains = values.gains(candidate, base, metric_of(metric))[:, values.sites.index(site)]
                components[site, candidate] = replace(component, mean=float(np.nanmean(gains)))
    components = _pool_seeds(components)
    components_by_site = {
        site: components[site, method] for site, (method, _) in pairs.items() if (site, method) in components
    }
    if not components_by_site:
        return {}
    significant = count_discoveries(np.array([component.p_value(counts) for component in components_by_site.values()]))
    corrected = counts.multiply(len(components_by_site) / max(1, significant))
    return {site: component.to_gain(corrected) for site, component in components_by_site.items()}


def _pool_seeds(components: Mapping[tuple[str, str], VarianceComponents]) -> dict[tuple[str, str], VarianceComponents]:
    """Return the components, by site and method, with pooled variances of the seeds.

    Methods at one site are compared with the same model, so that their differences have a correlation of about 1/2;
    those of different sites have different rows. A component without variation between cells keeps its own variance.
    """
    columns = {
        key: component
        for key, component in components.items()
        if component.seed_variance.freedom > 0 and component.cell_variance > 0
    }
    number, sites = len(columns), Counter(site for site, _ in columns)
    if number < 2:
        return dict(components)
    same_site = sum(count * (count - 1) for count in sites.values()) / (number * (number - 1))
    pooled = pool_variances(list(columns.values()), same_site / 2, clients=False)
    return {**components, **dict(zip(columns, pooled, strict=True))}


def _estimate_row_components(cells: Cells, metric: str, seeds: int) -> VarianceComponents | None:
    """Return the components of the gains of rows and a row without a gain; None if a row has no defined metric."""
    gains, sizes = {}, {}
    for seed, (method, base) in cells.items():
        (better, rows), (than, _) = method.by_row, base.by_row
        gains[seed] = np.append(metric_of(metric).direction * (better - than), 0.0)
        sizes[seed] = np.append(rows, 1.0) / (rows.sum() + 1.0)
    if not np.isfinite(np.concatenate(list(gains.values()))).all():
        return None
    if len({method.mark for method, _ in cells.values()}) == 1:
        table = np.full((seeds, len(next(iter(gains.values())))), np.nan)
        for seed, column in gains.items():
            table[seed] = column
        return VarianceComponents.from_differences(table, next(iter(sizes.values())))
    return _estimate_nested_components(gains, sizes, seeds)


def _estimate_nested_components(
    gains: Mapping[int, Values], sizes: Mapping[int, Values], seeds: int
) -> VarianceComponents:
    """Return the components of gains if each seed has other rows, so that rows are nested within seeds."""
    means = np.full((seeds, 1), np.nan)
    for seed, column in gains.items():
        means[seed] = (sizes[seed] * column).sum()
    between = VarianceComponents.from_differences(means, np.ones(1))
    within = [VarianceComponents.from_differences(column[None], sizes[seed]) for seed, column in gains.items()]
    parts = np.array([component.client_variance.value for component in within]) / len(gains) ** 2
    freedom = np.array([component.client_variance.freedom for component in within])
    variance = float(parts.sum())
    row_freedom = variance**2 / float((parts**2 / freedom).sum()) if variance > 0 else float(freedom.sum())
    return replace(between, client_variance=Variance(variance, row_freedom), cell_variance=variance)


def _list_methods(values: ClientTable, pairs: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the methods chosen at the sites, those they are compared with, and all other federated methods."""
    compared = [method for pair in pairs.values() for method in pair]
    federated = [m for m in values.of_method if not needs_no_federation(m) and not m.startswith(POOLED)]
    return list(dict.fromkeys([*compared, *federated]))


def _match_predictions(
    predictions: Mapping[tuple[str, int], SitePredictions | None],
    values: ClientTable,
    site: str,
    pair: tuple[str, str],
) -> Cells:
    """Return the predictions of two methods at a site by seed; empty if rows or reported values of a seed differ."""
    reported = [values.of_method[name][:, values.sites.index(site)] for name in pair]
    seeds = np.flatnonzero(np.isfinite(reported[0] - reported[1])).tolist()
    cells: Cells = {}
    for number in seeds:
        method, base = (predictions.get((name, values.seeds[number])) for name in pair)
        if method is None or base is None or (method.mark, method.rows) != (base.mark, base.rows):
            return {}
        if not (method.reproduces(reported[0][number]) and base.reproduces(reported[1][number])):
            return {}
        cells[number] = method, base
    return cells
