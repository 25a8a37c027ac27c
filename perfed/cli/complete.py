"""What a shell offers when the user presses Tab; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from perfed.cli.index import LISTS, index
from perfed.data.originals.sources import SOURCES
from perfed.plugins import BLEND

_MARKS = ("config.toml", "comparisons.toml")


def _list_names(what: str) -> list[str]:
    return [item["name"] for item in index()[what]]


def methods(incomplete: str) -> list[str]:
    """Return methods that begin so; after METHOD+ with each policy."""
    return [name for name in _methods_and_pairs(incomplete) if name.startswith(incomplete)]


def _methods_and_pairs(incomplete: str) -> list[str]:
    """Return all methods; if ``incomplete`` has a ``+``, the method before it with each policy."""
    method, plus, _ = incomplete.rpartition("+")
    return [f"{method}+{policy}" for policy in _list_names("policies")] if plus else _list_names("methods")


def several_methods(incomplete: str) -> list[str]:
    """Return the last of several names that are separated by commas, scikit-learn's models among them."""
    before, comma, last = incomplete.rpartition(",")
    used = before.split(",")
    known = [
        *_methods_and_pairs(last),
        BLEND,
        *(name for name in index()["baselines"] if name.islower() and "." not in name),
    ]
    return [f"{before}{comma}{name}" for name in known if name.startswith(last) and name not in used]


def experiments(incomplete: str) -> list[str]:
    """Return shipped experiments and the user's own files."""
    return [
        *(name for name in _list_names("experiments") if name.startswith(incomplete)),
        *_match_files(incomplete, ".toml"),
    ]


def leaderboards(incomplete: str) -> list[str]:
    """Return leaderboards that begin so."""
    return [name for name in _list_names("leaderboards") if name.startswith(incomplete)]


def campaigns(incomplete: str) -> list[str]:
    """Return files that may be campaigns."""
    return _match_files(incomplete, ".toml")


def shown(incomplete: str) -> list[str]:
    """Return whatever ``perfed show`` knows."""
    found = (name for what in LISTS for name in _list_names(what) if name.startswith(incomplete))
    return list(dict.fromkeys(found))


def lists(incomplete: str) -> list[str]:
    """Return what ``perfed list`` knows."""
    return [name for name in LISTS if name.startswith(incomplete)]


def sources(incomplete: str) -> list[str]:
    """Return what ``perfed data get`` knows: files by their names, data sets and experiments that need some."""
    needing = (item["name"] for what in ("datasets", "experiments") for item in index()[what] if item["files"])
    return [name for name in dict.fromkeys((*SOURCES, *needing)) if name.startswith(incomplete)]


def engines(incomplete: str) -> list[str]:
    """Return engines that begin so."""
    return [name for name in index()["engines"] if name.startswith(incomplete)]


def run_directories(incomplete: str) -> list[str]:
    """Return directories of runs, comparisons, searches and campaigns, and those on the way to them."""
    folders = [path for path in _list_siblings(incomplete) if path.is_dir()]
    results = [str(path) for path in folders if any((path / mark).is_file() for mark in _MARKS)]
    inside = (path for path in folders if str(path) in results or not results)
    return [*results, *(f"{path}/" for path in inside if any(child.is_dir() for child in path.iterdir()))]


def _match_files(incomplete: str, suffix: str) -> list[str]:
    return [str(path) for path in _list_siblings(incomplete) if path.suffix == suffix and path.is_file()]


def _list_siblings(incomplete: str) -> Iterator[Path]:
    """What begins so on disk, without what is hidden."""
    begun = Path(incomplete)
    folder, start = (begun, "") if incomplete.endswith("/") or not incomplete else (begun.parent, begun.name)
    if folder.is_dir():
        yield from sorted(p for p in folder.iterdir() if p.name.startswith(start) and not p.name.startswith("."))
