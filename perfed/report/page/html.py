"""Pieces of HTML: sections, tables, figures, what a reader can switch, data for the script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from perfed.methods.titles import display_name
from perfed.report.page import svg
from perfed.report.page.style import Look
from perfed.report.text import TextTable

HINTS = {
    "client": "One hospital, lab, phone or other site with data of its own, which stay there.",
    "method": "A way to train the clients' models, with or without the others.",
    "federated": "Trained together: clients send parameters of models, never their data.",
    "reference": "What the others are compared with: the best method that needs no federation, if there is one.",
    "95 % interval": "Where the true difference plausibly lies, by how much clients and seeds differ, corrected for "
    "the number of methods. With 0 in it, the difference can be chance.",
    "client-run": "One client in one repetition (seed).",
    "seed": "A repetition with other random numbers: other initial models, often other splits of the data.",
    "10 % worst": "A tenth of the clients are not better than this.",
    "points": "Differences between percentages: from 90 % to 92 % are 2 points.",
    "round": "One exchange between the clients and the server, with local training in between.",
    "virtual time": "Seconds that the rounds would take if each client had its own speed, by the run's clock.",
}

_PLAIN = {"client", "method", "federated", "reference"}  # said once, under the verdict


def section(name: str, heading: str, *parts: str) -> str:
    """A section with its heading; nothing where it has no parts."""
    inside = "\n".join(part for part in parts if part)
    head = f'<h2 id="{name}-head">{escape(heading)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-head">\n{head}\n{inside}\n</section>' if inside else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{_class(kind)}>{escape(text)}</p>" if text else ""


def note(text: str) -> str:
    """A paragraph in smaller letters."""
    return paragraph(text, "note")


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def figure(drawing: str) -> str:
    """A drawing of its own; nothing where there is none."""
    return f"<figure>{drawing}</figure>" if drawing else ""


def grid(*parts: str, small: bool = False) -> str:
    """Figures beside each other where there is room, three of them if they are small."""
    inside = "".join(parts)
    return f'<div class="grid{" small" if small else ""}">{inside}</div>' if inside else ""


def details(summary: str, *parts: str, printed: bool = False) -> str:
    """Parts that are folded away; on paper too, unless they are ``printed``."""
    return (
        f"<details{_class('printed' if printed else '')}><summary>{escape(summary)}</summary>{''.join(parts)}</details>"
    )


def hinted(text: str) -> str:
    """``text`` with a hint on the first words that :data:`HINTS` explains."""
    for words in HINTS:
        if words not in _PLAIN and re.search(rf"\b{re.escape(words)}", text, re.IGNORECASE):
            return f'<abbr title="{escape(HINTS[words], quote=True)}">{escape(text)}</abbr>'
    return escape(text)


def swatch(look: Look) -> str:
    """A method's line, small, to stand beside its name."""
    drawn = svg.line([(1, 5), (25, 5)], look)
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">{drawn}</svg>'


def named(name: str, looks: Mapping[str, Look]) -> str:
    """A method as readers know it, beside its line; any other name as it is."""
    return f"{swatch(looks[name])}{escape(display_name(name))}" if name in looks else escape(name)


def table(of: TextTable, *, sortable: bool = False, looks: Mapping[str, Look] | None = None) -> str:
    """A table of text whose first column names the rows."""
    head = "".join(heading(cell, sortable=sortable) for cell in of.header)
    lines, own = [], {display_name(name): look for name, look in (looks or {}).items()}
    for first, *others in of.rows:
        others = [f"<td>{escape(cell)}</td>" for cell in others]
        lines.append(f'<tr><th scope="row">{named(first, own)}</th>{"".join(others)}</tr>')
    body = "\n".join(lines)
    caption = f"<caption>{escape(of.title)}</caption>" if of.title else ""
    kind = _class("sortable" if sortable else "")
    few = "narrow" if len(of.header) <= 3 else ""
    return scrolled(
        of.title, f"<table{kind}>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", few
    ) + note(of.note)


def scrolled(name: str, inside: str, kind: str = "") -> str:
    """A wide table in a box of its own that scrolls, by keyboard too."""
    label = escape(name or "Table", quote=True)
    return f'<div class="{f"wide {kind}".rstrip()}" role="region" aria-label="{label}" tabindex="0">{inside}</div>'


def heading(text: str, *, sortable: bool = False, name: str = "") -> str:
    """The head of a column; a button where the table can be sorted."""
    inside = f'<button type="button">{hinted(text)}</button>' if sortable else hinted(text)
    return f'<th scope="col"{_class(name)}>{inside}</th>'


def radio(name: str, label: str, options: Mapping[str, str]) -> str:
    """Buttons of which one is pressed, the first; ``options`` are keys with their texts."""
    each = [
        f'<label><input type="radio" name="{name}" value="{escape(key, quote=True)}"{" checked" if i == 0 else ""}>'
        f"<span>{escape(text)}</span></label>"
        for i, (key, text) in enumerate(options.items())
    ]
    return f'<fieldset class="pick"><legend>{escape(label)}</legend>{"".join(each)}</fieldset>' if len(each) > 1 else ""


def select(name: str, label: str, options: Mapping[str, str]) -> str:
    """A list of which one entry is chosen, the first."""
    each = "".join(f'<option value="{escape(k, quote=True)}">{escape(text)}</option>' for k, text in options.items())
    inside = f'<label class="pick">{escape(label)} <select name="{name}">{each}</select></label>'
    return inside if len(options) > 1 else ""


def slider(name: str, label: str, values: Sequence[object]) -> str:
    """A slider over the places of ``values``, at the last one."""
    last = len(values) - 1
    texts = escape(json.dumps([str(value) for value in values]), quote=True)
    if last < 1:
        return ""
    return (
        f'<label class="pick">{escape(label)} <input type="range" name="{name}" min="0" max="{last}" value="{last}" '
        f'data-texts="{texts}" aria-valuetext="{values[-1]}"><output>{values[-1]}</output></label>'
    )


def switched(controls: Sequence[str], panels: Mapping[str, str], shown: str | None = None) -> str:
    """``panels``, of which one is shown: that whose key the values of the controls, joined by ``|``, are."""
    first = next(iter(panels), None) if shown is None else shown
    each = [
        f'<div data-key="{escape(key, quote=True)}"{"" if key == first else " hidden"}>{panel}</div>'
        for key, panel in panels.items()
    ]
    inside = f'<div class="picks">{"".join(controls)}</div>' if any(controls) else ""
    return f'<div class="switched">{inside}{"".join(each)}</div>' if each else ""


def data(name: str, content: Any) -> str:
    """Numbers for the script."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
