"""The commands ``perfed list`` and ``perfed show``, which read the index and do not import torch."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import typer

from perfed.cli import complete
from perfed.cli.app import app
from perfed.cli.console import command_lines, console, print_json
from perfed.cli.index import LISTS, index
from perfed.errors import PerfedError
from perfed.plugins import match_name

DIFFERENCES = {
    "features": "clients measure different things: columns, sensors, kinds of pictures",
    "labels": "clients hold different labels, or differ in whatever way: the usual case",
    "domains": "every client mixes samples of several known domains: sexes, origins, devices",
    "speeds": "some clients take much longer to reply than others",
    "nothing": "one model for clients that are alike, or one's own model from one's own data",
}
"""What differs between clients, and how ``perfed list methods`` says it."""

_OF_NO_PAPER = "of no paper"
_KINDS = {
    "methods": "method",
    "datasets": "data set",
    "experiments": "experiment",
    "extensions": "extension",
    "leaderboards": "leaderboard",
    "policies": "policy",
    "aggregations": "aggregation",
}


@app.command("list", epilog="Example: perfed list methods")
def list_command(
    what: Annotated[str, typer.Argument(help=", ".join(LISTS), autocompletion=complete.lists)],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, with all settings")] = False,
) -> None:
    """List methods, data sets and others; methods are grouped by how the clients differ, and by paper."""
    list_name = match_name(what, LISTS)
    if list_name is None:
        raise PerfedError(f"unknown list '{what}'; allowed: {', '.join(LISTS)}")
    if as_json:
        return print_json(index()[list_name])
    for line in format_list(list_name):
        typer.echo(line)


@app.command("show", epilog="Example: perfed show fedpac")
def show_command(
    name: Annotated[
        str,
        typer.Argument(
            help="a method, data set, experiment, extension, policy or aggregation", autocompletion=complete.shown
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON: kind and facts")] = False,
) -> None:
    """Show what a method, data set, experiment or policy is, its settings, what it needs, and a command to try."""
    hits = find_item(name)
    if as_json:
        return print_json(hits)
    for number, (kind, item) in enumerate(hits.items()):
        for line in [*([""] if number else []), *describe_item(kind, item)]:
            typer.echo(line)


def format_list(list_name: str) -> Iterator[str]:
    """Return the lines of ``perfed list``."""
    items = index()[list_name]
    if list_name != "methods":
        yield from _list_names(items, "")
        return
    for number, (differs, meaning) in enumerate(DIFFERENCES.items()):
        if number:
            yield ""
        yield from _wrap_text(meaning, f"{differs}: ", " " * 4)
        selected = sorted((item for item in items if item["differs"] == differs), key=_sort_items)
        for paper, group in groupby(selected, key=_format_paper):
            yield f"  {paper}"
            yield from _list_names(list(group), " " * 4)


def _format_paper(item: Mapping[str, Any]) -> str:
    """Return the paper's authors and year up to the first comma; a placeholder without a paper."""
    return item["paper"].partition(",")[0] or _OF_NO_PAPER


def _sort_items(item: Mapping[str, Any]) -> tuple[bool, str]:
    """Return a sort key that orders items by paper; items without a paper come last."""
    return not item["paper"], _format_paper(item).casefold()


def _get_title(item: Mapping[str, Any]) -> str:
    """Return the title of an item; its name if it has none."""
    title: str = item.get("title", item["name"])
    return title


def _list_names(items: Sequence[Mapping[str, Any]], indent: str) -> Iterator[str]:
    widest = max(len(_get_title(item)) for item in items)
    column = min(widest, max(12, console.width // 3 - len(indent)))
    for item in items:
        head = f"{indent}{_get_title(item).ljust(column)}  "
        if len(_get_title(item)) > column:
            yield head.rstrip()
            head = " " * len(indent + " " * column + "  ")
        yield from _wrap_text(_format_summary(item), head, " " * (len(indent) + column + 2))


def _format_summary(item: Mapping[str, Any]) -> str:
    """Return the summary without its paper, which is printed elsewhere, and without code markup."""
    text: str = item["summary"].replace("``", "")
    paper = item.get("paper", "")
    return text.replace(f" ({paper})", "") if paper else text


def _wrap_text(text: str, first: str, later: str) -> list[str]:
    wrapper = textwrap.TextWrapper(
        console.width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text) or [first.rstrip()]


def find_item(name: str) -> dict[str, dict[str, Any]]:
    """Return the items with this name, ignoring case: descriptions by kind, such as a data set and an experiment.

    Raises:
        PerfedError: if nothing has the name; suggests similar names.
    """
    entries = [(_KINDS[list_name], item) for list_name in LISTS for item in index()[list_name]]
    hits = {kind: item for kind, item in entries if match_name(name, (item["name"], _get_title(item)))}
    if hits:
        return hits
    if set(name) & set(":+"):  # in a module of the user, or under a policy
        from perfed.cli.listing import describe_name

        return describe_name(name)
    names, word = sorted({item["name"] for _, item in entries}), name.casefold()
    family = [candidate for candidate in names if candidate.startswith(f"{word}-")]
    suggestions = (
        difflib.get_close_matches(word, family or names, n=3, cutoff=0.5)
        or [candidate for candidate in names if word in candidate][:3]
    )
    hint = (
        f"did you mean: {', '.join(suggestions)}?"
        if suggestions
        else "see 'perfed list methods', 'datasets', 'experiments', 'policies' or 'aggregations'"
    )
    raise PerfedError(f"nothing is called '{name}'; {hint}")


def describe_item(kind: str, item: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines of ``perfed show``."""
    yield from _wrap_text(_format_summary(item), f"{_get_title(item)} ({kind}): ", "  ")
    facts = _FACTS[kind](item) if kind in _FACTS else []
    for label, text in facts:
        if text:
            yield ""
            yield from _wrap_text(text, f"{label}: ", "  ")
    settings = item.get("settings") or item.get("options") or {}
    common = [key for key in settings if kind == "method" and key in index()["training"]]
    specific = {key: value for key, value in settings.items() if key not in common}
    if specific:
        yield from ["", "options:" if kind == "data set" else "settings:"]
        yield from _format_settings(specific)
    if common:
        yield from ["", "settings that every method has:"]
        yield from _format_settings({key: settings[key] for key in common})
    if item.get("try"):
        yield from ["", "try:", *command_lines(item["try"])]


def _format_settings(settings: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, setting in settings.items():
        yield from _wrap_text(f"{_format_value(setting['default'])} ({setting['allowed']})", f"  {name} = ", " " * 6)
        if setting["description"]:
            yield from _wrap_text(setting["description"].replace("``", ""), " " * 6, " " * 6)


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _list_method_facts(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    places = ", ".join(f"{stage} {place}" for stage, place in item["parameters"].items())
    combination = f"{item['base']} under the participation policy {item['policy']}" if "base" in item else ""
    differs = f"{item['differs']} ({DIFFERENCES[item['differs']]})"
    needs = "; ".join(item["needs"]) or "nothing in particular"
    return [
        ("in files and settings", item["name"]),
        ("paper", item["paper"]),
        ("is", combination),
        ("made for clients that differ in", differs),
        ("parameters", places),
        ("needs", needs),
    ]


def _list_dataset_facts(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("about", item["about"]),
        ("source", item["paper"]),
        ("task", item["task"]),
        ("needs", _format_files(item)),
        ("experiments", ", ".join(item["experiments"])),
    ]


def _list_experiment_facts(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    data = ", ".join(f"{key} = {_format_value(value)}" for key, value in item["data"].items() if key != "name")
    training = ", ".join(f"{key} = {_format_value(value)}" for key, value in item["training"].items())
    model = ", ".join(f"{stage} {_format_stage(value)}" for stage, value in item["model"].items())
    return [
        ("method", item["method"] or ""),
        ("rounds", str(item["rounds"])),
        ("data", f"{item['data']['name']}{': ' * bool(data)}{data}"),
        ("model", model),
        ("training", training),
        ("needs", _format_files(item)),
    ]


def _format_files(item: Mapping[str, Any]) -> str:
    return f"{', '.join(item['files'])} (perfed data get {item['name']})" if item["files"] else ""


def _format_stage(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    options = ", ".join(f"{key} {_format_value(option)}" for key, option in value.items() if key != "kind")
    return f"{value.get('kind', '')}{f' ({options})' if options else ''}"


def _list_leaderboard_facts(item: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("source", item["paper"]),
        ("theirs", ", ".join(item["theirs"])),
        ("ours on top", ", ".join(item["ours"])),
        ("data", item["data"]),
        ("needs", _format_files(item)),
    ]


def _list_value_facts(setting: str, item: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts on a policy or a kind of aggregation, which is a value of ``setting``."""
    return [
        ("in files and settings", f'{setting} = "{item["name"]}"'),
        ("about", item["about"]),
        ("paper", item["paper"]),
    ]


_FACTS: dict[str, Callable[[Mapping[str, Any]], list[tuple[str, str]]]] = {
    "method": _list_method_facts,
    "data set": _list_dataset_facts,
    "experiment": _list_experiment_facts,
    "leaderboard": _list_leaderboard_facts,
    "policy": partial(_list_value_facts, "[participation] policy"),
    "aggregation": partial(_list_value_facts, "[aggregation] kind"),
}
