"""All tables of several runs: metrics of each domain, of slower and faster clients, and the time to an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from perfed.engine.evaluate import ENOUGH
from perfed.methods.presets import method_and_policy
from perfed.methods.titles import display_name
from perfed.participation.policy import POLICIES
from perfed.plugins import bare_name
from perfed.report.comparison import judged_table, metric_tables, short_table
from perfed.report.runs import ClientValues, Run, main_metric, methods_of, reported
from perfed.report.text import UNKNOWN, TextTable, axis_title, directed_title, mean_std, metric_text
from perfed.report.verdict import Verdict
from perfed.report.warnings import MOSTLY, most_frequent
from perfed.run.callbacks.targets import duration, percent
from perfed.run.records import Target

BESIDE = ("accuracy", "auc", "average-precision", "log-loss")
OVER_DOMAINS = ("mean", "min", "max")
_UNTRAINED = "* Nobody trains on this domain: means of the outputs with the parameters of the others."
_FEW = "† Fewer than ten samples: not in mean, min and max, unless there are no other domains."


def all_tables(runs: Sequence[Run], found: Verdict | None = None) -> list[TextTable]:
    """Those that the runs have data for: comparison, time to accuracy, domains, slower and faster clients."""
    maybe = [target_table(runs), *domain_tables(runs), speed_table(runs, main_metric(runs))]
    return [*metric_tables(judged_table(runs, found), reported(runs)), *(table for table in maybe if table)]


def first_tables(runs: Sequence[Run], found: Verdict | None) -> list[TextTable]:
    """Those about the metric that runs are compared by, in short, what else tells of rare classes, time to accuracy."""
    metric = main_metric(runs)
    if metric is None:
        return []
    by_domain = [run for run in runs if metric in _domains(run)]
    domains = [_domain_table(by_domain, metric)] if by_domain else []
    maybe = [short_table(runs, judged_table(runs, found), metric), class_table(runs), target_table(runs), *domains]
    return [table for table in maybe if table]


def class_table(runs: Sequence[Run]) -> TextTable | None:
    """Accuracy, AUC, average precision and log loss of each method, mean ± std over seeds, as far as measured.

    None where runs are compared by accuracy and no class is rare (:data:`perfed.report.warnings.MOSTLY`), or where
    there is only one of these metrics.
    """
    finished = [run for run in runs if run.summary]
    spreads = [(run.method, run.summary.spreads) for run in finished if run.summary]
    names = [name for name in BESIDE if any(name in own for _, own in spreads)]
    if len(names) < 2 or (main_metric(runs) == "accuracy" and most_frequent(runs) < MOSTLY):
        return None
    rows = []
    for method in methods_of(finished):
        own = [found for name, found in spreads if name == method]
        values = [[found[name].mean for found in own if name in found] for name in names]
        cells = [mean_std(of, partial(metric_text, name), len(own)) for name, of in zip(names, values, strict=True)]
        rows.append([display_name(method), *cells])
    return TextTable("accuracy is not all", ["Method", *map(directed_title, names)], rows)


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
            [display_name(method), *(f"{c} *" if n in untrained else c for n, c in zip(columns, cells, strict=True))]
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
        rows.append([display_name(method), *cells])
    titles = [f"{what}, {half} half" for what in ("Rounds", axis_title(metric)) for half in ("slower", "faster")]
    return TextTable("slower and faster half of the clients", ["Method", *titles], rows)


def _cell(values: Sequence[float], text: Callable[[float], str]) -> str:
    there = [value for value in values if np.isfinite(value)]
    return mean_std(there, text, len(values))


_FITTED = (
    "Clients that were not used yet are evaluated after fitting what is their own, which takes no virtual time "
    "(participation.fit_unused)."
)

Times = dict[int, float | None]
"""Virtual time by seed, of the runs that had the target; None where it was never reached."""


def target_table(runs: Sequence[Run]) -> TextTable | None:
    """One row per method, a column per target, and one per target for the speed-up over base methods.

    The speed-up of a method under a policy is the base method's virtual time divided by its own, for each seed in which
    both reached the target. Without a clock virtual time is the number of rounds, and the table says so. None where no
    finished run had targets.
    """
    targets = sorted({target.accuracy for run in runs for target in _targets(run)})
    if not targets:
        return None
    methods = methods_of(runs)
    times = {method: [_times(runs, method, target) for target in targets] for method in methods}
    bases = _bases(methods)
    what, ratio = ("Virtual time", "Speed-up") if any(run.clocked for run in runs) else ("Rounds", "Speed-up in rounds")
    header = ["Method", *(f"{what} to {percent(target)}" for target in targets)]
    header += [f"{ratio} at {percent(target)}" for target in targets] if bases else []
    rows = []
    for method in methods:
        row = [display_name(method), *(_time_cell(times_) for times_ in times[method])]
        if method in bases:
            base = bases[method]
            row += [_speed_up_cell(base, *pair) for pair in zip(times[base], times[method], strict=True)]
        elif bases:
            row += [UNKNOWN] * len(targets)
        rows.append(row)
    return TextTable(f"{what.lower()} to accuracy", header, rows, _FITTED if any(map(_fits_unused, runs)) else "")


def _bases(methods: Sequence[str]) -> dict[str, str]:
    """The same method without a policy, of the methods under one that have it beside them."""
    said = {name: method_and_policy(name) for name in methods}
    plain = {method: name for name, (method, policy) in said.items() if policy in ("", "uniform")}
    staged = {name: method for name, (method, policy) in said.items() if policy not in ("", "uniform")}
    return {name: plain[method] for name, method in staged.items() if method in plain}


def _fits_unused(run: Run) -> bool:
    participation = run.config.get("participation", {})
    policy = POLICIES.get(bare_name(participation.get("policy", "uniform")))
    return bool(participation.get("fit_unused", policy is not None and policy.policy.fits_unused))


def _targets(run: Run) -> list[Target]:
    return (run.summary.targets or []) if run.summary else []


def _times(runs: Sequence[Run], method: str, accuracy: float) -> Times:
    members = [run for run in runs if run.method == method]
    return {run.seed: t.virtual_time for run in members for t in _targets(run) if t.accuracy == accuracy}


def _time_cell(times: Times) -> str:
    """Mean ± std over the seeds; a method that failed in some seeds must not look as if it had none."""
    if not times:
        return UNKNOWN
    reached = [time for time in times.values() if time is not None]
    if not reached:
        return "not reached"
    text = mean_std(reached, duration)
    return text if len(reached) == len(times) else f"reached by {len(reached)} of {len(times)} seeds: {text}"


def _speed_up_cell(base: str, base_times: Times, times: Times) -> str:
    common = sorted(base_times.keys() & times.keys())
    pairs = [(base_times[seed], times[seed]) for seed in common]
    # A measured trace may say that work takes no time at all; nothing can be divided by that.
    ratios = [before / after for before, after in pairs if before is not None and after]
    return mean_std(ratios, "{:.2f}".format, len(common)) + (f" over {display_name(base)}" if ratios else "")
