"""What a reader of a verdict must mind: one line for each thing that is not as the numbers let one think."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from perfed.engine.metrics import Metric, metric_of, shown
from perfed.methods.titles import display_name
from perfed.plugins import POOLED, SKLEARN
from perfed.report.against import MethodVerdict
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults, find_federation_data, methods_of
from perfed.report.text import amount, listed, metric_text

Constant = Mapping[str, Sequence[str]]
"""By method the sites at which its models say the same of every row."""

MOSTLY = 0.8
"""Share of the most frequent class from which on accuracy may tell little."""

MOST_NAMES = 5  # of sites in a line

TWO_SEEDS = (
    "Two seeds do not support an interval over trainings: differences between methods are printed without one. Use at "
    "least three seeds."
)

_STILL = 0.005  # half a point; of errors the same part of their value
_LOSS = 0.05  # of the first round's
_LOST, _LOST_OF_ERRORS = 0.03, 0.1  # three points; of errors a tenth of their value
_PAST_BEST = (
    "Tune lr and weight_decay, or keep each client's best round: evaluation.stop = 'validated' with "
    "data.validation_fraction."
)
_MEANT = (SKLEARN + "majority", SKLEARN + "mean")  # what they say of everybody is what they are for
_NO_MORE = 0.02
_FOLDS = {
    "memory": "; give a function from a seed to a federation for folds",
    "tables": "; 'folds' in [data] gives each seed test rows of its own",
}


def unfinished(runs: Sequence[RunResults], metric: str) -> list[str]:
    """The methods whose training ended too early, or too late.

    Too early: with every seed the metric got better in the last quarter of the rounds, on average by more than half a
    point; or the training loss fell from the third quarter to the last by more than a twentieth of the first round's,
    and the metric did not get worse. Too late: with every seed a metric ends worse than it was after the round in which
    its mean over the seeds was best, on average by more than three points, of errors by more than a tenth.
    """
    found = []
    for method in methods_of(runs):
        own = [run for run in runs if run.method == method]
        still = _still_better(own, metric) or _still_learning(own, metric)
        if still:
            found.append(
                f"{display_name(method)} has not converged: in the last quarter of the rounds {still}; more rounds may "
                "change the verdict."
            )
        worse = [text for name in dict.fromkeys((metric, "auc")) if (text := _past_best(own, name))][:1]
        found += [f"{display_name(method)} {text}. {_PAST_BEST}" for text in worse]
    return found


def _still_better(runs: Sequence[RunResults], metric: str) -> str:
    rises = [pair for run in runs if (pair := _last_quarter(run, metric)) is not None]
    if not rises or min(rise for rise, _ in rises) <= 0:
        return ""
    rise, value = (float(np.mean(column)) for column in zip(*rises, strict=True))
    return f"it still gained {amount(metric, rise)}" if rise > _part(_STILL, metric, value) else ""


def _still_learning(runs: Sequence[RunResults], metric: str) -> str:
    """By the loss, which moves where the metric does not yet: an accuracy while a class is rare."""
    rises = [pair for run in runs if (pair := _last_quarter(run, metric)) is not None]
    losses = [own for run in runs if (own := _losses(run)) is not None]
    if not rises or len(losses) < len(runs):
        return ""
    first, before, last = np.array(losses).T
    rise, value = (float(np.mean(column)) for column in zip(*rises, strict=True))
    if (before <= last).any() or np.mean(before - last) <= _LOSS * abs(np.mean(first)):
        return ""
    worse = rise < -_part(_STILL, metric, value)
    return "" if worse else f"its training loss still fell from {np.mean(before):.3g} to {np.mean(last):.3g}"


def _losses(run: RunResults) -> tuple[float, float, float] | None:
    """The training loss of the first round, and its means over the third and the last quarter of the rounds."""
    known = [
        (line.round, line.train_loss)
        for line in run.rounds
        if line.train_loss is not None and np.isfinite(line.train_loss)
    ]
    end = max((line.round for line in run.rounds), default=0)
    before = [loss for number, loss in known if 0.5 * end < number <= 0.75 * end]
    last = [loss for number, loss in known if number > 0.75 * end]
    return (known[0][1], float(np.mean(before)), float(np.mean(last))) if before and last else None


def _last_quarter(run: RunResults, metric: str) -> tuple[float, float] | None:
    """By how much the mean got better, and what it was before."""
    curve = _curve(run, metric)
    before = [number for number in curve if number <= 0.75 * max(curve)]
    if not before:
        return None
    start, end = curve[max(before)], curve[max(curve)]
    return metric_of(metric).direction * (end - start), start


def _past_best(runs: Sequence[RunResults], metric: str) -> str:
    """What the metric was at its best and what is reported, which need not be that of the last round."""
    curves = [_curve(run, metric) for run in runs if run.summary and metric in run.summary.spreads]
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
    was, now = shown(metric, means[best]), shown(metric, float(np.mean(ends)))
    return f"was better after round {best} ({was}) than it is at the end ({now})"


def _curve(run: RunResults, metric: str) -> dict[int, float]:
    """The mean over the clients by evaluated round."""
    return {line.round: line.spreads[metric].mean for line in run.rounds if metric in line.spreads}


def _part(share: float, metric: str, value: float) -> float:
    """What counts as a change of a metric: of errors a part of their value."""
    return share * (1.0 if metric_of(metric).higher_is_better else abs(value))


def below(found: Sequence[MethodVerdict], base: str, metric: str) -> list[str]:
    """One line for the federated methods that a model that needs no federation is as good as: those that are below it,
    and those whose mean is not above it though their interval has 0 in it.
    """
    worse = [v for v in found if v.gain.mean <= 0]
    none = amount(metric, 0.0)  # as it is printed
    lost = [v for v in worse if v.gain.sign < 0 and amount(metric, -v.gain.mean) != none]
    parts, alone = [], f"{display_name(base)}, which needs no federation"
    if lost:
        each = ", ".join(f"{display_name(v.method)} (by {amount(metric, -v.gain.mean)})" for v in lost)
        parts.append(f"Worse than {alone}: {each}")
    level = ", ".join(display_name(v.method) for v in worse if v not in lost)
    if level:
        parts.append(f"no better: {level}" if lost else f"No better than {alone}: {level}")
    return [f"{'; '.join(parts)}."] if parts else []


def unequal_rounds(runs: Sequence[RunResults]) -> list[str]:
    """The methods whose finished runs were asked for different numbers of rounds: some went on beside the others."""
    found = []
    for method in methods_of(runs):
        own = [run for run in runs if run.method == method and run.summary and run.summary.rounds]
        asked = {int(run.config.get("rounds", 0)) for run in own} - {0}
        if len(asked) > 1:
            found.append(
                f"{display_name(method)}: seeds have {listed([str(number) for number in sorted(asked)])} rounds."
            )
    return found


def same_rows(runs: Sequence[RunResults]) -> list[str]:
    """One line where seeds differ in nothing but what training draws: clients, rows and targets are the same."""
    by_seed: dict[int, RunResults] = {}
    for run in runs:
        if run.summary:
            by_seed.setdefault(run.seed, run)
    data = {run.data for run in by_seed.values()}
    rows = {run.predictions.marks for run in by_seed.values()}
    if len(by_seed) < 2 or len(rows) > 1 or (rows == {()} and (len(data) > 1 or data == {None})):
        return []  # without predictions the targets alone say it
    which = "training and test" if len(data - {None}) == len(data) == 1 else "test"
    name = str(next(iter(by_seed.values())).config.get("data", {}).get("name", ""))
    way = _FOLDS.get("memory" if name.endswith(" in memory") else name, "")
    return [f"All seeds have the same {which} rows: intervals over seeds are of the training alone{way}."]


def one_class(runs: Sequence[RunResults], metric: str, values: ClientTable) -> list[str]:
    """One line where most rows are of one class and no method's accuracy says more than that.

    The yardstick is the mean over sites of the share that the site's most frequent class has of its training rows.
    """
    if metric != "accuracy":
        return []
    frequent, best = most_frequent(runs, values.sites), max(values.mean(method) for method in values.of_method)
    if frequent < MOSTLY or best > frequent + _NO_MORE:
        return []
    share, most = (metric_text(metric, value) for value in (frequent, best))
    return [
        f"Always predicting a client's most frequent class is right for {share} % of the rows, and no method for more "
        f"than {most} %: compare by another metric, evaluation.compare_by = 'auc' or 'log-loss'."
    ]


def most_frequent(runs: Sequence[RunResults], sites: Collection[str] = ()) -> float:
    """The share of a site's most frequent class of its training rows, averaged over ``sites`` (all if none are given);
    0 where nothing is known of classes.
    """
    held = find_federation_data(runs)
    clients = {} if held is None else held[1].clients
    counts = [np.array(own.classes) for site, own in clients.items() if not sites or site in sites]
    shares = [of.max() / of.sum() for of in counts if of.sum()]
    return float(np.mean(shares)) if shares else 0.0


def without(runs: Sequence[RunResults], metric: str, values: ClientTable) -> list[str]:
    """One line for the finished methods that lack the metric, as log loss where a model has no probabilities."""
    finished = methods_of([run for run in runs if run.summary])
    lacking = [display_name(method) for method in finished if method not in values.of_method]
    return [f"Not compared, for lack of {metric}: {listed(lacking)}."] if lacking else []


def few_seeds(values: ClientTable) -> list[str]:
    """One line where one or two seeds cannot say how much trainings vary, or one client how much clients do."""
    if len(values.seeds) == 2:
        return [TWO_SEEDS]
    if values.pooled:
        over = "the noise alone: they hold for these trainings" if len(values.seeds) == 1 else "seeds alone"
        return [
            "The mean over all clients is known alone: the variation between clients is unknown. Intervals of methods "
            f"are over {over}."
        ]
    if len(values.sites) == 1:
        return ["One client: the variation between clients is unknown. Intervals of methods are over seeds alone."]
    if len(values.seeds) == 1:
        return [
            "One seed: the variation between trainings is unknown. Intervals of methods are over clients alone: they "
            "hold for these trainings."
        ]
    return []


def doubts(runs: Sequence[RunResults]) -> list[str]:
    """What was found of the data beforehand: a column that holds the answer, one class written in two ways."""
    found = find_federation_data(runs)
    return [] if found is None else found[1].doubts


def spent(runs: Sequence[RunResults]) -> list[str]:
    """What each method has spent of its privacy budget, the client that spent most, in one line; or nothing."""
    most: dict[str, float] = {}
    unit = ""
    for run in runs:
        if run.summary and (privacy := run.summary.privacy):
            most[run.method] = max(most.get(run.method, 0.0), *privacy["spent"].values())
            unit = f"of each {'row' if privacy['unit'] == 'sample' else 'client'} (delta {privacy['delta']:g})"
    each = ", ".join(f"{display_name(method)} {value:.3g}" for method, value in most.items())
    return [f"Privacy {unit}: the largest epsilon that a client has spent is {each}."] if most else []


def noisy(values: ClientTable, known: Metric) -> list[str]:
    """One line where metrics had noise when they left the clients: how much of it is in a difference of means."""
    if not values.noise:
        return []
    share, deviations = values.weights / values.weights.sum(), []
    for variances in values.noise.values():
        deviations.append(float(np.sqrt((share**2 * variances).sum(1)).mean()))
    unit = f" {'points' if known.percent else known.unit}".rstrip()
    most = f"{known.scale * max(deviations):.3g}{unit}"
    return [
        f"Metrics left the clients with noise: in a method's mean its standard deviation is at most {most} with each "
        "seed. Intervals have it in them."
    ]


def constant(runs: Sequence[RunResults]) -> dict[str, list[str]]:
    """Return, by method, the sites at which its models predict the same for all test rows with at least half the seeds.

    Sites with fewer than :data:`perfed.report.run_predictions.ENOUGH_ROWS` test rows are left out. The outputs are
    compared, with a relative tolerance of 1e-6 (the logarithms of probabilities for classes), not the metric: if all
    rows of a site have one class, a model that predicts it for all of them is constant only if its outputs are equal.
    Certain outputs (probabilities 0 and 1) that are right for the rows of such a site are not counted.
    """
    times: dict[str, dict[str, list[bool]]] = {}
    for run in runs:
        for site, same in run.predictions.constant.items():
            times.setdefault(run.method, {}).setdefault(site, []).append(same)
    each = {method: [site for site, of in sites.items() if 2 * sum(of) >= len(of)] for method, sites in times.items()}
    return {method: sites for method, sites in each.items() if sites}


def learnt_nothing(found: Constant, sites: int) -> list[str]:
    """One line for each method."""
    told = []
    for method, own in found.items():
        if not method.startswith(POOLED) and method not in _MEANT:
            names = ", ".join([*own[:MOST_NAMES], *["..."] * (len(own) > MOST_NAMES)])
            told.append(
                f"{display_name(method)} predicts the same for every test row at {len(own)} of {sites} clients "
                f"({names}): it has learnt nothing there."
            )
    return told
