"""Load the runs of several directories that can be compared, and explain why others are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfed.errors import PerfedError
from perfed.plugins import bare_name
from perfed.report.run_results import RunResults, describe_evaluation, list_methods, load_run
from perfed.settings import describe_value, flatten_keys

_FREE = {"name", "description", "method", "seed", "device", "checkpoint_seconds", "plan", "snapshots"}
_PATHS = {("data", "files"), ("data", "test_files")}  # the same tables may be in another place
_WITHOUT_DEFAULTS = {"data", "model", "training", "methods"}  # a key that is missing here differs from one that is set


@dataclass(frozen=True)
class GatheredRuns:
    """Runs that can be compared, in the order in which their methods first appear, then by seed.

    Attributes:
        runs: the runs.
        left_out: a line on each run that is left out, with the reason.
        remarks: lines on what limits the comparison.
    """

    runs: list[RunResults]
    left_out: list[str]
    remarks: list[str]

    @property
    def notes(self) -> list[str]:
        """All lines for the user."""
        return [*(f"left out: {problem}" for problem in self.left_out), *self.remarks]


def load_runs(places: Sequence[Path]) -> list[RunResults]:
    """Return the runs of directories that must all be comparable, ordered as by :func:`gather_runs`.

    Raises:
        PerfedError: a run would be left out; the message has the reason.
    """
    gathered = gather_runs(places)
    if gathered.left_out:
        raise PerfedError(gathered.left_out[0])
    return gathered.runs


def gather_runs(places: Sequence[Path]) -> GatheredRuns:
    """Read run directories, finished or not, and leave out runs that cannot be compared with the others.

    The first readable directory decides on the data set. A run is left out if it cannot be read, has other data, has
    other settings than the same method has in an earlier directory (except for the rounds within one folder), or is
    passed twice.

    Raises:
        PerfedError: no directory can be read; the message has the problem of the first one.
    """
    if not places:
        raise PerfedError("no run directory given; a report needs at least one")
    runs: list[RunResults] = []
    left_out: list[str] = []
    for place in places:
        try:
            run = load_run(Path(place))
            problem = _explain_misfit(run, runs)
        except PerfedError as error:
            problem = str(error)
        if problem:
            left_out.append(problem)
        else:
            runs.append(run)
    if not runs:
        raise PerfedError(left_out[0])
    order = list_methods(runs)
    runs.sort(key=lambda run: (order.index(run.method), run.seed))
    return GatheredRuns(runs, left_out, _describe_limits(runs))


def _explain_misfit(run: RunResults, earlier_runs: Sequence[RunResults]) -> str:
    """Return why a run cannot be compared with earlier ones; empty if it can."""
    same_method = [earlier for earlier in earlier_runs if earlier.method == run.method]
    for earlier in [*same_method, *earlier_runs][:1]:
        difference = _find_difference(run, earlier, same_method=bool(same_method))
        if difference:
            return f"{run.directory}: {difference} in {earlier.directory}"
    for earlier in same_method:
        place = earlier.directory
        if earlier.seed == run.seed and run.directory.resolve() != place.resolve():
            return f"{run.directory}: {run.method} with seed {run.seed} is in {place} already; counted once"
        if earlier.seed == run.seed:
            return f"{run.directory}: given twice; counted once"
    return ""


def _find_difference(run: RunResults, earlier: RunResults, same_method: bool) -> str:
    """Return a text on the first setting that differs: one of the data, or any setting if the method is the same."""
    if run.summary and earlier.summary and run.summary.dataset != earlier.summary.dataset:
        return f"data set '{run.summary.dataset}', not '{earlier.summary.dataset}' as"
    settings, earlier_settings = flatten_keys(run.config), flatten_keys(earlier.config)
    same_folder = run.directory.resolve().parent == earlier.directory.resolve().parent  # one may have more rounds
    for key in dict.fromkeys([*earlier_settings, *settings]):
        if same_folder and key == ("rounds",):
            continue
        absent = key not in settings or key not in earlier_settings
        if key in _PATHS or key[0] in _FREE or (absent and key[0] not in _WITHOUT_DEFAULTS):
            continue
        if key[0] != "data" and not (same_method and _is_setting_of(key, run.method)):
            continue
        if settings.get(key) != earlier_settings.get(key):
            earlier_value = describe_value(earlier_settings.get(key))
            return f"{'.'.join(key)} is {describe_value(settings.get(key))}, not {earlier_value} as"
    return ""


def _is_setting_of(key: tuple[str, ...], method: str) -> bool:
    """Return whether a setting affects a method: any setting does, except those of other methods."""
    name = bare_name(method)
    return key[0] != "methods" or len(key) < 2 or name == bare_name(key[1]) or name.startswith(f"{bare_name(key[1])}+")


def _describe_limits(runs: Sequence[RunResults]) -> list[str]:
    """Return lines on unfinished runs, metrics that some runs lack, and runs that report different values."""
    notes = []
    unfinished = [f"{run.method} seed {run.seed}" for run in runs if run.summary is None]
    if unfinished:
        notes.append(f"not finished, so not in the tables: {', '.join(unfinished)}")
    summaries = [run.summary for run in runs if run.summary]
    counts = Counter(name for summary in summaries for name in summary.spreads)
    with_rounds = sum(1 for summary in summaries if summary.rounds)  # scikit-learn's models have no loss
    rare = [
        f"{name} (in {count} of {len(summaries)} runs)"
        for name, count in counts.items()
        if count < min(with_rounds, len(summaries))
    ]
    if rare:
        notes.append(f"not measured in every run: {', '.join(rare)}")
    descriptions = {describe_evaluation(summary.evaluation) for summary in summaries if summary.evaluation}
    if len(descriptions) > 1:
        notes.append(f"the runs report different numbers: {'; '.join(sorted(descriptions))}")
    return notes
