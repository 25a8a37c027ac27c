"""The verdict of a comparison: what each method gains over what needs no federation, and what to use at each site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from perfed.engine.metrics import Metric, metric_of
from perfed.errors import PerfedError, shorten_list
from perfed.methods.titles import display_name
from perfed.plugins import POOLED
from perfed.report.against import (
    MethodVerdict,
    best_reference,
    compare_methods,
    compared_by,
    gainers,
    headline,
    needs_no_federation,
    sent,
)
from perfed.report.intervals import ComparisonCounts, Gain
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults, main_metric
from perfed.report.site_intervals import row_intervals
from perfed.report.text import UNKNOWN, TextTable, amount, format_difference, listed
from perfed.report.warnings import (
    Constant,
    describe_constant_predictions,
    describe_convergence,
    describe_few_seeds,
    describe_frequent_class,
    describe_inferior_methods,
    describe_missing_metric,
    describe_noise,
    describe_same_rows,
    describe_spent_privacy,
    describe_unequal_rounds,
    find_constant_predictions,
    list_data_doubts,
)

WORTH = 200
"""Rows that the mean over all sites counts for beside a site's own test rows when a method is chosen for the site."""

GAINS, AHEAD = "helps here", "ahead over all clients"
LOSES, LEVEL = "hurts here: keep the local model", "no clear difference: keep the local model"
FLAT, ALONE = "the local model predicts the same for every row", "nothing else was compared"


@dataclass(frozen=True)
class SiteVerdict:
    """What to use at a site, of what a site can have.

    A site has few test rows, on which one or another method is better by chance. A method's mean over the seeds at the
    site is therefore shrunk towards its mean over all sites, as if the site had :data:`WORTH` more rows with that mean
    (:meth:`perfed.report.paired.ClientTable.shrink_to_mean`). The best method after that is selected among the models
    that need no federation, and among the others. Constant models
    (:func:`perfed.report.warnings.find_constant_predictions`) rank below all others. The federated method is
    recommended if it gains at the site, or if it is ahead over all sites and nothing at the site contradicts this;
    otherwise the local one is.

    Attributes:
        method: what to use.
        why: one of the texts above.
        local: the best in this way of the models that need no federation; None where none was compared.
        federated: the best of the others; None where there are none.
        gain: of ``federated`` over ``local``; None where it is not known.
        could_gain: whether the best possible value of the metric would be a significant gain over ``local``; None if
            there is no interval.
    """

    site: str
    method: str
    why: str
    local: str | None
    federated: str | None
    gain: Gain | None = None
    could_gain: bool | None = None


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
        """The sentences of the verdict, in their order.

        They cover the methods ahead and behind, the clients that are worse off, the warnings, the recommendation for
        the sites, and the evidence from the test rows of single sites.
        """
        return [
            headline(self.methods, self.reference, self.metric),
            *compared_by(self.metric),
            *self.worse_off,
            *self.warnings,
            *_describe_recommendation(self.sites),
            *_describe_site_evidence(self.sites, self.metric, self._site_methods),
        ]

    @property
    def worse_off(self) -> list[str]:
        """A sentence on the clients that are worse off with the best method; empty if there is no such method."""
        return gainers(self.best_method, self.reference, self.losing_sites)

    @property
    def losing_sites(self) -> tuple[int, int] | None:
        """The number of sites whose own test rows show a loss, and of all sites with an interval; None without any."""
        signs = [site.gain.sign for site in self.sites if site.gain is not None and site.gain.low is not None]
        return (signs.count(-1), len(signs)) if signs else None

    @property
    def _site_methods(self) -> int:
        """The number of methods that are available to a site, which excludes pooled ones."""
        names = [self.reference, *(verdict.method for verdict in self.methods)]
        return sum(not name.startswith(POOLED) for name in names)

    @property
    def best_method(self) -> MethodVerdict | None:
        """The one with the largest gain, of those ahead of the reference where any is, and of what sites can have."""
        known = [found for found in self.methods if found.runs and not found.method.startswith(POOLED)]
        return max(known, key=lambda found: (found.gain.sign, found.gain.mean), default=None)

    @property
    def below_local(self) -> list[str]:
        """The federated methods that are behind the best of those that need no federation; none without such."""
        alone = needs_no_federation(self.reference)
        found = [of.method for of in self.methods if of.gain.sign < 0 and not of.method.startswith(POOLED)]
        return [method for method in found if alone and not needs_no_federation(method)]

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
        known = shorten_list([found.site for found in self.sites])
        raise PerfedError(f"nothing was measured at site '{site}'; sites are: {known}")

    @property
    def site_table(self) -> TextTable:
        """One row per site."""
        gain = "Gain of the federated over the local one [95 % interval over test rows and seeds]"
        rows = [
            [s.site, _name(s.method), s.why, _name(s.local), _name(s.federated), self._gain_at(s)] for s in self.sites
        ]
        header = ["Site", "Use", "Why", "Best local model", "Best federated one", gain]
        return TextTable("what to use at each site", header, rows)

    def _gain_at(self, site: SiteVerdict) -> str:
        gain = site.gain
        return UNKNOWN if gain is None else format_difference(self.metric, gain.mean, gain.low, gain.high)

    def warned(self, lines: Sequence[str]) -> Verdict:
        """The same with further warnings before the others."""
        return replace(self, warnings=(*lines, *self.warnings))

    def to_dict(self) -> dict[str, Any]:
        """As ``comparison.json`` has it."""
        return {**asdict(self), "sentences": self.sentences}


def verdict(runs: Sequence[RunResults], reference: str | None = None) -> Verdict | None:
    """Return the verdict of finished runs; None if fewer than two methods have measured clients in common.

    The intervals of methods are over clients and seeds (:func:`perfed.report.intervals.estimate_gains`), and corrected
    for the number of methods. The intervals of single sites are over test rows and seeds, and corrected for the numbers
    of methods and sites; they exist if the runs kept predictions (:func:`perfed.report.site_intervals.row_intervals`).

    Args:
        runs: of several methods and seeds.
        reference: that the others are compared with; if not given, the one with the best mean of those that need no
            federation (``local`` and ``sklearn:``), else the first.
    """
    metric, values = main_metric(runs), ClientTable.from_runs(runs)
    if metric is None or len(values.of_method) < 2:
        return None
    known = metric_of(metric)
    base = reference or best_reference(values, known)
    sizes = {method: sent(runs, method) for method in values.of_method}
    found = tuple(compare_methods(base, values, known, sizes).values())
    federated = [of for of in found if not needs_no_federation(of.method) and not of.method.startswith(POOLED)]
    flat = find_constant_predictions(runs)
    warnings = [
        *describe_spent_privacy(runs),
        *describe_noise(values, known),
        *describe_few_seeds(values),
        *describe_missing_metric(runs, metric, values),
        *list_data_doubts(runs),
        *describe_unequal_rounds(runs),
        *describe_constant_predictions(flat, len(values.sites)),
        *describe_same_rows(runs),
        *describe_convergence(runs, metric),
        *describe_frequent_class(runs, metric, values),
        *(describe_inferior_methods(federated, base, metric) if needs_no_federation(base) else ()),
    ]
    several = needs_no_federation(base) and len(values.sites) > 1  # else nothing is known of other sites
    ahead = {of.method for of in federated if several and of.gain.sign > 0}
    sites = () if values.pooled else _of_sites(runs, values, metric, flat, ahead)
    return Verdict(metric, base, found, tuple(warnings), sites)


@dataclass(frozen=True)
class _Candidates:
    """The best model of a site's own and the best federated one, each with how good it is there."""

    local: str | None
    federated: str | None
    scores: Mapping[str, tuple[bool, float]]

    @classmethod
    def at(cls, column: int, values: ClientTable, known: Metric, flat: Constant) -> _Candidates:
        """Those of the site in this column."""
        site = values.sites[column]
        scores = {
            method: (
                site not in flat.get(method, ()),
                known.direction * float(values.shrink_to_mean(method, WORTH)[column]),
            )
            for method, own in values.of_method.items()
            if np.isfinite(own[:, column]).any() and not method.startswith(POOLED)
        }
        local, federated = (
            max((m for m in scores if needs_no_federation(m) is alone), key=lambda m: scores[m], default=None)
            for alone in (True, False)
        )
        return cls(local, federated, scores)

    def judged(self, site: str, gain: Gain | None, could_gain: bool | None, ahead: Collection[str]) -> SiteVerdict:
        """What to use there, with the gain of the federated one, and the methods that are ahead over all sites."""
        if self.local is None or self.federated is None:
            return SiteVerdict(site, str(self.local or self.federated), ALONE, self.local, self.federated, gain)
        sign = 0 if gain is None else gain.sign
        (local_says, _), (says, _) = own, other = self.scores[self.local], self.scores[self.federated]
        better = self.federated in ahead and other > own and sign >= 0
        if says > local_says:
            why = FLAT
        elif says == local_says and (sign > 0 or better):
            why = GAINS if sign > 0 else AHEAD
        else:
            why = LOSES if sign < 0 else LEVEL
        use = self.federated if why in (FLAT, GAINS, AHEAD) else self.local
        return SiteVerdict(site, use, why, self.local, self.federated, gain, could_gain)


def _of_sites(
    runs: Sequence[RunResults], values: ClientTable, metric: str, flat: Constant, ahead: Collection[str]
) -> tuple[SiteVerdict, ...]:
    known = metric_of(metric)
    found = {site: _Candidates.at(column, values, known, flat) for column, site in enumerate(values.sites)}
    pairs = {site: (of.federated, of.local) for site, of in found.items() if of.federated and of.local}
    of_site = [method for method in values.of_method if not method.startswith(POOLED)]
    alone = sum(map(needs_no_federation, of_site))
    gains = row_intervals(runs, values, metric, pairs, ComparisonCounts(max(1, len(of_site) - alone), max(1, alone)))
    for column, site in enumerate(values.sites):
        if site in pairs and site not in gains:
            each = values.gains(*pairs[site], known)[:, column]
            if np.isfinite(each).any():
                gains[site] = Gain(float(np.nanmean(each)), None, None)
    could = {
        site: _could_gain(gain, float(np.nanmean(values.of_method[pairs[site][1]][:, values.sites.index(site)])), known)
        for site, gain in gains.items()
    }
    limited = {site: gain.limit(known.widest) for site, gain in gains.items()}
    return tuple(of.judged(site, limited.get(site), could.get(site), ahead) for site, of in found.items() if of.scores)


def _could_gain(gain: Gain, local: float, known: Metric) -> bool | None:
    """Return whether the best possible value of the metric would be significantly better than the ``local`` value."""
    if gain.low is None:
        return None
    best = known.span[1] if known.higher_is_better else known.span[0]
    return gain.mean - gain.low < known.direction * (best - local)


def _name(method: str | None) -> str:
    return UNKNOWN if method is None else display_name(method)


def _describe_recommendation(sites: Sequence[SiteVerdict]) -> list[str]:
    """Return a sentence that recommends methods for the sites, with the reason if it is the result over all clients."""
    if not sites:
        return []
    counts = Counter(site.method for site in sites).most_common()
    choices = [f"{display_name(method)} at {count}" for method, count in counts]
    choices[0] += f" of {len(sites)} clients"
    ahead = list(dict.fromkeys(display_name(site.method) for site in sites if site.why == AHEAD))
    reason = ": keep the local models" if all(site.why == LEVEL for site in sites) else ""
    if ahead:
        reason = f": {listed(ahead)} {'is' if len(ahead) == 1 else 'are'} ahead over all clients together"
    return [f"Use {', '.join(choices)}{reason}."]


def _describe_site_evidence(sites: Sequence[SiteVerdict], metric: str, methods: int) -> list[str]:
    """Return a sentence on the evidence from test rows of single sites, and on the gain that they could detect."""
    tested = [(site, site.gain) for site in sites if site.gain is not None and site.gain.low is not None]
    if not tested:
        if all(site.gain is None for site in sites):
            return []
        return ["What a single client gains is not known: the runs kept no predictions of test rows."]
    signs, number = Counter(gain.sign for _, gain in tested), len(tested)
    detectable = sum(bool(site.could_gain) for site, _ in tested)
    plural = "s" if number > 1 else ""
    method_text = (
        "the best federated model against the best local one; 95 % intervals over rows and seeds, corrected for "
        f"{methods} methods and {number} client{plural}"
    )
    if not detectable and not signs[1] and not signs[-1]:
        return [
            f"The test rows of a single client are too few to show a gain: at none of {number} client{plural} would "
            f"even the best possible value have been a significant one ({method_text})."
        ]
    limit_text = f", of which {number - detectable} could not have shown any gain" if detectable < number else ""
    threshold = float(np.median([gain.mean - float(gain.low or 0.0) for _, gain in tested]))
    return [
        f"The test rows of a single client show a gain at {signs[1]} of {number} client{plural}, a loss at "
        f"{signs[-1]}, and leave it open at {signs[0]}{limit_text}; at the median client a gain must exceed "
        f"{amount(metric, threshold)} to show ({method_text})."
    ]
