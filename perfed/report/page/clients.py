"""The table of the clients that a reader can search: what each holds, and what each method gives it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from perfed.errors import some
from perfed.report.holdings import Held, Holdings, first_holdings
from perfed.report.page.forms import data, heading, note, scrolled
from perfed.report.page.study import Study
from perfed.report.text import UNKNOWN, axis_title, metric_text

FIRST_ROWS = 20  # that are in the page without the script
MOST_NAMES = 6  # of classes or domains of a client

Column = tuple[str, Callable[[str], str | None]]
"""Head of a column, and its cell of a client."""


def clients_table(study: Study) -> str:
    """The table with its search; the script fills it, the first rows are there without. Nothing without clients."""
    sites, metric = study.table.sites, str(study.metric)
    if not study.metric or not sites:
        return ""
    kept = first_holdings(study.runs)
    columns: list[Column] = [("Client", str), *(_held_columns(kept[1]) if kept else _sample_columns(study))]
    place = {site: column for column, site in enumerate(sites)}
    for method, values in study.table.of_method.items():
        columns.append((f"{method}, {axis_title(metric)}", _measured(metric, values, place)))
    rows = [[cell(site) for _, cell in columns] for site in sites]
    head = "".join(heading(text) for text, _ in columns)
    body = "".join(_line(row) for row in rows[:FIRST_ROWS])
    search = (
        '<label class="pick">Search clients, classes, domains <input type="search" name="client" autocomplete="off">'
        '</label><span id="clients-found" class="note" role="status"></span>'
    )
    inside = f'<table id="clients-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    said = f" What clients hold is that of seed {kept[0].seed}." if kept else ""
    words = len(columns) - len(study.table.of_method)
    parts = [
        "<h3>Clients</h3>" if study.reference else "",
        f'<div class="picks script-only">{search}</div>',
        scrolled("Clients", inside, "tall"),
        note(f"Means over the seeds.{said}"),
        data("clients-data", {"rows": rows, "words": words}),
    ]
    return "".join(parts)


def _measured(metric: str, values: Any, place: Mapping[str, int]) -> Callable[[str], str | None]:
    there = np.isfinite(values)
    means = np.where(there, values, 0).sum(0) / np.maximum(there.sum(0), 1)

    def cell(site: str) -> str | None:
        return metric_text(metric, float(means[place[site]])) if there[:, place[site]].any() else None

    return cell


def _held_columns(held: Holdings) -> list[Column]:
    """Rows, classes, domains, columns and inputs; what no client has, or all have the same of, is left out."""
    clients = list(held.clients.values())

    def of(text: Callable[[Held], str | None]) -> Callable[[str], str | None]:
        return lambda site: text(held.clients[site]) if site in held.clients else None

    found: list[Column] = [
        (f"Rows: {split}", of(lambda c, split=split: str(c.rows.get(split, 0))))  # type: ignore[misc]
        for split in ("train", "validation", "test")
        if any(split in client.rows for client in clients)
    ]
    if held.classes:
        found.append(("Classes", of(lambda c: _named(c.classes, held.classes))))
    if held.domains:
        found.append(("Domains", of(lambda c: _named(c.domains, held.domains))))
    if any(client.columns for client in clients):
        found.append(("Columns: shared", of(lambda c: str(c.columns.get("shared", 0)))))
        if any(client.columns.get("some") for client in clients):
            found.append(("Columns: some sites", of(lambda c: str(c.columns.get("some", 0)))))
        found.append(("Columns: own", of(lambda c: str(c.columns.get("own", 0)))))
    if len({client.inputs for client in clients}) > 1:
        found.append(("Inputs", of(lambda c: str(c.inputs))))
    return found


def _named(counts: Sequence[int], names: Sequence[str]) -> str:
    there = [name for count, name in zip(counts, names, strict=False) if count]
    if len(there) == len(names) and len(names) > MOST_NAMES:
        return f"all {len(names)}"
    return some(there, MOST_NAMES)


def _sample_columns(study: Study) -> list[Column]:
    """Rows as ``clients.csv`` has them, of runs that kept no more."""
    found: dict[str, dict[str, str]] = {}
    for run in study.runs:
        for name, values in (run.clients.samples or {}).items() if run.clients else ():
            numbers = found.setdefault(f"Rows: {name.removeprefix('n_')}", {})
            for site, value in zip(run.clients.ids, values, strict=True) if run.clients else ():
                numbers.setdefault(site, f"{value:g}")
    return [(name, numbers.get) for name, numbers in found.items()]


def _line(cells: Sequence[str | None]) -> str:
    first, *others = (UNKNOWN if cell is None else escape(cell) for cell in cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
