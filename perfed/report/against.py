"""The comparison of methods with a reference: gains, counts of clients, and the sentences that describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfed.engine.metrics import ALWAYS, Metric, metric_of
from perfed.methods.titles import display_name
from perfed.plugins import BLEND, POOLED, SKLEARN
from perfed.report.intervals import ComparisonCounts, Gain, estimate_gains
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults
from perfed.report.text import format_amount, format_megabytes, format_short, join_names


@dataclass(frozen=True)
class MethodVerdict:
    """The comparison of one method with the reference.

    Attributes:
        method: the name of the method.
        gain: its gain over the reference, with the interval.
        seeds: the number of seeds that both methods have.
        better, equal, worse: the number of client-runs (a client with a seed) in which the method is better than the
            reference, equal to it, or worse.
        sent: the bytes that a run of the method sends up and down, averaged over the seeds; None if its rounds lack
            them.
    """

    method: str
    gain: Gain
    seeds: int
    better: int
    equal: int
    worse: int
    sent: float | None = None

    @property
    def runs(self) -> int:
        """The number of client-runs that both methods have."""
        return self.better + self.equal + self.worse


def needs_no_federation(method: str) -> bool:
    """Return whether a site can train the method without other sites."""
    return method == "local" or method.startswith(SKLEARN)


def best_reference(values: ClientTable, metric_spec: Metric) -> str:
    """Return the method with the best mean among those that need no federation.

    If no method is of this kind, the result is the first method; if there are no values, it is empty.
    """
    local_methods = [method for method in values.of_method if needs_no_federation(method)]
    first = next(iter(values.of_method), "")
    return max(local_methods, key=lambda method: metric_spec.direction * values.mean(method), default=first)


def count_comparisons(base: str, values: ClientTable, metric_spec: Metric) -> ComparisonCounts:
    """Return the numbers of comparisons among which "ahead of" or "behind" ``base`` could be claimed.

    Any other method can be ahead or behind. If ``base`` is the best of m methods that need no federation, the others of
    these cannot be ahead. Any of the m could have become the reference, which makes other methods look worse;
    m times as many comparisons are therefore counted for "behind". Simulations confirm this number
    (``benchmarks/verdict_coverage.py``).
    """
    other_count = len(values.of_method) - 1
    local_count = sum(map(needs_no_federation, values.of_method))
    if not needs_no_federation(base) or base != best_reference(values, metric_spec):
        return ComparisonCounts(max(1, other_count), max(1, other_count))
    return ComparisonCounts(max(1, other_count - local_count + 1), max(1, other_count * local_count))


def compare_methods(
    base: str, values: ClientTable, metric_spec: Metric, sizes: Mapping[str, float | None] | None = None
) -> dict[str, MethodVerdict]:
    """Compare each other method with ``base`` over their common clients and seeds.

    The intervals are simultaneous (:func:`perfed.report.intervals.estimate_gains`) and corrected for the number of
    methods in ``values`` (:func:`count_comparisons`): if no method differs, some interval excludes 0 in at most 5 % of
    the comparisons. The intervals are clipped to the range of the metric's differences.

    Args:
        base: the method that the others are compared with.
        values: the metric of each client and seed, by method.
        metric_spec: the metric.
        sizes: the bytes that a run sends, by method.
    """
    gains = {method: values.gains(method, base, metric_spec) for method in values.of_method if method != base}
    noise = {method: values.noise_of(method, base) for method in gains}
    limited = {
        method: gain.limit(metric_spec.widest)
        for method, gain in estimate_gains(
            gains, values.weights, count_comparisons(base, values, metric_spec), noise
        ).items()
    }
    verdicts = {}
    for method, cells in gains.items():
        better, equal, worse = (int(np.nansum(cases)) for cases in (cells > 0, cells == 0, cells < 0))
        seeds = int(np.isfinite(cells).any(1).sum())
        verdicts[method] = MethodVerdict(
            method, limited[method], seeds, better, equal, worse, (sizes or {}).get(method)
        )
    return verdicts


def average_sent_bytes(runs: Sequence[RunResults], method: str) -> float | None:
    """Return the bytes that a run of ``method`` sends up and down in all its rounds, averaged over its runs.

    The result is None if a round lacks the number, if no run has this method, and for a blend: it sends what its
    candidates send, again in each fold, and has no number of its own.
    """
    totals: list[int] = []
    if method == BLEND:
        return None
    for run in runs:
        if run.method == method:
            sizes = [(line.bytes_up, line.bytes_down) for line in run.rounds]
            known_sizes = [up + down for up, down in sizes if up is not None and down is not None]
            if len(known_sizes) < len(sizes):
                return None
            totals.append(sum(known_sizes))
    return float(np.mean(totals)) if totals else None


def describe_methods(methods: Sequence[MethodVerdict], reference: str, metric: str) -> str:
    """Return one sentence: which methods are ahead of the reference, not significantly different, or behind.

    The sentence contains the differences with their intervals; for methods without an interval, only the differences.
    """
    comparable = [verdict for verdict in methods if verdict.runs]
    tested = sorted(
        (verdict for verdict in comparable if verdict.gain.low is not None),
        key=lambda verdict: (verdict.method.startswith(POOLED), -verdict.gain.mean),
    )
    ahead, level, behind = ([verdict for verdict in tested if verdict.gain.sign == sign] for sign in (1, 0, -1))
    base, number = display_name(reference), len(tested)
    parts = [_describe_side("ahead of", ahead, base, metric, number, first=True)] if ahead else []
    if tested and not ahead:
        parts.append(f"No method is ahead of {base}")
    if level:
        parts += _describe_level(level, base if ahead else "", metric, number)
    if behind:
        furthest_first = sorted(behind, key=lambda verdict: (verdict.method.startswith(POOLED), verdict.gain.mean))
        parts.append(_describe_side("behind", furthest_first, base, metric, number, first=not (ahead or level)))
    parts += _describe_without_interval([verdict for verdict in comparable if verdict.gain.low is None], base, metric)
    disjoint = [display_name(verdict.method) for verdict in methods if not verdict.runs]
    if disjoint:
        parts.append(f"{join_names(disjoint)} and {base} have no client and seed in common")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _describe_level(verdicts: Sequence[MethodVerdict], reference: str, metric: str, number: int) -> list[str]:
    """Return clauses on the methods without a significant difference; if none is ahead, also on the closest."""
    names = join_names([display_name(verdict.method) for verdict in verdicts])
    shows = "shows" if len(verdicts) == 1 else "show"
    clause = f"{names} {shows} no significant difference from {reference or 'it'}"
    if reference:
        return [clause]
    evidence = _format_evidence(verdicts[0], metric, number)
    if len(verdicts) == 1:
        return [f"{clause} {evidence}"]
    return [clause, f"the closest is {display_name(verdicts[0].method)} {evidence}"]


def _describe_side(
    word: str, verdicts: Sequence[MethodVerdict], reference: str, metric: str, number: int, *, first: bool
) -> str:
    """Return a clause on the methods ahead or behind; ``first``: the first interval states its level and seeds."""
    amounts = [format_amount(metric, abs(verdict.gain.mean)) for verdict in verdicts]
    evidence = [
        _format_evidence(verdict, metric, number) if first and i == 0 else f"({_format_interval(verdict, metric)})"
        for i, verdict in enumerate(verdicts)
    ]
    clause = f"{display_name(verdicts[0].method)} is {word} {reference} by {amounts[0]} {evidence[0]}"
    return clause + "".join(
        f", {display_name(verdict.method)} by {difference} {interval_text}"
        for verdict, difference, interval_text in list(zip(verdicts, amounts, evidence, strict=True))[1:]
    )


def _describe_without_interval(methods: Sequence[MethodVerdict], reference: str, metric: str) -> list[str]:
    """Return a clause with the differences of methods that have no interval; an empty list if there are none."""
    ordered = sorted(methods, key=lambda verdict: (verdict.method.startswith(POOLED), -verdict.gain.mean))
    if not ordered:
        return []
    first, *other_differences = [format_amount(metric, verdict.gain.mean, "+") for verdict in ordered]
    differences = [f"{display_name(ordered[0].method)} differs from {reference} by {first}"]
    differences += [
        f"{display_name(verdict.method)} by {step}"
        for verdict, step in zip(ordered[1:], other_differences, strict=True)
    ]
    seeds = sorted({verdict.seeds for verdict in ordered})
    counts = join_names([f"{count} seed{'s' if count > 1 else ''}" for count in seeds])
    return [f"on average, {join_names(differences)} ({counts}, no interval)"]


def _format_interval(verdict: MethodVerdict, metric: str) -> str:
    """Return the ends of the interval as text, with their signs reversed if the method is behind the reference."""
    gain = verdict.gain
    assert gain.low is not None and gain.high is not None
    side = -1 if gain.sign < 0 else 1
    low, high = sorted((side * gain.low, side * gain.high))
    return f"{format_short(metric, low)} to {format_short(metric, high)}"


def _format_evidence(verdict: MethodVerdict, metric: str, number: int) -> str:
    """Return the interval of a method in brackets, with its correction (``number`` methods) and number of seeds."""
    seeds = f"{verdict.seeds} seed{'s' if verdict.seeds > 1 else ''}"
    mean_text = f"at {format_short(metric, verdict.gain.mean, '+')}: " if verdict.gain.sign == 0 else ""
    scope = " over clients only" if verdict.seeds == 1 else ""
    corrected = f", corrected for {number} methods" if number > 1 else ""
    return f"({mean_text}95 % interval{scope} {_format_interval(verdict, metric)}{corrected}, {seeds})"


def describe_metric_choice(metric: str) -> list[str]:
    """Return a line that names the metric if it is not a default metric of its task; empty otherwise."""
    if metric in {name for names in ALWAYS.values() for name in names}:
        return []
    better = "higher" if metric_of(metric).higher_is_better else "lower"
    return [f"Compared by {metric}, {better} is better; evaluation.compare_by chooses another metric."]


def describe_client_counts(
    best: MethodVerdict | None, reference: str, losing: tuple[int, int] | None = None
) -> list[str]:
    """Return a sentence on the clients for which the best method is better or worse, and on the bytes that it sends.

    Args:
        best: the best method; ``None`` if there is none, for which the result is empty.
        reference: the method that it is compared with.
        losing: the number of clients whose own test rows show a loss, and the number of clients with such an interval;
            ``None`` if no predictions of rows are known.
    """
    if best is None:
        return []
    counts = f"better for {best.better}, equal for {best.equal}, worse for {best.worse} of {best.runs} client-runs"
    rows = "" if losing is None else f"; by their own test rows, {losing[0]} of {losing[1]} clients are worse off"
    sends = "" if best.sent is None else f"; it sends {format_megabytes(best.sent)}"
    against = f"Against {display_name(reference)}, {display_name(best.method)}"
    return [f"{against} is {counts}, counting differences of any size{rows}{sends}."]
