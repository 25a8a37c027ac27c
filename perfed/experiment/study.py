"""An experiment's file for tables of the user's own, with comments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from perfed.data.federation import Federation
from perfed.data.summary import columns_of

_WHAT = {
    "files": "files or folders, beside this file",
    "test_files": "rows to test on",
    "site_column": "names the site of every row",
    "target": "column to predict",
    "event": "1 or yes where the event was seen at that time; else nothing is known beyond it",
    "domain": "column of domains; its accuracy is reported for each",
    "group": "rows of one value are never on both sides of a split",
    "drop": "columns that do not enter: ids, free text",
    "dates": "columns of dates, where they were not taken for it",
    "categories": "columns whose numbers are codes",
    "folds": "seed s tests on fold s mod 5, so that --seeds 0..4 judges every row once",
    "test_fraction": "share of each site's rows to test on",
    "columns": "own: each site its own; common: those that all have (for all methods); union: all, absent ones filled",
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
# All sites have the same columns: a body that they share and a head that each may have of its own.
[model]
body = { kind = "mlp", hidden = [32], out = 16 }
head = "linear"
"""
_SURVIVAL_BATCH = "batch_size = 256  # events are compared with the rows of their batch: the whole site, if it can be"


def study_text(name: str, settings: Mapping[str, Any], federation: Federation) -> str:
    """TOML of an experiment on tables, which runs as it stands.

    Args:
        name: of the experiment.
        settings: options of the data set "tables"; with ``columns = "common"`` the model has one body for all sites.
        federation: made with them.
    """
    same, survival = settings["columns"] == "common", federation.task == "survival"
    data: dict[str, Any] = {"drop": [], "dates": [], "categories": [], **settings}
    lines = [f"{_toml(key, data[key])}  # {_WHAT[key]}" for key in _WHAT if key in data]
    method = "fedrep" if same else "hetfedrep"
    others = ["fedavg"] if same else [] if survival else ["flic-class"]
    compared = ",".join(["local", method, *others, *_baselines(federation)])
    tables = [client.table for client in federation if client.table is not None]
    kinds = "\n".join(f"#   {kind}: {', '.join(names)}" for kind, names in columns_of(tables).items())
    return f"""\
# Written by 'perfed init'. What the sites hold, and what is wrong: perfed check {name}.toml
# The verdict: perfed compare {name}.toml --methods {compared} --seeds 0..4
{_toml("name", name)}
method = "{method}"
rounds = 30

[data]
name = "tables"
{chr(10).join(lines)}
# What the columns were taken for; drop, dates and categories say otherwise.
{kinds}

{_SHARED if same else _OWN if survival else _OWN + _OWN_LABELS}
[training]
optimizer = "adam"
lr = {"1e-3" if same and not survival else "3e-3"}
weight_decay = {"1e-3" if survival else "1e-2" if same else "1e-1"}
{_SURVIVAL_BATCH if survival else "batch_size = 32"}
local_epochs = 2

[evaluation]
every = 5
"""


def _baselines(federation: Federation) -> list[str]:
    return [
        {"classification": "sklearn:logistic", "regression": "sklearn:ridge", "survival": "sklearn:cox"}[
            federation.task
        ]
    ]


def _toml(key: str, value: Any) -> str:
    """A key and its value in one line of TOML."""
    texts = (
        [tomli_w.dumps({"x": text}).partition(" = ")[2].strip() for text in value] if isinstance(value, list) else []
    )
    return f"{key} = [{', '.join(texts)}]" if isinstance(value, list) else tomli_w.dumps({key: value}).strip()
