"""``key=value`` assignments: where a key belongs, and what its value is."""

from __future__ import annotations

import difflib
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from perfed.datasets import describe
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, canonical
from perfed.method.extension import extension_class
from perfed.method.method import Method
from perfed.method.registry import entry
from perfed.methods.build import setting_names
from perfed.participation.clock import Clock
from perfed.participation.settings import Participation, table_fields
from perfed.plugins import bare_name
from perfed.run.settings import Evaluation

SECTIONS: dict[str, type[BaseModel]] = {"participation": Participation, "clock": Clock, "evaluation": Evaluation}
"""Tables whose keys may be given without the table's name."""

_COMMAS = re.compile(r",(?![^\[{]*[\]}])")
"""Those that are not within brackets."""
_PART = r"""(?:'[^']+'|"[^"]+"|[^.'"\s]+)"""


def parse_value(text: str) -> Any:
    """Return a value from the command line: TOML (numbers, true, lists, tables), else the text itself.

    A shell takes quotes away, so a flat list may hold texts without them.

    Example:
        >>> parse_value("[1, 2]"), parse_value("[proximal,mine:shrink]"), parse_value("mine:avg")
        ([1, 2], ['proximal', 'mine:shrink'], 'mine:avg')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        inside = text.strip().removeprefix("[").removesuffix("]")
        if len(inside) == len(text.strip()) - 2 and not set(inside) & set("[]{}\"'"):
            return [parse_value(part.strip()) for part in inside.split(",") if part.strip()]
        return text


def override(table: dict[str, Any], assignments: Iterable[str], methods: Sequence[str]) -> dict[str, Any]:
    """Apply ``key=value`` assignments to an experiment's table, without changing it.

    A dotted key is a path (``data.clients=5``, ``methods.flic-hl.lambda1=0``); its parts may be quoted as in TOML
    (``methods.'package.module:NAME'.lr=0.1``). A key that starts with no table's name is looked up among the options of
    the data set, the settings of ``methods`` and of training, participation, clock, evaluation. Names of methods are
    the same in any case.

    Raises:
        PerfedError: not of the form key=value, or a key that is unknown or found in several places.
    """
    result = _copy(canonical(table))
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign or not key:
            raise PerfedError(f"'{assignment}' is not of the form key=value")
        value = parse_value(text)
        for path in resolve(result, key.strip(), methods):
            node = result
            for part in path[:-1]:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise PerfedError(f"unknown key '{key}': '{part}' is a value, not a table")
            node[path[-1]] = value
        result = canonical(result)
    return result


def grid_points(grid: Sequence[str]) -> list[list[str]]:
    """Return every combination of the values of ``key=v1,v2,...``, each a list of assignments.

    Raises:
        PerfedError: no or an empty axis, a key that is there twice, or one that is not for all methods alike.

    Example:
        >>> grid_points(["lr=0.1,1", "batch_size=8"])
        [['lr=0.1', 'batch_size=8'], ['lr=1', 'batch_size=8']]
    """
    axes = [axis_of(entry, "--grid ") for entry in grid]
    if not axes:
        raise PerfedError("--grid: at least one key=v1,v2,... is needed")
    keys = [axis[0].partition("=")[0] for axis in axes]
    if len(set(keys)) < len(keys):
        raise PerfedError(f"--grid: a key is given twice; given: {', '.join(keys)}")
    if "seed" in keys or "method" in keys:
        raise PerfedError(f"--grid {', '.join(keys)}: methods and seeds are given with --methods and --seeds")
    if any(key.startswith("methods.") for key in keys):
        raise PerfedError(f"--grid {', '.join(keys)}: name settings alone; every method gets the same grid")
    return [list(point) for point in itertools.product(*axes)]


def axis_of(entry: str, where: str = "") -> list[str]:
    """Return the assignments of ``key=v1,v2,...``; commas within brackets are of a value.

    Raises:
        PerfedError: of another form, or a value that is there twice; starts with ``where``.

    Example:
        >>> axis_of("lr=0.1,1"), axis_of("hidden=[32],[64,64]")
        (['lr=0.1', 'lr=1'], ['hidden=[32]', 'hidden=[64,64]'])
    """
    key, sign, values = entry.partition("=")
    parts = [value.strip() for value in _COMMAS.split(values) if value.strip()]
    if not sign or not key.strip() or not parts:
        raise PerfedError(f"{where}{entry}: must be key=v1,v2,...")
    found = [parse_value(part) for part in parts]
    for number, value in enumerate(found):
        if value in found[:number]:
            raise PerfedError(f"{where}{entry}: {parts[number]} is given twice")
    return [f"{key.strip()}={value}" for value in parts]


def resolve(table: Mapping[str, Any], key: str, methods: Sequence[str]) -> list[tuple[str, ...]]:
    """Return where the key of an assignment belongs, as paths; several if it is a setting of several methods."""
    first, *rest = key_path(key)
    of_methods = () if rest else _find_holders(table, first, methods)  # FedDAR has a setting 'aggregation'
    if first in Experiment.model_fields and not of_methods:
        return [(first, *rest)]
    return [(*path, *rest) for path in _places(table, first, methods)]


def key_path(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, without the quotes that TOML wants around names with a dot or a colon.

    Raises:
        PerfedError: no part between two dots, or an open quote.

    Example:
        >>> key_path("methods.'pack.mine:avg'.lr")
        ('methods', 'pack.mine:avg', 'lr')
    """
    if not re.fullmatch(rf"{_PART}(\.{_PART})*", key):
        raise PerfedError(f"'{key}' is no key: names with a dot between them, one with a dot in itself in quotes")
    return tuple(part.strip("'\"") for part in re.findall(_PART, key))


def _places(table: Mapping[str, Any], key: str, methods: Sequence[str]) -> list[tuple[str, ...]]:
    """:func:`resolve` for a key without dots that is no table's name."""
    places: dict[str, list[tuple[str, ...]]] = {}
    name = _section(table, "data").get("name")
    if key in _data_options(name):
        places["data"] = [("data", key)]
    holders = _find_holders(table, key, methods)
    if key in Method.model_fields and key != "extensions":
        tables, named = _section(table, "methods"), {bare_name(m) for m in _with_bases(methods)}
        places["training"] = [("training", key)] + [
            ("methods", m, key) for m in tables if bare_name(m) in named and key in _section(tables, m)
        ]
    elif holders:
        places["methods"] = [("methods", m, key) for m in holders]
    for section, cls in SECTIONS.items():
        if key in table_fields(cls):
            places[section] = [(section, key)]
    if len(places) == 1:
        return next(iter(places.values()))
    if places:
        options = [".".join(path) for paths in places.values() for path in paths]
        raise PerfedError(f"'{key}' is ambiguous; write one of: {', '.join(options)}")
    raise PerfedError(_unknown(key, name, methods))


def _find_holders(table: Mapping[str, Any], key: str, methods: Sequence[str]) -> list[str]:
    """Return those of ``methods`` that have a setting ``key``, themselves or in an extension."""
    return [method for method in methods if key in setting_names(method) | _extension_settings(table, method)]


def _with_bases(methods: Sequence[str]) -> list[str]:
    """The names, and after each preset's that of its method."""
    return [name for m in methods for name in (m, entry(m).base) if name]


def _section(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The table under ``key``; empty if there is none (validation says so if it is something else)."""
    value = table.get(key)
    return value if isinstance(value, Mapping) else {}


def _data_options(name: Any) -> set[str]:
    """Names of the data set's options; none if there is no such data set (validation says so)."""
    try:
        return {option.name for option in describe(name).options} if isinstance(name, str) else set()
    except PerfedError:
        if ":" in name:  # a file of the user's that does not import
            raise
        return set()


def _unknown(key: str, data: Any, methods: Sequence[str]) -> str:
    tables: tuple[type[BaseModel], ...] = (Experiment, Method, *SECTIONS.values())
    known = {key for table in tables for key in table_fields(table)} | _data_options(data)
    known |= {key for method in methods for key in setting_names(method)}
    near = difflib.get_close_matches(key, sorted(known), n=3)
    hint = f"did you mean: {', '.join(near)}?" if near else f"allowed: {', '.join(sorted(known))}"
    return f"unknown key '{key}'; {hint}"


def _extension_settings(table: Mapping[str, Any], method: str) -> set[str]:
    """Settings of the extensions that the table adds to ``method``."""
    tables = [_section(_section(table, "methods"), name) for name in _with_bases([method])]
    names: Any = next((t["extensions"] for t in tables if "extensions" in t), [])
    known = [extension_class(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return {setting for extension in known for setting in extension.model_fields}


def _copy(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in table.items()}
