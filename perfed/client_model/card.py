"""The model card: the facts about the model of a client as a page in Markdown."""

from __future__ import annotations

import re
from typing import Any

from perfed.data.client import SPLITS
from perfed.data.names import markdown_code, markdown_text

_MAX_CONTRIBUTORS = 100
_PERCENT = ("accuracy",)
_ENCODINGS = {
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
    """Return the model card of a site in Markdown.

    Args:
        facts: the facts of its :class:`~perfed.client_model.site_model.SiteModel`.
    """
    parts = [
        f"# Model of site {markdown_text(facts['site'])}",
        f"Trained by **{markdown_text(facts['method'])}** (perfed {facts['versions']['perfed']}) on data set "
        f"'{markdown_text(facts['dataset'])}', {facts['rounds']} rounds, seed {facts['seed']}; "
        f"written on {facts['date']}.",
        *([] if "joined" not in facts else [_JOINED.format(rounds=facts["joined"])]),
        "## What it does",
        _describe_use(facts),
        *([] if facts["columns"] is None else ["## Columns", _format_columns(facts)]),
        *([] if not facts.get("weights") else ["## What it is made of", _format_mixture(facts["weights"])]),
        "## Data of the site",
        _format_data(facts),
        *([] if not facts.get("contributors") else ["## Sites that contributed", _format_contributors(facts)]),
        "## How good it is",
        _format_metrics(facts),
        "## What it is not for",
        _list_limits(facts),
        *([] if "privacy" not in facts else ["## Privacy", _describe_privacy(facts["privacy"])]),
        "## Settings",
        _format_table(
            ("setting", "value"), [(key, markdown_code(str(value))) for key, value in facts["settings"].items()]
        ),
        "## Versions",
        _format_table(("program", "version"), list(facts["versions"].items())),
    ]
    return "\n\n".join(parts) + "\n"


def is_card_of(facts: dict[str, Any], text: str) -> bool:
    """Return whether ``text`` is the :func:`card` of the same model, ignoring the date."""
    dated = re.compile(r"; written on \S+\.")
    return dated.sub("", text) == dated.sub("", card(facts))


def _describe_use(facts: dict[str, Any]) -> str:
    """Return a sentence about the inputs and the predictions of the model."""
    shape = "x".join(map(str, facts["input_shape"]))
    inputs = f"numbers of shape {shape}"
    if facts["columns"] is not None:
        inputs = f"the columns {_join_names([column['name'] for column in facts['columns']])}"
    domains = facts["domains"]
    domain = "" if domains is None else f", and the sample's domain ({', '.join(map(markdown_text, domains))})"
    of_target = f" of {markdown_code(target)}" if (target := facts.get("target")) else ""
    usual = "values" if facts["classes"] is None else "probabilities"
    output = facts.get("output") or usual
    renamed = "" if output == usual else f" The output of an ONNX file is called `{output}`: `{usual}` is a column."
    if facts["classes"] is None:
        return (
            f"It takes {inputs}{domain}, and predicts {f'the value{of_target}' if of_target else 'a value'}.{renamed}"
        )
    classes = _join_names(facts["classes"])
    return f"It takes {inputs}{domain}, and predicts the probabilities of the classes{of_target}: {classes}.{renamed}"


def _format_columns(facts: dict[str, Any]) -> str:
    columns = facts["columns"]
    rows = [(markdown_text(column["name"]), column["kind"], _describe_encoding(column)) for column in columns]
    parts = [_format_table(("column", "kind", "in an ONNX file"), rows)]
    if any(column["kind"] == "category" for column in columns):
        parts.append(_SPELLINGS)
    if codes := facts.get("missing"):
        parts.append(f"Taken for missing, beside empty cells: {_join_names(codes)}.")
    for name, replacements in facts.get("values", {}).items():
        texts = [f"{old} as {new}" for old, new in replacements.items()]
        parts.append(f"Texts of {markdown_text(name)} that are read as others: {_join_names(texts)}.")
    return "\n\n".join(parts)


def _describe_encoding(column: dict[str, Any]) -> str:
    texts = [markdown_code(text) for text in column.get("texts") or ()]
    return _ENCODINGS.get(column["kind"], "") + (f": {', '.join(texts)}" if texts else "")


def _format_mixture(weights: dict[str, float]) -> str:
    table = _format_table(
        ("model", "weight"), [(markdown_text(name), f"{weight:.3f}") for name, weight in weights.items()]
    )
    return f"It is the mean of what these models say, with weights learnt from held-out training rows.\n\n{table}"


def _format_data(facts: dict[str, Any]) -> str:
    data = facts["data"]
    rows = [(f"{name} samples", data[name]) for name in SPLITS]
    rows += [(f"training samples of class {markdown_text(name)}", n) for name, n in data.get("per_class", {}).items()]
    rows += [(f"training samples of domain {markdown_text(name)}", n) for name, n in data.get("per_domain", {}).items()]
    rows += [(f"{name} training target", f"{v:.4g}") for name, v in data.get("targets", {}).items()]
    return _format_table(("of", "number"), rows)


def _format_contributors(facts: dict[str, Any]) -> str:
    """Return a table of at most 100 sites that contributed to training, with the privacy budget that each has spent."""
    contributors: dict[str, int | None] = facts["contributors"]
    privacy = facts.get("privacy")
    header, rows = ("site", "rounds in which its reply was used"), list[tuple[Any, ...]]()
    for site, rounds in [*contributors.items()][:_MAX_CONTRIBUTORS]:
        spent = () if privacy is None else (_format_spent(site, facts["site"], privacy),)
        rows.append((markdown_text(site), "not known here" if rounds is None else rounds, *spent))
    rest_note = (
        f"\n\nAnd {len(contributors) - _MAX_CONTRIBUTORS} more." if len(contributors) > _MAX_CONTRIBUTORS else ""
    )
    return _format_table((*header, *(() if privacy is None else ("epsilon spent",))), rows) + rest_note


def _format_spent(site: str, model_site: str, privacy: dict[str, Any]) -> str:
    """Return the epsilon that a site has spent, as text; an upper bound if only the common budget is known."""
    spent = privacy["spent"] if site == model_site else privacy.get("contributors", {}).get(site)
    return f"at most {privacy['most']:.4g}" if spent is None and "most" in privacy else f"{spent or 0.0:.4g}"


def _format_metrics(facts: dict[str, Any]) -> str:
    metrics = facts["metrics"]
    if not metrics:
        return "The site has no test data: nothing is known of how good the model is there."
    table = _format_table(("metric", "value", "interval (95 %)"), shown_metrics(metrics))
    return (
        f"On the site's {metrics['samples']} test samples; the intervals are over these samples (of the accuracy "
        f"Wilson's, else of a bootstrap) and say nothing about other seeds or other sites.\n\n{table}"
    )


def shown_metrics(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return name, value and interval of each metric, as text; accuracies are in %.

    Args:
        metrics: the result of :func:`~perfed.client_model.metrics.compute_metrics`.
    """
    rows = []
    for name, values in metrics.get("of", {}).items():
        scale, unit = (100, " %") if name in _PERCENT else (1, "")
        value, low, high = (None if v is None else f"{scale * v:.4g}{unit}" for v in values.values())
        rows.append((name, str(value), "not known" if low is None else f"{low} to {high}"))
    return rows


def _list_limits(facts: dict[str, Any]) -> str:
    absent = [name for name, n in facts["data"].get("per_class", {}).items() if n == 0]
    lines = [
        f"* For samples of other sites than {markdown_text(facts['site'])}: the model is that site's own.",
        "* For samples unlike those it was trained on (other devices, years, groups): nothing was measured there.",
        "* As the only ground of a decision about a person: probabilities are not calibrated, nor is fairness tested.",
    ]
    if absent:
        lines.append(f"* For the classes {_join_names(absent)}: the site has no training sample of them.")
    names = (facts["method"], *(facts.get("weights") or ()))
    if any(name.startswith("knnper") for name in names):
        lines.append("* For giving away without thought: it holds features and labels of the site's training samples.")
    if {"forest", "boost"} & {*names}:
        lines.append("* For giving away without thought: thresholds and leaves of its own trees are of single rows.")
    return "\n".join(lines)


def _describe_privacy(privacy: dict[str, Any]) -> str:
    unit = "row" if privacy["unit"] == "sample" else "client"
    return (
        f"What left the site in training is differentially private for each {unit}: epsilon {privacy['spent']:.4g} "
        f"spent at delta {privacy['delta']:g} (norm {privacy['clip']:g}, noise multiplier {privacy['noise']:.4g}). "
        "This card is not: it has counts of the site's data."
    )


def _join_names(names: list[Any]) -> str:
    listed = ", ".join(markdown_text(str(name)) for name in names[:10])
    return listed + (f", ... ({len(names)})" if len(names) > 10 else "")


def _format_table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    cells = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(_format_cell(cell) for cell in row) + " |" for row in cells)


def _format_cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split("\n"))
