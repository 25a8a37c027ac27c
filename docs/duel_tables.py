"""The tables of docs/benchmarks.md on other programs, from the results that ``benchmarks/duel/duel.py`` keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markdown_tables import table

KEPT = Path(__file__).parent / "results/duel.json"
PROGRAMS = {
    "perfed": "perfed",
    "fluke": "fluke",
    "pfllib": "PFLlib",
    "pfl": "pfl",
    "fedjax": "FedJAX",
    "flower": "Flower",
}
NETWORKS = {"mlp-small": "MLP 15-64-64-20", "mlp-large": "MLP 784-256-128-64-10", "cnn": "CNN 16-32, 128"}
METHODS = {"fedavg": "FedAvg", "fedrep": "FedRep", "ditto": "Ditto"}
AIMS = {"mlp-small": {"": 20.0}, "mlp-large": {"": 20.0}, "cnn": {"fedavg": 1.5, "fedrep": 5.0}}
"""Network -> method, or all -> how many times as fast as every program perfed was to be."""

Row = dict[str, Any]


def rounds() -> str:
    """Milliseconds of a round, and their ratio to perfed's."""
    return _table(lambda row: f"{1e3 * row['round']:.0f}{_ratio(row)}")


def needs() -> str:
    """Seconds of the first round, and the peak of memory."""
    return _table(lambda row: f"{row['first_round']:.1f} s, {row['peak_mb']:.0f} MB")


def aims() -> str:
    """What was aimed at and reached: least and most of the ratios, void ones left out."""
    wanted = [(network, method, aim) for network, of in AIMS.items() for method, aim in of.items()]
    lines = []
    for network, method, aim in wanted:
        of = [row for row in _rows() if row["model"] == network and method in ("", row["method"])]
        told = [row for row in of if row["program"] != "perfed" and row["times"] is not None]
        others = sorted(told, key=lambda row: float(row["times"]))
        name = f"{NETWORKS[network]}{f', {METHODS[method]}' if method else ''}"
        if not others:
            lines.append([name, f"{aim:g} ×", "void", ""])
            continue
        least, most = others[0], others[-1]
        by = f"{PROGRAMS[least['program']]}, {METHODS[least['method']]}"
        reached = f"{least['times']:.1f} × ({by}) to {most['times']:.1f} ×"
        lines.append([name, f"{aim:g} ×", reached, "met" if least["times"] >= aim else "**missed**"])
    return table(["", "aim: as fast as every program", "reached", ""], lines)


def _rows() -> list[Row]:
    rows: list[Row] = json.loads(KEPT.read_text())
    return rows


def _ratio(row: Row) -> str:
    if row["program"] == "perfed":
        return ""
    return " (void)" if row["times"] is None else f" ({row['times']:.1f} ×)"


def _table(cell: Callable[[Row], str]) -> str:
    """Networks and methods x programs."""
    by = {(row["model"], row["method"], row["program"]): row for row in _rows()}

    def at(key: tuple[str, str, str]) -> str:
        return "" if key not in by else "failed" if "error" in by[key] else cell(by[key])

    lines = [
        [title, shown, *(at((network, method, program)) for program in PROGRAMS)]
        for network, title in NETWORKS.items()
        for method, shown in METHODS.items()
        if any((network, method, program) in by for program in PROGRAMS)
    ]
    load = max(row["load"] for row in by.values())
    return f"(load at most {load:.1f})\n\n{table(['network', 'method', *PROGRAMS.values()], lines)}"


TABLES: dict[str, Callable[[], str]] = {"duel": rounds, "duel's first rounds and memory": needs, "duel's aims": aims}
"""Table's name -> the table."""
