"""What leaves a client in every method, and whether it may leave, from the declarations of methods and extensions."""

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
    """Return the disclosure of ``part``, after checking that every entry has a mechanism under ``unit``.

    Args:
        part: the method, or one of its extensions.
        name: name of the part in messages.
        unit: the protected unit.

    Raises:
        PerfedError: if the part declares nothing, or an entry has no mechanism; names it.
    """
    disclosure = find_disclosure(type(part))
    if disclosure is None:
        raise PerfedError(
            f"privacy: {name} does not declare what it sends, so that it has no mechanism; allowed methods: "
            f"{', '.join(_list_declaring_methods())}"
        )
    if reason := disclosure.refused.get(unit):
        raise PerfedError(f"privacy.unit = '{unit}' has no mechanism for {name}: {reason}")
    for entry_name, kind in disclosure.sent_entries(part).items():
        if not _may_leave(kind, unit):
            raise PerfedError(
                f"privacy.unit = '{unit}' has no mechanism for entry '{entry_name}' of {name} ({kind.name})"
            )
    return disclosure


def list_disclosures() -> list[tuple[str, str, str, str]]:
    """Return what leaves a client in every registered method, for the page on privacy.

    Returns:
        One row for each method: its name, the entries of its replies with their kinds, whether rows can be protected
        and whether clients can ("yes", or why not). Methods that declare nothing are refused under both units.

    Example:
        >>> next(row for row in list_disclosures() if row[0] == "fedavg")
        ('fedavg', 'shared (parameters), num_samples (number of rows)', 'yes', 'yes')
    """
    methods = [(name, _list_parts(name)) for name in method_names()]
    return [
        (name, _list_entries(parts), _explain_protection(parts, "sample"), _explain_protection(parts, "client"))
        for name, parts in methods
    ]


def _list_declaring_methods() -> list[str]:
    """Return the names of the classes of registered methods that declare what they send, sorted."""
    classes = {item.method for item in METHODS.values()}
    return sorted(kind.__name__ for kind in classes if find_disclosure(kind) is not None)


def _may_leave(kind: Mechanism, unit: Unit) -> bool:
    return bool(kind.sample if unit == "sample" else kind.client)


_Parts = list[tuple[Method | Extension, Disclosure | None]]


def _list_parts(name: str) -> _Parts:
    """Return a method with its default settings, and its extensions, each with its disclosure."""
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


def _explain_protection(parts: _Parts, unit: Unit) -> str:
    """Return "yes" if the unit can be protected, otherwise "no" and the reason."""
    for part, disclosure in parts:
        if disclosure is None:
            return "no: nothing is declared"
        if reason := disclosure.refused.get(unit):
            return f"no: {reason}"
        for entry_name, kind in disclosure.sent_entries(part).items():
            if not _may_leave(kind, unit):
                return f"no: {entry_name}"
    return "yes"
