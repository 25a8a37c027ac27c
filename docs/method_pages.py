"""A page for each method, made from the code: ``docs/build_site.py`` writes them into the site."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markdown_tables import table
from site_text import from_docstring, one_line, settings

from perfed import build_method, validate
from perfed.cli.index import index
from perfed.cli.list_commands import DIFFERENCES
from perfed.experiment.published import find_board
from perfed.method.method import Method
from perfed.method.registry import Entry, entry
from perfed.privacy.mechanisms import list_disclosures
from perfed.sites.deploy.trial import list_sent_entries

DOCS = Path(__file__).parent
_COMMON = next(item for item in index()["methods"] if item["name"] == "fedavg")["settings"]
_HOMES = {"client": "at each client", "server": "on the server", "table": "on the server, a row per client"}
WITH_TABLES = ("leaderboards.md", "results.md", "when.md")
_OPENING = """# Methods

For those who choose a method or look one up. One page each: what it is, its paper, its settings and a command to try.
Every page is made from the code, so that it says what the program does. Reading one takes two minutes.

Which method to begin with: [a table](../when.md#choose-a-method). In a terminal `perfed show NAME` says the same.
"""


def pages() -> dict[str, str]:
    """Pages by their paths in the site: the index, and one for each method."""
    return {"methods/index.md": index_page(), **{f"methods/{item['name']}.md": page(item) for item in _methods()}}


def _methods() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = index()["methods"]
    return found


def index_page() -> str:
    """The methods by what differs between the clients."""
    methods, parts = _methods(), [_OPENING]
    for differs, meaning in DIFFERENCES.items():
        rows = [
            (f"[{item['title']}]({item['name']}.md)", one_line(_without_paper(item)), item["paper"] or "")
            for item in sorted(methods, key=lambda item: item["title"].casefold())
            if item["differs"] == differs
        ]
        head = "Nothing differs" if differs == "nothing" else f"{differs.capitalize()} differ"
        parts.append(
            f"## {head}\n\n{meaning[:1].upper()}{meaning[1:]}.\n\n{table(('method', 'what', 'paper'), rows)}\n"
        )
    return "\n".join([*parts, "```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"])


def page(item: Mapping[str, Any]) -> str:
    """The page of a method, of which ``item`` is what ``perfed list methods --json`` has."""
    own, common = {}, {}
    for key, about in item["settings"].items():
        if key not in Method.model_fields:
            own[key] = about
        elif about["default"] != _COMMON[key]["default"]:
            common[key] = about
    own |= common
    parts = [f"# {item['title']}", one_line(_without_paper(item)).rstrip(".") + "."]
    parts += [f"On the command line and in files: `{item['name']}`.", f"```\n{item['try']}\n```"]
    if text := _text(entry(item["name"])):
        parts += ["## What it does", text]
    parts += ["## Facts", table(("", ""), _facts(item)), "## Settings"]
    parts += [settings(own)] if own else ["It has none of its own."]
    parts += ["Local training has the settings that [every method has](../reference/settings.md#training)."]
    if shown := [*tables_with(item)]:
        parts += ["## Tables that it is in", "\n".join(shown)]
    return "\n\n".join(parts) + "\n"


def _without_paper(item: Mapping[str, Any]) -> str:
    text: str = item["summary"]
    return text.replace(f" ({item['paper']})", "") if item["paper"] else text


def _text(item: Entry) -> str:
    """What the class's docstring says below its first line; of a variant also which class it is of."""
    body = (inspect.getdoc(item.method) or "").partition("\n")[2].strip()
    first = (inspect.getdoc(item.method) or "").partition("\n")[0]
    variant = f"A variant of: {from_docstring(first)}\n\n" if item.summary != first else ""
    return (variant + from_docstring(body)).strip()


def _facts(item: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found, name = entry(item["name"]), item.get("base", item["name"])
    if item["paper"]:
        yield "paper", item["paper"]
    if "base" in item:
        yield "is", f"[{item['base']}]({item['base']}.md) under the participation policy `{item['policy']}`"
    yield "made for clients that differ in", item["differs"]
    yield "needs", "; ".join(item["needs"]) or "nothing in particular"
    yield "parameters", ", ".join(f"{stage} {place}" for stage, place in item["parameters"].items())
    yield "extensions of its own", ", ".join(f"`{of.__name__}`" for of in found.extensions) or "none"
    yield "a client sends", ", ".join(f"`{entry_}`" for entry_ in sent(item)) or "nothing"
    kept = {key: _HOMES[of.home] for key, of in build_method(name).sets().items()}
    yield "kept beside the model", ", ".join(f"`{key}` {where}" for key, where in kept.items()) or "nothing"
    yield "before a client is evaluated", _before(found.method)
    protected = next((row[2:] for row in list_disclosures() if row[0] == name), ("", ""))
    for unit, said in zip(("rows", "clients"), protected, strict=True):
        yield f"private {unit}", one_line(said)
    yield "code", f"`{Path(inspect.getfile(found.method)).relative_to(DOCS.parent).as_posix()}`"


def sent(item: Mapping[str, Any]) -> list[str]:
    """Names of what a client's replies hold, found by a rehearsal on made-up tables, as a deployment's is."""
    name, body = item.get("base", item["name"]), {"kind": "mlp", "hidden": [4], "out": 4}
    body |= {"batch_norm": True} if name == "fedbn" else {}
    data = {"name": "tables", "files": ["a", "b"], "target": "y"}
    data |= {"domain": "group"} if entry(name).method.needs_domains else {}
    training = {"optimizer": "sgd"} if "SGD as the optimiser" in item["needs"] else {}
    model = {"embedding": body, "body": body, "head": "linear"}
    table = {"method": name, "rounds": 2, "data": data, "model": model, "training": training}
    paths = [path.split("/") for path in list_sent_entries(validate(table))]
    return list(dict.fromkeys("/".join(path[: 3 if path[0] == "extensions" else 1]) for path in paths))


def _before(method: type[Method]) -> str:
    changed = method.personalise is not Method.personalise
    return "it makes a model of its own from what it gets" if changed else "it takes the newest shared parameters"


def tables_with(item: Mapping[str, Any]) -> Iterator[str]:
    """Leaderboards that have a row of the method, and sections of the results with a table that names it."""
    for board in index()["leaderboards"]:
        if any(row.method == item["name"] for row in find_board(board["name"]).rows):
            yield f"* `perfed leaderboard {board['name']}`: {board['summary']}"
    for page in WITH_TABLES:
        for heading, rows in _sections((DOCS / page).read_text()):
            if any(_names(row, item) for row in rows):
                yield f"* [{heading}](../{page}#{anchor(heading)})"


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    """Headings of a page and the rows of tables below each."""
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)[1:]
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        yield heading, [line for line in body.splitlines() if line.startswith("|")]


def _names(row: str, item: Mapping[str, Any]) -> bool:
    """Whether a row of a table begins with the method's name, or is under a head that does."""
    cells = [re.sub(r"[*`]", "", part).partition(" (")[0].strip() for part in row.strip("|").split("|")]
    return any(part in (item["title"], item["name"]) for part in cells)


def anchor(heading: str) -> str:
    """The mark of a heading in links, as forges and the site make it.

    Example:
        >>> anchor("FedDAR: linear problem (Figure 1)")
        'feddar-linear-problem-figure-1'
    """
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
