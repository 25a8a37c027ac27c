"""TensorBoard: the numbers of every round as scalars (extra ``tensorboard``)."""

from __future__ import annotations

from typing import Any

from pydantic import PrivateAttr

from perfed.errors import PerfedError
from perfed.run.callback import Callback, Running, collect_numbers


class TensorBoard(Callback):
    """Writes event files, which ``tensorboard --logdir`` shows.

    Attributes:
        folder: where they go; empty: ``tensorboard/`` in the run's directory.
    """

    name = "tensorboard"
    needs = "tensorboard"
    folder: str = ""
    _writer: Any = PrivateAttr(None)

    def begin(self, run: Running) -> None:
        """Open the files; rounds that a resumed run repeats replace those in the files."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder or (run.directory and str(run.directory.path / "tensorboard"))
        if not folder:
            raise PerfedError("callbacks.tensorboard.folder: is needed where the run has no directory")
        self._writer = SummaryWriter(folder, purge_step=run.done + 1)

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Write the round's numbers."""
        for name, value in collect_numbers(record).items():
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()
        return False

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Close the event files."""
        self._writer.close()
