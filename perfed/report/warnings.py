"""Warnings of a verdict: a line for each reason to be careful with its numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from perfed.engine.metrics import Metric, describe_metric, metric_of
from perfed.methods.titles import display_name
from perfed.plugins import POOLED, SKLEARN
from perfed.report.against import MethodVerdict
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults, find_federation_data, list_methods
from perfed.report.text import format_amount, format_metric, join_names

Constant = Mapping[str, Sequence[str]]
"""The sites at which the models of a method predict the same for all rows, by method."""

MOSTLY = 0.8
"""The share of the most frequent class from which accuracy may not be informative."""

MOST_NAMES = 5  # of sites in a line

TWO_SEEDS = (
    "Two seeds do not support an interval over trainings: differences between methods are printed without one. Use at "
    "least three seeds."
)

_STILL = 0.005  # half a point; for errors, the same share of their value
_LOSS = 0.05  # share of the training loss of the first round
_LOST, _LOST_OF_ERRORS = 0.03, 0.1  # three points; for errors, a tenth of their value
_PAST_BEST = (
    "Tune lr and weight_decay, or keep each client's best round: evaluation.stop = 'validated' with "
    "data.validation_fraction."
)
_INTENDED = (SKLEARN + "majority", SKLEARN + "mean")  # their purpose is to predict the same for all rows
_NO_MORE = 0.02
_FOLDS = {
    "memory": "; give a function from a seed to a federation for folds",
    "tables": "; 'folds' in [data] gives each seed test rows of its own",
}


def describe_convergence(runs: Sequence[RunResults], metric: str) -> list[str]:
    """Return a line for each method whose training ended too early or too late.

    Training ended too early if the metric improved with every seed in the last quarter of the rounds, on average by
    more than half a point, or if the training loss fell from the third quarter to the last by more than a twentieth of
    that of the first round and the metric did not get worse. It ended too late if with every seed a metric ends worse
    than after the round in which its mean over the seeds was best, on average by more than three points (errors: by
    more than a tenth).
    """
    lines = []
    for method in list_methods(runs):
        members = [run for run in runs if run.method == method]
        progress = _describe_metric_gain(members, metric) or _describe_loss_decrease(members, metric)
        if progress:
            lines.append(
                f"{display_name(method)} has not converged: in the last quarter of the rounds {progress}; more rounds "
                "may change the verdict."
            )
        decline = [text for name in dict.fromkeys((metric, "auc")) if (text := _describe_decline(members, name))][:1]
        lines += [f"{display_name(method)} {text}. {_PAST_BEST}" for text in decline]
    return lines


def _describe_metric_gain(runs: Sequence[RunResults], metric: str) -> str:
    rises = [pair for run in runs if (pair := _compute_last_gain(run, metric)) is not None]
    if not rises or min(rise for rise, _ in rises) <= 0:
        return ""
    rise, value = (float(np.mean(column)) for column in zip(*rises, strict=True))
    return (
        f"it still gained {format_amount(metric, rise)}"
        if rise > _compute_relevant_change(_STILL, metric, value)
        else ""
    )


def _describe_loss_decrease(runs: Sequence[RunResults], metric: str) -> str:
    """Return a text on the training loss, which may fall before the metric improves (accuracy if a class is rare)."""
    rises = [pair for run in runs if (pair := _compute_last_gain(run, metric)) is not None]
    losses = [means for run in runs if (means := _average_losses(run)) is not None]
    if not rises or len(losses) < len(runs):
        return ""
    first, before, last = np.array(losses).T
    rise, value = (float(np.mean(column)) for column in zip(*rises, strict=True))
    if (before <= last).any() or np.mean(before - last) <= _LOSS * abs(np.mean(first)):
        return ""
    worse = rise < -_compute_relevant_change(_STILL, metric, value)
    return "" if worse else f"its training loss still fell from {np.mean(before):.3g} to {np.mean(last):.3g}"


def _average_losses(run: RunResults) -> tuple[float, float, float] | None:
    """Return the training loss of the first round, and its means over the third and the last quarter of the rounds."""
    losses = [
        (line.round, line.train_loss)
        for line in run.rounds
        if line.train_loss is not None and np.isfinite(line.train_loss)
    ]
    end = max((line.round for line in run.rounds), default=0)
    before = [loss for number, loss in losses if 0.5 * end < number <= 0.75 * end]
    last = [loss for number, loss in losses if number > 0.75 * end]
    return (losses[0][1], float(np.mean(before)), float(np.mean(last))) if before and last else None


def _compute_last_gain(run: RunResults, metric: str) -> tuple[float, float] | None:
    """Return the gain of the mean in the last quarter of the rounds, and the mean before it."""
    curve = _list_means_by_round(run, metric)
    before = [number for number in curve if number <= 0.75 * max(curve)]
    if not before:
        return None
    start, end = curve[max(before)], curve[max(curve)]
    return metric_of(metric).direction * (end - start), start


def _describe_decline(runs: Sequence[RunResults], metric: str) -> str:
    """Return a text on the best mean of a metric and the reported one, which need not be that of the last round."""
    curves = [_list_means_by_round(run, metric) for run in runs if run.summary and metric in run.summary.spreads]
    ends = [run.summary.spreads[metric].mean for run in runs if run.summary and metric in run.summary.spreads]
    shared = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
    if not shared:
        return ""
    direction = metric_of(metric).direction
    means = {number: float(np.mean([curve[number] for curve in curves])) for number in shared}
    best = max(shared, key=lambda number: direction * means[number])
    lost = [direction * (curve[best] - end) for curve, end in zip(curves, ends, strict=True)]
    enough = _LOST if metric_of(metric).higher_is_better else _LOST_OF_ERRORS * abs(means[best])
    if min(lost) <= 0 or np.mean(lost) <= enough:
        return ""
    was, now = describe_metric(metric, means[best]), describe_metric(metric, float(np.mean(ends)))
    return f"was better after round {best} ({was}) than it is at the end ({now})"


def _list_means_by_round(run: RunResults, metric: str) -> dict[int, float]:
    """Return the mean over the clients by evaluated round."""
    return {line.round: line.spreads[metric].mean for line in run.rounds if metric in line.spreads}


def _compute_relevant_change(share: float, metric: str, value: float) -> float:
    """Return the smallest relevant change of a metric, which is relative to the value for errors."""
    return share * (1.0 if metric_of(metric).higher_is_better else abs(value))


def describe_inferior_methods(verdicts: Sequence[MethodVerdict], base: str, metric: str) -> list[str]:
    """Return a line on the federated methods that are not better than a model that needs no federation.

    These are methods that are significantly worse, and methods whose mean is not better though the interval contains 0.
    """
    inferior = [v for v in verdicts if v.gain.mean <= 0]
    zero = format_amount(metric, 0.0)  # as it is printed
    worse = [v for v in inferior if v.gain.sign < 0 and format_amount(metric, -v.gain.mean) != zero]
    parts, reference = [], f"{display_name(base)}, which needs no federation"
    if worse:
        names = ", ".join(f"{display_name(v.method)} (by {format_amount(metric, -v.gain.mean)})" for v in worse)
        parts.append(f"Worse than {reference}: {names}")
    level = ", ".join(display_name(v.method) for v in inferior if v not in worse)
    if level:
        parts.append(f"no better: {level}" if worse else f"No better than {reference}: {level}")
    return [f"{'; '.join(parts)}."] if parts else []


def describe_unequal_rounds(runs: Sequence[RunResults]) -> list[str]:
    """Return a line for each method whose finished runs have different numbers of rounds in their settings."""
    lines = []
    for method in list_methods(runs):
        members = [run for run in runs if run.method == method and run.summary and run.summary.rounds]
        rounds = {int(run.config.get("rounds", 0)) for run in members} - {0}
        if len(rounds) > 1:
            lines.append(
                f"{display_name(method)}: seeds have {join_names([str(number) for number in sorted(rounds)])} rounds."
            )
    return lines


def describe_same_rows(runs: Sequence[RunResults]) -> list[str]:
    """Return a line if the seeds have the same clients, rows and targets, and differ only in the training."""
    by_seed: dict[int, RunResults] = {}
    for run in runs:
        if run.summary:
            by_seed.setdefault(run.seed, run)
    data = {run.data for run in by_seed.values()}
    rows = {run.predictions.marks for run in by_seed.values()}
    if len(by_seed) < 2 or len(rows) > 1 or (rows == {()} and (len(data) > 1 or data == {None})):
        return []  # without predictions only the checksum of the data shows this
    which = "training and test" if len(data - {None}) == len(data) == 1 else "test"
    name = str(next(iter(by_seed.values())).config.get("data", {}).get("name", ""))
    advice = _FOLDS.get("memory" if name.endswith(" in memory") else name, "")
    return [
        f"All seeds have the same {which} rows: intervals over seeds only cover the variation of the training{advice}."
    ]


def describe_frequent_class(runs: Sequence[RunResults], metric: str, values: ClientTable) -> list[str]:
    """Return a line if most rows have one class, and no method is more accurate than always predicting it.

    The accuracy of that prediction is the mean over sites of the share of the site's most frequent class among its
    training rows.
    """
    if metric != "accuracy":
        return []
    frequent, best = compute_majority_share(runs, values.sites), max(values.mean(method) for method in values.of_method)
    if frequent < MOSTLY or best > frequent + _NO_MORE:
        return []
    share, most = (format_metric(metric, value) for value in (frequent, best))
    return [
        f"Always predicting a client's most frequent class is right for {share} % of the rows, and no method for more "
        f"than {most} %: compare by another metric, evaluation.compare_by = 'auc' or 'log-loss'."
    ]


def compute_majority_share(runs: Sequence[RunResults], sites: Collection[str] = ()) -> float:
    """Return the share of a site's most frequent class among its training rows, averaged over sites.

    Args:
        runs: the runs, of which one has the number of rows by class. Otherwise the result is 0.
        sites: the sites; all if empty.
    """
    first = find_federation_data(runs)
    clients = {} if first is None else first[1].clients
    counts = [np.array(client.classes) for site, client in clients.items() if not sites or site in sites]
    shares = [rows.max() / rows.sum() for rows in counts if rows.sum()]
    return float(np.mean(shares)) if shares else 0.0


def describe_missing_metric(runs: Sequence[RunResults], metric: str, values: ClientTable) -> list[str]:
    """Return a line on finished methods without the metric, such as log loss if a model has no probabilities."""
    finished = list_methods([run for run in runs if run.summary])
    lacking = [display_name(method) for method in finished if method not in values.of_method]
    return [f"Not compared, for lack of {metric}: {join_names(lacking)}."] if lacking else []


def describe_few_seeds(values: ClientTable) -> list[str]:
    """Return a line if there are too few seeds to estimate the variation of trainings, or too few clients."""
    if len(values.seeds) == 2:
        return [TWO_SEEDS]
    if values.pooled:
        over = "the noise only: they hold for these trainings" if len(values.seeds) == 1 else "seeds only"
        return [
            "Only the mean over all clients is known: the variation between clients is unknown. Intervals of methods "
            f"are over {over}."
        ]
    if len(values.sites) == 1:
        return ["One client: the variation between clients is unknown. Intervals of methods are over seeds only."]
    if len(values.seeds) == 1:
        return [
            "One seed: the variation between trainings is unknown. Intervals of methods are over clients only: they "
            "hold for these trainings."
        ]
    return []


def list_data_doubts(runs: Sequence[RunResults]) -> list[str]:
    """Return the doubts about the data: a column that contains the target, or two spellings of a class, for example."""
    first = find_federation_data(runs)
    return [] if first is None else first[1].doubts


def describe_spent_privacy(runs: Sequence[RunResults]) -> list[str]:
    """Return a line with the largest epsilon that a client has spent, for each method with differential privacy."""
    most: dict[str, float] = {}
    unit = ""
    for run in runs:
        if run.summary and (privacy := run.summary.privacy):
            most[run.method] = max(most.get(run.method, 0.0), *privacy["spent"].values())
            unit = f"of each {'row' if privacy['unit'] == 'sample' else 'client'} (delta {privacy['delta']:g})"
    values = ", ".join(f"{display_name(method)} {value:.3g}" for method, value in most.items())
    return [f"Privacy {unit}: the largest epsilon that a client has spent is {values}."] if most else []


def describe_noise(values: ClientTable, metric_spec: Metric) -> list[str]:
    """Return a line on the noise in the mean of a method if clients add noise to their metrics."""
    if not values.noise:
        return []
    share, deviations = values.weights / values.weights.sum(), []
    for variances in values.noise.values():
        deviations.append(float(np.sqrt((share**2 * variances).sum(1)).mean()))
    unit = f" {'points' if metric_spec.percent else metric_spec.unit}".rstrip()
    most = f"{metric_spec.scale * max(deviations):.3g}{unit}"
    return [
        f"Metrics left the clients with noise: in a method's mean its standard deviation is at most {most} with each "
        "seed. The intervals include this noise."
    ]


def find_constant_predictions(runs: Sequence[RunResults]) -> dict[str, list[str]]:
    """Return, by method, the sites at which its models predict the same for all test rows with at least half the seeds.

    Sites with fewer than :data:`perfed.report.run_predictions.ENOUGH_ROWS` test rows are left out. The outputs are
    compared, with a relative tolerance of 1e-6 (the logarithms of probabilities for classes), not the metric: if all
    rows of a site have one class, a model that predicts it for all of them is constant only if its outputs are equal.
    Certain outputs (probabilities 0 and 1) that are right for the rows of such a site are not counted.
    """
    flags_by_site: dict[str, dict[str, list[bool]]] = {}
    for run in runs:
        for site, is_constant in run.predictions.constant.items():
            flags_by_site.setdefault(run.method, {}).setdefault(site, []).append(is_constant)
    constant = {
        method: [site for site, flags in sites.items() if 2 * sum(flags) >= len(flags)]
        for method, sites in flags_by_site.items()
    }
    return {method: sites for method, sites in constant.items() if sites}


def describe_constant_predictions(constant: Constant, sites: int) -> list[str]:
    """Return a line for each method with constant predictions at some of the ``sites`` (their number)."""
    lines = []
    for method, ids in constant.items():
        if not method.startswith(POOLED) and method not in _INTENDED:
            names = ", ".join([*ids[:MOST_NAMES], *["..."] * (len(ids) > MOST_NAMES)])
            lines.append(
                f"{display_name(method)} predicts the same for every test row at {len(ids)} of {sites} clients "
                f"({names}): it has learnt nothing there."
            )
    return lines
