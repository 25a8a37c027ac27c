"""The tables of how often the verdict is wrong, from the shares that ``benchmarks/verdict_coverage.py`` keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from markdown_tables import table

FILE = Path(__file__).parent / "results/verdict-coverage.json"

Row = dict[str, Any]


def markdown() -> str:
    """Return the tables of two methods, several methods, unequal variances, skewed effects, and single sites, in %."""
    shares = json.loads(FILE.read_text())
    parts = [
        "`python benchmarks/verdict_coverage.py`",
        _two(shares["two"]),
        _family(shares["family"]),
        _unequal(shares["unequal"]),
        _skewed(shares["skewed"]),
        _sites(shares["sites"]),
        _sites_power(shares["sites_power"]),
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
        cells = [", ".join(_percent(of[a][name]) for name in ("ahead", "behind", "detected")) for a in sorted(of)]
        lines.append([*map(str, key), *cells])
    effects = sorted({row["a"] for row in rows})
    heads = [f"some ahead, some behind, gain detected, a = {a:g}" for a in effects]
    return table(["local rows", "federated", "seeds", *heads], lines)


def _unequal(rows: list[Row]) -> str:
    lines = []
    columns = sorted({(row["a"], row["federated"]) for row in rows})
    for kind in dict.fromkeys(row["kind"] for row in rows):
        shares = {(row["a"], row["federated"]): row["wrong"] for row in rows if row["kind"] == kind}
        lines.append([kind, *(_percent(shares[column]) for column in columns)])
    return table(["unequal variances", *(f"{number} methods, a = {a:g}" for a, number in columns)], lines)


def _skewed(rows: list[Row]) -> str:
    lines, clients = _pivot(rows, "seeds", "clients", ["low", "high"])
    return table(["seeds", *(f"lower, upper end wrong, {n} clients" for n in clients)], lines)


def _sites_power(rows: list[Row]) -> str:
    lines, seeds = _pivot(rows, "federated", "seeds", ["detected"])
    heads = [f"sites whose gain is detected, {n} seed{'s' if n > 1 else ''}" for n in seeds]
    return table(["federated", *heads], lines)


def _pivot(rows: list[Row], line: str, column: str, shares: list[str]) -> tuple[list[list[str]], list[int]]:
    """Return a table line for each value of ``line``, with a cell for each value of ``column``, and these values."""
    columns = sorted({row[column] for row in rows})
    cells = {(row[line], row[column]): ", ".join(_percent(row[share]) for share in shares) for row in rows}
    keys = dict.fromkeys(row[line] for row in rows)
    return [[str(key), *(cells[key, value] for value in columns)] for key in keys], columns


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
