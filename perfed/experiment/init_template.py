"""An experiment's file for tables of the user's own, with comments."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import tomli_w

from perfed.data.federation import Federation
from perfed.data.labels import Task
from perfed.data.summary import NAMES, columns_of
from perfed.data.tables.problems import TableProblems
from perfed.datasets import load
from perfed.errors import shorten_list
from perfed.report.warnings import MOSTLY

_WHAT = {
    "files": "files or folders, beside this file",
    "test_files": "rows to test on",
    "site_column": "names the site of every row",
    "target": "column to predict",
    "event": "1 or yes where the event was seen at that time; else nothing is known beyond it",
    "domain": "column of domains; its accuracy is reported for each",
    "group": "rows of one value are never on both sides of a split",
    "drop": "columns that do not enter: ids, free text",
    "numbers": 'columns of numbers, where they were not taken for it; "crp=mg/l" removes a unit or mark',
    "dates": "columns of dates, where they were not taken for it",
    "categories": "columns whose numbers are codes",
    "missing": 'values that mean missing: "-9" in every column, "age=999" in one',
    "thousands": "columns of numbers with separated thousands (1,250)",
    "decimals": "columns of numbers with a decimal comma",
    "swapped": "columns of dates whose day and month a spreadsheet swapped at some sites",
    "values": "by column, texts that are replaced wherever it is read",
    "folds": "seed s tests on fold s mod 5, so that --seeds 0..4 judges every row once",
    "test_fraction": "share of each site's rows to test on",
    "columns": "named: those that several sites have mean the same, others are a site's own; or own, common, union",
}

_OWN = """\
# Each site has an embedding of its own columns (hetfedrep keeps it to itself); body and head come behind it.
# Linear does best on small tables; on large ones try { kind = "mlp", hidden = [32], out = 16 }.
[model]
embedding = { kind = "linear", out = 8 }
body = { kind = "hidden-layer", out = 8 }
head = "linear"
"""
_OWN_LABELS = """
[methods.local.model]
body = "none"

# How long clients align their embeddings before round 1; "validated" lets each find out, which takes longer.
[methods.flic-class]
pretrain_epochs = 10
"""
_SHARED = """\
# Columns of one name mean the same at all sites: a body that they share, whose weights of a site's own columns stay
# there, and a head that each may have of its own. Mixed is a linear model with partial pooling, and has the head alone.
[model]
body = { kind = "mlp", hidden = [32], out = 16 }
head = "linear"
"""
_SHARED_LOCAL = """
# A model on one site's rows needs more of it than one on everybody's.
[methods.local]
weight_decay = {}
"""
_VALUES = """\
lr = 1e-2
lr_drops = [40]  # a tenth of it after round 40"""
_GRID = "--grid lr=1e-3,3e-3,1e-2 --grid weight_decay=1e-3,1e-2,1e-1"
_COMPARED = """\
# Methods are compared by log loss, which also sees probabilities; compare_by = "accuracy" or "auc" takes another.
"""
_BASELINES: dict[Task, list[str]] = {
    "classification": ["sklearn:logistic", "sklearn:random-forest"],
    "regression": ["sklearn:ridge", "sklearn:random-forest"],
    "survival": ["sklearn:cox"],
}
_SURVIVAL_BATCH = "batch_size = 256  # events are compared with the rows of their batch: the whole site, if it can be"


def fitting(settings: dict[str, Any]) -> tuple[Federation, dict[str, Any]]:
    """Return the federation of tables with the split and the columns that fit, and these settings.

    That is five folds where each site has the rows, and named columns where two sites have one of the same name.

    Args:
        settings: options of the data set "tables", without those on the split; ``columns``, if given, stay.

    Raises:
        TableProblems: the tables have problems whatever the split.
    """
    split: dict[str, Any] = {} if "test_files" in settings else {"folds": 5}
    if "columns" not in settings:
        named = {**settings, **split, "columns": "named"}
        with suppress(TableProblems):  # kinds that differ, or too few rows for the folds
            federation = load("tables", named, seed=0)
            if _share_columns(federation):
                return federation, named
    try:
        federation = load("tables", {**settings, **split}, seed=0)
    except TableProblems:
        split = {} if "test_files" in settings else {"test_fraction": 0.2}
        federation = load("tables", {**settings, **split}, seed=0)
    if "columns" in settings:
        return federation, {**settings, **split}
    if split == {"test_fraction": 0.2} and _share_columns(federation):
        named = {**settings, **split, "columns": "named"}
        with suppress(TableProblems):  # kinds that differ
            return load("tables", named, seed=0), named
    return federation, {**settings, **split, "columns": "own"}


def _share_columns(federation: Federation) -> bool:
    """Return whether two sites have a column of the same name."""
    tables = [client.table for client in federation if client.table is not None]
    return max(Counter(name for table in tables for name in table.columns_there).values(), default=0) > 1


def compared(settings: Mapping[str, Any], federation: Federation) -> list[str]:
    """Return the methods that are worth comparing first, with scikit-learn's models beside them; arguments as below.

    Where most rows are of one class, what says that class of every row is among them.

    Example:
        >>> from perfed import load
        >>> compared({"columns": "named"}, load("digits", {"clients": 9}, seed=0))
        ['local', 'mixed', 'forest', 'fedavg-ft', 'sklearn:logistic', 'sklearn:random-forest']
    """
    majority = ["sklearn:majority"] if _one_class(federation) else []
    return [*_methods(settings, federation), *_BASELINES[federation.task], *majority]


def _one_class(federation: Federation) -> bool:
    """Whether most rows are of one class."""
    if federation.num_classes is None:
        return False
    counts = [client.train.class_counts(federation.num_classes) for client in federation]
    return max(map(sum, zip(*counts, strict=True))) >= MOSTLY * sum(map(sum, counts))


def study_text(name: str, settings: Mapping[str, Any], federation: Federation) -> str:
    """Return TOML of an experiment on tables, which runs as it stands.

    Rate, weight decay and rounds are those with which, of several, verdicts come closest to those of tuned methods on
    heart disease, intensive care, schools and Parkinson's disease (docs/results.md). Survival has its own.

    Args:
        name: of the experiment.
        settings: options of the data set "tables"; with ``columns = "named"`` the model has one body for all sites.
        federation: made with them.
    """
    same, survival = settings["columns"] == "named", federation.task == "survival"
    values = same and federation.task == "regression"
    data: dict[str, Any] = {"drop": [], "numbers": [], "dates": [], "categories": [], "missing": [], **settings}
    lines = [f"{_toml(key, data[key])}  # {_WHAT[key]}" for key in _WHAT if key in data]
    methods = compared(settings, federation)
    tables = [client.table for client in federation if client.table is not None]
    kinds = "\n".join(f"#   {kind}: {shorten_list(names, NAMES)}" for kind, names in columns_of(tables).items())
    return f"""\
# Written by 'perfed init'. What the sites hold, and what is wrong: perfed check {name}.toml
# The verdict: perfed compare {name}.toml --methods {",".join(methods)} --seeds 0..4
# With a mixture of all at each site, in six times the time: perfed blend with the same --methods and --seeds
{_toml("name", name)}
method = "{methods[1]}"
rounds = {30 if survival else 60}

[data]
name = "tables"
{chr(10).join(lines)}
# What the columns were taken for; drop, numbers, dates and categories say otherwise.
{kinds}

{_SHARED if same else _OWN if survival else _OWN + _OWN_LABELS}
# Rate and weight decay decide who wins. These do for a first look; yours are found on validation data alone:
#   {tune_command(f"{name}.toml", settings, federation)} --out tuned
#   perfed compare tuned/chosen.toml --methods {",".join(methods)} --seeds 0..4
[training]
optimizer = "adam"
{_VALUES if values else "lr = 3e-3"}
weight_decay = {"1e-3" if survival or values else "1e-2" if same else "3e-2"}
{_SURVIVAL_BATCH if survival else "batch_size = 32"}
local_epochs = 2
{_SHARED_LOCAL.format("1e-2" if values else "3e-2") if same and not survival else ""}
[evaluation]
every = 5
{_COMPARED if federation.task == "classification" else ""}"""


def tune_command(file: str, settings: Mapping[str, Any], federation: Federation) -> str:
    """Return the command that chooses rate and weight decay for each method of a file of :func:`study_text`."""
    trained = [name for name in _methods(settings, federation) if name not in ("mixed", "forest")]
    methods = ",".join(trained)
    return f"perfed tune {shlex.quote(file)} --methods {methods} {_GRID}"


def _methods(settings: Mapping[str, Any], federation: Federation) -> list[str]:
    if settings["columns"] == "named":
        return ["local", "mixed", *(["forest"] if federation.task != "survival" else []), "fedavg-ft"]
    return ["local", "hetfedrep", *(["flic-class"] if federation.task != "survival" else [])]


def _toml(key: str, value: Any) -> str:
    """A key and its value in one line of TOML."""
    if isinstance(value, Mapping):
        inner = ", ".join(_toml(name, entry) for name, entry in value.items())
        return f"{_toml(key, 0).removesuffix('0')}{{ {inner} }}"
    texts = (
        [tomli_w.dumps({"x": text}).partition(" = ")[2].strip() for text in value] if isinstance(value, list) else []
    )
    return f"{key} = [{', '.join(texts)}]" if isinstance(value, list) else tomli_w.dumps({key: value}).strip()
