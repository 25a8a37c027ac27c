"""What a reader of a verdict must mind: one line for each thing that is not as the numbers let one think."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax  # type: ignore[import-untyped]

from perfed.engine.metrics import metric_of
from perfed.plugins import POOLED
from perfed.report.against import MethodVerdict
from perfed.report.holdings import holdings_of
from perfed.report.runs import Run, methods_of
from perfed.report.text import amount, listed
from perfed.run import predictions

Constant = Mapping[str, Sequence[str]]
"""By method the sites at which its models say the same of every row."""

ENOUGH_ROWS = 5
"""Test rows of a site from which on models that say the same of all have learnt nothing: few can be alike by chance."""

MOST_NAMES = 5  # of sites in a line

_STILL = 0.005  # half a point; of errors the same part of their value
_SAME = 1e-6
_HARD = (0.0, 1.0, float(np.log(np.finfo(np.float64).tiny)))  # what models without doubts say, and its logarithms
_FOLDS = {
    "memory": "; give a function from a seed to a federation for folds",
    "tables": "; 'folds' in [data] gives each seed test rows of its own",
}


def unfinished(runs: Sequence[Run], metric: str) -> list[str]:
    """The methods that got better with every seed in the last quarter of the rounds, by more than half a point."""
    known, found = metric_of(metric), []
    for method in methods_of(runs):
        curves = [_last_quarter(run, metric) for run in runs if run.method == method]
        rises = [pair for pair in curves if pair is not None]
        if not rises or min(rise for rise, _ in rises) <= 0:
            continue
        rise, value = (float(np.mean(column)) for column in zip(*rises, strict=True))
        if rise > _STILL * (1.0 if known.higher_is_better else abs(value)):
            found.append(
                f"{method} has not converged: in the last quarter of the rounds it still gained "
                f"{amount(metric, rise)}; more rounds may change the verdict."
            )
    return found


def _last_quarter(run: Run, metric: str) -> tuple[float, float] | None:
    """By how much the mean got better, and what it was before."""
    curve = {line.round: line.spreads[metric].mean for line in run.rounds if metric in line.spreads}
    before = [number for number in curve if number <= 0.75 * max(curve)]
    if not before:
        return None
    start, end = curve[max(before)], curve[max(curve)]
    return metric_of(metric).direction * (end - start), start


def below(found: Sequence[MethodVerdict], base: str, metric: str) -> list[str]:
    """One line for the federated methods that a model that needs no federation is as good as: those that are below it,
    and those whose mean is not above it though their interval has 0 in it.
    """
    worse = [v for v in found if v.gain.mean <= 0]
    none = amount(metric, 0.0)  # as it is printed
    lost = [v for v in worse if v.gain.sign < 0 and amount(metric, -v.gain.mean) != none]
    parts = []
    if lost:
        each = ", ".join(f"{v.method} (by {amount(metric, -v.gain.mean)})" for v in lost)
        parts.append(f"Below {base}, which needs no federation: {each}")
    level = ", ".join(v.method for v in worse if v not in lost)
    if level:
        parts.append(f"not above it: {level}" if lost else f"Not above {base}, which needs no federation: {level}")
    return [f"{'; '.join(parts)}."] if parts else []


def unequal_rounds(runs: Sequence[Run]) -> list[str]:
    """The methods whose finished runs were asked for different numbers of rounds: some went on beside the others."""
    found = []
    for method in methods_of(runs):
        own = [run for run in runs if run.method == method and run.summary and run.summary.rounds]
        asked = {int(run.config.get("rounds", 0)) for run in own} - {0}
        if len(asked) > 1:
            found.append(f"{method}: seeds have {listed([str(number) for number in sorted(asked)])} rounds.")
    return found


def same_rows(runs: Sequence[Run]) -> list[str]:
    """One line where seeds differ in nothing but what training draws: clients, rows and targets are the same."""
    by_seed: dict[int, Run] = {}
    for run in runs:
        if run.summary:
            by_seed.setdefault(run.seed, run)
    data = {None if (held := holdings_of(run)) is None else held.data for run in by_seed.values()}
    rows = {predictions.marks(run.directory) for run in by_seed.values()}
    if len(by_seed) < 2 or len(rows) > 1 or (rows == {()} and (len(data) > 1 or data == {None})):
        return []  # without predictions the targets alone say it
    which = "training and test" if len(data - {None}) == len(data) == 1 else "test"
    name = str(next(iter(by_seed.values())).config.get("data", {}).get("name", ""))
    way = _FOLDS.get("memory" if name.endswith(" in memory") else name, "")
    return [f"All seeds have the same {which} rows: intervals over seeds are of the training alone{way}."]


def constant(runs: Sequence[Run]) -> dict[str, list[str]]:
    """By method the sites, of :data:`ENOUGH_ROWS` test rows or more, at which its models say the same of every row with
    at least half of the seeds.

    What they say is compared, to 1e-6 of its size (of classes the logarithms of probabilities), and not how good it is:
    a site whose rows are all of one class tells nothing of a model that is right of all of them, except where what it
    says of them differs. Answers without any doubt (probabilities 0 and 1) that are right of such a site's rows are
    not counted.
    """
    times: dict[str, dict[str, list[bool]]] = {}
    for run in runs:
        for site, same in _constant_in(run).items() if run.summary else ():
            times.setdefault(run.method, {}).setdefault(site, []).append(same)
    each = {method: [site for site, of in sites.items() if 2 * sum(of) >= len(of)] for method, sites in times.items()}
    return {method: sites for method, sites in each.items() if sites}


def _constant_in(run: Run) -> dict[str, bool]:
    last = int(run.summary.evaluation.get("last", 1)) if run.summary else 1
    found: dict[str, bool] = {}
    for file in predictions.read(run.directory, last):
        labels = np.issubdtype(file.targets.dtype, np.integer)
        outputs = file.outputs.reshape(len(file.outputs), -1)
        for site, _, own in file.sites():
            if own.stop - own.start >= ENOUGH_ROWS:
                same = _says_the_same(outputs[own], file.targets[own] if labels else None)
                found[site] = found.get(site, True) and same
    return found


def _says_the_same(outputs: NDArray[np.float64], labels: NDArray[np.int64] | None) -> bool:
    """Whether all rows of ``outputs`` ``(rows, C)`` are equal."""
    said = outputs if labels is None else log_softmax(outputs, axis=1)
    there = np.isfinite(said)
    filled = np.where(there, said, 0.0)
    if (there != there[0]).any() or np.ptp(filled, axis=0).max() > _SAME * np.abs(filled).max():
        return False
    if labels is None or (labels != labels[0]).any() or int(outputs[0].argmax()) != labels[0]:
        return True
    sure = np.isin(outputs[0][np.isfinite(outputs[0])], _HARD).all() and outputs[0].min() < outputs[0].max()
    return not (sure or said[0].max() == 0.0)


def learnt_nothing(found: Constant, sites: int) -> list[str]:
    """One line for each method."""
    told = []
    for method, own in found.items():
        if not method.startswith(POOLED):
            names = ", ".join([*own[:MOST_NAMES], *["..."] * (len(own) > MOST_NAMES)])
            told.append(
                f"{method} says the same of everybody at {len(own)} of {sites} sites ({names}): it has learnt nothing "
                "there."
            )
    return told
