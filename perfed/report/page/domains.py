"""FedDAR's picture: each domain's metric under every method, with how far the best and the worst domain are apart."""

from __future__ import annotations

import numpy as np

from perfed.engine.metrics import metric_of
from perfed.report.page import svg
from perfed.report.page.html import figure, grid, note, section, table
from perfed.report.page.page_data import Study
from perfed.report.page.style import paint
from perfed.report.tables import OVER_DOMAINS, domain_tables
from perfed.report.text import axis_title

MOST_DOMAINS = 40
READ_DOMAINS = (
    "A dot is the mean over the seeds, its line goes from the lowest to the highest seed; n: samples that were "
    "evaluated. Gap: between a method's best and worst domain, the smaller the fairer."
)
LINE = 9.0  # between methods of a domain


def domains_section(study: Study) -> str:
    """A dot plot of the main metric, or the first that was measured by domain, and the tables of all."""
    tables = domain_tables(study.runs)
    drawn = "".join(domain_figures(study).values())
    return section("domains", "Domains", grid(figure(drawn)), note(READ_DOMAINS if drawn else ""), *map(table, tables))


def domain_figures(study: Study) -> dict[str, str]:
    """The dot plot by name; none where nothing was measured by domain."""
    runs = [run.summary for run in study.runs if run.summary and run.summary.domains]
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.domains))
    if not metrics:
        return {}
    metric = str(study.metric) if study.metric in metrics else metrics[0]
    found = {m: [r.domains[metric] for r in runs if r.method == m and metric in r.domains] for m in study.methods}
    values = {m: of for m, of in found.items() if of}
    sizes = {name: count for run in runs for name, count in run.domain_samples.items()}
    names = dict.fromkeys(name for of in values.values() for one in of for name in one if name not in OVER_DOMAINS)
    return {"domains": _drawn(study, metric, values, {n: sizes.get(n) for n in list(names)[:MOST_DOMAINS]})}


def _drawn(study: Study, metric: str, values: dict[str, list[dict[str, float]]], sizes: dict[str, int | None]) -> str:
    known, looks = metric_of(metric), study.looks
    gaps = {m: known.scale * float(np.mean([one["max"] - one["min"] for one in of])) for m, of in values.items()}
    entries, top = svg.legend([(f"{m} (gap {gaps[m]:.3g})", looks[m]) for m in values])
    labels = {n: n if size is None else f"{n} (n = {size})" for n, size in sizes.items()}
    row = LINE * len(values) + 12
    height = top + row * len(sizes) + 54
    all_ = [known.scale * one[n] for of in values.values() for one in of for n in sizes if n in one]
    log = bool(not known.percent and min(all_) > 0 and max(all_) / min(all_) >= 100)
    left = min(190.0, 14 + max(svg.width_of(label) for label in labels.values()))
    x = svg.Scale(*svg.spanned(all_, log=log), left, svg.WIDTH - 14, log)
    frame = svg.Axes(x, svg.Scale(0, 1, height - 44, top), axis_title(metric), "")
    parts = [entries, frame.horizontal()]
    for place, (name, label) in enumerate(labels.items()):
        at = top + 6 + row * place
        ends = svg.path([(x.start, at + row - 6), (x.end, at + row - 6)])
        parts += [svg.tag("path", d=ends, stroke=paint("line")), svg.words(4, at + row / 2, label[:26])]
        for line, (method, of) in enumerate(values.items()):
            own = [known.scale * one[name] for one in of if np.isfinite(one.get(name, np.nan))]
            if own:
                height_ = at + 4 + LINE * (line + 0.5)
                hint = f"{method}, {label}: {np.mean(own):.4g}, seeds {min(own):.4g} to {max(own):.4g}"
                colour = looks[method].colour
                spread = svg.path([(x(min(own)), height_), (x(max(own)), height_)])
                parts.append(svg.tag("path", d=spread, stroke=colour, stroke_width=1.5))
                parts.append(svg.dot(x(float(np.mean(own))), height_, colour, hint, r=4))
    told = "; ".join(f"{m}: gap {gap:.3g}" for m, gap in gaps.items())
    return svg.drawing(f"{axis_title(metric)} by domain", told, *parts, height=height)
