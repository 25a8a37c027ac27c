"""The verdict of a comparison: what each method gains over what needs no federation, and what to use at each site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from perfed.engine.metrics import Metric, metric_of
from perfed.errors import PerfedError, some
from perfed.plugins import POOLED, SKLEARN
from perfed.report.against import MethodVerdict, against, gainers, headline, sent
from perfed.report.paired import ClientTable, Gain, interval
from perfed.report.runs import Run, main_metric
from perfed.report.site_intervals import row_intervals
from perfed.report.text import UNKNOWN, TextTable, difference_text
from perfed.report.warnings import (
    Constant,
    below,
    constant,
    doubts,
    learnt_nothing,
    one_class,
    same_rows,
    unequal_rounds,
    unfinished,
)

WORTH = 200
"""Rows that the mean over all sites counts for beside a site's own test rows when a method is chosen for the site."""


@dataclass(frozen=True)
class SiteVerdict:
    """What to use at a site, of what a site can have.

    A site's few test rows favour by chance one method or another. So a method's mean over the seeds there is brought
    nearer to its mean over all sites, as if :data:`WORTH` more rows of the site had the latter
    (:meth:`perfed.report.paired.ClientTable.shrunk`), and the best after that is chosen. Models that say the same of
    every row (:func:`perfed.report.warnings.constant`) come after all others.

    Attributes:
        local: the best in this way of the models that need no federation; None where none was compared.
        federated: the best of the others; None where there are none.
        gain: of ``federated`` over ``local``; None where they have no seed in common.
        over_rows: whether its interval is over the site's test rows and the seeds
            (:func:`perfed.report.site_intervals.row_intervals`); else over the seeds alone.
    """

    site: str
    method: str
    local: str | None
    federated: str | None
    gain: Gain | None = None
    over_rows: bool = False


@dataclass(frozen=True)
class Verdict:
    """What a comparison says, in sentences and per site; ``metric`` is the one that runs are compared by."""

    metric: str
    reference: str
    methods: tuple[MethodVerdict, ...]
    warnings: tuple[str, ...]
    sites: tuple[SiteVerdict, ...]

    @property
    def sentences(self) -> list[str]:
        """Who is ahead and behind, who gains and loses with the best method, one per warning, and one on the sites."""
        return [
            headline(self.methods, self.reference, self.metric),
            *gainers(self.best_method, self.reference),
            *self.warnings,
            *_over_sites(self.sites),
        ]

    @property
    def best_method(self) -> MethodVerdict | None:
        """The one with the largest gain, of those ahead of the reference where any is, and of what sites can have."""
        known = [found for found in self.methods if found.runs and not found.method.startswith(POOLED)]
        return max(known, key=lambda found: (found.gain.sign, found.gain.mean), default=None)

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def best(self, site: str) -> str:
        """The method to use at ``site``.

        Raises:
            PerfedError: nothing was measured there.
        """
        for found in self.sites:
            if found.site == site:
                return found.method
        known = some([found.site for found in self.sites])
        raise PerfedError(f"nothing was measured at site '{site}'; sites are: {known}")

    @property
    def site_table(self) -> TextTable:
        """One row per site."""
        over = _interval_over(self.sites)
        gain = f"Gain of the federated over the local one [95 % interval{over and ' ' + over}]"
        rows = [[s.site, s.method, s.local or UNKNOWN, s.federated or UNKNOWN, self._gain_at(s)] for s in self.sites]
        header = ["Site", "Use", "Best local model", "Best federated one", gain]
        return TextTable("what to use at each site", header, rows)

    def _gain_at(self, site: SiteVerdict) -> str:
        gain = site.gain
        return UNKNOWN if gain is None else difference_text(self.metric, gain.mean, gain.low, gain.high)

    def warned(self, lines: Sequence[str]) -> Verdict:
        """The same with further warnings before the others."""
        return replace(self, warnings=(*lines, *self.warnings))

    def to_dict(self) -> dict[str, Any]:
        """As ``comparison.json`` has it."""
        return {**asdict(self), "sentences": self.sentences}


def verdict(runs: Sequence[Run], reference: str | None = None) -> Verdict | None:
    """What the finished ``runs`` say; None where fewer than two methods have measured clients in common.

    Intervals are of a bootstrap (Efron and Tibshirani 1993, section 13.3; 2000 resamples, 2.5th and 97.5th percentile)
    of the paired differences, in which clients and seeds are drawn (:func:`perfed.report.paired.interval`); those of a
    single site draw its rows and the seeds, where the runs kept what their models say of each
    (:func:`perfed.report.site_intervals.row_intervals`), else the seeds alone.

    Args:
        runs: of several methods and seeds.
        reference: that the others are compared with; if not given, the one with the best mean of those that need no
            federation (``local`` and ``sklearn:``), else the first.
    """
    metric, values = main_metric(runs), ClientTable.of(runs)
    if metric is None or len(values.of_method) < 2:
        return None
    known = metric_of(metric)
    alone = [method for method in values.of_method if needs_no_federation(method)]
    base = reference or best_reference(values, known)
    others = [method for method in values.of_method if method != base]
    found = tuple(against(method, base, values, known, sent(runs, method)) for method in others)
    federated = [of for of in found if not needs_no_federation(of.method) and not of.method.startswith(POOLED)]
    flat = constant(runs)
    warnings = [
        *doubts(runs),
        *unequal_rounds(runs),
        *learnt_nothing(flat, len(values.sites)),
        *same_rows(runs),
        *unfinished(runs, metric),
        *one_class(runs, metric, values),
        *(below(federated, base, metric) if needs_no_federation(base) else ()),
    ]
    return Verdict(metric, base, found, tuple(warnings), _of_sites(runs, values, alone, metric, flat))


def best_reference(values: ClientTable, known: Metric) -> str:
    """The method with the best mean of those that need no federation, else the first; empty where nothing is known."""
    alone = [method for method in values.of_method if needs_no_federation(method)]
    first = next(iter(values.of_method), "")
    return max(alone, key=lambda method: known.direction * values.mean(method), default=first)


def needs_no_federation(method: str) -> bool:
    """Whether a site can have the method by itself."""
    return method == "local" or method.startswith(SKLEARN)


def _of_sites(
    runs: Sequence[Run], values: ClientTable, alone: Sequence[str], metric: str, flat: Constant
) -> tuple[SiteVerdict, ...]:
    known, columns = metric_of(metric), range(len(values.sites))
    found = [own for column in columns if (own := _at_site(column, values, alone, known, flat)) is not None]
    pairs = {own.site: (own.federated, own.local) for own in found if own.federated and own.local}
    over_rows = row_intervals(runs, values, metric, pairs)
    column = {site: number for number, site in enumerate(values.sites)}
    for number, own in enumerate(found):
        if own.site in over_rows:
            found[number] = replace(own, gain=over_rows[own.site], over_rows=True)
        elif own.site in pairs:
            gains = values.gains(*pairs[own.site], known)[:, [column[own.site]]]
            found[number] = replace(own, gain=interval(gains, np.ones(1)) if np.isfinite(gains).any() else None)
    return tuple(found)


def _at_site(
    column: int, values: ClientTable, alone: Sequence[str], known: Metric, flat: Constant
) -> SiteVerdict | None:
    """What is chosen for a site, without the gain."""
    site = values.sites[column]
    means = {
        method: (site not in flat.get(method, ()), known.direction * float(values.shrunk(method, WORTH)[column]))
        for method, own in values.of_method.items()
        if np.isfinite(own[:, column]).any() and not method.startswith(POOLED)
    }
    if not means:
        return None
    order = [*(m for m in means if m in alone), *(m for m in means if m not in alone)]
    best = max(order, key=lambda method: means[method])  # of equal ones that which needs no federation
    local = max((m for m in order if m in alone), key=lambda method: means[method], default=None)
    federated = max((m for m in order if m not in alone), key=lambda method: means[method], default=None)
    return SiteVerdict(site, best, local, federated)


def _over_sites(sites: Sequence[SiteVerdict]) -> list[str]:
    if not sites:
        return []
    used = ", ".join(f"{method} at {count}" for method, count in Counter(s.method for s in sites).most_common())
    signs = Counter(s.gain.sign for s in sites if s.gain is not None)
    text = f"To use at each of the {len(sites)} sites: {used}."
    if signs:
        text += (
            " The federated method chosen for a site gains over the local model chosen for it at "
            f"{signs[1]}, loses at {signs[-1]}, cannot be told from it at {signs[0]}"
        )
        over = _interval_over(sites)
        text += f" (intervals {over})." if over else "."
    return [text]


def _interval_over(sites: Sequence[SiteVerdict]) -> str:
    """What the intervals of single sites are over; empty where there are none."""
    kinds = {s.over_rows for s in sites if s.gain is not None and s.gain.low is not None}
    words = {True: "over its test rows and the seeds", False: "over the seeds alone"}
    return ", at some sites ".join(words[kind] for kind in sorted(kinds, reverse=True))
