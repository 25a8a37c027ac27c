"""The training loss of each local epoch, of the clients that are watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.run.callback import Callback, Running
from perfed.run.callbacks.results import write_arrays


class LocalLosses(Callback):
    """Keeps the losses of local epochs, of the preparation's too, in ``losses/``."""

    name = "losses"

    def begin(self, run: Running) -> None:
        """Store the losses of the preparation."""
        self._store_losses(run)

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Store the losses of the round."""
        self._store_losses(run)
        return False

    def _store_losses(self, run: Running) -> None:
        if run.latest is not None:
            write_arrays(run, losses_to_arrays(run.latest.loss_curves))


def losses_to_arrays(courses: Mapping[str, Sequence[float]]) -> dict[str, dict[str, NDArray[Any]]]:
    """Return losses of local epochs, by client id, as arrays: ``client`` and ``loss`` ``(epochs,)``; or nothing."""
    client = [i for i in sorted(courses) for _ in courses[i]]
    loss = [value for i in sorted(courses) for value in courses[i]]
    return {"losses": {"client": np.array(client), "loss": np.array(loss)}} if loss else {}
