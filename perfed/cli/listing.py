"""The contents of ``perfed list`` and ``perfed show``: methods, data sets, experiments, policies and others.

``python -m perfed.cli.listing`` prints it for :mod:`perfed.cli.index`, which the command line reads.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import perfed.methods.presets  # noqa: F401 - registers methods and presets
from perfed.aggregation.aggregator import aggregator_entry, aggregator_id, aggregator_names
from perfed.cli.index import digest_of_sources
from perfed.datasets import dataset_id, dataset_names, describe
from perfed.datasets.catalogue import DATASETS, describe_type
from perfed.errors import PerfedError
from perfed.experiment.config import Experiment, experiment_names, find_experiment
from perfed.experiment.estimators import baseline_names
from perfed.experiment.overrides import SECTIONS
from perfed.experiment.published import board_names, find_board
from perfed.method.extension import extension_class, extension_id, extension_names
from perfed.method.method import Method
from perfed.method.registry import Entry, entry, known_names, method_id
from perfed.methods.titles import display_name
from perfed.participation.policy import policy_entry, policy_id, policy_names
from perfed.participation.settings import table_fields
from perfed.plugins import bare_name
from perfed.training.plan import ENGINES
from perfed.training.schedule import accepts_schedule

# Experiments that need no file, by how their clients differ.
_TRY = {
    "features": "flic-digits-views",
    "labels": "digits-label-skew",
    "domains": "feddar-synthetic",
    "speeds": "digits-label-skew clock.speeds=fixed evaluation.targets=[0.8]",
    "nothing": "digits-label-skew",
}
# Settings whose types do not describe the allowed values.
_ALLOWED = {
    "placement": "table",
    "extensions": "list of extensions (perfed list extensions)",
    "lr": "number >= 0, or table of numbers",
    "weight_decay": "number >= 0, or table of numbers",
}
_SHARED_OPTIONS = {
    "validation_fraction": "share of each client's training samples that is held out",
    "inner_fold": "[i, k]: fold i of k of the training samples, from 0, in the place of the test data",
    "domain_input": "whether a sample's domain is one of its inputs",
}


def _describe_method(name: str) -> dict[str, Any]:
    item = entry(name)
    fields = {**item.method.model_fields}
    for extension in item.extensions:
        fields.update(extension.model_fields)
    combination = {"base": item.base, "policy": item.policy} if item.base else {}
    differs = _choose_difference(item)
    return {
        "name": name,
        "title": display_name(name),
        "summary": item.summary,
        "differs": differs,
        "paper": _find_paper(item.summary),
        **combination,
        "parameters": dict(item.method.default_placement),
        "needs": _list_needs(item),
        "try": _build_command(name, item, differs),
        "settings": _describe_settings(fields, item.defaults or {}),
    }


def _find_paper(summary: str) -> str:
    """Return the paper of a summary: the text in its last brackets that contain a year; empty if there is none."""
    papers = re.findall(r"\(([^()]*\b\d{4}\b[^()]*)\)", summary)
    return papers[-1] if papers else ""


def _needs_speeds(item: Entry) -> bool:
    """Return whether the method has a policy that selects clients by the time of their replies."""
    return bool(item.policy) and policy_entry(item.policy).policy.chooses_by_time


def _choose_difference(item: Entry) -> str:
    """Return how the clients differ for which a method is designed."""
    if _needs_speeds(item):
        return "speeds"
    return item.differs or ("domains" if item.method.needs_domains else "labels")


def _list_needs(item: Entry) -> list[str]:
    needs = ["the domain of every sample"] if item.method.needs_domains else []
    needs += [item.needs] if item.needs else []
    if item.method.uses_validation:
        needs.append("validation samples (data.validation_fraction); training samples where there are none")
    return [*needs, *(["clients of different speeds (clock.speeds)"] if _needs_speeds(item) else [])]


def _build_command(name: str, item: Entry, differs: str) -> str:
    first = item.base or "local"
    methods = name if name == first else f"{first},{name}"
    return f"perfed compare {item.example or _TRY[differs]} --methods {methods}"


def _describe_settings(
    fields: Mapping[str, FieldInfo], defaults: Mapping[str, Any], *, schedules: bool = True
) -> dict[str, Any]:
    """Return the default, the allowed values and the meaning of each setting.

    ``schedules``: whether a number may be a schedule, as among the settings of methods and extensions.
    """
    return {
        key: {
            "default": defaults.get(
                key, "needed" if field.is_required() else field.get_default(call_default_factory=True)
            ),
            "allowed": _describe_allowed(key, field, schedules),
            "description": field.description,
        }
        for key, field in fields.items()
    }


def _describe_allowed(key: str, field: FieldInfo, schedules: bool) -> str:
    words = _ALLOWED.get(key) or describe_type(field.rebuild_annotation())
    return f"{words}, or schedule" if schedules and accepts_schedule(field.annotation) else words


def _describe_extension(name: str) -> dict[str, Any]:
    item = extension_class(name)
    summary = (item.__doc__ or name).strip().splitlines()[0]
    return {"name": name, "summary": summary, "settings": _describe_settings(item.model_fields, {})}


def _describe_policy(name: str) -> dict[str, Any]:
    item = policy_entry(name)
    return {
        "name": policy_id(name),
        "title": item.title,
        **_describe_class(item.policy, item.summary),
        "try": f"perfed compare digits-label-skew {item.example} --methods fedavg,fedavg+{name}".replace("  ", " "),
        "settings": _describe_settings(item.settings.model_fields, {}, schedules=False),
    }


def _describe_aggregator(name: str) -> dict[str, Any]:
    item = aggregator_entry(name)
    return {
        "name": aggregator_id(name),
        **_describe_class(item.aggregator, item.summary),
        "try": f"perfed compare digits-label-skew aggregation.kind={name} --methods local,fedavg,ditto",
        "settings": _describe_settings(item.settings.model_fields, {}, schedules=False),
    }


def _describe_class(cls: type, summary: str) -> dict[str, str]:
    """Return the summary, the paper that it names, and the other paragraphs of the class's docstring."""
    paragraphs = (cls.__doc__ or "").split("\n\n")[1:]
    return {
        "summary": summary,
        "about": " ".join(_strip_markup(part) for part in paragraphs),
        "paper": _find_paper(summary),
    }


@cache
def _group_experiments() -> dict[str, list[str]]:
    """Return the names of the shipped experiments of each data set."""
    groups: dict[str, list[str]] = {}
    for experiment in experiment_names():
        groups.setdefault(find_experiment(experiment)["data"]["name"], []).append(experiment)
    return groups


def _describe_dataset(name: str) -> dict[str, Any]:
    item, dataset = describe(name), DATASETS[bare_name(name)]
    paragraphs = [_strip_markup(part) for part in (inspect.getdoc(dataset.build) or "").split("\n\n")[1:]]
    source = next((part for part in paragraphs if part.startswith("Source: ")), "")
    meanings = _SHARED_OPTIONS | _parse_attributes(dataset.model.__mro__[1])
    options = {
        o.name: {"default": o.default, "allowed": o.allowed, "description": meanings.get(o.name, "")}
        for o in item.options
    }
    return {
        "name": name,
        "summary": _strip_markup(item.summary),
        "about": " ".join(part for part in paragraphs if part != source),
        "paper": source.removeprefix("Source: "),
        "task": item.task,
        "files": list(item.files),
        "experiments": _group_experiments().get(name, []),
        "options": options,
    }


def describe_name(name: str) -> dict[str, dict[str, Any]]:
    """Return descriptions of ``METHOD+POLICY``, or of ``module:NAME`` in a user's file, by kind.

    Raises:
        PerfedError: if the module cannot be imported, or has nothing of that name; lists what it has.
    """
    descriptions, problems = {}, []
    for kind, resolve_name, describe_item in (
        ("method", method_id, _describe_method),
        ("data set", dataset_id, _describe_dataset),
        ("extension", extension_id, _describe_extension),
        ("policy", policy_id, _describe_policy),
        ("aggregation", aggregator_id, _describe_aggregator),
    ):
        try:
            descriptions[kind] = describe_item(resolve_name(name))
        except PerfedError as error:
            problems.append(error)
    if not descriptions:
        raise next((problem for problem in problems if "; it has: " in str(problem)), problems[0])
    return descriptions


def _parse_attributes(cls: type) -> dict[str, str]:
    """Return the description of each attribute in the docstring of a class."""
    text = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    parts = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)[1:]
    return {name: _strip_markup(meaning) for name, meaning in zip(parts[::2], parts[1::2], strict=True)}


def _strip_markup(text: str) -> str:
    """Return the text of a docstring in one line, without markup."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", " ".join(text.split()))
    return text.replace("``", "")


def _describe_experiments() -> list[dict[str, Any]]:
    descriptions = []
    for name in experiment_names():
        table = find_experiment(name)
        method = table.get("method", "fedavg")
        methods = method if method == "local" else f"local,{method}"
        descriptions.append(
            {
                "name": name,
                "summary": table.get("description", ""),
                "method": table.get("method"),
                "data": table["data"],
                "rounds": table["rounds"],
                "files": list(describe(table["data"]["name"]).files),
                "model": table["model"],
                "training": table.get("training", {}),
                "try": f"perfed compare {name} --methods {methods} --seeds 0..2",
            }
        )
    return descriptions


def _describe_leaderboards() -> list[dict[str, Any]]:
    descriptions = []
    for name in board_names():
        board = find_board(name)
        data = board.experiment["data"]["name"]
        descriptions.append(
            {
                "name": name,
                "summary": board.title,
                "paper": board.source,
                "data": data,
                "metric": board.metric,
                "files": list(describe(data).files),
                "theirs": [row.name for row in board.rows if row.theirs_mean is not None],
                "ours": [row.name for row in board.rows if row.theirs_mean is None],
                "try": f"perfed leaderboard {name} --out {name}",
            }
        )
    return descriptions


def build_lists() -> dict[str, Any]:
    """Return all lists by name, and the names that help and hints need."""
    lists: dict[str, Any] = {"methods": [_describe_method(name) for name in known_names()]}
    lists["datasets"] = [_describe_dataset(name) for name in dataset_names()]
    lists["experiments"] = _describe_experiments()
    lists["extensions"] = [_describe_extension(name) for name in extension_names()]
    lists["leaderboards"] = _describe_leaderboards()
    lists["policies"] = [_describe_policy(name) for name in policy_names()]
    lists["aggregations"] = [_describe_aggregator(name) for name in aggregator_names()]
    tables: tuple[type[BaseModel], ...] = (Experiment, *SECTIONS.values())
    option_names = {
        "training": list(Method.model_fields),
        "settings": [key for table in tables for key in table_fields(table)],
    }
    option_names |= {"engines": [*ENGINES], "baselines": [*baseline_names(), "sklearn:module.Class", "pooled:NAME"]}
    return {**lists, **option_names}


if __name__ == "__main__":
    print(json.dumps({"sources": digest_of_sources(), **build_lists()}, default=str))
