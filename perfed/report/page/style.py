"""The style of a page: colours, the line style of each method, and the HTML document around the sections.

Green and purple mean better and worse only; no method has these colours. All colours can be distinguished with
red-green colour blindness (``tests/report/test_page_drawing.py``).
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
    """The line style of a method: ``colour`` is a CSS value, ``dash`` an SVG ``stroke-dasharray`` (empty: solid)."""

    colour: str
    dash: str


def css_colour(name: str) -> str:
    """Return the CSS value of a colour in :data:`LIGHT` and :data:`DARK`; the page's colour scheme decides which."""
    return f"var(--{name})"


def cycle_colour(number: int) -> str:
    """Return the colour with this number; the colours repeat after the last one."""
    return css_colour(COLOURS[number % len(COLOURS)])


def assign_looks(methods: Iterable[str]) -> dict[str, Look]:
    """Return a line style for each method, in their order.

    The first 40 styles differ from each other, and neighbours have different dashes.
    """
    styles = {}
    for number, method in enumerate(methods):
        turn, colour = divmod(number, len(COLOURS))
        styles[method] = Look(cycle_colour(colour), DASHES[(colour + turn) % len(DASHES)])
    return styles


def build_colour_variables() -> str:
    """Return a style sheet that defines the colours as variables; a printed page has the light colours."""

    def rules(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    return f":root{{{rules(LIGHT)}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{rules(DARK)}}}}}"


def use_light_colours(drawing: str) -> str:
    """Return ``drawing`` with the light colours in place of the variables."""
    return re.sub(r"var\(--(\w+)\)", lambda match: LIGHT[match[1]], drawing)


def build_document(title: str, facts: str, sections: Sequence[str]) -> str:
    """Return a self-contained HTML document, whose content security policy forbids all requests.

    Args:
        title: the title of the page.
        facts: a line below the title.
        sections: the HTML of the sections; empty ones are left out.
    """
    package = files("perfed.report.page")
    page, style, script = ((package / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    inside = "\n".join(section for section in sections if section)
    return Template(page).substitute(
        title=escape(title),
        style=f"{build_colour_variables()}\n{style.strip()}",
        facts=escape(facts),
        contents=_build_contents(inside),
        sections=inside,
        script=script.strip(),
    )


def _build_contents(sections: str) -> str:
    """Return links to the sections; empty if there are fewer than three."""
    heads = re.findall(r'<section id="([\w-]+)".*?\n<h2[^>]*>(.*?)</h2>', sections)
    links = "".join(f'<a href="#{name}">{text}</a>' for name, text in heads)
    return f'<nav aria-label="Sections">{links}</nav>' if len(heads) > 2 else ""


def write_page(out: Path, title: str, facts: str, sections: Sequence[str]) -> Path:
    """Write the page (:func:`build_document`) to ``out`` atomically, and return the path."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, build_document(title, facts, sections))
    return out
