"""All tables of several runs; here those of the metrics of each domain, and of slower and faster clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfed.engine.evaluate import ENOUGH
from perfed.report.client_values import ClientValues
from perfed.report.comparison import judged_table, metric_tables, short_table
from perfed.report.runs import Run, main_metric, methods_of, reported
from perfed.report.targets import target_table
from perfed.report.text import TextTable, axis_title, mean_std, method_text, metric_text
from perfed.report.verdict import Verdict

OVER_DOMAINS = ("mean", "min", "max")
_UNTRAINED = "* Nobody trains on this domain: means of the outputs with the parameters of the others."
_FEW = "† Fewer than ten samples: not in mean, min and max, unless there are no other domains."


def all_tables(runs: Sequence[Run], found: Verdict | None = None) -> list[TextTable]:
    """Those that the runs have data for: comparison, time to accuracy, domains, slower and faster clients."""
    maybe = [target_table(runs), *domain_tables(runs), speed_table(runs, main_metric(runs))]
    return [*metric_tables(judged_table(runs, found), reported(runs)), *(table for table in maybe if table)]


def first_tables(runs: Sequence[Run], found: Verdict | None) -> list[TextTable]:
    """Of :func:`all_tables` those about the metric that runs are compared by, in short, and time to accuracy."""
    metric = main_metric(runs)
    if metric is None:
        return []
    by_domain = [run for run in runs if metric in _domains(run)]
    domains = [_domain_table(by_domain, metric)] if by_domain else []
    maybe = [short_table(runs, judged_table(runs, found), metric), target_table(runs), *domains]
    return [table for table in maybe if table]


def domain_tables(runs: Sequence[Run]) -> list[TextTable]:
    """One table per metric that runs measured by domain: methods x domains, then mean, min and max over the domains.

    Each number is taken per run and then averaged over the seeds, the minimum over domains too (FedDAR, section 5).
    """
    finished = [run for run in runs if run.summary and run.summary.domains]
    metrics = dict.fromkeys(metric for run in finished if run.summary for metric in run.summary.domains)
    return [_domain_table([run for run in finished if metric in _domains(run)], metric) for metric in metrics]


def _domains(run: Run) -> dict[str, dict[str, float]]:
    return run.summary.domains if run.summary else {}


def _domain_table(runs: Sequence[Run], metric: str) -> TextTable:
    found = dict.fromkeys(name for run in runs for name in _domains(run)[metric])
    columns = [*(name for name in found if name not in OVER_DOMAINS), *OVER_DOMAINS]
    rows, marked = [], False
    sizes = _samples(runs)
    few = {name for name, (least, _) in sizes.items() if least < ENOUGH}
    for method in methods_of(runs):
        own = [run for run in runs if run.method == method]
        members = [_domains(run)[metric] for run in own]
        values = [[member[name] for member in members if np.isfinite(member.get(name, np.nan))] for name in columns]
        cells = [mean_std(of, lambda v: metric_text(metric, v), len(members)) for of in values]
        untrained = {name for run in own if run.summary for name in run.summary.untrained_domains}
        marked |= bool(untrained.intersection(columns))
        rows.append(
            [method_text(method), *(f"{c} *" if n in untrained else c for n, c in zip(columns, cells, strict=True))]
        )
    titles = [f"{name}{_size(*sizes[name])}{' †' * (name in few)}" if name in sizes else name for name in columns]
    note = " ".join([_UNTRAINED] * marked + [_FEW] * bool(few))
    return TextTable(f"{axis_title(metric)} by domain", ["Method", *titles], rows, note)


def _samples(runs: Sequence[Run]) -> dict[str, tuple[int, int]]:
    """The least and largest number of samples of each domain; runs with other seeds may have other splits."""
    found: dict[str, list[int]] = {}
    for run in runs:
        for name, count in (run.summary.domain_samples if run.summary else {}).items():
            found.setdefault(name, []).append(count)
    return {name: (min(counts), max(counts)) for name, counts in found.items()}


def _size(least: int, most: int) -> str:
    return f" (n = {least})" if least == most else f" (n = {least} to {most})"


@dataclass(frozen=True)
class Halves:
    """Means over the slower and over the faster half of a run's clients, in this order; NaN where nothing is known.

    Attributes:
        rounds: taken part.
        value: of the metric.
    """

    rounds: tuple[float, float]
    value: tuple[float, float]


def halves(clients: ClientValues) -> Halves | None:
    """Halves by the seconds of a client's replies; None where the clients' speeds do not differ.

    Clients without replies belong to neither half, nor does the middle one of an odd number. Clients of equal speed
    are taken in the order of their ids.
    """
    if not clients.timed:
        return None
    known = np.flatnonzero(np.isfinite(clients.seconds))
    ordered = known[np.lexsort((np.array(clients.ids)[known], clients.seconds[known]))]
    size = len(ordered) // 2
    slower, faster = ordered[-size:], ordered[:size]

    def means(values: NDArray[np.float64]) -> tuple[float, float]:
        return _mean(values[slower]), _mean(values[faster])

    return Halves(means(clients.rounds), means(clients.reported))


def _mean(values: NDArray[np.float64]) -> float:
    there = values[np.isfinite(values)]
    return float(there.mean()) if len(there) else float("nan")


def speed_table(runs: Sequence[Run], metric: str | None) -> TextTable | None:
    """Rounds and metric of the slower and the faster half of the clients, one row per method, mean ± std over seeds.

    None where no run has clients of different speeds.
    """
    found = [(run.method, halves(run.clients)) for run in runs if run.clients and run.clients.metric == metric]
    known = [(method, of) for method, of in found if of is not None]
    if not known or metric is None:
        return None
    rows = []
    for method in dict.fromkeys(method for method, _ in known):
        members = [of for own, of in known if own == method]
        cells = [_cell([of.rounds[i] for of in members], "{:.4g}".format) for i in (0, 1)]
        cells += [_cell([of.value[i] for of in members], partial(metric_text, metric)) for i in (0, 1)]
        rows.append([method, *cells])
    titles = [f"{what}, {half} half" for what in ("Rounds", axis_title(metric)) for half in ("slower", "faster")]
    return TextTable("slower and faster half of the clients", ["Method", *titles], rows)


def _cell(values: Sequence[float], text: Callable[[float], str]) -> str:
    there = [value for value in values if np.isfinite(value)]
    return mean_std(there, text, len(values))
