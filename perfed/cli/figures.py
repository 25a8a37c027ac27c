"""Figures as files: SVG, PDF and PNG if the libraries are installed, and a page that shows and explains them."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from perfed.cli.console import say, say_where, say_whole
from perfed.errors import PerfedError, shorten_list
from perfed.report.page.gallery import build_gallery, read_title
from perfed.report.page.paper import FAMILY, SPACE
from perfed.system import extra_command, write_atomic

BOLD = f"{FAMILY}-Bold"
POINTS, DOTS = 72, 300  # per inch: units of a PDF, pixels of a PNG
Maker = Callable[[str], tuple[bytes, bytes, list[str]]]
"""A function from an SVG to a PDF, a PNG, and messages about parts that were not converted correctly."""


def write_figures(svgs: Mapping[str, str], folder: Path, command: str) -> list[Path]:
    """Write figures and ``index.html`` that shows them; print their titles, and differences of a PDF to its SVG.

    Args:
        svgs: the SVGs, by file name without suffix.
        folder: the folder for the files, which is created if it does not exist.
        command: the command that wrote the figures, for the page.

    Returns:
        The paths of the written files.
    """
    folder.mkdir(exist_ok=True)
    written: list[Path] = []

    def write(name: str, content: str | bytes) -> None:
        written.append(folder / name)
        write_atomic(written[-1], content)

    for stem, svg in svgs.items():
        write(f"{stem}.svg", svg)
    try:
        convert = picture_maker()
        for stem, svg in svgs.items():
            pdf, png, lines = convert(svg)
            write(f"{stem}.pdf", pdf)
            write(f"{stem}.png", png)
            for line in lines:
                say(f"{stem}.pdf: {line}", style="yellow")
    except PerfedError as error:
        say(str(error), style="yellow")
    write("index.html", build_gallery(svgs, written, command))
    say_where("written", written[-1])
    for stem, svg in svgs.items():
        kinds = ", ".join(path.suffix[1:] for path in written if path.stem == stem)
        say_whole(f"  {stem} ({kinds}): {read_title(svg)}")
    return written


def picture_maker() -> Maker:
    """Return a function that converts an SVG to a PDF with embedded fonts and to a PNG, and lists problems.

    Raises:
        PerfedError: a library is not installed; names the extra.
    """
    try:
        from matplotlib import get_data_path  # its fonts
        from pypdfium2 import PdfDocument
        from reportlab.graphics.renderPDF import drawToString
        from reportlab.pdfbase.pdfmetrics import getFont
        from svglib.fonts import FontMap
        from svglib.svglib import svg2rlg
    except ImportError:
        raise PerfedError(
            f"PDF and PNG need svglib, matplotlib and pypdfium2: {extra_command('figures')}; the SVGs are there"
        ) from None
    fonts, folder = FontMap(), Path(get_data_path()) / "fonts" / "ttf"
    fonts.register_font(FAMILY, str(folder / "DejaVuSans.ttf"), rlgFontName=FAMILY)
    fonts.register_font(FAMILY, str(folder / "DejaVuSans-Bold.ttf"), weight="bold", rlgFontName=BOLD)

    def convert(svg: str) -> tuple[bytes, bytes, list[str]]:
        collector = _MessageCollector()
        logger = logging.getLogger("svglib")
        logger.addHandler(collector)
        try:
            drawing = svg2rlg(io.BytesIO(svg.encode()), font_map=fonts)
        finally:
            logger.removeHandler(collector)
        if drawing is None:
            raise PerfedError("a figure could not be converted to PDF; its SVG was written")
        drawing.initialFontName = FAMILY  # reportlab would name Helvetica, which it does not embed
        content = bytes(drawToString(drawing, initialFontName=FAMILY))
        picture = io.BytesIO()
        PdfDocument(content)[0].render(scale=DOTS / POINTS).to_pil().save(
            picture, "PNG", dpi=(DOTS, DOTS), optimize=True
        )
        return (
            content,
            picture.getvalue(),
            [*collector.lines, *_describe_missing_letters(svg, lambda name: getFont(name).face.charToGlyph)],
        )

    return convert


class _MessageCollector(logging.Handler):
    """A logging handler that collects the warnings of svglib."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Append the message of a record to ``lines``."""
        self.lines.append(record.getMessage())


def _describe_missing_letters(svg: str, letters: Callable[[str], Mapping[int, int]]) -> list[str]:
    """Return a message about characters that the font lacks; an empty list if it has all."""
    missing: dict[str, None] = {}
    for text in ElementTree.fromstring(svg).iter(f"{{{SPACE}}}text"):
        has = letters(BOLD if text.get("font-weight") == "bold" else FAMILY)
        missing |= dict.fromkeys(letter for letter in text.text or "" if ord(letter) not in has)
    return [f"{FAMILY} lacks {shorten_list([*missing], 10)}: boxes in their place; the SVG has them"] if missing else []
