"""perfed's side of the duel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problem as duel
import torch
from pydantic import PrivateAttr

import perfed
from perfed.model.chain import StageFactory
from perfed.run.callback import Callback
from perfed.training.plan import Plan


class Laps(Callback):
    """Mark the clock at the end of each round."""

    _clock: duel.Clock = PrivateAttr()

    def begin(self, run: Any) -> None:
        """Start the clock."""
        self._clock = duel.Clock()

    def after_round(self, run: Any, record: Any) -> bool:
        """Mark one round."""
        self._clock.lap()
        return False

    @property
    def clock(self) -> duel.Clock:
        """The clock of the run."""
        return self._clock


def run(folder: Path) -> dict[str, Any]:
    """Train and return the clock's result."""
    problem, train, test, weights = duel.read(folder)
    clients = {
        f"{i:03d}": {"x_train": x, "y_train": y, "x_test": a, "y_test": b}
        for i, ((x, y), (a, b)) in enumerate(zip(train, test, strict=True))
    }

    def stage(name: str) -> StageFactory:
        def make(shape: tuple[int, ...]) -> torch.nn.Module:
            network = duel.build(problem.model)
            network.load_state_dict(weights)
            part: torch.nn.Module = getattr(network, name)
            return part

        return make

    settings: dict[str, Any] = {"lr": problem.rate, "optimizer": "sgd", "batch_size": problem.batch, "local_epochs": 1}
    if problem.method == "fedrep":
        settings |= {"local_epochs": problem.head_epochs, "body_epochs": 1}
    if problem.method == "ditto":
        settings["lam"] = problem.pull
    laps = Laps()
    training = perfed.Run(
        perfed.Federation.from_arrays(clients),
        perfed.build_method(problem.method, settings),
        perfed.Model(body=stage("body"), head=stage("head")),
        rounds=problem.rounds,
        seed=problem.order,
        plan=Plan("auto", threads=torch.get_num_threads(), remember=False),
        evaluation=perfed.Evaluation(every=problem.rounds + 1),
        callbacks=[laps],
    )
    summary = training.execute()
    return laps.clock.result(summary["accuracy"]["mean"])


if __name__ == "__main__":
    duel.main(run)
