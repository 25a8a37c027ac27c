"""The reference, and a method against it: by how much it is better, for how many clients, and the sentences on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfed.engine.metrics import ALWAYS, Metric, metric_of
from perfed.methods.titles import display_name
from perfed.plugins import BLEND, POOLED, SKLEARN
from perfed.report.intervals import Chances, Gain, intervals
from perfed.report.paired import ClientTable
from perfed.report.runs import Run
from perfed.report.text import amount, listed, megabytes, short_number


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


def chances_of(base: str, values: ClientTable, known: Metric) -> Chances:
    """How many comparisons a claim of "ahead of" or "behind" ``base`` is picked from.

    Each other method may be so. Where ``base`` is the best of m that need no federation, these cannot be ahead, and
    that it was chosen makes others look behind: any of the m could have been the reference, so that m times as many
    comparisons are counted there, as simulation asks for (``benchmarks/verdict_coverage.py``).
    """
    others = len(values.of_method) - 1
    alone = sum(map(needs_no_federation, values.of_method))
    if not needs_no_federation(base) or base != best_reference(values, known):
        return Chances(max(1, others), max(1, others))
    return Chances(max(1, others - alone + 1), max(1, others * alone))


def compare_methods(
    base: str, values: ClientTable, known: Metric, sizes: Mapping[str, float | None] | None = None
) -> dict[str, MethodVerdict]:
    """Return each other method compared with ``base`` over their common clients and seeds.

    The intervals are simultaneous (:func:`perfed.report.intervals.intervals`) and corrected for the number of methods
    in ``values`` (:func:`chances_of`): where nothing differs, one of them leaves 0 out in 5 % of the comparisons at
    most. No end exceeds the range of the metric's differences.

    Args:
        base: the method that the others are compared with.
        values: the metric of each client and seed, by method.
        known: the metric.
        sizes: bytes that a run sends, by method.
    """
    gains = {method: values.gains(method, base, known) for method in values.of_method if method != base}
    noise = {method: values.noise_of(method, base) for method in gains}
    limited = {
        method: gain.limit(known.widest)
        for method, gain in intervals(gains, values.weights, chances_of(base, values, known), noise).items()
    }
    verdicts = {}
    for method, cells in gains.items():
        better, equal, worse = (int(np.nansum(cases)) for cases in (cells > 0, cells == 0, cells < 0))
        seeds = int(np.isfinite(cells).any(1).sum())
        verdicts[method] = MethodVerdict(
            method, limited[method], seeds, better, equal, worse, (sizes or {}).get(method)
        )
    return verdicts


def sent(runs: Sequence[Run], method: str) -> float | None:
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
    """Who is ahead of the reference, who shows no significant difference and who is behind, and by how much.

    Methods without an interval have their differences alone.
    """
    there = [found for found in methods if found.runs]
    known = sorted(
        (found for found in there if found.gain.low is not None),
        key=lambda found: (found.method.startswith(POOLED), -found.gain.mean),
    )
    ahead, level, behind = ([found for found in known if found.gain.sign == sign] for sign in (1, 0, -1))
    base, number = display_name(reference), len(known)
    parts = [_side("ahead of", ahead, base, metric, number, first=True)] if ahead else []
    if known and not ahead:
        parts.append(f"No method is ahead of {base}")
    if level:
        parts += _level(level, base if ahead else "", metric, number)
    if behind:
        last = sorted(behind, key=lambda found: (found.method.startswith(POOLED), found.gain.mean))
        parts.append(_side("behind", last, base, metric, number, first=not (ahead or level)))
    parts += _without_interval([found for found in there if found.gain.low is None], base, metric)
    alone = [display_name(found.method) for found in methods if not found.runs]
    if alone:
        parts.append(f"{listed(alone)} and {base} have no client and seed in common")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def _level(found: Sequence[MethodVerdict], reference: str, metric: str, number: int) -> list[str]:
    """The methods without a significant difference; where nobody is ahead, how close the first one is."""
    names, shows = listed([display_name(of.method) for of in found]), "shows" if len(found) == 1 else "show"
    told = f"{names} {shows} no significant difference from {reference or 'it'}"
    if reference:
        return [told]
    sure = _evidence(found[0], metric, number)
    return [f"{told} {sure}"] if len(found) == 1 else [told, f"the closest is {display_name(found[0].method)} {sure}"]


def _side(word: str, found: Sequence[MethodVerdict], reference: str, metric: str, number: int, *, first: bool) -> str:
    """The methods on one side of the reference; the first one says what its interval is, and on how many seeds."""
    amounts = [amount(metric, abs(of.gain.mean)) for of in found]
    sure = [
        _evidence(of, metric, number) if first and i == 0 else f"({_ends(of, metric)})" for i, of in enumerate(found)
    ]
    told = f"{display_name(found[0].method)} is {word} {reference} by {amounts[0]} {sure[0]}"
    return told + "".join(
        f", {display_name(of.method)} by {a} {s}" for of, a, s in list(zip(found, amounts, sure, strict=True))[1:]
    )


def _without_interval(methods: Sequence[MethodVerdict], reference: str, metric: str) -> list[str]:
    """Return the differences of methods that have no interval, in one part of a sentence."""
    ordered = sorted(methods, key=lambda of: (of.method.startswith(POOLED), -of.gain.mean))
    if not ordered:
        return []
    first, *others = [amount(metric, of.gain.mean, "+") for of in ordered]
    each = [f"{display_name(ordered[0].method)} differs from {reference} by {first}"]
    each += [f"{display_name(of.method)} by {step}" for of, step in zip(ordered[1:], others, strict=True)]
    counts = listed([f"{count} seed{'s' if count > 1 else ''}" for count in sorted({of.seeds for of in ordered})])
    return [f"on average, {listed(each)} ({counts}, no interval)"]


def _ends(found: MethodVerdict, metric: str) -> str:
    """The interval in the direction of the gain's sign."""
    assert found.gain.low is not None and found.gain.high is not None
    side = -1 if found.gain.sign < 0 else 1
    low, high = sorted((side * found.gain.low, side * found.gain.high))
    return f"{short_number(metric, low)} to {short_number(metric, high)}"


def _evidence(found: MethodVerdict, metric: str, number: int) -> str:
    """Return the interval of a method, what it is corrected for (``number`` methods), and on how many seeds it is."""
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    mean = f"at {short_number(metric, found.gain.mean, '+')}: " if found.gain.sign == 0 else ""
    over = " over clients alone" if found.seeds == 1 else ""
    corrected = f", corrected for {number} methods" if number > 1 else ""
    return f"({mean}95 % interval{over} {_ends(found, metric)}{corrected}, {seeds})"


def compared_by(metric: str) -> list[str]:
    """One line where it is another metric than the task's own."""
    if metric in {name for names in ALWAYS.values() for name in names}:
        return []
    better = "higher" if metric_of(metric).higher_is_better else "lower"
    return [f"Compared by {metric}, {better} is better; evaluation.compare_by chooses another metric."]


def gainers(best: MethodVerdict | None, reference: str, losing: tuple[int, int] | None = None) -> list[str]:
    """Return one sentence: for how many clients the best method is better and worse, and what it sends.

    Args:
        best: the method.
        reference: what it is compared with.
        losing: the number of clients whose own test rows show a loss, and of how many; ``None`` where rows are not
            known.
    """
    if best is None:
        return []
    counts = f"better for {best.better}, equal for {best.equal}, worse for {best.worse} of {best.runs} client-runs"
    rows = "" if losing is None else f"; by their own test rows, {losing[0]} of {losing[1]} clients are worse off"
    sends = "" if best.sent is None else f"; it sends {megabytes(best.sent)}"
    against = f"Against {display_name(reference)}, {display_name(best.method)}"
    return [f"{against} is {counts}, counting differences of any size{rows}{sends}."]
