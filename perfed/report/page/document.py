"""A whole page: the template, the style sheet and the script of the package around sections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from perfed.machine import write_atomic
from perfed.report.page.look import variables


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
