"""The verdict of a comparison: the gain of each method over the reference, and a recommendation for each site."""

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
    average_sent_bytes,
    best_reference,
    compare_methods,
    describe_client_counts,
    describe_methods,
    describe_metric_choice,
    needs_no_federation,
)
from perfed.report.intervals import ComparisonCounts, Gain
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults, main_metric
from perfed.report.site_intervals import row_intervals
from perfed.report.text import UNKNOWN, TextTable, format_amount, format_difference, join_names
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
"""The number of rows whose weight the mean over all sites has when it is combined with a site's own test rows."""

GAINS, AHEAD = "helps here", "ahead over all clients"
LOSES, LEVEL = "hurts here: keep the local model", "no clear difference: keep the local model"
FLAT, ALONE = "the local model predicts the same for every row", "nothing else was compared"


@dataclass(frozen=True)
class SiteVerdict:
    """The recommendation for one site, among the methods that are available to a site.

    A site has few test rows, on which one or another method is better by chance. A method's mean over the seeds at the
    site is therefore shrunk towards its mean over all sites, as if the site had :data:`WORTH` more rows with that mean
    (:meth:`perfed.report.paired.ClientTable.shrink_to_mean`). The best method after that is selected among the models
    that need no federation, and among the others. Constant models
    (:func:`perfed.report.warnings.find_constant_predictions`) rank below all others. The federated method is
    recommended if it gains at the site, or if it is ahead over all sites and nothing at the site contradicts this;
    otherwise the local one is.

    Attributes:
        site: the id of the site.
        method: the recommended method.
        why: the reason; one of the texts above, such as :data:`GAINS`.
        local: the best of the models that need no federation; None if none was compared.
        federated: the best of the other methods; None if there are none.
        gain: the gain of ``federated`` over ``local``; None if it is not known.
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
    """The conclusions of a comparison, for all clients together and for each site.

    Attributes:
        metric: the metric by which the methods are compared.
        reference: the method with which the others are compared.
        methods: the comparison of each other method with the reference.
        warnings: the reasons to be careful with the numbers, one line each.
        sites: the recommendation for each site; empty if only means over all clients are known.
    """

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
            describe_methods(self.methods, self.reference, self.metric),
            *describe_metric_choice(self.metric),
            *self.worse_off,
            *self.warnings,
            *_describe_recommendation(self.sites),
            *_describe_site_evidence(self.sites, self.metric, self._site_methods),
        ]

    @property
    def worse_off(self) -> list[str]:
        """A sentence on the clients that are worse off with the best method; empty if there is no such method."""
        return describe_client_counts(self.best_method, self.reference, self.losing_sites)

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
        """The method with the largest gain, which is significantly ahead of the reference if any is.

        Pooled methods are not considered. None if no method has a client and seed in common with the reference.
        """
        comparable = [method for method in self.methods if method.runs and not method.method.startswith(POOLED)]
        return max(comparable, key=lambda method: (method.gain.sign, method.gain.mean), default=None)

    @property
    def below_local(self) -> list[str]:
        """The federated methods that are significantly behind the reference; empty if the reference is federated."""
        if not needs_no_federation(self.reference):
            return []
        behind = [v.method for v in self.methods if v.gain.sign < 0 and not v.method.startswith(POOLED)]
        return [method for method in behind if not needs_no_federation(method)]

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def best(self, site: str) -> str:
        """Return the method that is recommended for ``site``.

        Raises:
            PerfedError: nothing was measured at this site.
        """
        for site_verdict in self.sites:
            if site_verdict.site == site:
                return site_verdict.method
        site_names = shorten_list([site_verdict.site for site_verdict in self.sites])
        raise PerfedError(f"nothing was measured at site '{site}'; sites are: {site_names}")

    @property
    def site_table(self) -> TextTable:
        """The recommendations as a table with one row per site."""
        gain = "Gain of the federated over the local one [95 % interval over test rows and seeds]"
        rows = [
            [
                s.site,
                _format_method(s.method),
                s.why,
                _format_method(s.local),
                _format_method(s.federated),
                self._format_gain(s),
            ]
            for s in self.sites
        ]
        header = ["Site", "Use", "Why", "Best local model", "Best federated one", gain]
        return TextTable("what to use at each site", header, rows)

    def _format_gain(self, site: SiteVerdict) -> str:
        gain = site.gain
        return UNKNOWN if gain is None else format_difference(self.metric, gain.mean, gain.low, gain.high)

    def with_warnings(self, lines: Sequence[str]) -> Verdict:
        """Return a copy of the verdict with further warnings before the existing ones."""
        return replace(self, warnings=(*lines, *self.warnings))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``comparison.json``."""
        return {**asdict(self), "sentences": self.sentences}


def verdict(runs: Sequence[RunResults], reference: str | None = None) -> Verdict | None:
    """Return the verdict of finished runs; None if fewer than two methods have measured clients in common.

    The intervals of methods are over clients and seeds (:func:`perfed.report.intervals.estimate_gains`), and corrected
    for the number of methods. The intervals of single sites are over test rows and seeds, and corrected for the numbers
    of methods and sites; they exist if the runs kept predictions (:func:`perfed.report.site_intervals.row_intervals`).

    Args:
        runs: the runs of several methods and seeds.
        reference: the method with which the others are compared. By default, it is the method with the best mean among
            those that need no federation (``local`` and ``sklearn:``), or the first method if there are none.
    """
    metric, values = main_metric(runs), ClientTable.from_runs(runs)
    if metric is None or len(values.of_method) < 2:
        return None
    metric_spec = metric_of(metric)
    base = reference or best_reference(values, metric_spec)
    sizes = {method: average_sent_bytes(runs, method) for method in values.of_method}
    methods = tuple(compare_methods(base, values, metric_spec, sizes).values())
    federated = [v for v in methods if not needs_no_federation(v.method) and not v.method.startswith(POOLED)]
    constant = find_constant_predictions(runs)
    warnings = [
        *describe_spent_privacy(runs),
        *describe_noise(values, metric_spec),
        *describe_few_seeds(values),
        *describe_missing_metric(runs, metric, values),
        *list_data_doubts(runs),
        *describe_unequal_rounds(runs),
        *describe_constant_predictions(constant, len(values.sites)),
        *describe_same_rows(runs),
        *describe_convergence(runs, metric),
        *describe_frequent_class(runs, metric, values),
        *(describe_inferior_methods(federated, base, metric) if needs_no_federation(base) else ()),
    ]
    several = needs_no_federation(base) and len(values.sites) > 1  # a single site says nothing about other sites
    ahead = {v.method for v in federated if several and v.gain.sign > 0}
    sites = () if values.pooled else _judge_sites(runs, values, metric, constant, ahead)
    return Verdict(metric, base, methods, tuple(warnings), sites)


@dataclass(frozen=True)
class _Candidates:
    """The best local and the best federated model of a site.

    Attributes:
        local: the best model that needs no federation; None if there is none.
        federated: the best other model; None if there is none.
        scores: for each method, whether its predictions vary over the rows, and its shrunk mean (greater is better).
    """

    local: str | None
    federated: str | None
    scores: Mapping[str, tuple[bool, float]]

    @classmethod
    def select_at(cls, column: int, values: ClientTable, metric_spec: Metric, constant: Constant) -> _Candidates:
        """Return the candidates of the site in a column of ``values``."""
        site = values.sites[column]
        scores = {
            method: (
                site not in constant.get(method, ()),
                metric_spec.direction * float(values.shrink_to_mean(method, WORTH)[column]),
            )
            for method, site_values in values.of_method.items()
            if np.isfinite(site_values[:, column]).any() and not method.startswith(POOLED)
        }
        local, federated = (
            max((m for m in scores if needs_no_federation(m) is is_local), key=lambda m: scores[m], default=None)
            for is_local in (True, False)
        )
        return cls(local, federated, scores)

    def recommend(self, site: str, gain: Gain | None, could_gain: bool | None, ahead: Collection[str]) -> SiteVerdict:
        """Return the recommendation for the site.

        Args:
            site: the id of the site.
            gain: the gain of the federated model over the local one at the site.
            could_gain: see :class:`SiteVerdict`.
            ahead: the methods that are ahead over all sites.
        """
        if self.local is None or self.federated is None:
            return SiteVerdict(site, str(self.local or self.federated), ALONE, self.local, self.federated, gain)
        sign = 0 if gain is None else gain.sign
        local_score, federated_score = self.scores[self.local], self.scores[self.federated]
        (local_varies, _), (federated_varies, _) = local_score, federated_score
        better = self.federated in ahead and federated_score > local_score and sign >= 0
        if federated_varies > local_varies:
            why = FLAT
        elif federated_varies == local_varies and (sign > 0 or better):
            why = GAINS if sign > 0 else AHEAD
        else:
            why = LOSES if sign < 0 else LEVEL
        use = self.federated if why in (FLAT, GAINS, AHEAD) else self.local
        return SiteVerdict(site, use, why, self.local, self.federated, gain, could_gain)


def _judge_sites(
    runs: Sequence[RunResults], values: ClientTable, metric: str, constant: Constant, ahead: Collection[str]
) -> tuple[SiteVerdict, ...]:
    metric_spec = metric_of(metric)
    candidates = {
        site: _Candidates.select_at(column, values, metric_spec, constant) for column, site in enumerate(values.sites)
    }
    pairs = {site: (c.federated, c.local) for site, c in candidates.items() if c.federated and c.local}
    site_methods = [method for method in values.of_method if not method.startswith(POOLED)]
    local_count = sum(map(needs_no_federation, site_methods))
    counts = ComparisonCounts(max(1, len(site_methods) - local_count), max(1, local_count))
    gains = row_intervals(runs, values, metric, pairs, counts)
    for column, site in enumerate(values.sites):
        if site in pairs and site not in gains:
            seed_gains = values.gains(*pairs[site], metric_spec)[:, column]
            if np.isfinite(seed_gains).any():
                gains[site] = Gain(float(np.nanmean(seed_gains)), None, None)
    could_gain = {
        site: _could_gain(
            gain, float(np.nanmean(values.of_method[pairs[site][1]][:, values.sites.index(site)])), metric_spec
        )
        for site, gain in gains.items()
    }
    limited = {site: gain.limit(metric_spec.widest) for site, gain in gains.items()}
    return tuple(
        site_candidates.recommend(site, limited.get(site), could_gain.get(site), ahead)
        for site, site_candidates in candidates.items()
        if site_candidates.scores
    )


def _could_gain(gain: Gain, local: float, metric_spec: Metric) -> bool | None:
    """Return whether the best possible value of the metric would be significantly better than the ``local`` value."""
    if gain.low is None:
        return None
    best = metric_spec.span[1] if metric_spec.higher_is_better else metric_spec.span[0]
    return gain.mean - gain.low < metric_spec.direction * (best - local)


def _format_method(method: str | None) -> str:
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
        reason = f": {join_names(ahead)} {'is' if len(ahead) == 1 else 'are'} ahead over all clients together"
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
        f"{format_amount(metric, threshold)} to show ({method_text})."
    ]
