"""Weights & Biases: the configuration, and the numbers of every round (extra ``wandb``)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PrivateAttr

from perfed.errors import PerfedError
from perfed.run.callback import Callback, Running, collect_numbers


class WandB(Callback):
    """Makes a run of a W&B project; a run that is resumed goes on in it.

    Attributes:
        project: its name.
        mode: "online", "offline" (``wandb sync`` sends the files later), or empty: what W&B is set to (``WANDB_MODE``).
        folder: where its files go; empty: the run's directory.
    """

    name = "wandb"
    needs = "wandb"
    project: str = "perfed"
    mode: Literal["", "online", "offline"] = ""
    folder: str = ""
    _run: Any = PrivateAttr(None)

    def begin(self, run: Running) -> None:
        """Make the run, or go on in the run that there is."""
        import wandb

        try:
            self._run = wandb.init(
                project=self.project,
                id=self.state.get("run"),
                name=f"{run.name} seed {run.seed}",
                config=run.config or {"method": run.name, "seed": run.seed, "rounds": run.rounds},
                dir=self.folder or (run.directory and run.directory.path),
                mode=self.mode or None,
                resume="allow",
                reinit="finish_previous",  # that of a run which was interrupted
            )
        except wandb.Error as error:
            raise PerfedError(f"callbacks.wandb: {error}") from None
        self.state["run"] = self._run.id

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Log the round's numbers."""
        self._run.log(collect_numbers(record), step=record["round"])
        return False

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Send what is left."""
        self._run.finish()
