"""Figures for papers: the report's own drawings as SVG and, with a library, as PDF."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from perfed.errors import PerfedError
from perfed.machine import write_atomic

ToPdf = Callable[[str], bytes]


def pdf_maker() -> ToPdf:
    """What makes a PDF of an SVG.

    Raises:
        PerfedError: svglib is not installed; names the extra.
    """
    try:
        from reportlab.graphics.renderPDF import drawToString
        from svglib.svglib import svg2rlg
    except ImportError:
        raise PerfedError('PDF needs svglib: pip install "perfed[figures]"; the figures are there as SVG') from None
    logging.getLogger("svglib").setLevel(logging.ERROR)  # it has no titles for hovering, and says so

    def to_pdf(svg: str) -> bytes:
        drawing = svg2rlg(io.BytesIO(svg.encode()))
        if drawing is None:
            raise PerfedError("a figure could not be made a PDF; it is there as SVG")
        return bytes(drawToString(drawing))

    return to_pdf


def write_figures(
    drawn: Mapping[str, str], folder: Path, maker: Callable[[], ToPdf] = pdf_maker
) -> tuple[list[Path], str]:
    """Write figures, SVG by the stem of their names, as SVG and PDF.

    Returns:
        The paths, and why there are no PDFs; empty where there are.
    """
    folder.mkdir(exist_ok=True)
    written = []
    for stem, svg in drawn.items():
        written.append(folder / f"{stem}.svg")
        write_atomic(written[-1], svg)
    try:
        to_pdf = maker()
        for stem, svg in drawn.items():
            content = to_pdf(svg)
            written.append(folder / f"{stem}.pdf")
            write_atomic(written[-1], content)
    except PerfedError as error:
        return written, str(error)
    return written, ""
