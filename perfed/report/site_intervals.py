"""The interval of a single site's gain: a bootstrap over its rows and the seeds, from what the runs' models said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import computed, metric_of
from perfed.report.paired import INTERVAL, RESAMPLES, ClientTable, Gain
from perfed.report.runs import Run
from perfed.run import predictions

FEW_RESAMPLES = 200
"""Draws where a metric is no mean over rows, and is computed anew for each."""

_NUMBERS = 4_000_000  # drawn at once

Values = NDArray[np.float64]
Cells = list[tuple["Judged", "Judged"]]


@dataclass(frozen=True)
class Judged:
    """What a run's models said of a site's rows: of each reported evaluation the rows' own parts of the metric, or,
    where it is no mean over rows, targets and outputs.

    Attributes:
        mark: changes with the rows.
    """

    mark: int
    metric: str
    parts: tuple[tuple[NDArray[Any], ...], ...]

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.parts[0][0])

    def gives(self, reported: float) -> bool:
        """Whether the metric on all rows is the one that the run reported."""
        return bool(np.isclose(self.drawn(np.ones((1, self.rows)))[0], reported, rtol=1e-6, atol=1e-9))

    def drawn(self, counts: Values) -> Values:
        """The metric ``(draws,)`` on the rows as often as they were drawn, ``(draws, rows)``; NaN: not defined."""
        if metric_of(self.metric).rows is not None:
            mean = np.mean([rows for (rows,) in self.parts], axis=0)
            return np.asarray(counts @ mean / self.rows)
        return np.array([np.mean([_again(self.metric, part, own) for part in self.parts]) for own in counts])


def _again(metric: str, part: tuple[NDArray[Any], ...], counts: Values) -> float:
    y, outputs = part
    rows = np.repeat(np.arange(len(y)), counts.astype(np.int64))
    found = computed(metric, y[rows], outputs[rows])
    return np.nan if found is None else found


def judged(run: Run, metric: str) -> dict[str, Judged]:
    """By site, from the run's predictions; empty where none were kept."""
    last = int(run.summary.evaluation.get("last", 1)) if run.summary else 1
    of_rows = metric_of(metric).rows
    found: dict[str, Judged] = {}
    for file in predictions.read(run.directory, last):
        arrays = (file.targets, file.outputs) if of_rows is None else (of_rows(file.targets, file.outputs),)
        for site, mark, own in file.sites():
            earlier = found[site].parts if site in found else ()
            found[site] = Judged(mark, metric, (*earlier, tuple(array[own] for array in arrays)))
    return found


def row_intervals(
    runs: Sequence[Run], values: ClientTable, metric: str, pairs: Mapping[str, tuple[str, str]]
) -> dict[str, Gain]:
    """Gains at single sites with 95 % bootstrap intervals over the seeds and the site's rows.

    Seeds are drawn with replacement, and for each drawn seed as many of the site's rows of that seed as there are,
    with replacement too: the same for both methods (:data:`~perfed.report.paired.RESAMPLES` draws, or
    :data:`FEW_RESAMPLES` where the metric is no mean over rows). Where the rows are the same with every seed, they are
    drawn once for all drawn seeds: what is special about them does not average out over seeds. Where each seed has
    other rows, what is special about them is in the differences between seeds as well as between rows, so that the
    interval is rather too wide than too narrow. The draws are the same for all sites of a number of rows.

    Args:
        runs: finished ones, of which some kept what their models said.
        values: the metric of each client, as the runs reported it.
        metric: its name.
        pairs: by site the method and what it is compared with.

    Returns:
        By site. Those are left out for which predictions of some seed are missing, are of other rows for the two
        methods, or do not give the reported metric; and those with a single row and seed.

    Source: Efron and Tibshirani 1993, section 13.3; Davison and Hinkley 1997, section 3.8; Owen 2007.
    """
    known = metric_of(metric)
    resamples = FEW_RESAMPLES if known.rows is None else RESAMPLES
    groups: dict[tuple[int, int, int, bool], list[tuple[str, Judged, Judged]]] = {}
    totals, means = {}, {}
    for site, (cells, mean) in _comparable(runs, values, metric, pairs).items():
        same = len({own.mark for own, _ in cells}) == 1
        totals[site], means[site] = np.zeros(resamples), mean
        for number, (own, base) in enumerate(cells):
            groups.setdefault((len(cells), number, own.rows, same), []).append((site, own, base))
    for key, members in groups.items():
        for owners, weights, counts in _draws(*key, resamples):
            for site, own, base in members:
                gain = known.direction * (own.drawn(counts) - base.drawn(counts))
                totals[site] += np.bincount(owners, weights * gain, resamples)
    found = {site: _gain(drawn, means[site]) for site, drawn in totals.items()}
    return {site: gain for site, gain in found.items() if gain is not None}


def _gain(drawn: Values, mean: float) -> Gain | None:
    there = drawn[np.isfinite(drawn)]
    if not len(there):
        return None
    low, high = np.percentile(there, INTERVAL)
    return Gain(mean, float(low), float(high))


def _comparable(
    runs: Sequence[Run], values: ClientTable, metric: str, pairs: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[Cells, float]]:
    """Of each site that has them, what method and base said of its rows with each seed, and the mean gain."""
    wanted = {method for pair in pairs.values() for method in pair}
    said = {(run.method, run.seed): judged(run, metric) for run in runs if run.summary and run.method in wanted}
    column, found = {site: number for number, site in enumerate(values.sites)}, {}
    for site, (method, base) in pairs.items():
        reported = [values.of_method[name][:, column[site]] for name in (method, base)]
        gains = metric_of(metric).direction * (reported[0] - reported[1])
        cells: Cells = []
        for number in np.flatnonzero(np.isfinite(gains)).tolist():
            own, other = (said.get((name, values.seeds[number]), {}).get(site) for name in (method, base))
            if own is None or other is None or (own.mark, own.rows) != (other.mark, other.rows):
                break
            if not (own.gives(reported[0][number]) and other.gives(reported[1][number])):
                break
            cells.append((own, other))
        if len(cells) == np.isfinite(gains).sum() and sum(own.rows for own, _ in cells) > 1:
            found[site] = cells, float(np.nanmean(gains))
    return found


def _draws(
    seeds: int, seed: int, rows: int, same: bool, resamples: int
) -> Iterator[tuple[NDArray[np.int64], Values, Values]]:
    """The draws that have seed number ``seed`` of ``seeds``, some at a time: of which resample each is, its weight in
    the resample's mean, and how often each row was drawn. With the ``same`` rows for all seeds these are drawn once a
    resample.
    """
    times = np.random.default_rng([seeds]).multinomial(seeds, np.full(seeds, 1 / seeds), resamples)[:, seed]
    owners = np.arange(resamples) if same else np.repeat(np.arange(resamples), times)
    weights = times / seeds if same else np.full(len(owners), 1 / seeds)
    rng, some = np.random.default_rng([seeds, rows] if same else [seeds, rows, seed]), max(1, _NUMBERS // rows)
    for start in range(0, len(owners), some):
        own = slice(start, start + some)
        draws = len(owners[own])
        drawn = rng.integers(rows, size=(draws, rows)) + rows * np.arange(draws)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=draws * rows).reshape(draws, rows).astype(np.float64)
        there = weights[own] > 0
        yield owners[own][there], weights[own][there], counts[there]
