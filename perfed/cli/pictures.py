"""Files for papers: tables, and the report's own drawings as SVG and, with libraries, as PDF, with an index of them."""

from __future__ import annotations

import io
import logging
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from perfed.cli.console import say, say_where
from perfed.cli.options import Files
from perfed.errors import PerfedError, some
from perfed.machine import write_atomic
from perfed.report.page.gallery import gallery
from perfed.report.page.paper import FAMILY, SPACE

BOLD = f"{FAMILY}-Bold"
ToPdf = Callable[[str], tuple[bytes, list[str]]]
"""From an SVG to a PDF, and what is not in it as it should be."""


def pdf_maker() -> ToPdf:
    """What makes a PDF of an SVG, with the letters that it needs of its fonts.

    Raises:
        PerfedError: a library is not installed; names the extra.
    """
    try:
        from matplotlib import get_data_path  # its fonts
        from reportlab.graphics.renderPDF import drawToString
        from reportlab.pdfbase.pdfmetrics import getFont
        from svglib.fonts import FontMap
        from svglib.svglib import svg2rlg
    except ImportError:
        raise PerfedError(
            'PDF needs svglib and matplotlib: pip install "perfed[figures]"; the figures are there as SVG'
        ) from None
    fonts, folder = FontMap(), Path(get_data_path()) / "fonts" / "ttf"
    fonts.register_font(FAMILY, str(folder / "DejaVuSans.ttf"), rlgFontName=FAMILY)
    fonts.register_font(FAMILY, str(folder / "DejaVuSans-Bold.ttf"), weight="bold", rlgFontName=BOLD)

    def to_pdf(svg: str) -> tuple[bytes, list[str]]:
        heard = _Heard()
        logger = logging.getLogger("svglib")
        logger.addHandler(heard)
        try:
            drawing = svg2rlg(io.BytesIO(svg.encode()), font_map=fonts)
        finally:
            logger.removeHandler(heard)
        if drawing is None:
            raise PerfedError("a figure could not be made a PDF; it is there as SVG")
        drawing.initialFontName = FAMILY  # reportlab would name Helvetica, which it does not embed
        content = bytes(drawToString(drawing, initialFontName=FAMILY))
        return content, [*heard.lines, *_absent(svg, lambda name: getFont(name).face.charToGlyph)]

    return to_pdf


class _Heard(logging.Handler):
    """What svglib complains of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what is said."""
        self.lines.append(record.getMessage())


def _absent(svg: str, letters: Callable[[str], Mapping[int, int]]) -> list[str]:
    """A line on characters that the font does not have, if there are any."""
    missing: dict[str, None] = {}
    for text in ElementTree.fromstring(svg).iter(f"{{{SPACE}}}text"):
        has = letters(BOLD if text.get("font-weight") == "bold" else FAMILY)
        missing |= dict.fromkeys(letter for letter in text.text or "" if ord(letter) not in has)
    return [f"{FAMILY} lacks {some([*missing], 10)}: boxes in their place; the SVG has them"] if missing else []


def command_line() -> str:
    """Return the command as it was given."""
    return shlex.join(["perfed", *sys.argv[1:]])


def write_files(
    files: Files, latex: Callable[[], str], csv: Callable[[], str], figures: Callable[[], Mapping[str, str]]
) -> list[Path]:
    """Make and write what was asked for, except for the page; return the paths, and say them.

    ``figures`` are SVG by the stem of their names; a PDF that cannot be made, or not as its SVG, is said.
    """
    written = []
    for path, text in ((files.latex, latex), (files.csv, csv)):
        if path is not None:
            write_atomic(path, text())
            written.append(path)
    if files.figures is not None:
        made, problems = _write_figures(figures(), files.figures)
        written += made
        for problem in problems:
            say(problem, style="yellow")
    for path in written:
        say_where("written", path)
    return written


def _write_figures(drawn: Mapping[str, str], folder: Path) -> tuple[list[Path], list[str]]:
    """Write figures, and ``index.html`` that shows them; return the paths, and lines on PDFs."""
    folder.mkdir(exist_ok=True)
    written, problems = [], []
    for stem, svg in drawn.items():
        written.append(folder / f"{stem}.svg")
        write_atomic(written[-1], svg)
    try:
        to_pdf = pdf_maker()
        for stem, svg in drawn.items():
            content, lines = to_pdf(svg)
            problems += [f"{stem}.pdf: {line}" for line in lines]
            written.append(folder / f"{stem}.pdf")
            write_atomic(written[-1], content)
    except PerfedError as error:
        problems.append(str(error))
    index = folder / "index.html"
    write_atomic(index, gallery(drawn, written, command_line()))
    written.append(index)
    return written, problems
