"""``key=value`` assignments: parsing of values, and the tables to which short keys belong."""

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
from perfed.experiment.config import Experiment, to_canonical_names
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
"""Matches commas outside of brackets."""
_PART = r"""(?:'[^']+'|"[^"]+"|[^.'"\s]+)"""


def parse_value(text: str) -> Any:
    """Parse a value from the command line as TOML (number, boolean, list, table); otherwise return the text itself.

    The strings of a flat list may lack quotes, because a shell removes them.

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
    """Return a copy of an experiment's table with ``key=value`` assignments applied.

    A dotted key is a path (``data.clients=5``, ``methods.flic-hl.lambda1=0``), whose parts may be quoted as in TOML
    (``methods.'package.module:NAME'.lr=0.1``). A key that does not start with the name of a table is searched among the
    options of the data set, the settings of ``methods``, and the tables training, participation, clock and evaluation.
    Names of methods are accepted in any case.

    Raises:
        PerfedError: an assignment is not of the form key=value, or its key is unknown or ambiguous.
    """
    result = _copy_table(to_canonical_names(table))
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign or not key:
            raise PerfedError(f"'{assignment}' is not of the form key=value")
        value = parse_value(text)
        for path in find_setting_paths(result, key.strip(), methods):
            node = result
            for part in path[:-1]:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise PerfedError(f"unknown key '{key}': '{part}' is a value, not a table")
            node[path[-1]] = value
        result = to_canonical_names(result)
    return result


def grid_points(grid: Sequence[str]) -> list[list[str]]:
    """Return every combination of the values of ``key=v1,v2,...``, each a list of assignments.

    Raises:
        PerfedError: there is no axis, an axis is empty, a key occurs twice, or a key does not apply to all methods.

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
        raise PerfedError(f"--grid {', '.join(keys)}: name only the setting; every method gets the same grid")
    return [list(point) for point in itertools.product(*axes)]


def axis_of(entry: str, where: str = "") -> list[str]:
    """Return the assignments of ``key=v1,v2,...``; commas within brackets do not separate values.

    Args:
        entry: the text.
        where: the start of error messages.

    Raises:
        PerfedError: the text has another form, or a value occurs twice.

    Example:
        >>> axis_of("lr=0.1,1"), axis_of("hidden=[32],[64,64]")
        (['lr=0.1', 'lr=1'], ['hidden=[32]', 'hidden=[64,64]'])
    """
    key, sign, values = entry.partition("=")
    parts = [value.strip() for value in _COMMAS.split(values) if value.strip()]
    if not sign or not key.strip() or not parts:
        raise PerfedError(f"{where}{entry}: must be key=v1,v2,...")
    parsed = [parse_value(part) for part in parts]
    for number, value in enumerate(parsed):
        if value in parsed[:number]:
            raise PerfedError(f"{where}{entry}: {parts[number]} is given twice")
    return [f"{key.strip()}={value}" for value in parts]


def find_setting_paths(table: Mapping[str, Any], key: str, methods: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the paths of the settings that a key denotes; there are several if several methods have the setting."""
    first, *subkeys = key_path(key)
    holders = () if subkeys else _find_holders(table, first, methods)  # FedDAR has a setting 'aggregation'
    if first in Experiment.model_fields and not holders:
        return [(first, *subkeys)]
    return [(*path, *subkeys) for path in _find_paths(table, first, methods)]


def key_path(key: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, without the quotes that TOML needs around names with a dot or a colon.

    Raises:
        PerfedError: a part is empty, or a quote is not closed.

    Example:
        >>> key_path("methods.'pack.mine:avg'.lr")
        ('methods', 'pack.mine:avg', 'lr')
    """
    if not re.fullmatch(rf"{_PART}(\.{_PART})*", key):
        raise PerfedError(f"'{key}' is not a key; separate names by dots, and quote a name that contains a dot")
    return tuple(part.strip("'\"") for part in re.findall(_PART, key))


def _find_paths(table: Mapping[str, Any], key: str, methods: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the paths of :func:`find_setting_paths` for a key without dots that is not the name of a table."""
    paths_by_section: dict[str, list[tuple[str, ...]]] = {}
    name = _get_table(table, "data").get("name")
    if key in _data_options(name):
        paths_by_section["data"] = [("data", key)]
    holders = _find_holders(table, key, methods)
    if key in Method.model_fields and key != "extensions":
        tables, method_names = _get_table(table, "methods"), {bare_name(m) for m in _with_bases(methods)}
        paths_by_section["training"] = [("training", key)] + [
            ("methods", m, key) for m in tables if bare_name(m) in method_names and key in _get_table(tables, m)
        ]
    elif holders:
        paths_by_section["methods"] = [("methods", m, key) for m in holders]
    for section, cls in SECTIONS.items():
        if key in table_fields(cls):
            paths_by_section[section] = [(section, key)]
    if len(paths_by_section) == 1:
        return next(iter(paths_by_section.values()))
    if paths_by_section:
        options = [".".join(path) for section_paths in paths_by_section.values() for path in section_paths]
        raise PerfedError(f"'{key}' is ambiguous; write one of: {', '.join(options)}")
    raise PerfedError(_describe_unknown_key(key, name, methods))


def _find_holders(table: Mapping[str, Any], key: str, methods: Sequence[str]) -> list[str]:
    """Return the methods that have a setting ``key``, directly or through an extension."""
    return [method for method in methods if key in setting_names(method) | _extension_settings(table, method)]


def _with_bases(methods: Sequence[str]) -> list[str]:
    """Return the names, with the name of its base method after each preset."""
    return [name for m in methods for name in (m, entry(m).base) if name]


def _get_table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table under ``key``, empty if there is none; validation reports a value that is not a table."""
    value = table.get(key)
    return value if isinstance(value, Mapping) else {}


def _data_options(name: Any) -> set[str]:
    """Return the names of a data set's options; empty for an unknown data set, which validation reports."""
    try:
        return {option.name for option in describe(name).options} if isinstance(name, str) else set()
    except PerfedError:
        if ":" in name:  # the user's module cannot be imported
            raise
        return set()


def _describe_unknown_key(key: str, data: Any, methods: Sequence[str]) -> str:
    """Return an error message for an unknown key, with similar keys or all allowed ones."""
    tables: tuple[type[BaseModel], ...] = (Experiment, Method, *SECTIONS.values())
    allowed = {key for table in tables for key in table_fields(table)} | _data_options(data)
    allowed |= {key for method in methods for key in setting_names(method)}
    similar = difflib.get_close_matches(key, sorted(allowed), n=3)
    hint = f"did you mean: {', '.join(similar)}?" if similar else f"allowed: {', '.join(sorted(allowed))}"
    return f"unknown key '{key}'; {hint}"


def _extension_settings(table: Mapping[str, Any], method: str) -> set[str]:
    """Return the names of the settings of the extensions that the table adds to ``method``."""
    tables = [_get_table(_get_table(table, "methods"), name) for name in _with_bases([method])]
    names: Any = next((t["extensions"] for t in tables if "extensions" in t), [])
    classes = [extension_class(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return {setting for extension in classes for setting in extension.model_fields}


def _copy_table(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy_table(value) if isinstance(value, dict) else value for key, value in table.items()}
