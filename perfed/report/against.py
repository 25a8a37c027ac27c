"""The reference, and a method against it: by how much it is better, for how many clients, and the sentences on it."""

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
from perfed.report.text import amount, format_short, listed, megabytes


@dataclass(frozen=True)
class MethodVerdict:
    """One method against the reference; better, equal and worse count client-runs (a client with a seed).

    ``sent`` are the bytes that a run of it sends up and down, averaged over the seeds; None where its rounds lack them.
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
        """Client-runs that both methods have."""
        return self.better + self.equal + self.worse


def needs_no_federation(method: str) -> bool:
    """Whether a site can have the method by itself."""
    return method == "local" or method.startswith(SKLEARN)


def best_reference(values: ClientTable, known: Metric) -> str:
    """The method with the best mean of those that need no federation, else the first; empty where nothing is known."""
    alone = [method for method in values.of_method if needs_no_federation(method)]
    first = next(iter(values.of_method), "")
    return max(alone, key=lambda method: known.direction * values.mean(method), default=first)


def count_comparisons(base: str, values: ClientTable, known: Metric) -> ComparisonCounts:
    """Return the numbers of comparisons among which "ahead of" or "behind" ``base`` could be claimed.

    Any other method can be ahead or behind. If ``base`` is the best of m methods that need no federation, the others of
    these cannot be ahead. Any of the m could have become the reference, which makes other methods look worse;
    m times as many comparisons are therefore counted for "behind". Simulations confirm this number
    (``benchmarks/verdict_coverage.py``).
    """
    others = len(values.of_method) - 1
    alone = sum(map(needs_no_federation, values.of_method))
    if not needs_no_federation(base) or base != best_reference(values, known):
        return ComparisonCounts(max(1, others), max(1, others))
    return ComparisonCounts(max(1, others - alone + 1), max(1, others * alone))


def compare_methods(
    base: str, values: ClientTable, known: Metric, sizes: Mapping[str, float | None] | None = None
) -> dict[str, MethodVerdict]:
    """Compare each other method with ``base`` over their common clients and seeds.

    The intervals are simultaneous (:func:`perfed.report.intervals.estimate_gains`) and corrected for the number of
    methods in ``values`` (:func:`count_comparisons`): if no method differs, some interval excludes 0 in at most 5 % of
    the comparisons. The intervals are clipped to the range of the metric's differences.

    Args:
        base: the method that the others are compared with.
        values: the metric of each client and seed, by method.
        known: the metric.
        sizes: the bytes that a run sends, by method.
    """
    gains = {method: values.gains(method, base, known) for method in values.of_method if method != base}
    noise = {method: values.noise_of(method, base) for method in gains}
    limited = {
        method: gain.limit(known.widest)
        for method, gain in estimate_gains(gains, values.weights, count_comparisons(base, values, known), noise).items()
    }
    verdicts = {}
    for method, cells in gains.items():
        better, equal, worse = (int(np.nansum(cases)) for cases in (cells > 0, cells == 0, cells < 0))
        seeds = int(np.isfinite(cells).any(1).sum())
        verdicts[method] = MethodVerdict(
            method, limited[method], seeds, better, equal, worse, (sizes or {}).get(method)
        )
    return verdicts


def sent(runs: Sequence[RunResults], method: str) -> float | None:
    """Bytes up and down in all rounds of a run of ``method``, averaged over its runs; None where a round lacks them.

    A blend sends what its candidates send, again in each fold, and has no number of its own.
    """
    found: list[int] = []
    if method == BLEND:
        return None
    for run in runs:
        if run.method == method:
            sizes = [(line.bytes_up, line.bytes_down) for line in run.rounds]
            known = [up + down for up, down in sizes if up is not None and down is not None]
            if len(known) < len(sizes):
                return None
            found.append(sum(known))
    return float(np.mean(found)) if found else None


def headline(methods: Sequence[MethodVerdict], reference: str, metric: str) -> str:
    """Return one sentence: which methods are ahead of the reference, not significantly different, or behind.

    It contains the differences and their intervals; of methods without an interval only the differences.
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
        parts.append(f"{listed(disjoint)} and {base} have no client and seed in common")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _describe_level(verdicts: Sequence[MethodVerdict], reference: str, metric: str, number: int) -> list[str]:
    """Return clauses on the methods without a significant difference; if none is ahead, also on the closest."""
    names = listed([display_name(verdict.method) for verdict in verdicts])
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
    amounts = [amount(metric, abs(verdict.gain.mean)) for verdict in verdicts]
    evidence = [
        _format_evidence(verdict, metric, number) if first and i == 0 else f"({_ends(verdict, metric)})"
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
    first, *other_differences = [amount(metric, verdict.gain.mean, "+") for verdict in ordered]
    differences = [f"{display_name(ordered[0].method)} differs from {reference} by {first}"]
    differences += [
        f"{display_name(verdict.method)} by {step}"
        for verdict, step in zip(ordered[1:], other_differences, strict=True)
    ]
    seeds = sorted({verdict.seeds for verdict in ordered})
    counts = listed([f"{count} seed{'s' if count > 1 else ''}" for count in seeds])
    return [f"on average, {listed(differences)} ({counts}, no interval)"]


def _ends(found: MethodVerdict, metric: str) -> str:
    """The interval in the direction of the gain's sign."""
    assert found.gain.low is not None and found.gain.high is not None
    side = -1 if found.gain.sign < 0 else 1
    low, high = sorted((side * found.gain.low, side * found.gain.high))
    return f"{format_short(metric, low)} to {format_short(metric, high)}"


def _format_evidence(verdict: MethodVerdict, metric: str, number: int) -> str:
    """Return the interval of a method in brackets, with its correction (``number`` methods) and number of seeds."""
    seeds = f"{verdict.seeds} seed{'s' if verdict.seeds > 1 else ''}"
    mean_text = f"at {format_short(metric, verdict.gain.mean, '+')}: " if verdict.gain.sign == 0 else ""
    scope = " over clients alone" if verdict.seeds == 1 else ""
    corrected = f", corrected for {number} methods" if number > 1 else ""
    return f"({mean_text}95 % interval{scope} {_ends(verdict, metric)}{corrected}, {seeds})"


def compared_by(metric: str) -> list[str]:
    """One line where it is another metric than the task's own."""
    if metric in {name for names in ALWAYS.values() for name in names}:
        return []
    better = "higher" if metric_of(metric).higher_is_better else "lower"
    return [f"Compared by {metric}, {better} is better; evaluation.compare_by chooses another metric."]


def gainers(best: MethodVerdict | None, reference: str, losing: tuple[int, int] | None = None) -> list[str]:
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
    sends = "" if best.sent is None else f"; it sends {megabytes(best.sent)}"
    against = f"Against {display_name(reference)}, {display_name(best.method)}"
    return [f"{against} is {counts}, counting differences of any size{rows}{sends}."]
