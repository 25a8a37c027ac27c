"""What ``perfed list`` knows: methods, data sets, experiments and terms with their settings.

``python -m perfed.cli.listing`` writes it to ``index.json``, which the command line reads (:mod:`perfed.cli.index`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

import perfed.methods.presets  # noqa: F401 - registers methods and presets
from perfed.datasets import dataset_names, describe
from perfed.experiment.config import experiment_names, find_experiment
from perfed.experiment.estimators import baseline_names
from perfed.method.registry import entry, known_names
from perfed.method.term import term_class, term_names
from perfed.training.plan import ENGINES


def _methods() -> list[dict[str, Any]]:
    found = []
    for name in known_names():
        item = entry(name)
        fields = {**item.method.model_fields}
        for term in item.terms:
            fields.update(term.model_fields)
        made_of = {"base": item.base, "policy": item.policy} if item.base else {}
        found.append({"name": name, "summary": item.summary, **made_of, "settings": _settings(fields)})
    return found


def _settings(fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Default and description of each."""
    return {
        key: {"default": field.get_default(call_default_factory=True), "description": field.description}
        for key, field in fields.items()
    }


def _terms() -> list[dict[str, Any]]:
    found = []
    for name in term_names():
        item = term_class(name)
        summary = (item.__doc__ or name).strip().splitlines()[0]
        found.append({"name": name, "summary": summary, "settings": _settings(item.model_fields)})
    return found


def _datasets() -> list[dict[str, Any]]:
    found = []
    for name in dataset_names():
        item = describe(name)
        options = {o.name: {"default": o.default, "allowed": o.allowed} for o in item.options}
        about = {"name": name, "summary": item.summary, "task": item.task, "files": list(item.files)}
        found.append({**about, "options": options})
    return found


def _experiments() -> list[dict[str, Any]]:
    tables = {name: find_experiment(name) for name in experiment_names()}
    return [
        {"name": n, "summary": t.get("description", ""), "method": t.get("method"), "data": t["data"]}
        for n, t in tables.items()
    ]


def index() -> str:
    """The text of ``index.json``."""
    lists = {"methods": _methods(), "datasets": _datasets(), "experiments": _experiments(), "terms": _terms()}
    content = {**lists, "engines": ENGINES, "baselines": [*baseline_names(), "sklearn:module.Class", "pooled:NAME"]}
    return json.dumps(content, indent=1, default=str) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("index.json").write_text(index(), encoding="utf-8")
