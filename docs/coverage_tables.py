"""The tables of how often the verdict is wrong, from the shares that ``benchmarks/verdict_coverage.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markdown_tables import table

FILE = Path(__file__).parent / "results/verdict-coverage.json"

Row = dict[str, Any]


def markdown() -> str:
    """Two methods, several methods, and single sites; in % of comparisons in which nothing differs."""
    kept = json.loads(FILE.read_text())
    parts = [
        "`python benchmarks/verdict_coverage.py`",
        _two(kept["two"]),
        _family(kept["family"]),
        _sites(kept["sites"]),
    ]
    return "\n\n".join(parts)


def _two(rows: list[Row]) -> str:
    effects = sorted({row["a"] for row in rows})
    lines = []
    for key in dict.fromkeys((row["seeds"], row["clients"], row["b"], row["e"]) for row in rows):
        cells = {row["a"]: row for row in rows if (row["seeds"], row["clients"], row["b"], row["e"]) == key}
        shown = [f"{_percent(cells[a]['wrong'])} ({cells[a]['width']:.1f})" if a in cells else "–" for a in effects]
        lines.append([*(f"{value:g}" for value in key), *shown])
    return table(["seeds", "clients", "b", "e", *(f"a = {a:g}" for a in effects)], lines)


def _family(rows: list[Row]) -> str:
    lines = []
    for key in dict.fromkeys((row["alone"], row["federated"], row["seeds"]) for row in rows):
        of = {row["a"]: row for row in rows if (row["alone"], row["federated"], row["seeds"]) == key}
        lines.append(
            [*map(str, key), *(f"{_percent(of[a]['ahead'])}, {_percent(of[a]['behind'])}" for a in sorted(of))]
        )
    effects = sorted({row["a"] for row in rows})
    return table(["local rows", "federated", "seeds", *(f"some ahead, some behind, a = {a:g}" for a in effects)], lines)


def _sites(rows: list[Row]) -> str:
    lines = [
        [
            *(str(row[key]) for key in ("federated", "seeds", "of", "rows")),
            *(_percent(row[key]) for key in ("sites", "comparisons", "advice")),
        ]
        for row in rows
    ]
    head = ["federated", "seeds", "sites", "test rows", "sites that gain", "with any gain", "with advice to federate"]
    return table(head, lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
