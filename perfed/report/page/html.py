"""Functions that build HTML: sections, tables, figures, controls, and data for the page's script."""

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
    "client": "A hospital, laboratory, phone or other site that has data; the data do not leave it.",
    "method": "A way to train the clients' models, with or without the others.",
    "federated": "Trained jointly: clients send parameters of models, never their data.",
    "reference": "The method with which the others are compared: if possible, the best one without federation.",
    "95 % interval": "The range of plausible values of the true difference, estimated from the variation between "
    "clients and seeds, and corrected for the number of methods. If it contains 0, the difference may be chance.",
    "client-run": "One client with one seed.",
    "seed": "A repetition with different random numbers: other initial models, and often other splits of the data.",
    "10 % worst": "The value that the worst tenth of the clients do not exceed.",
    "points": "Differences between percentages: 92 % is 2 points more than 90 %.",
    "round": "One exchange between the clients and the server, with local training in between.",
    "virtual time": "The seconds that the rounds would take with the clients' speeds that the run's clock simulates.",
}

_PLAIN = {"client", "method", "federated", "reference"}  # explained only in the glossary below the verdict


def build_section(name: str, heading: str, *parts: str) -> str:
    """Return a section with its heading; empty if all parts are empty."""
    inside = "\n".join(part for part in parts if part)
    head = f'<h2 id="{name}-head">{escape(heading)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-head">\n{head}\n{inside}\n</section>' if inside else ""


def build_paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text with the CSS class ``kind``; empty if the text is."""
    return f"<p{_class_attribute(kind)}>{escape(text)}</p>" if text else ""


def build_note(text: str) -> str:
    """Return a paragraph in small letters."""
    return build_paragraph(text, "note")


def _class_attribute(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def wrap_figure(drawing: str) -> str:
    """Return a drawing in a ``figure`` element; empty if the drawing is."""
    return f"<figure>{drawing}</figure>" if drawing else ""


def build_grid(*parts: str, small: bool = False) -> str:
    """Return the parts in a grid with as many columns as the width allows; ``small`` parts need less width."""
    inside = "".join(parts)
    return f'<div class="grid{" small" if small else ""}">{inside}</div>' if inside else ""


def build_details(summary: str, *parts: str, printed: bool = False) -> str:
    """Return parts that are folded below ``summary``; ``printed`` parts are unfolded on paper."""
    kind = _class_attribute("printed" if printed else "")
    return f"<details{kind}><summary>{escape(summary)}</summary>{''.join(parts)}</details>"


def add_tooltip(text: str) -> str:
    """Return ``text`` with a tooltip that explains the first term of :data:`HINTS` in it."""
    for term in HINTS:
        if term not in _PLAIN and re.search(rf"\b{re.escape(term)}", text, re.IGNORECASE):
            return f'<abbr title="{escape(HINTS[term], quote=True)}">{escape(text)}</abbr>'
    return escape(text)


def draw_swatch(look: Look) -> str:
    """Return a short line in a method's style, for use beside its name."""
    line = svg.draw_line([(1, 5), (25, 5)], look)
    return f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">{line}</svg>'


def label_method(name: str, looks: Mapping[str, Look]) -> str:
    """Return the display name of a method beside its line; a name without a line style is returned unchanged."""
    return f"{draw_swatch(looks[name])}{escape(display_name(name))}" if name in looks else escape(name)


def build_table(text_table: TextTable, *, sortable: bool = False, looks: Mapping[str, Look] | None = None) -> str:
    """Return a table as HTML, whose first column has the names of the rows.

    Args:
        text_table: the content.
        sortable: whether a click on the head of a column sorts the rows.
        looks: the line styles of methods, which are drawn beside their names.
    """
    head = "".join(build_column_head(cell, sortable=sortable) for cell in text_table.header)
    lines, looks_by_title = [], {display_name(name): look for name, look in (looks or {}).items()}
    for first, *values in text_table.rows:
        values = [f"<td>{escape(cell)}</td>" for cell in values]
        lines.append(f'<tr><th scope="row">{label_method(first, looks_by_title)}</th>{"".join(values)}</tr>')
    body = "\n".join(lines)
    caption = f"<caption>{escape(text_table.title)}</caption>" if text_table.title else ""
    kind = _class_attribute("sortable" if sortable else "")
    few = "narrow" if len(text_table.header) <= 3 else ""
    return wrap_scrollable(
        text_table.title, f"<table{kind}>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", few
    ) + build_note(text_table.note)


def wrap_scrollable(name: str, inside: str, kind: str = "") -> str:
    """Return a wide table in a box that can be scrolled, also with the keyboard."""
    label = escape(name or "Table", quote=True)
    return f'<div class="{f"wide {kind}".rstrip()}" role="region" aria-label="{label}" tabindex="0">{inside}</div>'


def build_column_head(text: str, *, sortable: bool = False, name: str = "") -> str:
    """Return the head of a column, which is a button if the table is sortable."""
    inside = f'<button type="button">{add_tooltip(text)}</button>' if sortable else add_tooltip(text)
    return f'<th scope="col"{_class_attribute(name)}>{inside}</th>'


def build_radio(name: str, label: str, options: Mapping[str, str]) -> str:
    """Return radio buttons, of which the first is selected; ``options`` are keys with their labels."""
    buttons = [
        f'<label><input type="radio" name="{name}" value="{escape(key, quote=True)}"{" checked" if i == 0 else ""}>'
        f"<span>{escape(text)}</span></label>"
        for i, (key, text) in enumerate(options.items())
    ]
    return (
        f'<fieldset class="pick"><legend>{escape(label)}</legend>{"".join(buttons)}</fieldset>'
        if len(buttons) > 1
        else ""
    )


def build_select(name: str, label: str, options: Mapping[str, str]) -> str:
    """Return a drop-down list, whose first option is selected; empty if there is only one option."""
    entries = "".join(f'<option value="{escape(k, quote=True)}">{escape(text)}</option>' for k, text in options.items())
    inside = f'<label class="pick">{escape(label)} <select name="{name}">{entries}</select></label>'
    return inside if len(options) > 1 else ""


def build_slider(name: str, label: str, values: Sequence[object]) -> str:
    """Return a slider over ``values``, which is at the last one; empty for a single value."""
    last = len(values) - 1
    texts = escape(json.dumps([str(value) for value in values]), quote=True)
    if last < 1:
        return ""
    return (
        f'<label class="pick">{escape(label)} <input type="range" name="{name}" min="0" max="{last}" value="{last}" '
        f'data-texts="{texts}" aria-valuetext="{values[-1]}"><output>{values[-1]}</output></label>'
    )


def build_switched_panels(controls: Sequence[str], panels: Mapping[str, str], visible_key: str | None = None) -> str:
    """Return panels of which one is visible: the one whose key equals the values of the controls, joined by ``|``."""
    visible_key = next(iter(panels), None) if visible_key is None else visible_key
    divisions = [
        f'<div data-key="{escape(key, quote=True)}"{"" if key == visible_key else " hidden"}>{panel}</div>'
        for key, panel in panels.items()
    ]
    inside = f'<div class="picks">{"".join(controls)}</div>' if any(controls) else ""
    return f'<div class="switched">{inside}{"".join(divisions)}</div>' if divisions else ""


def embed_data(name: str, content: Any) -> str:
    """Return a script element with data as JSON, which the page's script reads."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
