"""What leaves a client in every method, and whether it may leave: by what methods and extensions declare themselves."""

from __future__ import annotations

from perfed.errors import PerfedError
from perfed.method.disclosure import Disclosure, Mechanism, Unit, find_disclosure
from perfed.method.extension import Extension
from perfed.method.method import Method
from perfed.method.registry import METHODS, method_names
from perfed.methods.build import build_method

METRICS = Mechanism(
    "metrics of evaluation",
    'with `metrics = "noisy"` at real sites: means over n test rows, each cut to its bound B; noise z B / n',
    "the same; noise z B on a client's mean, or a share of it where the server sees sums alone",
    "B / n (a test row); B (a client)",
)


def check_disclosure(part: Method | Extension, name: str, unit: Unit) -> Disclosure:
    """Return what ``part`` of a run sends, all of which may leave under ``unit``.

    Args:
        part: the method, or one of its extensions.
        name: what messages call it.
        unit: what is protected.

    Raises:
        PerfedError: nothing is declared of it, or an entry has no mechanism; names it.
    """
    disclosure = find_disclosure(type(part))
    if disclosure is None:
        raise PerfedError(
            f"privacy: nothing is declared of what {name} sends, so that it has no mechanism; allowed methods: "
            f"{', '.join(_declared_methods())}"
        )
    if reason := disclosure.refused.get(unit):
        raise PerfedError(f"privacy.unit = '{unit}' has no mechanism for {name}: {reason}")
    for entry_name, kind in disclosure.sent_entries(part).items():
        if not _may_leave(kind, unit):
            raise PerfedError(
                f"privacy.unit = '{unit}' has no mechanism for entry '{entry_name}' of {name} ({kind.name})"
            )
    return disclosure


def leaving_table() -> list[tuple[str, str, str, str]]:
    """Return what leaves in every registered method, for the page on privacy.

    Returns:
        Rows of method, entries of its replies with their kinds, and whether rows and clients can be protected: "yes",
        or why not. Methods of which nothing is declared are refused under both units.

    Example:
        >>> next(row for row in leaving_table() if row[0] == "fedavg")
        ('fedavg', 'shared (parameters), num_samples (number of rows)', 'yes', 'yes')
    """
    methods = [(name, _parts(name)) for name in method_names()]
    return [(name, _list_entries(p), _protect(p, "sample"), _protect(p, "client")) for name, p in methods]


def _declared_methods() -> list[str]:
    """Return the names of the classes of registered methods that declare what they send, sorted."""
    classes = {item.method for item in METHODS.values()}
    return sorted(kind.__name__ for kind in classes if find_disclosure(kind) is not None)


def _may_leave(kind: Mechanism, unit: Unit) -> bool:
    return bool(kind.sample if unit == "sample" else kind.client)


_Parts = list[tuple[Method | Extension, Disclosure | None]]


def _parts(name: str) -> _Parts:
    """Return a method with its default settings, and its extensions, each with what it declares."""
    method = build_method(name)
    parts: list[Method | Extension] = [method, *method.extensions]
    return [(part, find_disclosure(type(part))) for part in parts]


def _list_entries(parts: _Parts) -> str:
    entries: dict[str, Mechanism] = {}
    for part, disclosure in parts:
        if disclosure is None:
            return "not declared"
        entries |= disclosure.sent_entries(part)
    return ", ".join(f"{entry_name} ({kind.name})" for entry_name, kind in entries.items()) or "nothing"


def _protect(parts: _Parts, unit: Unit) -> str:
    for part, disclosure in parts:
        if disclosure is None:
            return "no: nothing is declared"
        if reason := disclosure.refused.get(unit):
            return f"no: {reason}"
        for entry_name, kind in disclosure.sent_entries(part).items():
            if not _may_leave(kind, unit):
                return f"no: {entry_name}"
    return "yes"
