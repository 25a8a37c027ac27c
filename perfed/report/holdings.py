"""``federation.json`` read back: who holds what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ValidationError

from perfed.report.runs import Run


class Held(BaseModel):
    """What a client holds; ``classes`` and ``domains`` count its training rows of each."""

    rows: dict[str, int]
    inputs: int = 0
    classes: list[int] = []
    domains: list[int] = []
    columns: dict[str, int] = {}


class Holdings(BaseModel):
    """Every client of a run; ``data`` is the same for the same data only."""

    data: str
    classes: list[str]
    domains: list[str]
    clients: dict[str, Held]


def holdings_of(run: Run) -> Holdings | None:
    """Who held what in a run; None where it did not keep that, as older ones, or where it cannot be read."""
    file = Path(run.directory) / "federation.json"
    try:
        return Holdings.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, ValidationError):
        return None


def first_holdings(runs: Sequence[Run]) -> tuple[Run, Holdings] | None:
    """Those of the first run that kept them."""
    return next(((run, found) for run in runs if (found := holdings_of(run)) is not None), None)
