"""The number of samples of each client by class and domain: a summary line, tables for the terminal, an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.client import Client, Split
from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.report.page.federation import draw_stacked_bars
from perfed.report.page.heat import draw_heat_map
from perfed.report.page.html import build_grid, build_section, wrap_figure
from perfed.report.page.style import write_page
from perfed.report.text import TextTable

SPLITS = ("train", "test")
SPLIT_WORDS = {"train": "Training samples", "test": "Test samples"}
NONE = "·"


@dataclass(frozen=True)
class ClassTable:
    """The numbers of samples of all clients in training and test data.

    Attributes:
        name: the name of the data.
        ids: the ids of the clients.
        groups: the group of each client as text; empty if there are no groups.
        classes: the names of the classes; empty for regression.
        sizes: the numbers of samples ``(clients,)`` by split.
        held_out: the number of training samples of all clients that are held out for validation.
        counts: the numbers of samples of each class ``(clients, classes)`` by split.
        domains: the names of the domains; empty if there are none.
        domain_counts: the numbers of samples of each domain ``(clients, domains)`` by split.
    """

    name: str
    ids: list[str]
    groups: list[str]
    classes: list[str]
    sizes: dict[str, NDArray[np.int64]]
    held_out: int
    counts: dict[str, NDArray[np.int64]]
    domains: list[str]
    domain_counts: dict[str, NDArray[np.int64]]

    @classmethod
    def from_federation(cls, federation: Federation) -> ClassTable:
        """Count the samples of a federation; validation samples count as training samples."""
        num_classes = federation.num_classes or 0
        names = federation.class_names or [str(label) for label in range(num_classes)]
        domains = federation.domain_names or [str(domain) for domain in range(federation.num_domains)]
        group = federation.notes.get("group", {})
        counts, domain_counts = (
            {s: np.zeros((len(federation), number), dtype=np.int64) for s in SPLITS}
            for number in (num_classes, len(domains))
        )
        sizes = {s: np.zeros(len(federation), dtype=np.int64) for s in SPLITS}
        for row, client in enumerate(federation):
            for split, part in _iterate_splits(client):
                sizes[split][row] += len(part)
                if num_classes:
                    counts[split][row] += part.class_counts(num_classes)
                if part.has_domains:
                    domain_counts[split][row] += part.domain_counts(len(domains))
        return cls(
            name=federation.name,
            ids=federation.ids,
            groups=[str(group[id_]) for id_ in federation.ids] if group else [],
            classes=list(names) if num_classes else [],
            sizes=sizes,
            held_out=sum(len(client.split("validation") or ()) for client in federation),
            counts=counts,
            domains=list(domains),
            domain_counts=domain_counts,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content as values for JSON."""
        clients = [
            {"client": id_, **({"group": self.groups[row]} if self.groups else {})}
            | {
                split: {
                    "samples": int(self.sizes[split][row]),
                    "classes": self.counts[split][row].tolist(),
                    "domains": self.domain_counts[split][row].tolist(),
                }
                for split in SPLITS
            }
            for row, id_ in enumerate(self.ids)
        ]
        summary = {"dataset": self.name, "summary": self.summary(), "classes": self.classes, "domains": self.domains}
        return {**summary, "held_out": self.held_out, "clients": clients}

    def summary(self) -> str:
        """Return a line with the numbers of clients, classes, domains and samples."""
        parts = [f"{self.name}: {len(self.ids)} clients"]
        if self.groups:
            parts[0] += f" in {len(set(self.groups))} groups"
        if self.classes:
            numbers = (self.counts["train"] > 0).sum(axis=1)
            parts.append(f"{len(self.classes)} classes, {_format_range(numbers)} per client")
        if self.domains:
            numbers = (self.domain_counts["train"] > 0).sum(axis=1)
            parts.append(f"{len(self.domains)} domains, {_format_range(numbers)} per client")
        held_out = {"train": f" with {self.held_out} held out for validation" if self.held_out else ""}
        for split, size in self.sizes.items():
            parts.append(f"{split} {_format_range(size)} each, {size.sum()} in all{held_out.get(split, '')}")
        return "; ".join(parts)


def _iterate_splits(client: Client) -> Iterator[tuple[str, Split]]:
    for name in ("train", "validation", "test"):
        split = client.split(name)
        if split is not None:
            yield ("test" if name == "test" else "train"), split


def _format_range(numbers: NDArray[np.int64]) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"


def count_tables(table: ClassTable) -> Iterator[TextTable]:
    """Yield a table with a row per client and a column ``train/test`` per class, then one with the domains."""
    if table.classes or not table.domains:
        yield _count_table(table, table.classes, table.counts)
    if table.domains:
        yield _count_table(table, table.domains, table.domain_counts)


def _count_table(table: ClassTable, names: list[str], counts: dict[str, NDArray[np.int64]]) -> TextTable:
    header = ["client", *(["group"] if table.groups else []), "train", "test", *names]
    rows = []
    for row, id_ in enumerate(table.ids):
        sizes = [*([table.groups[row]] if table.groups else []), *(str(table.sizes[split][row]) for split in SPLITS)]
        rows.append([id_, *sizes, *_format_counts(counts["train"][row], counts["test"][row])])
    return TextTable("", header, rows)


def _format_counts(train: NDArray[np.int64], test: NDArray[np.int64]) -> list[str]:
    return [f"{a}/{b}" if a or b else NONE for a, b in zip(train.tolist(), test.tolist(), strict=True)]


def write_partition_page(table: ClassTable, out: Path) -> Path:
    """Write the picture of the table to ``out``, a self-contained HTML file, and return the path.

    Raises:
        PerfedError: ``out`` is a folder.
    """
    if out.is_dir():
        raise PerfedError(f"--out {out}: is a folder; give the name of an .html file")
    labels = [f"{id_} (group {table.groups[i]})" if table.groups else id_ for i, id_ in enumerate(table.ids)]
    sections = []
    for kind, names, counts in (
        ("class", table.classes, table.counts),
        ("domain", table.domains, table.domain_counts),
    ):
        if not names:
            continue
        figures = [
            wrap_figure(draw_heat_map(f"{SPLIT_WORDS[s]} by client and {kind}", labels, names, counts[s]))
            for s in SPLITS
        ]
        sections.append(build_section(kind, f"By {kind}", build_grid(*figures)))
    totals = {name: [int(table.sizes[split][row]) for split in SPLITS] for row, name in enumerate(labels)}
    sections.append(
        build_section(
            "sizes", "Samples", build_grid(wrap_figure(draw_stacked_bars("Samples of each client", SPLITS, totals)))
        )
    )
    return write_page(out, f"Partition of {table.name}", table.summary(), sections)
