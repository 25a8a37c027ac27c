"""A table as the documents have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of cells with a rule below the first."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))
