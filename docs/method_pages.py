"""A page for each method, made from the code: ``docs/build_site.py`` writes them into the site."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from markdown_tables import table
from site_text import from_docstring, one_line, settings

from perfed.cli.index import index
from perfed.cli.list_commands import DIFFERENCES
from perfed.experiment.published import find_board
from perfed.method.method import Method
from perfed.method.registry import Entry, entry
from perfed.privacy.mechanisms import leaving_table

DOCS = Path(__file__).parent
_COMMON = next(item for item in index()["methods"] if item["name"] == "fedavg")["settings"]
WITH_TABLES = ("leaderboards.md", "results.md", "when.md")
_OPENING = """# Methods

For those who choose a method or look one up. One page each: what it is, its paper, its settings and a command to try.
Every page is made from the code, so that it says what the program does. Reading one takes two minutes.

Which method to begin with: [a table](../when.md#choose-a-method). In a terminal `perfed show NAME` says the same.
"""


def pages() -> dict[str, str]:
    """Pages by their paths in the site: the index, and one for each method."""
    methods = index()["methods"]
    sent = {name: (what, rows, clients) for name, what, rows, clients in leaving_table()}
    found = {f"methods/{item['name']}.md": _page(item, sent.get(item["name"])) for item in methods}
    return {"methods/index.md": _index(methods), **found}


def _index(methods: list[dict[str, Any]]) -> str:
    parts = [_OPENING]
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


def _page(item: Mapping[str, Any], sent: tuple[str, str, str] | None) -> str:
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
    parts += ["## Facts", table(("", ""), _facts(item, sent)), "## Settings"]
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


def _facts(item: Mapping[str, Any], sent: tuple[str, str, str] | None) -> Iterator[tuple[str, str]]:
    found = entry(item["name"])
    if item["paper"]:
        yield "paper", item["paper"]
    if "base" in item:
        yield "is", f"[{item['base']}]({item['base']}.md) under the participation policy `{item['policy']}`"
    yield "made for clients that differ in", item["differs"]
    yield "needs", "; ".join(item["needs"]) or "nothing in particular"
    yield "parameters", ", ".join(f"{stage} {place}" for stage, place in item["parameters"].items())
    yield "rides along", ", ".join(f"`{of.__name__}`" for of in found.extensions) or "no extension"
    yield "before a client is evaluated", _before(found.method)
    if sent and sent[0] != "not declared":
        yield "a client sends", one_line(sent[0])
        yield "private rows, private clients", "; ".join(one_line(said) for said in sent[1:])
    else:
        yield "under `[privacy]`", "refused: what it sends is not declared"
    yield "code", f"`{Path(inspect.getfile(found.method)).relative_to(DOCS.parent).as_posix()}`"


def _before(method: type[Method]) -> str:
    changed = method.personalise is not Method.personalise
    return "it makes a model of its own from what it gets" if changed else "it takes the newest shared parameters"


def tables_with(item: Mapping[str, Any]) -> Iterator[str]:
    """Leaderboards that have a row of the method, and sections of the results with a table that names it."""
    for board in index()["leaderboards"]:
        rows = [row for row in find_board(board["name"]).rows if row.method == item["name"]]
        if rows:
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
