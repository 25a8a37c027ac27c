"""The section with everything that is needed to reproduce the numbers: commands, versions, data and settings."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Mapping
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from perfed.methods.titles import display_name
from perfed.plugins import BLEND, POOLED, SKLEARN
from perfed.report.page.html import build_details, build_note, build_section, build_table
from perfed.report.page.page_data import ReportData
from perfed.report.text import UNKNOWN, TextTable
from perfed.settings import flatten_keys

LEFT_OUT = ("method", "methods", "seed", "plan", "description")


def reproduce_section(report: ReportData, command: str = "") -> str:
    """Return the section; complete settings and execution plans are folded."""
    differing = _tabulate_differences(report)
    return build_section(
        "reproduce",
        "Reproduce",
        f"<pre>{escape(_format_commands(report, command))}</pre>",
        build_table(_tabulate_versions(report)),
        "<h3>Settings in which the methods differ</h3>" if differing.rows else "",
        build_table(differing) if differing.rows else "",
        _list_notes(report),
        *(_show_settings(report, method) for method in report.methods),
        build_note(f"Page written with Python {platform.python_version()}, perfed {_get_installed_version('perfed')}."),
    )


def _format_commands(report: ReportData, command: str) -> str:
    """Return commands with quoted names, which can be pasted into a shell."""
    first = report.runs[0]
    method = " ".join(display_name(first.method).split())
    comment = f"# repeat one of these runs: {method} with seed {first.seed}"
    rerun = f"{comment}\n{shlex.join(['perfed', 'run', str(first.directory / 'config.toml')])}"
    return f"{command}\n{rerun}" if command else rerun


def _tabulate_versions(report: ReportData) -> TextTable:
    """Return a table of the software versions of the runs and the checksums of their data."""
    rows: dict[str, dict[str, None]] = {}
    for run in report.runs:
        for name, number in (run.summary.versions if run.summary else {}).items():
            rows.setdefault(name, {})[str(number)] = None
    marks: dict[str, dict[int, None]] = {}
    for run in report.runs:
        if run.data is not None:
            marks.setdefault(run.data, {})[run.seed] = None
    cells = [[name, ", ".join(numbers)] for name, numbers in rows.items()]
    for mark, seeds in marks.items():
        cells.append([f"data of seed {', '.join(map(str, seeds))}", mark])
    return TextTable("Versions and data", ["Item", "Version or checksum"], cells)


def _tabulate_differences(report: ReportData) -> TextTable:
    """Return a table of the settings whose values differ between methods; scikit-learn's models are left out."""
    firsts = {m: report.members(m)[0] for m in report.methods if not m.startswith((SKLEARN, POOLED)) and m != BLEND}
    values_by_key: dict[str, dict[str, str]] = {}
    for method, run in firsts.items():
        settings = {k: v for k, v in run.config.items() if k not in LEFT_OUT}
        method_settings = run.summary.settings if run.summary else {}
        for key, value in {**_flatten_settings(settings), **_flatten_settings(method_settings)}.items():
            values_by_key.setdefault(key, {})[method] = value
    rows = [
        [key, *(values.get(method, UNKNOWN) for method in firsts)]
        for key, values in sorted(values_by_key.items())
        if len(values) > 1 and len(set(values.values())) > 1
    ]
    return TextTable("", ["Setting", *map(display_name, firsts)], rows)


def _flatten_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of nested settings as text, by their dotted keys."""
    return {".".join(k): v if isinstance(v, str) else json.dumps(v) for k, v in flatten_keys(settings).items()}


def _list_notes(report: ReportData) -> str:
    seeds: dict[str, list[str]] = {}
    for run in report.runs:
        for text in run.summary.notes if run.summary else []:
            seeds.setdefault(f"{display_name(run.method)}: {text}", []).append(str(run.seed))
    items = "".join(f"<li>{escape(text)} (seed {', '.join(numbers)})</li>" for text, numbers in seeds.items())
    return build_details("Notes of the runs", f"<ul>{items}</ul>") if items else ""


def _show_settings(report: ReportData, method: str) -> str:
    members = report.members(method)
    parts = [f"<p>config.toml, seed {members[0].seed}</p>", _wrap_preformatted(members[0].config_text)]
    settings = next((run.summary.settings for run in members if run.summary and run.summary.settings), None)
    parts += (
        ["<p>All settings of the method</p>", _wrap_preformatted(json.dumps(settings, indent=2))] if settings else []
    )
    plans: dict[str, list[str]] = {}
    for run in members:
        if run.summary and run.summary.plan:
            plans.setdefault(json.dumps(run.summary.plan, indent=2), []).append(str(run.seed))
    for plan, seeds in plans.items():
        parts += [f"<p>Execution plan, seed {', '.join(seeds)}</p>", _wrap_preformatted(plan)]
    return build_details(f"{display_name(method)}: settings{' and execution plan' if plans else ''}", *parts)


def _wrap_preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _get_installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed as a package)"
