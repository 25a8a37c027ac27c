"""``federation.json`` read back: who holds what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, model_validator

from perfed.report.runs import Run


class Held(BaseModel):
    """What a client holds; ``classes`` and ``domains`` count its training rows of each."""

    rows: dict[str, int]
    inputs: int = 0
    classes: list[int] = []
    domains: list[int] = []
    columns: dict[str, int] = {}


class Holdings(BaseModel):
    """Every client of a run; ``data`` is the same for the same data only, ``doubts`` are about them, a line each."""

    data: str
    classes: list[str]
    domains: list[str]
    doubts: list[str] = []
    clients: dict[str, Held]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for held in self.clients.values():
            for counts, names in ((held.classes, self.classes), (held.domains, self.domains)):
                if counts and len(counts) != len(names):
                    raise ValueError("a client has a number for every class and domain, or none")
        return self


def holdings_of(run: Run) -> Holdings | None:
    """Who held what in a run; None where it did not keep that, as older ones, or where it cannot be read."""
    file = Path(run.directory) / "federation.json"
    try:
        return Holdings.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def first_holdings(runs: Sequence[Run]) -> tuple[Run, Holdings] | None:
    """Those of the first run that kept them."""
    return next(((run, found) for run in runs if (found := holdings_of(run)) is not None), None)
