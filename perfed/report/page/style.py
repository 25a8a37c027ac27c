"""How a page looks: colours and dashes, one of each per method everywhere, and the template around its sections.

Green and purple say better and worse, and nothing else: no method has either. People who see red and green alike tell
all of them apart (``tests/report/test_page_drawing.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from perfed.system import write_atomic

LIGHT = {
    "ink": "#1c2530",
    "muted": "#586574",
    "line": "#dfe4ea",
    "paper": "#ffffff",
    "panel": "#f5f7f9",
    "accent": "#0b63a5",
    "better": "#238636",
    "equal": "#c3cad2",
    "worse": "#7b1fa2",
    "c0": "#5d6773",
    "c1": "#128be0",
    "c2": "#b37903",
    "c3": "#2c9a88",
    "c4": "#b71c0e",
    "c5": "#024574",
    "c6": "#ef546c",
    "c7": "#4f4dcc",
    "c8": "#b53a9b",
    "c9": "#6f1c52",
}
DARK = {
    "ink": "#e6ebf0",
    "muted": "#9fadbb",
    "line": "#323c47",
    "paper": "#14191f",
    "panel": "#1c232b",
    "accent": "#6db8f2",
    "better": "#7ee08d",
    "equal": "#5a6673",
    "worse": "#b57bee",
    "c0": "#aab4bf",
    "c1": "#3e78f0",
    "c2": "#faa12a",
    "c3": "#239382",
    "c4": "#c15e50",
    "c5": "#61faed",
    "c6": "#f2e309",
    "c7": "#9e9621",
    "c8": "#bb4cb5",
    "c9": "#f985f0",
}
COLOURS = tuple(name for name in LIGHT if re.fullmatch(r"c\d", name))
DASHES = ("", "7 3", "2 3", "9 3 2 3")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True)
class Look:
    """How a method is drawn: ``colour`` is a variable of the style sheet, ``dash`` SVG's ``stroke-dasharray``."""

    colour: str
    dash: str


def paint(name: str) -> str:
    """The colour ``name`` of :data:`LIGHT` or :data:`DARK`, whichever the page is in."""
    return f"var(--{name})"


def shade(number: int) -> str:
    """The colour of the ``number``-th of several things that are no methods."""
    return paint(COLOURS[number % len(COLOURS)])


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """Of each method, by its place: no two of the first 40 are drawn alike, and neighbours have different dashes."""
    found = {}
    for number, method in enumerate(methods):
        turn, colour = divmod(number, len(COLOURS))
        found[method] = Look(shade(colour), DASHES[(colour + turn) % len(DASHES)])
    return found


def variables() -> str:
    """The colours as variables of a style sheet; a printed page is light."""

    def rules(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    return f":root{{{rules(LIGHT)}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{rules(DARK)}}}}}"


def in_light(drawing: str) -> str:
    """``drawing`` with the light colours in place of variables, for a file of its own."""
    return re.sub(r"var\(--(\w+)\)", lambda found: LIGHT[found[1]], drawing)


def document(title: str, facts: str, sections: Sequence[str]) -> str:
    """One HTML file that needs no other; its policy keeps whatever it holds from asking a server for anything."""
    package = files("perfed.report.page")
    page, style, script = ((package / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    inside = "\n".join(section for section in sections if section)
    return Template(page).substitute(
        title=escape(title),
        style=f"{variables()}\n{style.strip()}",
        facts=escape(facts),
        contents=_contents(inside),
        sections=inside,
        script=script.strip(),
    )


def _contents(sections: str) -> str:
    """Links to the sections, where there are several."""
    heads = re.findall(r'<section id="([\w-]+)".*?\n<h2[^>]*>(.*?)</h2>', sections)
    links = "".join(f'<a href="#{name}">{text}</a>' for name, text in heads)
    return f'<nav aria-label="Sections">{links}</nav>' if len(heads) > 2 else ""


def write_page(out: Path, title: str, facts: str, sections: Sequence[str]) -> Path:
    """Write the page to ``out``, whole or not at all, and return it."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, document(title, facts, sections))
    return out
