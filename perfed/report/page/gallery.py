"""``index.html`` of a folder of figures: each figure with its title, an explanation and links to its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote
from xml.etree import ElementTree

from perfed.report.page.campaign import READ_SWEEP
from perfed.report.page.curves import READ_CALIBRATION, READ_CURVES, READ_LOSSES
from perfed.report.page.federation import READ_BEFORE_AFTER, READ_DOMAINS
from perfed.report.page.gains import READ_INTERVALS
from perfed.report.page.paper import SPACE
from perfed.report.page.pictures import READ_COMBINATION, READ_EMBEDDING
from perfed.report.page.speeds import READ_USED
from perfed.report.page.style import build_colour_variables

READ = {
    "gains": READ_INTERVALS,
    "gains-sorted-": "Clients averaged over the seeds, sorted from the worst to the best difference. The line over "
    "a client's bar goes from the lowest to the highest seed.",
    "gains-scatter-": "A dot is a client averaged over the seeds, or several clients if there are many. Clients above "
    "the diagonal (for errors: below it) gain.",
    "calibration": READ_CALIBRATION,
    "curves-": READ_CURVES,
    "losses-": READ_LOSSES,
    "time-to-target": "The first evaluated round whose mean accuracy was at least the target. A line goes from the "
    "fastest to the slowest seed that reached it.",
    "metric-by-speed": "A dot is a client with one seed; clients further to the right take longer to reply.",
    "used-": READ_USED,
    "domains": READ_DOMAINS,
    "embedding-": f"t-SNE of samples of the first seed: {READ_EMBEDDING}",
    "combination-": READ_COMBINATION,
    "partition-": "A row is a client. Training rows of the first seed; a stronger colour means more rows, no colour 0.",
    "rows": "A bar is a client; rows of the first seed.",
    "columns": "A bar is a client.",
    "before-after": READ_BEFORE_AFTER,
    "sweep-": READ_SWEEP,
}
"""Explanations of how to read a figure, by the beginning of its name; the longest match is used."""

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Figures</title>
<style>
$variables
body{margin:2rem auto;max-width:60rem;padding:0 1rem;font-family:system-ui,sans-serif;line-height:1.5;\
background:var(--paper);color:var(--ink)}
figure{margin:2.5rem 0}
img{width:100%;max-width:40rem;background:#fff}
a{color:var(--accent)}
code{overflow-wrap:anywhere}
</style>
</head>
<body>
<h1>Figures</h1>
<p>Written by <code>$command</code>. A zigzag on an axis means that it does not begin at 0.</p>
$figures
</body>
</html>
""")


def build_gallery(figures: Mapping[str, str], files: Sequence[Path], command: str) -> str:
    """Return a page that shows the figures; it only refers to the files in its folder.

    Args:
        figures: the figures as SVG text, by the stem of their file names.
        files: the files that were written.
        command: the command that wrote them.
    """
    parts = [
        _build_figure(stem, svg, [file.name for file in files if file.stem == stem]) for stem, svg in figures.items()
    ]
    return _PAGE.substitute(variables=build_colour_variables(), command=escape(command), figures="\n".join(parts))


def read_title(svg: str) -> str:
    """Return the title of a figure."""
    return ElementTree.fromstring(svg).findtext(f"{{{SPACE}}}title", "")


def _build_figure(stem: str, svg: str, names: Sequence[str]) -> str:
    root = ElementTree.fromstring(svg)
    title, description = (root.findtext(f"{{{SPACE}}}{name}", "") for name in ("title", "desc"))
    links = " ".join(f'<a href="{quote(name)}">{escape(name)}</a>' for name in names)
    caption = f"<b>{escape(title)}.</b> {escape(describe_reading(stem))}<br>{escape(description)}.<br>{links}"
    image = f'<img src="{quote(stem)}.svg" alt="{escape(title, quote=True)}" loading="lazy">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def describe_reading(stem: str) -> str:
    """Return how to read the figure with this name; empty if there is no explanation."""
    return READ.get(max(filter(stem.startswith, READ), key=len, default=""), "")
