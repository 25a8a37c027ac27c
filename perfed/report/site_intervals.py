"""The interval of a single site's gain: over its test rows and the seeds, from what the runs' models said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import computed, metric_of
from perfed.report.intervals import Chances, Gain, Spread, selected
from perfed.report.paired import ClientTable
from perfed.report.runs import Run
from perfed.run import predictions

MOST_GROUPS = 100
"""Groups of a site's rows that are left out one after the other where a metric is no mean over rows."""

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
        return bool(np.isclose(self._on(np.ones(self.rows, dtype=bool)), reported, rtol=1e-6, atol=1e-9))

    def by_row(self) -> tuple[Values, Values]:
        """What each row (or group of rows) says of the metric, which is the mean of it, and how many rows it is.

        Where the metric is no mean over rows, these are the jackknife's pseudo-values G m - (G - 1) m_(-g) of G groups
        (Tukey 1958); NaN where it is not defined without a group.
        """
        if metric_of(self.metric).rows is not None:
            return np.asarray(np.mean([rows for (rows,) in self.parts], axis=0)), np.ones(self.rows)
        groups = -(-self.rows // -(-self.rows // MOST_GROUPS))
        of_row = np.arange(self.rows) % groups
        sizes = np.bincount(of_row).astype(np.float64)
        times, whole = self.rows / sizes, self._on(np.ones(self.rows, dtype=bool))
        without = np.array([self._on(of_row != group) for group in range(groups)])
        return times * whole - (times - 1) * without, sizes

    def _on(self, rows: NDArray[np.bool_]) -> float:
        """The metric on some of the rows, averaged over the evaluations; NaN where it is not defined."""
        if metric_of(self.metric).rows is not None:
            return float(np.mean([own[rows].mean() for (own,) in self.parts]))
        if not rows.any():
            return np.nan
        values = [computed(self.metric, y[rows], outputs[rows]) for y, outputs in self.parts]
        return float(np.mean([np.nan if value is None else value for value in values]))


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
    runs: Sequence[Run],
    values: ClientTable,
    metric: str,
    pairs: Mapping[str, tuple[str, str]],
    chances: Chances,
) -> dict[str, Gain]:
    """Gains at single sites with 95 % intervals over the site's test rows and the seeds.

    They are those of :func:`perfed.report.intervals.interval` with rows in the place of clients. Rows that are the same
    with every seed have an effect of their own in all seeds: what is special about them does not average out. Where
    each seed has other rows, what is special about them is in the differences between seeds as well as between rows, so
    that the interval is rather too wide than too narrow. One row more counts, which shows no difference: a few rows
    that agree by chance are no certainty.

    All are corrected for the choice of the methods, and for the number of sites: of n sites s are significant by
    Benjamini and Hochberg's procedure (1995), and every interval has the error 5 % s / n (at least 5 % / n), so that
    those of significant sites, and no others, leave 0 out (Benjamini and Yekutieli 2005). Where nothing differs, one
    of the sites is said to gain or to lose in 5 % of the comparisons.

    Args:
        runs: finished ones, of which some kept what their models said.
        values: the metric of each client, as the runs reported it.
        metric: its name.
        pairs: by site the method and what it is compared with.
        chances: of how many methods those were chosen.

    Returns:
        By site. Those are left out for which predictions of some seed are missing, are of other rows for the two
        methods, or do not give the reported metric; and those where it is not defined without some rows.
    """
    spreads = {}
    for site, (cells, mean) in _comparable(runs, values, metric, pairs).items():
        found = _spread(cells, metric)
        if found is not None:
            spreads[site] = replace(found, mean=mean)
    if not spreads:
        return {}
    significant = selected(np.array([spread.p(chances) for spread in spreads.values()]))
    each = chances.times(len(spreads) / max(1, significant))
    return {site: spread.gain(each) for site, spread in spreads.items()}


def _spread(cells: Cells, metric: str) -> Spread | None:
    """Of the gain on each row ``(seeds, rows)``, with one row more that shows none; None where rows do not have it."""
    same, columns, sizes = len({own.mark for own, _ in cells}) == 1, [], []
    for own, base in cells:
        (better, rows), (than, _) = own.by_row(), base.by_row()
        columns.append(np.append(metric_of(metric).direction * (better - than), 0.0))
        sizes.append(np.append(rows, 1.0) / (rows.sum() + 1.0))
    if not np.isfinite(np.concatenate(columns)).all():
        return None
    if same:
        return Spread.of(np.stack(columns), sizes[0])
    starts = np.cumsum([0, *map(len, columns)])
    table = np.full((len(cells), starts[-1]), np.nan)
    for number, column in enumerate(columns):
        table[number, starts[number] : starts[number + 1]] = column
    return Spread.of(table, np.concatenate(sizes))


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
        if cells and len(cells) == np.isfinite(gains).sum():
            found[site] = cells, float(np.nanmean(gains))
    return found
