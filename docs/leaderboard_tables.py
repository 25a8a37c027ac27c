"""The tables of docs/leaderboards.md, from what ``perfed leaderboard`` left behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from markdown_tables import table

from perfed.experiment.published import find_board
from perfed.report.board import Figure, board_notes, board_table

FOLDER = Path(__file__).parent / "results/leaderboards"


def boards() -> list[str]:
    """Names of those that are kept."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def markdown(name: str) -> str:
    """Theirs and ours, and a line for each row that has something to mind."""
    board = find_board(name)
    kept = [Figure(**row) for row in json.loads((FOLDER / f"{name}.json").read_text())]
    noted = {row.name: row.note for row in board.rows}
    figures = [replace(of, note=noted.get(of.method, ""), their_rounds=board.their_rounds) for of in kept]
    made = board_table(figures, board.title, board.metric, board.best_over_test)
    rows = [[f"**{cell}**" if at in made.best else cell for cell in row] for at, row in enumerate(made.rows)]
    notes = "\n".join(f"* {line}" for line in board_notes(figures))
    return f"`perfed leaderboard {name}` ({board.source})\n\n{table(made.header, rows)}\n\n{notes}".strip()
