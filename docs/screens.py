"""Pictures of the report of docs/results.md's comparison on digits-label-skew: its verdict and its leaderboard."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perfed.experiment import study as experiments
from perfed.experiment.comparison import ComparisonSpec, federated
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override
from perfed.report import load_runs
from perfed.report.page.leaderboard import leaderboard_section
from perfed.report.page.page_data import ReportData
from perfed.report.page.style import write_page
from perfed.report.page.verdict import verdict_section
from perfed.report.page.write import summarize_runs

FOLDER = Path(__file__).parent
THEMES = {"light": 1, "dark": 0}
WIDTHS = (1400, 420)
COLOURS = 160  # of a picture's palette: a page has few


def screens(experiment: str, methods: Sequence[str], seeds: Sequence[int], settings: Sequence[str]) -> None:
    """Train, write the page, and let Chromium show it in both themes and widths as ``report-THEME-WIDTH.png``."""
    with tempfile.TemporaryDirectory() as folder:
        table = override(find_experiment(experiment), settings, federated(list(methods)))
        planned = ComparisonSpec(table, list(methods), list(seeds))
        made = experiments.Study.create(Path(folder) / "made", planned)
        page = _page(made, Path(folder) / "page.html", experiment)
        for theme, number in THEMES.items():
            for width in WIDTHS:
                shot = Path(folder) / "shot.png"
                _shoot(page, shot, width, f"--blink-settings=preferredColorScheme={number}")
                out = FOLDER / f"report-{theme}-{width}.png"
                _crop(shot, out)
                print(f"{out.name}: {out.stat().st_size / 1000:.0f} kB", file=sys.stderr)


def _page(made: experiments.Study, out: Path, title: str) -> Path:
    """The first two sections of the report."""
    ready = made.runs()
    for key in made.list_unfinished():
        ready(*key).execute()
    runs = load_runs(made.comparisons[""].started())
    report = ReportData.from_runs(runs)
    return write_page(out, title, summarize_runs(runs), [verdict_section(report), leaderboard_section(report)])


def _shoot(page: Path, out: Path, width: int, theme: str) -> None:
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    quiet += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    size = [f"--window-size={width},2400", f"--screenshot={out}", f"--user-data-dir={out.parent / 'profile'}"]
    subprocess.run(["chromium", *quiet, theme, *size, page.as_uri()], check=True, capture_output=True)


def _crop(shot: Path, out: Path) -> None:
    """Write the picture with few colours, without what is empty below the page."""
    from PIL import Image

    picture = Image.open(shot).convert("RGB")
    pixels = np.asarray(picture)
    full = np.flatnonzero((pixels != pixels[-1, 0]).any(axis=(1, 2)))
    kept = picture.crop((0, 0, picture.width, int(full[-1]) + 24))
    kept.quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(out, optimize=True)
