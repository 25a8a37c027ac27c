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
    numbers = sorted({row["federated"] for row in rows})
    of = {(row["kind"], row["federated"]): row for row in rows}
    lines = [
        [kind, *(", ".join(_percent(of[kind, n][name]) for name in ("ahead", "behind")) for n in numbers)]
        for kind in dict.fromkeys(row["kind"] for row in rows)
    ]
    return table(["unequal variances", *(f"some ahead, some behind, {n} methods" for n in numbers)], lines)


def _skewed(rows: list[Row]) -> str:
    clients = sorted({row["clients"] for row in rows})
    of = {(row["seeds"], row["clients"]): row for row in rows}
    lines = [
        [str(seeds), *(", ".join(_percent(of[seeds, n][end]) for end in ("low", "high")) for n in clients)]
        for seeds in dict.fromkeys(row["seeds"] for row in rows)
    ]
    return table(["seeds", *(f"lower, upper end wrong, {n} clients" for n in clients)], lines)


def _sites_power(rows: list[Row]) -> str:
    seeds = sorted({row["seeds"] for row in rows})
    of = {(row["federated"], row["seeds"]): row for row in rows}
    lines = [
        [str(number), *(_percent(of[number, n]["detected"]) for n in seeds)]
        for number in dict.fromkeys(row["federated"] for row in rows)
    ]
    heads = [f"sites whose gain is detected, {n} seed{'s' if n > 1 else ''}" for n in seeds]
    return table(["federated", *heads], lines)


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
