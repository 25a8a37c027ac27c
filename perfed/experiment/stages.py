"""The stages that a run passes through, told while it is made ready and executed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from perfed.experiment.sklearn_run import SklearnRun
from perfed.plugins import own_mistakes
from perfed.run.run import Run

DATA, PLANNING, PREPARING, ROUNDS, MODELS = "data", "planning", "pre-training", "rounds", "models"
"""Stages of a run; scikit-learn's have models in place of rounds."""


@dataclass(frozen=True)
class News:
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


def execute(make: Callable[[], Run | SklearnRun], tell: Callable[[News], None]) -> dict[str, Any]:
    """Make a run ready and execute it; ``tell`` is told of each stage and round.

    Returns:
        Its summary.

    Raises:
        PerfedError: also where a file of the user's own raises anything.
    """
    now = News(DATA)

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

    with own_mistakes():
        say()
        run = make()
        if isinstance(run, SklearnRun):
            say(stage=MODELS, total=len(run.federation))
            return run.execute(finished)
        before = max(0, run.done)
        say(stage=PREPARING if run.done < 0 else ROUNDS, done=before, total=run.rounds, before=before)
        if isinstance(run, Run) and run.resumed is not None:
            tell(replace(now, remarks=(*run.notes, f"continues from round {run.resumed} to {run.rounds}")))
        run.plan.trying = planning
        return run.execute(finished)
