"""Checkpoints by time, and at the end."""

from __future__ import annotations

import time
from typing import Any

from pydantic import PrivateAttr

from perfed.run.callback import Callback, Running


class Checkpoints(Callback):
    """Writes a checkpoint where the last one is ``checkpoint_seconds`` old, and after the last round."""

    name = "checkpoint"
    _saved: float = PrivateAttr(0.0)

    def begin(self, run: Running) -> None:
        """Keep a preparation that took long."""
        self._saved = time.perf_counter()
        if run.done == 0 and run.progress.wall >= run.checkpoint_seconds:
            run.save()

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Write one where it is time."""
        if run.at_its_end or time.perf_counter() - self._saved >= run.checkpoint_seconds:
            run.save()
            self._saved = time.perf_counter()
        return False
