"""The completions that a shell offers for the arguments of commands; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from perfed.cli.index import LISTS, index
from perfed.data.originals.sources import SOURCES
from perfed.plugins import BLEND

_MARKS = ("config.toml", "comparisons.toml")


def _list_names(list_name: str) -> list[str]:
    return [item["name"] for item in index()[list_name]]


def methods(incomplete: str) -> list[str]:
    """Return the methods that begin with ``incomplete``; after ``METHOD+``, that method with each policy."""
    return [name for name in _methods_and_pairs(incomplete) if name.startswith(incomplete)]


def _methods_and_pairs(incomplete: str) -> list[str]:
    """Return all methods; if ``incomplete`` has a ``+``, the method before it with each policy."""
    method, plus, _ = incomplete.rpartition("+")
    return [f"{method}+{policy}" for policy in _list_names("policies")] if plus else _list_names("methods")


def several_methods(incomplete: str) -> list[str]:
    """Return the completions of the last of several names separated by commas, including models of scikit-learn."""
    before, comma, last = incomplete.rpartition(",")
    earlier_names = before.split(",")
    candidates = [
        *_methods_and_pairs(last),
        BLEND,
        *(name for name in index()["baselines"] if name.islower() and "." not in name),
    ]
    return [f"{before}{comma}{name}" for name in candidates if name.startswith(last) and name not in earlier_names]


def experiments(incomplete: str) -> list[str]:
    """Return the shipped experiments and the ``.toml`` files that begin with ``incomplete``."""
    return [
        *(name for name in _list_names("experiments") if name.startswith(incomplete)),
        *_match_files(incomplete, ".toml"),
    ]


def leaderboards(incomplete: str) -> list[str]:
    """Return the leaderboards that begin with ``incomplete``."""
    return [name for name in _list_names("leaderboards") if name.startswith(incomplete)]


def campaigns(incomplete: str) -> list[str]:
    """Return the ``.toml`` files that begin with ``incomplete``, which may be campaigns."""
    return _match_files(incomplete, ".toml")


def shown(incomplete: str) -> list[str]:
    """Return the names that ``perfed show`` accepts and that begin with ``incomplete``."""
    names = (name for list_name in LISTS for name in _list_names(list_name) if name.startswith(incomplete))
    return list(dict.fromkeys(names))


def lists(incomplete: str) -> list[str]:
    """Return the lists of ``perfed list`` that begin with ``incomplete``."""
    return [name for name in LISTS if name.startswith(incomplete)]


def sources(incomplete: str) -> list[str]:
    """Return the names for ``perfed data get``: sources, and the data sets and experiments that need files."""
    items_with_files = (
        item["name"] for list_name in ("datasets", "experiments") for item in index()[list_name] if item["files"]
    )
    return [name for name in dict.fromkeys((*SOURCES, *items_with_files)) if name.startswith(incomplete)]


def engines(incomplete: str) -> list[str]:
    """Return the engines that begin with ``incomplete``."""
    return [name for name in index()["engines"] if name.startswith(incomplete)]


def run_directories(incomplete: str) -> list[str]:
    """Return directories of runs, comparisons, searches and campaigns, and directories that may contain some."""
    folders = [path for path in _list_siblings(incomplete) if path.is_dir()]
    results = [str(path) for path in folders if any((path / mark).is_file() for mark in _MARKS)]
    inside = (path for path in folders if str(path) in results or not results)
    return [*results, *(f"{path}/" for path in inside if any(child.is_dir() for child in path.iterdir()))]


def _match_files(incomplete: str, suffix: str) -> list[str]:
    return [str(path) for path in _list_siblings(incomplete) if path.suffix == suffix and path.is_file()]


def _list_siblings(incomplete: str) -> Iterator[Path]:
    """Yield the files and folders that begin with ``incomplete``, except hidden ones."""
    path = Path(incomplete)
    folder, start = (path, "") if incomplete.endswith("/") or not incomplete else (path.parent, path.name)
    if folder.is_dir():
        yield from sorted(p for p in folder.iterdir() if p.name.startswith(start) and not p.name.startswith("."))
