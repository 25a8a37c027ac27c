"""The reference, and a method against it: by how much it is better, for how many clients, and the sentences on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfed.engine.metrics import ALWAYS, Metric, metric_of
from perfed.methods.titles import display_name
from perfed.plugins import BLEND, POOLED, SKLEARN
from perfed.report.intervals import Chances, Gain, interval
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
    that it was chosen makes others look behind: m - 1 more are counted, as many as simulation asks for
    (``benchmarks/verdict_coverage.py``), which is less than all m times as many pairs.
    """
    others = len(values.of_method) - 1
    alone = sum(map(needs_no_federation, values.of_method))
    if not needs_no_federation(base) or base != best_reference(values, known):
        return Chances(max(1, others), max(1, others))
    return Chances(max(1, others - alone + 1), max(1, others + alone - 1))


def against(method: str, base: str, values: ClientTable, known: Metric, bytes_: float | None = None) -> MethodVerdict:
    """``method`` compared with ``base`` over their common clients and seeds.

    The interval is corrected for the number of methods in ``values`` (:func:`chances_of`), so that all can be read at
    once: where nothing differs, one of them leaves 0 out in 5 % of the comparisons at most.
    """
    gains = values.gains(method, base, known)
    seeds = int(np.isfinite(gains).any(1).sum())
    better, equal, worse = (int(np.nansum(found)) for found in (gains > 0, gains == 0, gains < 0))
    chances = chances_of(base, values, known)
    noise = values.noise_of(method, base)
    gain = interval(gains, values.weights, chances, noise) if seeds else Gain(float("nan"), None, None)
    return MethodVerdict(method, gain, seeds, better, equal, worse, bytes_)


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
    """Who is ahead of the reference, who shows no significant difference and who is behind, and by how much."""
    there = (found for found in methods if found.runs)
    known = sorted(there, key=lambda found: (found.method.startswith(POOLED), -found.gain.mean))
    ahead, level, behind = ([found for found in known if found.gain.sign == sign] for sign in (1, 0, -1))
    base = display_name(reference)
    parts = [_side("ahead of", ahead, base, metric, first=True)] if ahead else []
    if known and not ahead:
        parts.append(f"No method is ahead of {base}")
    if level:
        parts += _level(level, base if ahead else "", metric)
    if behind:
        last = sorted(behind, key=lambda found: (found.method.startswith(POOLED), found.gain.mean))
        parts.append(_side("behind", last, base, metric, first=not (ahead or level)))
    alone = [display_name(found.method) for found in methods if not found.runs]
    if alone:
        parts.append(f"{listed(alone)} and {base} have no client and seed in common")
    return "; ".join(parts) + "."


def _level(found: Sequence[MethodVerdict], reference: str, metric: str) -> list[str]:
    """The methods without a significant difference; where nobody is ahead, how close the first one is."""
    names, shows = listed([display_name(of.method) for of in found]), "shows" if len(found) == 1 else "show"
    told = f"{names} {shows} no significant difference from {reference or 'it'}"
    if reference:
        return [told]
    sure = _evidence(found[0], metric)
    return [f"{told} {sure}"] if len(found) == 1 else [told, f"the closest is {display_name(found[0].method)} {sure}"]


def _side(word: str, found: Sequence[MethodVerdict], reference: str, metric: str, *, first: bool) -> str:
    """The methods on one side of the reference; the first one says what its interval is, and on how many seeds."""
    amounts = [amount(metric, abs(of.gain.mean)) for of in found]
    sure = [_evidence(of, metric) if first and i == 0 else f"({_ends(of, metric)})" for i, of in enumerate(found)]
    told = f"{display_name(found[0].method)} is {word} {reference} by {amounts[0]} {sure[0]}"
    return told + "".join(
        f", {display_name(of.method)} by {a} {s}" for of, a, s in list(zip(found, amounts, sure, strict=True))[1:]
    )


def _ends(found: MethodVerdict, metric: str) -> str:
    """The interval in the direction of the gain's sign."""
    if found.gain.low is None or found.gain.high is None:
        return "no interval"
    side = -1 if found.gain.sign < 0 else 1
    low, high = sorted((side * found.gain.low, side * found.gain.high))
    return f"{short_number(metric, low)} to {short_number(metric, high)}"


def _evidence(found: MethodVerdict, metric: str) -> str:
    seeds = f"{found.seeds} seed{'s' if found.seeds > 1 else ''}"
    told = f"at {short_number(metric, found.gain.mean, '+')}: " if found.gain.sign == 0 else ""
    if found.gain.low is None or found.gain.high is None:
        return f"({told}{seeds}, no interval)"
    over = " over clients alone" if found.seeds == 1 else ""
    return f"({told}95 % interval{over} {_ends(found, metric)}, {seeds})"


def compared_by(metric: str) -> list[str]:
    """One line where it is another metric than the task's own."""
    if metric in {name for names in ALWAYS.values() for name in names}:
        return []
    better = "higher" if metric_of(metric).higher_is_better else "lower"
    return [f"Compared by {metric}, {better} is better; evaluation.compare_by chooses another metric."]


def gainers(found: MethodVerdict | None, reference: str) -> list[str]:
    """For how many clients the best method is better and worse, and what it sends."""
    if found is None:
        return []
    counts = f"better for {found.better}, equal for {found.equal}, worse for {found.worse} of {found.runs} client-runs"
    sends = "" if found.sent is None else f"; it sends {megabytes(found.sent)}"
    return [f"Against {display_name(reference)}, {display_name(found.method)} is {counts}{sends}."]
