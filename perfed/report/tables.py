"""The tables of several runs: comparison, domains, slower and faster clients, and time to an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfed.engine.evaluate import ENOUGH
from perfed.methods.presets import split_method_name
from perfed.methods.titles import display_name
from perfed.participation.policy import POLICIES
from perfed.plugins import bare_name
from perfed.report.comparison import compare_with_reference, metric_tables, short_table
from perfed.report.run_results import ClientValues, RunResults, describe_reported_values, list_methods, main_metric
from perfed.report.text import UNKNOWN, TextTable, axis_title, directed_title, format_mean_std, format_metric
from perfed.report.verdict import Verdict
from perfed.report.warnings import MOSTLY, compute_majority_share
from perfed.run.callbacks.targets import format_duration, format_percent
from perfed.run.records import Target

BESIDE = ("accuracy", "auc", "average-precision", "log-loss")
OVER_DOMAINS = ("mean", "min", "max")
_UNTRAINED = "* Nobody trains on this domain: means of the outputs with the parameters of the others."
_FEW = "† Fewer than ten samples: not in mean, min and max, unless there are no other domains."


def all_tables(runs: Sequence[RunResults], verdict: Verdict | None = None) -> list[TextTable]:
    """Return all tables for which the runs have data: comparison, time to accuracy, domains, slow and fast clients."""
    optional = [target_table(runs), *domain_tables(runs), speed_table(runs, main_metric(runs))]
    comparison = metric_tables(compare_with_reference(runs, verdict), describe_reported_values(runs))
    return [*comparison, *(table for table in optional if table)]


def first_tables(runs: Sequence[RunResults], verdict: Verdict | None) -> list[TextTable]:
    """Return the most important tables: main metric, metrics for rare classes, time to accuracy, and domains."""
    metric = main_metric(runs)
    if metric is None:
        return []
    by_domain = [run for run in runs if metric in _get_domain_values(run)]
    domains = [_build_domain_table(by_domain, metric)] if by_domain else []
    optional = [
        short_table(runs, compare_with_reference(runs, verdict), metric),
        class_table(runs),
        target_table(runs),
        *domains,
    ]
    return [table for table in optional if table]


def class_table(runs: Sequence[RunResults]) -> TextTable | None:
    """Return a table with accuracy, AUC, average precision and log loss of each method, mean ± std over seeds.

    ``None`` if runs are compared by accuracy and no class is rare (:data:`perfed.report.warnings.MOSTLY`), or if only
    one of these metrics was measured.
    """
    finished = [run for run in runs if run.summary]
    spreads = [(run.method, run.summary.spreads) for run in finished if run.summary]
    names = [name for name in BESIDE if any(name in metrics for _, metrics in spreads)]
    if len(names) < 2 or (main_metric(runs) == "accuracy" and compute_majority_share(runs) < MOSTLY):
        return None
    rows = []
    for method in list_methods(finished):
        seeds = [metrics for name, metrics in spreads if name == method]
        values = [[metrics[name].mean for metrics in seeds if name in metrics] for name in names]
        cells = [
            format_mean_std(means, partial(format_metric, name), len(seeds))
            for name, means in zip(names, values, strict=True)
        ]
        rows.append([display_name(method), *cells])
    return TextTable("Accuracy and the frequencies of the classes", ["Method", *map(directed_title, names)], rows)


def domain_tables(runs: Sequence[RunResults]) -> list[TextTable]:
    """Return a table for each metric by domain: methods x domains, then mean, min and max over the domains.

    Every number is computed for each run and then averaged over the seeds, also the minimum (FedDAR, section 5).
    """
    finished = [run for run in runs if run.summary and run.summary.domains]
    metrics = dict.fromkeys(metric for run in finished if run.summary for metric in run.summary.domains)
    return [
        _build_domain_table([run for run in finished if metric in _get_domain_values(run)], metric)
        for metric in metrics
    ]


def _get_domain_values(run: RunResults) -> dict[str, dict[str, float]]:
    return run.summary.domains if run.summary else {}


def _build_domain_table(runs: Sequence[RunResults], metric: str) -> TextTable:
    names = dict.fromkeys(name for run in runs for name in _get_domain_values(run)[metric])
    columns = [*(name for name in names if name not in OVER_DOMAINS), *OVER_DOMAINS]
    rows, marked = [], False
    sizes = _count_samples(runs)
    few = {name for name, (least, _) in sizes.items() if least < ENOUGH}
    for method in list_methods(runs):
        method_runs = [run for run in runs if run.method == method]
        members = [_get_domain_values(run)[metric] for run in method_runs]
        values = [[member[name] for member in members if np.isfinite(member.get(name, np.nan))] for name in columns]
        cells = [
            format_mean_std(seed_values, lambda v: format_metric(metric, v), len(members)) for seed_values in values
        ]
        untrained = {name for run in method_runs if run.summary for name in run.summary.untrained_domains}
        marked |= bool(untrained.intersection(columns))
        rows.append(
            [display_name(method), *(f"{c} *" if n in untrained else c for n, c in zip(columns, cells, strict=True))]
        )
    titles = [
        f"{name}{_format_sample_range(*sizes[name])}{' †' * (name in few)}" if name in sizes else name
        for name in columns
    ]
    note = " ".join([_UNTRAINED] * marked + [_FEW] * bool(few))
    return TextTable(f"{axis_title(metric)} by domain", ["Method", *titles], rows, note)


def _count_samples(runs: Sequence[RunResults]) -> dict[str, tuple[int, int]]:
    """Return the smallest and largest number of samples of each domain; seeds may have different splits."""
    samples: dict[str, list[int]] = {}
    for run in runs:
        for name, count in (run.summary.domain_samples if run.summary else {}).items():
            samples.setdefault(name, []).append(count)
    return {name: (min(counts), max(counts)) for name, counts in samples.items()}


def _format_sample_range(least: int, most: int) -> str:
    return f" (n = {least})" if least == most else f" (n = {least} to {most})"


@dataclass(frozen=True)
class Halves:
    """Means over the slower and the faster half of a run's clients, in this order; NaN if there are no values.

    Attributes:
        rounds: the number of rounds in which a client took part.
        value: the metric.
    """

    rounds: tuple[float, float]
    value: tuple[float, float]


def split_by_speed(clients: ClientValues) -> Halves | None:
    """Return means over the slower and faster half of the clients; ``None`` if all clients are equally fast.

    The halves do not contain clients without replies, nor the middle one of an odd number of clients. Equally fast
    clients are ordered by their ids.
    """
    if not clients.has_speeds:
        return None
    timed = np.flatnonzero(np.isfinite(clients.seconds))
    ordered = timed[np.lexsort((np.array(clients.ids)[timed], clients.seconds[timed]))]
    size = len(ordered) // 2
    slower, faster = ordered[-size:], ordered[:size]

    def means(values: NDArray[np.float64]) -> tuple[float, float]:
        return _average_finite(values[slower]), _average_finite(values[faster])

    return Halves(means(clients.rounds), means(clients.reported))


def _average_finite(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def speed_table(runs: Sequence[RunResults], metric: str | None) -> TextTable | None:
    """Return a table with rounds and metric of the slower and faster half of the clients, mean ± std over seeds.

    ``None`` if no run has clients of different speeds.
    """
    measured = [(run.method, run.clients) for run in runs if run.clients and run.clients.metric == metric]
    halves = [(method, pair) for method, clients in measured if (pair := split_by_speed(clients)) is not None]
    if not halves or metric is None:
        return None
    rows = []
    for method in dict.fromkeys(method for method, _ in halves):
        members = [pair for name, pair in halves if name == method]
        cells = [_format_values([pair.rounds[i] for pair in members], "{:.4g}".format) for i in (0, 1)]
        cells += [_format_values([pair.value[i] for pair in members], partial(format_metric, metric)) for i in (0, 1)]
        rows.append([display_name(method), *cells])
    titles = [f"{title}, {half} half" for title in ("Rounds", axis_title(metric)) for half in ("slower", "faster")]
    return TextTable("slower and faster half of the clients", ["Method", *titles], rows)


def _format_values(values: Sequence[float], text: Callable[[float], str]) -> str:
    finite = [value for value in values if np.isfinite(value)]
    return format_mean_std(finite, text, len(values))


_FITTED = (
    "Clients that were not used yet are evaluated after fitting what is their own, which takes no virtual time "
    "(participation.fit_unused)."
)

Times = dict[int, float | None]
"""The virtual time by seed of the runs with a target; ``None`` if the run never reached it."""


def target_table(runs: Sequence[RunResults]) -> TextTable | None:
    """Return a table with the time to each target and the speed-up over base methods, one row per method.

    The speed-up of a method under a policy is the virtual time of the base method divided by that of the method, for
    each seed with which both reached the target. Without a clock, virtual time is the number of rounds, as the table
    states. ``None`` if no finished run has targets.
    """
    targets = sorted({target.accuracy for run in runs for target in _list_targets(run)})
    if not targets:
        return None
    methods = list_methods(runs)
    times = {method: [_list_times(runs, method, target) for target in targets] for method in methods}
    bases = _find_bases(methods)
    has_clock = any(run.has_clock for run in runs)
    title, ratio = ("Virtual time", "Speed-up") if has_clock else ("Rounds", "Speed-up in rounds")
    header = ["Method", *(f"{title} to {format_percent(target)}" for target in targets)]
    header += [f"{ratio} at {format_percent(target)}" for target in targets] if bases else []
    rows = []
    for method in methods:
        row = [display_name(method), *(_format_times(times_) for times_ in times[method])]
        if method in bases:
            base = bases[method]
            row += [_format_speed_up(base, *pair) for pair in zip(times[base], times[method], strict=True)]
        elif bases:
            row += [UNKNOWN] * len(targets)
        rows.append(row)
    return TextTable(f"{title.lower()} to accuracy", header, rows, _FITTED if any(map(_fits_unused, runs)) else "")


def _find_bases(methods: Sequence[str]) -> dict[str, str]:
    """Return the base method of each method under a policy: the same method without one, if it was run, too."""
    parts = {name: split_method_name(name) for name in methods}
    plain = {method: name for name, (method, policy) in parts.items() if policy in ("", "uniform")}
    staged = {name: method for name, (method, policy) in parts.items() if policy not in ("", "uniform")}
    return {name: plain[method] for name, method in staged.items() if method in plain}


def _fits_unused(run: RunResults) -> bool:
    participation = run.config.get("participation", {})
    policy = POLICIES.get(bare_name(participation.get("policy", "uniform")))
    return bool(participation.get("fit_unused", policy is not None and policy.policy.fits_unused))


def _list_targets(run: RunResults) -> list[Target]:
    return (run.summary.targets or []) if run.summary else []


def _list_times(runs: Sequence[RunResults], method: str, accuracy: float) -> Times:
    members = [run for run in runs if run.method == method]
    return {run.seed: t.virtual_time for run in members for t in _list_targets(run) if t.accuracy == accuracy}


def _format_times(times: Times) -> str:
    """Return mean ± std over the seeds, and in how many of them the target was reached."""
    if not times:
        return UNKNOWN
    reached = [time for time in times.values() if time is not None]
    if not reached:
        return "not reached"
    text = format_mean_std(reached, format_duration)
    return text if len(reached) == len(times) else f"reached by {len(reached)} of {len(times)} seeds: {text}"


def _format_speed_up(base: str, base_times: Times, times: Times) -> str:
    common = sorted(base_times.keys() & times.keys())
    pairs = [(base_times[seed], times[seed]) for seed in common]
    # A measured trace may say that work takes no time at all; nothing can be divided by that.
    ratios = [before / after for before, after in pairs if before is not None and after]
    return format_mean_std(ratios, "{:.2f}".format, len(common)) + (f" over {display_name(base)}" if ratios else "")
