"""A run's events for Python's ``logging``, under the name ``perfed``: quiet, unless somebody listens."""

from __future__ import annotations

import logging
from typing import Any

from perfed.run.callback import Callback, Running

logging.getLogger("perfed").addHandler(logging.NullHandler())
_LOG = logging.getLogger("perfed.run")


class EventLog(Callback):
    """Logs the run's beginning, each round, and its end, at INFO."""

    name = "log"

    def begin(self, run: Running) -> None:
        """Log that the run begins, or the round after which it continues."""
        begins = "begins" if run.done == 0 else f"goes on behind round {run.done}"
        _LOG.info("%s, seed %d: %s, %d rounds", run.name, run.seed, begins, run.rounds)

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Log the round with its training loss, and the mean accuracy if it is known."""
        mean = record.get("accuracy", {}).get("mean")
        accuracy = "" if mean is None else f", accuracy {mean:.4f}"
        loss = record["train_loss"]
        _LOG.info("%s, seed %d: round %d, training loss %.6g%s", run.name, run.seed, record["round"], loss, accuracy)
        return False

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Log that the run has ended, and the callback that ended it, if any."""
        by = f", by '{summary['stopped_by']}'" if "stopped_by" in summary else ""
        _LOG.info("%s, seed %d: ended after round %d%s", run.name, run.seed, summary["rounds"], by)
