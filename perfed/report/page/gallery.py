"""``index.html`` of a folder of figures: each picture with what it shows, how it is read, and its files."""

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
    "gains-sorted-": "Clients averaged over the seeds, from the worst to the best difference. The line over a "
    "client's bar goes from the lowest to the highest seed.",
    "gains-scatter-": "A dot is a client averaged over the seeds; of many clients it stands for several. Those above "
    "the diagonal (of errors: below it) gain.",
    "calibration": READ_CALIBRATION,
    "curves-": READ_CURVES,
    "losses-": READ_LOSSES,
    "time-to-target": "The first evaluated round whose mean accuracy was at least the target. A line goes from the "
    "first to the last of the seeds that got there.",
    "metric-by-speed": "A dot is a client with one seed; the further to the right, the longer its replies take.",
    "used-": READ_USED,
    "domains": READ_DOMAINS,
    "embedding-": f"t-SNE of samples of the first seed: {READ_EMBEDDING}",
    "combination-": READ_COMBINATION,
    "partition-": "Row: a client. Training rows of the first seed; the stronger the colour, the more, no colour is 0.",
    "rows": "A bar is a client; rows of the first seed.",
    "columns": "A bar is a client.",
    "before-after": READ_BEFORE_AFTER,
    "sweep-": READ_SWEEP,
}
"""How a figure is read, by how its name begins; the longest beginning counts."""

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
<p>Written by <code>$command</code>. A zigzag on an axis says that it does not begin at 0.</p>
$figures
</body>
</html>
""")


def build_gallery(drawn: Mapping[str, str], files: Sequence[Path], command: str) -> str:
    """A page that shows the figures and asks for nothing but their files beside it.

    Args:
        drawn: SVG by the stem of its name.
        files: what was written of them.
        command: that wrote them.
    """
    parts = [_figure(stem, svg, [file.name for file in files if file.stem == stem]) for stem, svg in drawn.items()]
    return _PAGE.substitute(variables=build_colour_variables(), command=escape(command), figures="\n".join(parts))


def read_title(svg: str) -> str:
    """What a figure shows, in a few words."""
    return ElementTree.fromstring(svg).findtext(f"{{{SPACE}}}title", "")


def _figure(stem: str, svg: str, names: Sequence[str]) -> str:
    root = ElementTree.fromstring(svg)
    title, told = (root.findtext(f"{{{SPACE}}}{name}", "") for name in ("title", "desc"))
    links = " ".join(f'<a href="{quote(name)}">{escape(name)}</a>' for name in names)
    caption = f"<b>{escape(title)}.</b> {escape(describe_reading(stem))}<br>{escape(told)}.<br>{links}"
    image = f'<img src="{quote(stem)}.svg" alt="{escape(title, quote=True)}" loading="lazy">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def describe_reading(stem: str) -> str:
    """How the figure of this name is read; empty where nothing is known of it."""
    return READ.get(max(filter(stem.startswith, READ), key=len, default=""), "")
