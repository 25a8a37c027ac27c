"""Writes the commented experiment file of ``perfed init`` for the user's tables."""

from __future__ import annotations

import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from perfed.data.federation import Federation
from perfed.data.groups import best_draw
from perfed.data.labels import Task
from perfed.data.names import quote_unless_plain, toml_value
from perfed.data.problems import DataProblems
from perfed.data.summary import NAMES, columns_by_kind
from perfed.datasets import load
from perfed.datasets.tables import TableSettings
from perfed.errors import PerfedError, shorten_list
from perfed.report.warnings import MOSTLY
from perfed.tables.leaks import site_groups

_OPTION_COMMENTS = {
    "files": "files or folders, relative to the folder of this file",
    "test_files": "files with test rows",
    "site_column": "column with the site of every row",
    "target": "column to predict",
    "event": "column with 1 or yes if the event was observed at that time, and 0 or no for censored rows",
    "domain": "column of domains, for each of which the accuracy is reported",
    "group": "rows with the same value are always on the same side of a split, at all sites",
    "group_draw": "the most even of many random divisions of the groups, chosen by 'perfed init'",
    "drop": "columns that are not used: ids, free text",
    "numbers": 'columns of numbers that were not recognised as such; "crp=mg/l" removes a unit or mark',
    "dates": "columns of dates that were not recognised as such",
    "categories": "columns of numbers that are codes of categories",
    "missing": 'values that mean missing, in addition to NA and None: "-9", or "age=999" for one column; "" for none',
    "thousands": "columns of numbers with separators between thousands (1,250)",
    "decimals": "columns of numbers with a decimal comma",
    "swapped": "columns of dates whose day and month a spreadsheet has swapped at some sites",
    "values": "replacements of texts, by column",
    "folds": "seed s tests on fold s mod 5, so that --seeds 0..4 tests on every row once",
    "test_fraction": "fraction of each site's rows to test on",
    "columns": "named: columns of the same name are shared, the others belong to one site; or own, common, union",
}

_OWN = """\
# Each site has an embedding of its columns, which hetfedrep does not share; body and head follow it.
# A linear embedding is best for small tables; for large ones try { kind = "mlp", hidden = [32], out = 16 }.
[model]
embedding = { kind = "linear", out = 8 }
body = { kind = "hidden-layer", out = 8 }
head = "linear"
"""
_OWN_LABELS = """
[methods.local.model]
body = "none"

# The number of epochs in which clients align their embeddings before round 1; with "validated", each client
# determines it, which takes longer.
[methods.flic-class]
pretrain_epochs = 10
"""
_SHARED = """\
# Columns of the same name mean the same at all sites. The sites share a body, except for its weights of columns that
# only one site has; the head may be shared or personal. Mixed is a linear model with partial pooling and only a head.
[model]
body = { kind = "mlp", hidden = [32], out = 16 }
head = "linear"
"""
_SHARED_LOCAL = """
# A model of a single site needs more weight decay than a model of all sites.
[methods.local]
weight_decay = {}
"""
_VALUES = """\
lr = 1e-2
lr_drops = [40]  # a tenth of it after round 40"""
_GRID = "--grid lr=1e-3,3e-3,1e-2 --grid weight_decay=1e-3,1e-2,1e-1"
_EVALUATION_COMMENT = """\
# Methods are compared by log loss, which evaluates probabilities; compare_by = "accuracy" or "auc" is possible, too.
"""
_BASELINES: dict[Task, list[str]] = {
    "classification": ["sklearn:logistic", "sklearn:random-forest"],
    "regression": ["sklearn:ridge", "sklearn:random-forest"],
    "survival": ["sklearn:cox"],
}
_SURVIVAL_BATCH = "batch_size = 256  # an event is compared with the rows of its batch, which is ideally the whole site"


def choose_split_and_columns(settings: dict[str, Any]) -> tuple[Federation, dict[str, Any]]:
    """Choose the split and the kind of columns of tables; return the federation and the completed settings.

    The split has five folds if every site has enough rows, and otherwise a fraction of test rows. Columns are "named"
    if at least two sites have a column of the same name. Groups are divided by the draw that is most even over sites
    and classes.

    Args:
        settings: options of the data set "tables" without those of the split; a value of ``columns`` is not changed.

    Raises:
        DataProblems: the tables have problems that do not depend on the split.
    """
    if "columns" not in settings:
        with suppress(DataProblems):  # the kinds of columns differ, or there are too few rows for the folds
            named = {**settings, **_split(settings, {"folds": 5}), "columns": "named"}
            federation = load("tables", named, seed=0)
            if _share_columns(federation):
                return federation, named
    try:
        split = _split(settings, {"folds": 5})
        federation = load("tables", {**settings, **split}, seed=0)
    except DataProblems:
        split = _split(settings, {"test_fraction": 0.2})
        federation = load("tables", {**settings, **split}, seed=0)
    if "columns" in settings:
        return federation, {**settings, **split}
    if "test_fraction" in split and _share_columns(federation):
        named = {**settings, **split, "columns": "named"}
        with suppress(DataProblems):  # the kinds of columns differ
            return load("tables", named, seed=0), named
    return federation, {**settings, **split, "columns": "own"}


def _split(settings: Mapping[str, Any], split: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``split`` with the most even draw of the groups; empty if there are test files.

    Raises:
        DataProblems: the tables have problems that do not depend on the split.
    """
    if "test_files" in settings:
        return {}
    if "group" not in settings:
        return {**split}
    federation = load("tables", {**settings, "test_fraction": 0.0}, seed=0)
    options = TableSettings.model_construct(**{**settings, **split}).table_options(seed=0)
    draw = best_draw(site_groups(federation, federation.task), options.group_split)
    return {**split, **({"group_draw": draw} if draw else {})}


def _share_columns(federation: Federation) -> bool:
    """Return whether at least two sites have a column of the same name."""
    tables = [client.table for client in federation if client.table is not None]
    return max(Counter(name for table in tables for name in table.columns_there).values(), default=0) > 1


def suggest_methods(settings: Mapping[str, Any], federation: Federation) -> list[str]:
    """Return the methods that are worth comparing first, followed by scikit-learn models.

    If most rows belong to one class, the model that always predicts this class is included.

    Args:
        settings: options of the data set "tables".
        federation: the federation that was loaded with them.

    Example:
        >>> from perfed import load
        >>> suggest_methods({"columns": "named"}, load("digits", {"clients": 9}, seed=0))
        ['local', 'mixed', 'forest', 'fedavg-ft', 'sklearn:logistic', 'sklearn:random-forest']
    """
    majority = ["sklearn:majority"] if _has_dominant_class(federation) else []
    return [*_list_methods(settings, federation), *_BASELINES[federation.task], *majority]


def _has_dominant_class(federation: Federation) -> bool:
    """Return whether most training rows belong to one class."""
    if federation.num_classes is None:
        return False
    counts = [client.train.class_counts(federation.num_classes) for client in federation]
    return max(map(sum, zip(*counts, strict=True))) >= MOSTLY * sum(map(sum, counts))


def study_text(name: str, settings: Mapping[str, Any], federation: Federation) -> str:
    """Return the TOML text of a complete experiment on tables.

    The learning rate, weight decay and number of rounds were chosen among several: with them, verdicts are closest to
    those of tuned methods on heart disease, intensive care, schools and Parkinson's disease (docs/results.md). Survival
    tasks have other values.

    Args:
        name: the name of the experiment.
        settings: options of the data set "tables"; with ``columns = "named"`` the model has one body for all sites.
        federation: the federation that was loaded with them.

    Raises:
        PerfedError: the text does not parse to the intended settings.
    """
    data: dict[str, Any] = {"drop": [], "numbers": [], "dates": [], "categories": [], **settings}
    data = {key: data[key] for key in _OPTION_COMMENTS if key in data}
    lines = [f"{_format_toml_line(key, value)}  # {_OPTION_COMMENTS[key]}" for key, value in data.items()]
    lines += [] if "missing" in data else [f'# missing = ["-9"]  # {_OPTION_COMMENTS["missing"]}']
    methods = suggest_methods(settings, federation)
    rounds = 30 if federation.task == "survival" else 60
    tables = [client.table for client in federation if client.table is not None]
    kinds = [f"#   {kind}: {_format_names(names)}" for kind, names in columns_by_kind(tables).items()]
    file, names = shlex.quote(f"{name}.toml"), ",".join(methods)
    tune = tune_command(f"{name}.toml", settings, federation)
    comments = [f"{tune} --out tuned", f"perfed compare tuned/chosen.toml --methods {names} --seeds 0..4"]
    text = f"""\
# Written by 'perfed init'. To see a summary of the data and their problems: perfed check {file}
# To compare methods: perfed compare {file} --methods {names} --seeds 0..4
# To also mix their models at each site, in six times the time: perfed blend with the same --methods and --seeds
{_format_toml_line("name", name)}
{_format_toml_line("method", methods[1])}
rounds = {rounds}

[data]
name = "tables"
{chr(10).join(lines)}
# The kinds of the columns as perfed recognised them; drop, numbers, dates and categories change them.
{chr(10).join(kinds)}

{_model_and_training(settings, federation, comments)}"""
    tables_of_settings = tomllib.loads(_model_and_training(settings, federation, []))
    intended = {"name": name, "method": methods[1], "rounds": rounds, "data": {"name": "tables", **data}}
    check_settings(text, {**intended, **tables_of_settings})
    return text


def check_settings(text: str, intended: Mapping[str, Any]) -> None:
    """Raise an error if a TOML text does not parse to the intended settings.

    Names of columns, files and sites come from the data; none of them may add or change a setting.

    Raises:
        PerfedError: the text is not valid TOML, or contains other settings.
    """
    try:
        same = tomllib.loads(text) == intended
    except tomllib.TOMLDecodeError:
        same = False
    if not same:
        raise PerfedError(
            "the experiment file would not hold the settings that it is written for; rename columns and files whose "
            "names hold unusual characters"
        )


def _model_and_training(settings: Mapping[str, Any], federation: Federation, commands: Sequence[str]) -> str:
    """Return the TOML tables after ``[data]``; only their comment with ``commands`` depends on names."""
    same, survival = settings["columns"] == "named", federation.task == "survival"
    values = same and federation.task == "regression"
    return f"""\
{_SHARED if same else _OWN if survival else _OWN + _OWN_LABELS}
# Learning rate and weight decay decide which method is best. These values are a start; to tune them on validation data:
{chr(10).join(f"#   {command}" for command in commands)}
[training]
optimizer = "adam"
{_VALUES if values else "lr = 3e-3"}
weight_decay = {"1e-3" if survival or values else "1e-2" if same else "3e-2"}
{_SURVIVAL_BATCH if survival else "batch_size = 32"}
local_epochs = 2
{_SHARED_LOCAL.format("1e-2" if values else "3e-2") if same and not survival else ""}
[evaluation]
every = 5
{_EVALUATION_COMMENT if federation.task == "classification" else ""}"""


def tune_command(file: str, settings: Mapping[str, Any], federation: Federation) -> str:
    """Return the command that chooses rate and weight decay for each method of a file of :func:`study_text`."""
    tunable = [name for name in _list_methods(settings, federation) if name not in ("mixed", "forest")]
    methods = ",".join(tunable)
    return f"perfed tune {shlex.quote(file)} --methods {methods} {_GRID}"


def _list_methods(settings: Mapping[str, Any], federation: Federation) -> list[str]:
    if settings["columns"] == "named":
        return ["local", "mixed", *(["forest"] if federation.task != "survival" else []), "fedavg-ft"]
    return ["local", "hetfedrep", *(["flic-class"] if federation.task != "survival" else [])]


def _format_names(names: Sequence[str]) -> str:
    """Return names as a list on one line, with quotes around ambiguous ones."""
    return shorten_list([quote_unless_plain(name) for name in names], NAMES)


def _format_toml_line(key: str, value: Any) -> str:
    """Return a key and its value as one line of TOML."""
    return f"{key} = {toml_value(value)}"
