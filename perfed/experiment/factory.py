"""The one maker of runs, federated or of scikit-learn, here or in another process; how far one is, is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from perfed.data.federation import Federation
from perfed.datasets.catalogue import Data
from perfed.errors import PerfedError
from perfed.experiment.blend import BlendRun
from perfed.experiment.comparison import USUAL, Comparison, ComparisonSpec, Resources, federated
from perfed.experiment.config import Experiment
from perfed.experiment.estimators import is_baseline
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import resume, start
from perfed.plugins import BLEND, refuse_modules, report_user_errors
from perfed.run.run import Run

Key = tuple[str, str, int]
"""Name of a comparison, method and seed."""

AnyRun = Run | SklearnRun | BlendRun


DATA, PLANNING, PREPARING, ROUNDS, MODELS = "data", "planning", "pre-training", "rounds", "models"
"""Stages of a run; scikit-learn's have models in place of rounds."""


@dataclass(frozen=True)
class ProgressEvent:
    """How far a run is; it can be sent from one process to another.

    Attributes:
        stage: that it is in.
        done, total: rounds, or models.
        before: rounds of earlier sittings.
        accuracy: of the last evaluated round.
        remarks: what is to be said of the run, once; of one that goes on from where.
    """

    stage: str
    done: int = 0
    total: int = 0
    before: int = 0
    accuracy: float | None = None
    remarks: tuple[str, ...] = ()


@dataclass
class RunFactory:
    """Makes the runs of comparisons ready; data that the next run has too are not read again.

    Attributes:
        comparisons: by name, whose runs they are: in directories, or in memory where they have none.
        resources: that they are made with.
    """

    comparisons: Mapping[str, ComparisonSpec]
    resources: Resources = USUAL
    _data: tuple[tuple[int, Data], Federation] | None = field(default=None, init=False, repr=False)

    def label(self, name: str, method: str, seed: int) -> str:
        """Return what people call a run."""
        return f"{name}: {method} seed {seed}" if name else f"{method} seed {seed}"

    def check(self) -> None:
        """Refuse what this process does not know of what the runs are made of.

        Raises:
            PerfedError: says what.
        """
        for comparison in self.comparisons.values():
            comparison.check()

    def __call__(self, name: str, method: str, seed: int) -> AnyRun:
        """Return the run, not executed, where it was if it had begun."""
        of = self.comparisons[name]
        where = of.directory(method, seed) if isinstance(of, Comparison) else None
        if federated([method]) and where is not None and (where / "config.toml").exists():
            with refuse_modules(where, self.resources.trust):
                return resume(where, data_dir=self.resources.data_dir, device=self.resources.device)
        experiment = of.experiment(method, seed)
        federation = self._federation(experiment)
        experiment = by_loss(experiment, federation)
        if is_baseline(method):
            return SklearnRun(method, experiment, federation, where)
        if method == BLEND:
            if not isinstance(of, Comparison) or where is None:
                raise PerfedError(f"{BLEND}: is made of runs in directories, and these have none")
            return BlendRun(experiment, federation, of.finished_candidates(seed), where)
        return start(experiment, federation=federation, out=where, device=self.resources.device)

    def _federation(self, experiment: Experiment) -> Federation:
        which = experiment.seed, experiment.data
        if self._data is None or self._data[0] != which:
            self._data = None  # before there are two
            self._data = which, experiment.data.load(experiment.seed, self.resources.data_dir)
        return self._data[1]


def by_loss(experiment: Experiment, federation: Federation) -> Experiment:
    """Return the experiment, compared by log loss where it is of tables with classes and says nothing of a metric.

    It is proper: nobody gains by other probabilities than one's own. Accuracy is blind where a class is rare.
    """
    name, evaluation = experiment.data.name, experiment.evaluation
    of_tables = name == "tables" or (name.endswith(" in memory") and any(c.table is not None for c in federation))
    if evaluation.compare_by or federation.task != "classification" or not of_tables:
        return experiment
    return experiment.model_copy(update={"evaluation": evaluation.model_copy(update={"compare_by": "log-loss"})})


def execute(make: Callable[[], AnyRun], tell: Callable[[ProgressEvent], None]) -> dict[str, Any]:
    """Make a run ready and execute it; ``tell`` is told of each stage and round.

    Returns:
        Its summary.

    Raises:
        PerfedError: also where a file of the user's own raises anything.
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
        if isinstance(run, SklearnRun | BlendRun):
            say(stage=MODELS, total=len(run.federation))
            return run.execute(finished)
        before = max(0, run.done)
        say(stage=PREPARING if run.done < 0 else ROUNDS, done=before, total=run.rounds, before=before)
        if isinstance(run, Run) and run.resumed is not None:
            tell(replace(now, remarks=(*run.notes, f"continues from round {run.resumed} to {run.rounds}")))
        run.plan.trying = planning
        return run.execute(finished)
