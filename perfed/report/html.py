"""One self-contained HTML file about one run or many; it needs no network to be read."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from perfed.machine import write_atomic
from perfed.report.arrays import load_combination, load_snapshot
from perfed.report.comparison import compare_table, comparison_rows, metric_tables
from perfed.report.curves import metric_curves
from perfed.report.figures import (
    MAX_SAMPLES,
    combination_heat_maps,
    embedded_samples,
    metric_by_seconds,
    metric_per_client,
    sorted_clients,
)
from perfed.report.runs import Run, main_metric, methods_of, reported
from perfed.report.tables import domain_tables, speed_table
from perfed.report.targets import target_table
from perfed.report.text import TextTable
from perfed.report.verdict import sentences

MAX_HEAT_MAPS = 12

# The policy keeps whatever the page holds from asking a server for anything.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1f2933;
        max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ margin-bottom: 0.2rem; }}
h2 {{ margin-top: 2.5rem; padding-bottom: 0.2rem; border-bottom: 1px solid #d3d9df; }}
.facts, .note {{ color: #52606d; }}
.note {{ font-size: 0.9rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.35rem 0.7rem; border-bottom: 1px solid #e4e7eb; text-align: right; }}
th {{ vertical-align: bottom; font-size: 0.85rem; color: #52606d; }}
td {{ white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ background: #f5f7fa; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; line-height: 1.4; }}
summary {{ cursor: pointer; margin: 0.4rem 0; }}
</style>
<script>{plotlyjs}</script>
</head>
<body>
<h1>{title}</h1>
<p class="facts">{facts}</p>
{sections}
</body>
</html>
"""


def write_report(runs: Sequence[Run], out: Path, *, title: str) -> Path:
    """Write the report of the runs (several methods and seeds of one data set) to ``out`` and return it.

    What a run that is not finished lacks is left out, with a sentence saying so. The file appears whole or
    not at all.

    Raises:
        PerfedError: arrays of a run that cannot be read.
    """
    sections = [
        _comparison(runs),
        *_targets(runs),
        *_domains(runs),
        _over_rounds(runs),
        _per_client(runs),
        *_speeds(runs),
        _embedding(runs),
        *_combination(runs),
        _settings(runs),
    ]
    page = PAGE.format(title=escape(title), facts=_facts(runs), plotlyjs=get_plotlyjs(), sections="\n".join(sections))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, page)
    return out


def _facts(runs: Sequence[Run]) -> str:
    methods, seeds = methods_of(runs), sorted({run.seed for run in runs})
    clients = sorted({len(run.clients.ids) for run in runs if run.clients})
    trained = [run for run in runs if run.summary is None or run.summary.rounds]  # the others have no rounds
    done = sorted({run.rounds[-1].round if run.rounds else 0 for run in trained})
    datasets = [run.summary.dataset for run in runs if run.summary][:1]
    facts = [
        *datasets,
        _count(len(methods), "method"),
        f"{_count(len(seeds), 'seed')} ({', '.join(map(str, seeds))})",
        *([f"{_range(clients)} clients"] if clients else []),
        *([f"{_range(done)} rounds"] if done else []),
        *{
            f"{run.communication:g} s of communication per exchange, as set for this report"
            for run in runs
            if run.communication is not None
        },
    ]
    return " · ".join(escape(fact) for fact in facts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _section(name: str, heading: str, *parts: str) -> str:
    return "\n".join([f'<section id="{name}">', f"<h2>{escape(heading)}</h2>", *parts, "</section>"])


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def plot(name: str, figure: go.Figure) -> str:
    """The figure as the element ``name`` of a page that has plotly's program, without links or buttons to a server."""
    config = {"displaylogo": False, "responsive": True, "showSendToCloud": False}
    html = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    return str(html)


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = ["".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in table.rows]
    lines = "".join(f"<tr>{cells}</tr>\n" for cells in body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{lines}</tbody></table></div>'


def _titled(tables: Sequence[TextTable]) -> list[str]:
    """Each table below its title."""
    return [part for table in tables for part in (f"<h3>{escape(table.title)}</h3>", _table(table))]


def _comparison(runs: Sequence[Run]) -> str:
    tables = metric_tables(compare_table(comparison_rows(runs)), reported(runs))
    parts = [*(f"<p>{escape(text)}</p>" for text in sentences(runs)), *_titled(tables)]
    if tables:
        parts.append(_note("Spread over the clients is averaged over the seeds. Differences are paired by seed."))
    unfinished = [f"{run.method} with seed {run.seed}" for run in runs if not run.summary]
    if unfinished:
        parts.append(_note(f"Not finished, so not in the table: {', '.join(unfinished)}."))
    return _section("comparison", "Comparison", *parts)


def _targets(runs: Sequence[Run]) -> list[str]:
    table = target_table(runs)
    if table is None:
        return []
    what, unit = ("Virtual time at the end", "time") if any(run.clocked for run in runs) else ("Number", "rounds")
    note = _note(
        f"{what} of the first evaluated round whose mean accuracy was at least the target, mean ± std over the seeds "
        f"that reached it. Speed-up: the base method's {unit} divided by the method's own, per seed."
    )
    return [_section("targets", "Time to accuracy", _table(table), note, *([_note(table.note)] if table.note else []))]


def _domains(runs: Sequence[Run]) -> list[str]:
    tables = domain_tables(runs)
    if not tables:
        return []
    parts = _titled(tables)
    note = _note(
        "Mean, minimum and maximum over the domains are taken per run and then averaged over the seeds (± std)."
    )
    below = [_note(text) for text in dict.fromkeys(table.note for table in tables if table.note)]
    return [_section("domains", "Domains", *parts, note, *below)]


def _over_rounds(runs: Sequence[Run]) -> str:
    metric = main_metric(runs)
    figure = metric_curves(runs, metric) if metric else None
    if figure is None:
        return _section("rounds", "During training", _note("No round has been evaluated yet."))
    note = _note(
        "Mean over the clients; line: mean over the seeds, band: lowest to highest seed. Each point is a round; times "
        "and bytes are counted from the start and averaged over the seeds."
    )
    return _section("rounds", f"{_name(metric)} during training", plot("plot-rounds", figure), note)


def _per_client(runs: Sequence[Run]) -> str:
    metric = main_metric(runs)
    boxes = metric_per_client(runs, metric) if metric else None
    curves = sorted_clients(runs, metric) if metric else None
    if boxes is None or curves is None:
        return _section("clients", "Per client", _note("No run has measured its clients yet."))
    plots = [plot("plot-clients", boxes), plot("plot-sorted", curves)]
    shown = reported(runs)
    note = _note(
        "Each point is one client of one seed. After local training only participants of the round are measured. The "
        f"sorted curves show what the table reports{shown and ': '}{shown}."
    )
    return _section("clients", f"{_name(metric)} per client", *plots, note)


def _speeds(runs: Sequence[Run]) -> list[str]:
    metric = main_metric(runs)
    table = speed_table(runs, metric)
    if table is None:
        return []
    figure = metric_by_seconds(runs, metric) if metric else None
    plots = [plot("plot-speeds", figure)] if figure else []
    note = _note(
        "Clients ordered by the mean virtual seconds of their replies; those without a reply, and the middle one of an "
        "odd number, belong to neither half. Means over the clients of a half, then mean ± std over the seeds."
    )
    return [_section("speeds", "Slower and faster clients", _table(table), *plots, note)]


def _name(metric: str | None) -> str:
    return "Accuracy" if metric == "accuracy" else str(metric)


def _embedding(runs: Sequence[Run]) -> str:
    heading = "Embedded samples"
    kept = [(run, [load_snapshot(file) for file in run.snapshot_files]) for run in runs if run.snapshot_files]
    if not kept:
        return _section("embedding", heading, _note("No run has kept snapshots of embedded samples."))
    # A method that aligns to anchors is what the picture is for; without one, the first run will do.
    run, snapshots = next((pair for pair in kept if pair[1][0].anchors is not None), kept[0])
    figure = embedded_samples(snapshots)
    anchors = "" if snapshots[0].anchors is None else " and anchors"
    note = _note(
        f"t-SNE of training samples (at most {MAX_SAMPLES}){anchors} of {run.method} with seed {run.seed}, "
        "each panel on its own: neighbours mean something, positions and distances between panels do not."
    )
    return _section("embedding", heading, plot("plot-embedding", figure), note)


def _combination(runs: Sequence[Run]) -> list[str]:
    """Heat maps of each method's first run that combined heads: all its evaluated rounds, of many a dozen."""
    first = {run.method: run for run in reversed(runs) if run.combination_files}
    parts: list[str] = []
    for method in (name for name in methods_of(runs) if name in first):
        run = first[method]
        files = run.combination_files
        places = np.linspace(0, len(files) - 1, min(len(files), MAX_HEAT_MAPS)).round().astype(int)
        figure = combination_heat_maps([load_combination(files[place]) for place in places])
        parts += [f"<h3>{escape(method)}, seed {run.seed}</h3>", plot(f"plot-combination-{len(parts) // 2}", figure)]
    if not parts:
        return []
    note = "Row i shows whose heads (FedAMP: models) client i's was made of. Blocks are clients it found alike."
    return [_section("combination", "Weights of the combination", *parts, _note(note))]


def _settings(runs: Sequence[Run]) -> str:
    seeds: dict[str, list[str]] = {}
    for run in runs:
        for note in run.summary.notes if run.summary else []:
            seeds.setdefault(f"{run.method}: {note}", []).append(str(run.seed))
    notes = [f"<li>{escape(note)} (seed {', '.join(own)})</li>" for note, own in seeds.items()]
    parts = [f"<h3>Notes</h3><ul>{''.join(notes)}</ul>"] if notes else []
    for method in methods_of(runs):
        members = [run for run in runs if run.method == method]
        plans = [
            f"<p>Execution plan, seed {run.seed}</p>{_pre(json.dumps(run.summary.plan, indent=2))}"
            for run in members
            if run.summary and run.summary.plan
        ]
        config = f"<p>config.toml, seed {members[0].seed}</p>{_pre(members[0].config_text)}"
        used = next((run.summary.settings for run in members if run.summary and run.summary.settings), None)
        config += f"<p>All settings of the method</p>{_pre(json.dumps(used, indent=2))}" if used else ""
        head = f"<summary>{escape(method)}: settings{' and execution plan' if plans else ''}</summary>"
        parts.append(f"<details>{head}{config}{''.join(plans)}</details>")
    return _section("settings", "Settings", *parts, _note(f"Report written with {_versions()}."))


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _versions() -> str:
    packages = []
    for name in ("perfed", "torch", "numpy", "scikit-learn", "plotly"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            packages.append(f"{name} (not installed as a package)")
    return ", ".join([f"Python {platform.python_version()}", *packages])
