"""The tables of docs/scale.md, from the numbers that benchmarks/many_clients.py and benchmarks/messages.py keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markdown_tables import table

FOLDER = Path(__file__).parent / "results"
FAR = 10_000_000
"""Clients to which the straight line through those of 1,000 and 100,000 is drawn."""

Row = dict[str, Any]
Cell = Callable[[Row], str]


def _kept(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def _both(name: str, unit: float = 1.0) -> Cell:
    """Wall and processor time; the latter alone where that is all there is."""

    def cell(row: Row) -> str:
        wall = f"{_short(unit * row[f'{name}_s'])} " if f"{name}_s" in row else ""
        return f"{wall}({_short(unit * row[f'{name}_cpu_s'])})"

    return cell


def _of(name: str, unit: float = 1.0) -> Cell:
    return lambda row: _short(unit * row[name])


def _short(value: float) -> str:
    """Two digits at least."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _table(columns: dict[str, Cell], rows: Sequence[Row], titles: Sequence[str]) -> str:
    lines = [[title, *(cell(row) for cell in columns.values())] for title, row in zip(titles, rows, strict=True)]
    return table(["", *columns], lines)


ROUNDS: dict[str, Cell] = {
    "start, s": _both("start"),
    "a round, ms": _both("round", 1000),
    "choosing, ms": _both("choose", 1000),
    "copy of states, ms": _both("snapshot", 1000),
    "peak memory, MB": _of("peak_mb"),
    "kB down": _of("bytes_down", 1e-3),
    "kB up": _of("bytes_up", 1e-3),
    "evaluating all, s": _both("evaluate"),
    "peak then, MB": _of("peak_all_mb"),
    "`federation.json`, MB": _of("holdings_mb"),
}
CHECKPOINTS: dict[str, Cell] = {
    "clients with a state": lambda row: f"{row['next_files']:,}",
    "first, s": _both("first"),
    "after one more round, s": _both("next"),
    "its list of files, MB": _of("next_manifest_mb"),
    "of all clients, s": lambda row: _both("all")(row) if "all_s" in row else "",
    "that list, MB": lambda row: _of("all_manifest_mb")(row) if "all_s" in row else "",
}
SIZES: dict[str, Cell] = {
    "message, MB": _of("bytes", 1e-6),
    **{
        title: lambda row, name=name: f"{_short(1000 * row[name]['s'])} ({_short(1000 * row[name]['cpu_s'])})"  # type: ignore[misc]
        for title, name in {
            "pack, ms": "pack",
            "unpack, ms": "unpack",
            "mean, ms per client": "aggregate",
            "journal of three sites, ms": "write",
            "read back, ms": "read",
            "checkpoint, ms": "checkpoint",
        }.items()
    },
}
SITES: dict[str, Cell] = {"kB": _of("bytes", 1e-3), "pack, ms": lambda row: _short(1000 * row["pack"]["s"])}


def _far(rows: Sequence[Row]) -> Row:
    """The straight line through the second and the last row, at :data:`FAR` clients; no wall time, which is noisy."""
    _, near, *_, last = rows
    steps = (FAR - last["clients"]) / (last["clients"] - near["clients"])
    told = [name for name in last if name in near and (not name.endswith("_s") or name.endswith("_cpu_s"))]
    return {name: last[name] + steps * (last[name] - near[name]) for name in told}


def _clients(columns: dict[str, Cell], far: bool = False) -> str:
    kept = _kept("scale")
    rows = [*kept["clients"], *([_far(kept["clients"])] if far else [])]
    titles = [f"{row['clients']:,.0f}" for row in rows]
    if far:
        titles[-1] += ", extrapolated"
    return f"`{kept['command']}` (load at most {kept['load']:.1f})\n\n{_table(columns, rows, titles)}"


def _messages(columns: dict[str, Cell], name: str, key: str) -> str:
    kept = _kept("messages")
    rows = kept[name]
    made = _table(columns, rows, [f"{row[key]:,}" for row in rows])
    return f"`{kept['command']}` (load {kept['load']:.1f})\n\n{made}"


_MANY = {name: ROUNDS[name] for name in ("start, s", "a round, ms", "peak memory, MB")}
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "docs/scale.md": {
        "rounds": lambda: _clients(ROUNDS, far=True),
        "checkpoints": lambda: _clients(CHECKPOINTS),
        "parameters": lambda: _messages(SIZES, "sizes", "parameters"),
        "names": lambda: _messages(SITES, "named", "sites"),
    },
    "docs/benchmarks.md": {"many clients": lambda: _clients(_MANY)},
}
"""Document -> table's name -> the table."""
