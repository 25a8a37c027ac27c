"""Progress: a function that is told how far the run is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from perfed.run.callback import Callback, Running

Progress = Callable[[int, int, float | None], None]
"""Called with the round's number, the rounds of the run, and the mean accuracy if it is known."""


class ProgressReporter(Callback):
    """Calls ``tell`` after the preparation and after each round."""

    name = "progress"
    tell: Progress

    def begin(self, run: Running) -> None:
        """Report that the preparation has finished."""
        if run.done == 0:
            self.tell(0, run.rounds, None)

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Report the number of finished rounds and the mean accuracy."""
        self.tell(record["round"], run.rounds, record.get("accuracy", {}).get("mean"))
        return False
