"""The model card: the facts about the model of a client as a page for people."""

from __future__ import annotations

import re
from typing import Any

from perfed.data.client import SPLITS
from perfed.data.names import markdown_code, markdown_text

_LISTED = 100
_PERCENT = ("accuracy",)
_WRITTEN = {
    "number": "a number, NaN where missing",
    "boolean": "0 or 1, NaN where missing",
    "date": "days since 1970-01-01, the time of day as a fraction, NaN where missing",
    "category": "a text, `missing` where it is",
}
_SPELLINGS = (
    "A category may be written as in the site's table: with spaces around it, a whole number also with `.0` (`1`, "
    "`1.0`, `1.00`). Any other text counts as a category that training has not seen."
)
_JOINED = (
    "The site joined the finished run: it trained its own stages for {rounds} rounds against what the others share, "
    "which did not change."
)


def card(facts: dict[str, Any]) -> str:
    """Return the model card of a site, Markdown.

    Args:
        facts: of its :class:`~perfed.client_model.site_model.SiteModel`.
    """
    parts = [
        f"# Model of site {markdown_text(facts['site'])}",
        f"Trained by **{markdown_text(facts['method'])}** (perfed {facts['versions']['perfed']}) on data set "
        f"'{markdown_text(facts['dataset'])}', {facts['rounds']} rounds, seed {facts['seed']}; "
        f"written on {facts['date']}.",
        *([] if "joined" not in facts else [_JOINED.format(rounds=facts["joined"])]),
        "## What it does",
        _use(facts),
        *([] if facts["columns"] is None else ["## Columns", _columns(facts)]),
        *([] if not facts.get("weights") else ["## What it is made of", _mixture(facts["weights"])]),
        "## Data of the site",
        _data(facts),
        *([] if not facts.get("contributors") else ["## Sites that contributed", _contributors(facts)]),
        "## How good it is",
        _metrics(facts),
        "## What it is not for",
        _limits(facts),
        *([] if "privacy" not in facts else ["## Privacy", _privacy(facts["privacy"])]),
        "## Settings",
        _table(("setting", "value"), [(key, markdown_code(str(value))) for key, value in facts["settings"].items()]),
        "## Versions",
        _table(("program", "version"), list(facts["versions"].items())),
    ]
    return "\n\n".join(parts) + "\n"


def is_card_of(facts: dict[str, Any], text: str) -> bool:
    """Return whether ``text`` is :func:`card` of the same model, be it of another day."""
    dated = re.compile(r"; written on \S+\.")
    return dated.sub("", text) == dated.sub("", card(facts))


def _use(facts: dict[str, Any]) -> str:
    """Return what the model takes and predicts."""
    shape = "x".join(map(str, facts["input_shape"]))
    inputs = f"numbers of shape {shape}"
    if facts["columns"] is not None:
        inputs = f"the columns {_few([column['name'] for column in facts['columns']])}"
    domains = facts["domains"]
    domain = "" if domains is None else f", and the sample's domain ({', '.join(map(markdown_text, domains))})"
    of = f" of {markdown_code(target)}" if (target := facts.get("target")) else ""
    usual = "values" if facts["classes"] is None else "probabilities"
    output = facts.get("output") or usual
    renamed = "" if output == usual else f" The output of an ONNX file is called `{output}`: `{usual}` is a column."
    if facts["classes"] is None:
        return f"It takes {inputs}{domain}, and predicts {f'the value{of}' if of else 'a value'}.{renamed}"
    classes = _few(facts["classes"])
    return f"It takes {inputs}{domain}, and predicts the probabilities of the classes{of}: {classes}.{renamed}"


def _columns(facts: dict[str, Any]) -> str:
    columns = facts["columns"]
    rows = [(markdown_text(column["name"]), column["kind"], _how_written(column)) for column in columns]
    parts = [_table(("column", "kind", "in an ONNX file"), rows)]
    if any(column["kind"] == "category" for column in columns):
        parts.append(_SPELLINGS)
    if codes := facts.get("missing"):
        parts.append(f"Taken for missing, beside empty cells: {_few(codes)}.")
    for name, replacements in facts.get("values", {}).items():
        texts = [f"{old} as {new}" for old, new in replacements.items()]
        parts.append(f"Texts of {markdown_text(name)} that are read as others: {_few(texts)}.")
    return "\n\n".join(parts)


def _how_written(column: dict[str, Any]) -> str:
    texts = [markdown_code(text) for text in column.get("texts") or ()]
    return _WRITTEN.get(column["kind"], "") + (f": {', '.join(texts)}" if texts else "")


def _mixture(weights: dict[str, float]) -> str:
    table = _table(("model", "weight"), [(markdown_text(name), f"{weight:.3f}") for name, weight in weights.items()])
    return f"It is the mean of what these models say, with weights learnt from held-out training rows.\n\n{table}"


def _data(facts: dict[str, Any]) -> str:
    data = facts["data"]
    rows = [(f"{name} samples", data[name]) for name in SPLITS]
    rows += [(f"training samples of class {markdown_text(name)}", n) for name, n in data.get("per_class", {}).items()]
    rows += [(f"training samples of domain {markdown_text(name)}", n) for name, n in data.get("per_domain", {}).items()]
    rows += [(f"{name} training target", f"{v:.4g}") for name, v in data.get("targets", {}).items()]
    return _table(("of", "number"), rows)


def _contributors(facts: dict[str, Any]) -> str:
    """Who was used in training, and what each has spent of privacy; of many clients the first hundred."""
    found: dict[str, int | None] = facts["contributors"]
    privacy = facts.get("privacy")
    header, rows = ("site", "rounds in which its reply was used"), list[tuple[Any, ...]]()
    for site, rounds in [*found.items()][:_LISTED]:
        spent = () if privacy is None else (_spent_by(site, facts["site"], privacy),)
        rows.append((markdown_text(site), "not known here" if rounds is None else rounds, *spent))
    more = f"\n\nAnd {len(found) - _LISTED} more." if len(found) > _LISTED else ""
    return _table((*header, *(() if privacy is None else ("epsilon spent",))), rows) + more


def _spent_by(site: str, own: str, privacy: dict[str, Any]) -> str:
    """What a site has spent; at a real site it is known of the others that their budget is the same."""
    spent = privacy["spent"] if site == own else privacy.get("contributors", {}).get(site)
    return f"at most {privacy['most']:.4g}" if spent is None and "most" in privacy else f"{spent or 0.0:.4g}"


def _metrics(facts: dict[str, Any]) -> str:
    found = facts["metrics"]
    if not found:
        return "The site has no test data: nothing is known of how good the model is there."
    table = _table(("metric", "value", "interval (95 %)"), shown_metrics(found))
    return (
        f"On the site's {found['samples']} test samples; the intervals are over these samples (of the accuracy "
        f"Wilson's, else of a bootstrap) and say nothing about other seeds or other sites.\n\n{table}"
    )


def shown_metrics(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return name, value and interval of each metric, as text; accuracies are in %.

    Args:
        found: the result of :func:`~perfed.client_model.metrics.compute_metrics`.
    """
    rows = []
    for name, values in found.get("of", {}).items():
        scale, unit = (100, " %") if name in _PERCENT else (1, "")
        value, low, high = (None if v is None else f"{scale * v:.4g}{unit}" for v in values.values())
        rows.append((name, str(value), "not known" if low is None else f"{low} to {high}"))
    return rows


def _limits(facts: dict[str, Any]) -> str:
    absent = [name for name, n in facts["data"].get("per_class", {}).items() if n == 0]
    lines = [
        f"* For samples of other sites than {markdown_text(facts['site'])}: the model is that site's own.",
        "* For samples unlike those it was trained on (other devices, years, groups): nothing was measured there.",
        "* As the only ground of a decision about a person: probabilities are not calibrated, nor is fairness tested.",
    ]
    if absent:
        lines.append(f"* For the classes {_few(absent)}: the site has no training sample of them.")
    names = (facts["method"], *(facts.get("weights") or ()))
    if any(name.startswith("knnper") for name in names):
        lines.append("* For giving away without thought: it holds features and labels of the site's training samples.")
    if {"forest", "boost"} & {*names}:
        lines.append("* For giving away without thought: thresholds and leaves of its own trees are of single rows.")
    return "\n".join(lines)


def _privacy(of: dict[str, Any]) -> str:
    unit = "row" if of["unit"] == "sample" else "client"
    return (
        f"What left the site in training is differentially private for each {unit}: epsilon {of['spent']:.4g} spent at "
        f"delta {of['delta']:g} (norm {of['clip']:g}, noise multiplier {of['noise']:.4g}). This card is not: it has "
        "counts of the site's data."
    )


def _few(names: list[Any]) -> str:
    listed = ", ".join(markdown_text(str(name)) for name in names[:10])
    return listed + (f", ... ({len(names)})" if len(names) > 10 else "")


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    cells = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in cells)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split("\n"))
