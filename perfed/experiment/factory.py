"""Building, opening and executing all runs, of methods, scikit-learn's models and blends; their progress events."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perfed.data.federation import Federation
from perfed.datasets.catalogue import Data
from perfed.errors import PerfedError
from perfed.experiment.blend import FILE, BlendRun, open_blend
from perfed.experiment.comparison import USUAL, Comparison, ComparisonSpec, Resources, federated
from perfed.experiment.config import Experiment, validate
from perfed.experiment.estimators import is_baseline
from perfed.experiment.rows import AnyRun
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import open_method_run, resume, start
from perfed.plugins import BLEND, refuse_modules, report_user_errors
from perfed.run.directory import RunDirectory

Key = tuple[str, str, int]
"""The name of a comparison, a method and a seed."""

DATA, PLANNING, PREPARING, ROUNDS, MODELS = "data", "planning", "pre-training", "rounds", "models"
"""The stages of a run; scikit-learn's models are counted in place of rounds."""


@dataclass(frozen=True)
class ProgressEvent:
    """The progress of a run; it can be sent from one process to another.

    Attributes:
        stage: the stage of the run.
        done, total: the number of rounds, or of models.
        before: the number of rounds of earlier sessions.
        accuracy: the accuracy in the last evaluated round.
        remarks: remarks on the run that are shown once, such as the round from which it continues.
    """

    stage: str
    done: int = 0
    total: int = 0
    before: int = 0
    accuracy: float | None = None
    remarks: tuple[str, ...] = ()


def label_run(name: str, method: str, seed: int) -> str:
    """Return what the progress display calls a run."""
    return f"{name}: {method} seed {seed}".removeprefix(": ")


@dataclass
class RunFactory:
    """Builds the runs of comparisons; data that two consecutive runs share are read once.

    Attributes:
        comparisons: the comparisons by name, in directories or (without a directory) in memory.
        resources: the resources of all runs.
        label: returns what the progress display calls the run of a key.
    """

    comparisons: Mapping[str, ComparisonSpec]
    resources: Resources = USUAL
    label: Callable[[str, str, int], str] = label_run
    _data: tuple[tuple[int, Data], Federation] | None = field(default=None, init=False, repr=False)

    def check(self) -> None:
        """Check that this process knows the methods and settings of all runs.

        Raises:
            PerfedError: it does not know one of them, which the message names.
        """
        for comparison in self.comparisons.values():
            comparison.check()

    def __call__(self, name: str, method: str, seed: int) -> AnyRun:
        """Return the run of a key, ready to be executed: a new one, or from its last checkpoint if it had started."""
        comparison = self.comparisons[name]
        where = comparison.directory(method, seed) if isinstance(comparison, Comparison) else None
        if federated([method]) and where is not None and (where / "config.toml").exists():
            with refuse_modules(where, self.resources.trust):
                return resume(where, data_dir=self.resources.data_dir, device=self.resources.device)
        experiment = comparison.experiment(method, seed)
        federation = self._federation(experiment)
        experiment = by_loss(experiment, federation)
        if is_baseline(method):
            return SklearnRun(method, experiment, federation, where)
        if method == BLEND:
            if not isinstance(comparison, Comparison) or where is None:
                raise PerfedError(f"{BLEND}: is made of runs in directories, and these have none")
            return BlendRun(experiment, federation, comparison.finished_candidates(seed), where)
        return start(experiment, federation=federation, out=where, device=self.resources.device)

    def _federation(self, experiment: Experiment) -> Federation:
        source = experiment.seed, experiment.data
        if self._data is None or self._data[0] != source:
            self._data = None  # release the old data before the new are loaded
            self._data = source, experiment.data.load(experiment.seed, self.resources.data_dir)
        return self._data[1]


def open_run(path: Path | str, *, data_dir: Path | None = None, site: str | None = None) -> AnyRun:
    """Return the run in ``path``, whatever kind of run it is, to use its models: nothing is written.

    Args:
        path: the directory of the run.
        data_dir: the first folder in which data files are looked for.
        site: the only site whose model is needed; see :func:`perfed.experiment.start.open_method_run`.

    Raises:
        PerfedError: for the reasons of :func:`perfed.experiment.start.open_method_run`, or if a run without rounds has
            not finished or its files are damaged.
    """
    directory = RunDirectory(Path(path))
    name = directory.method
    if federated([name]):
        return open_method_run(path, data_dir=data_dir, site=site)
    if not directory.finished:
        raise PerfedError(f"{path}: this run has not finished, and so there is no model yet")
    directory.refuse_damage(["config.toml", FILE])
    table = {**tomllib.loads(directory.read_config()), "method": "local"}  # an experiment names a method
    try:
        experiment = validate(table)
    except PerfedError as error:
        raise PerfedError(f"{directory.path / 'config.toml'}: {error}") from None
    federation = experiment.data.load(experiment.seed, data_dir)
    if name == BLEND:
        return open_blend(experiment, federation, directory.path, site)
    return SklearnRun(name, experiment, federation, directory.path)


def by_loss(experiment: Experiment, federation: Federation) -> Experiment:
    """Return the experiment, compared by log loss if its data are tables with classes and it names no metric.

    Log loss is a proper score: reporting other probabilities than the true ones never pays. Accuracy says little where
    a class is rare.
    """
    name, evaluation = experiment.data.name, experiment.evaluation
    of_tables = name == "tables" or (name.endswith(" in memory") and any(c.table is not None for c in federation))
    if evaluation.compare_by or federation.task != "classification" or not of_tables:
        return experiment
    return experiment.model_copy(update={"evaluation": evaluation.model_copy(update={"compare_by": "log-loss"})})


def execute(make: Callable[[], AnyRun], tell: Callable[[ProgressEvent], None]) -> dict[str, Any]:
    """Build a run and execute it.

    Args:
        make: builds the run.
        tell: called with each stage and round.

    Returns:
        The summary of the run.

    Raises:
        PerfedError: the run failed, or a file of the user raised any exception.
    """
    now = ProgressEvent(DATA)

    def say(**changes: Any) -> None:
        nonlocal now
        now = replace(now, **changes)
        tell(now)

    def finished(number: int, total: int, accuracy: float | None) -> None:
        stage = MODELS if now.stage == MODELS else ROUNDS
        say(stage=stage, done=number, total=total, accuracy=now.accuracy if accuracy is None else accuracy)

    @contextmanager
    def planning() -> Iterator[None]:
        before = now.stage
        say(stage=PLANNING)
        try:
            yield
        finally:
            say(stage=before)

    with report_user_errors():
        say()
        run = make()
        before = max(0, run.done)
        stage = MODELS if run.rounds == 0 else PREPARING if run.done < 0 else ROUNDS
        say(stage=stage, done=before, total=run.rounds or len(run.federation), before=before)
        if run.resumed is not None:
            tell(replace(now, remarks=(*run.notes, f"continues from round {run.resumed} to {run.rounds}")))
        run.plan.trying = planning
        return run.execute(finished)
