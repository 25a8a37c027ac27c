"""Runs of several directories together: what can be drawn, and one line for each thing that cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfed.errors import PerfedError
from perfed.plugins import bare_name
from perfed.report.run_results import RunResults, load_run, methods_of, reported_by
from perfed.settings import leaves, stated

_FREE = {"name", "description", "method", "seed", "device", "checkpoint_seconds", "plan", "snapshots"}
_OF_PLACES = {("data", "files"), ("data", "test_files")}  # the same tables may lie elsewhere
_GIVEN = {"data", "model", "training", "methods"}  # a key that is there says something; others have defaults


@dataclass(frozen=True)
class Gathered:
    """Runs that can stand beside each other, in the order in which their methods first appear, then by seed.

    Attributes:
        runs: these.
        left_out: why others are not among them.
        remarks: what makes those that are less than comparable.
    """

    runs: list[RunResults]
    left_out: list[str]
    remarks: list[str]

    @property
    def notes(self) -> list[str]:
        """All that is to be said."""
        return [*(f"left out: {problem}" for problem in self.left_out), *self.remarks]


def load_runs(places: Sequence[Path]) -> list[RunResults]:
    """The runs of directories all of which must stand beside each other, ordered as by :func:`gathered`.

    Raises:
        PerfedError: one of them is left out; says why.
    """
    found = gathered(places)
    if found.left_out:
        raise PerfedError(found.left_out[0])
    return found.runs


def gathered(places: Sequence[Path]) -> Gathered:
    """Read run directories, whatever state they are in.

    The first that can be read says which data set it is about. A run that cannot be read, of other data, with other
    settings than the same method has in an earlier directory (but for rounds within one folder), or that is there
    twice, is left out with a line.

    Raises:
        PerfedError: none of them can be read; says why the first cannot.
    """
    if not places:
        raise PerfedError("no run directory given; a report needs at least one")
    runs: list[RunResults] = []
    left_out: list[str] = []
    for place in places:
        try:
            run = load_run(Path(place))
            problem = _misfit(run, runs)
        except PerfedError as error:
            problem = str(error)
        if problem:
            left_out.append(problem)
        else:
            runs.append(run)
    if not runs:
        raise PerfedError(left_out[0])
    order = methods_of(runs)
    runs.sort(key=lambda run: (order.index(run.method), run.seed))
    return Gathered(runs, left_out, _remarks(runs))


def _misfit(run: RunResults, others: Sequence[RunResults]) -> str:
    """Why ``run`` cannot stand beside the others; empty if it can."""
    same = [other for other in others if other.method == run.method]
    for other in [*same, *others][:1]:
        difference = _difference(run, other, same_method=bool(same))
        if difference:
            return f"{run.directory}: {difference} in {other.directory}"
    for other in same:
        if other.seed == run.seed and run.directory.resolve() != other.directory.resolve():
            return f"{run.directory}: {run.method} with seed {run.seed} is in {other.directory} already; counted once"
        if other.seed == run.seed:
            return f"{run.directory}: given twice; counted once"
    return ""


def _difference(run: RunResults, other: RunResults, same_method: bool) -> str:
    """The first setting that differs: of the data, and of the same method in anything."""
    if run.summary and other.summary and run.summary.dataset != other.summary.dataset:
        return f"data set '{run.summary.dataset}', not '{other.summary.dataset}' as"
    now, was = (leaves(one.config) for one in (run, other))
    beside = run.directory.resolve().parent == other.directory.resolve().parent  # one that went on to more rounds
    for key in dict.fromkeys([*was, *now]):
        if beside and key == ("rounds",):
            continue
        absent = key not in now or key not in was
        if key in _OF_PLACES or key[0] in _FREE or (absent and key[0] not in _GIVEN):
            continue
        if key[0] != "data" and not (same_method and _concerns(key, run.method)):
            continue
        if now.get(key) != was.get(key):
            return f"{'.'.join(key)} is {stated(now.get(key))}, not {stated(was.get(key))} as"
    return ""


def _concerns(key: tuple[str, ...], method: str) -> bool:
    """Whether the setting is not another method's."""
    own = bare_name(method)
    return key[0] != "methods" or len(key) < 2 or own == bare_name(key[1]) or own.startswith(f"{bare_name(key[1])}+")


def _remarks(runs: Sequence[RunResults]) -> list[str]:
    """What makes the runs less than comparable: unfinished ones, metrics that some lack, other numbers reported."""
    notes = []
    unfinished = [f"{run.method} seed {run.seed}" for run in runs if run.summary is None]
    if unfinished:
        notes.append(f"not finished, so not in the tables: {', '.join(unfinished)}")
    done = [run.summary for run in runs if run.summary]
    measured = Counter(name for summary in done for name in summary.spreads)
    rounds = sum(1 for summary in done if summary.rounds)  # scikit-learn's models have no loss
    rare = [
        f"{name} (in {count} of {len(done)} runs)" for name, count in measured.items() if count < min(rounds, len(done))
    ]
    if rare:
        notes.append(f"not measured in every run: {', '.join(rare)}")
    found = {reported_by(summary.evaluation) for summary in done if summary.evaluation}
    if len(found) > 1:
        notes.append(f"the runs report different numbers: {'; '.join(sorted(found))}")
    return notes
