"""Who was used when, from ``rounds.jsonl``; read when it is asked for, since it names every client of every round."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfed.report.runs import Run


@dataclass(frozen=True)
class Participation:
    """``used`` ``(rounds, clients)`` says whose replies were used in the rounds ``rounds``; clients are ``ids``."""

    rounds: tuple[int, ...]
    ids: tuple[str, ...]
    used: NDArray[np.bool_]

    @property
    def partial(self) -> bool:
        """Whether some round left somebody out."""
        return not bool(self.used.all())

    @property
    def so_far(self) -> dict[int, float]:
        """Share of the clients that have been used by the end of each round."""
        shares = np.maximum.accumulate(self.used, axis=0).mean(1)
        return dict(zip(self.rounds, shares.tolist(), strict=True))

    @property
    def everybody_at_the_end(self) -> bool:
        """Whether the last round used everybody and some round before did not."""
        return self.partial and bool(self.used[-1].all())


def participation(run: Run) -> Participation | None:
    """That of a finished run; None where a round does not say it."""
    if run.clients is None or not run.rounds:
        return None
    place = {name: number for number, name in enumerate(run.clients.ids)}
    used = np.zeros((len(run.rounds), len(place)), dtype=bool)
    with (run.directory / "rounds.jsonl").open(encoding="utf-8") as file:
        for row, text in zip(range(len(run.rounds)), file, strict=False):
            there = json.loads(text).get("participants")
            if not isinstance(there, list) or not all(isinstance(name, str) for name in there):
                return None
            used[row, [place[name] for name in there if name in place]] = True
    return Participation(tuple(line.round for line in run.rounds), run.clients.ids, used)
