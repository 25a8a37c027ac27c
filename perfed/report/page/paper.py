"""Conversion of a drawing into a standalone file for papers: light colours on white, no transparency, a named font.

Other programs than browsers (LaTeX, a venue's checks, svglib) may not support transparency. Every colour is therefore
replaced by its appearance on white paper. Areas become opaque, so they must be drawn before everything else.
"""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from perfed.report.page import svg
from perfed.report.page.style import LIGHT, use_light_colours

FAMILY = "DejaVu Sans"
"""The font of PDFs; SVGs also name a second font of the same width."""
FONT = f"'{FAMILY}', Verdana, sans-serif"
FONT_SIZE = 11  # its letters are wider than those of the page's fonts
SIDE = 600  # pixels along a picture's side, so that programs that smooth enlarged pictures only smooth the edges
SPACE = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", SPACE)

_WORDS = (f"{{{SPACE}}}title", f"{{{SPACE}}}desc")

Paint = dict[str, tuple[str, float]]
"""The inherited colour and opacity of ``fill`` and ``stroke``."""


def make_standalone(drawing: str) -> str:
    """Return a drawing of :mod:`perfed.report.page.svg` as the text of a standalone SVG file."""
    root = ElementTree.fromstring(use_light_colours(drawing))
    root.attrib |= {"font-family": FONT, "font-size": str(FONT_SIZE)}
    ground = ElementTree.Element(f"{{{SPACE}}}rect", {"width": "100%", "height": "100%", "fill": LIGHT["paper"]})
    root.insert(2, ground)  # behind its title and description
    _apply_opacity(root, 1.0, {"fill": ("#000000", 1.0), "stroke": ("none", 1.0)})
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _apply_opacity(element: ElementTree.Element, opacity: float, inherited: Paint) -> None:
    """Replace the transparent colours of an element and its descendants by opaque ones.

    Args:
        element: the element, which is changed.
        opacity: the opacity of its ancestors.
        inherited: the colours that it inherits.
    """
    if element.tag in _WORDS:
        return
    opacity *= float(element.attrib.pop("opacity", 1))
    paints = {
        kind: (element.get(kind, colour), float(element.attrib.pop(f"{kind}-opacity", share)))
        for kind, (colour, share) in inherited.items()
    }
    for kind, (colour, share) in paints.items():
        if share * opacity < 1 and colour != "none":
            element.set(kind, _blend_with_paper(colour, share * opacity))
    if element.tag == f"{{{SPACE}}}image":
        element.set("href", _flatten_image(element.attrib["href"], opacity))
    for child in element:
        _apply_opacity(child, opacity, paints)


def _blend_with_paper(colour: str, share: float) -> str:
    """Return the opaque colour that ``colour`` with the opacity ``share`` has on paper.

    Example:
        >>> _blend_with_paper("#ff0000", 0.2)
        '#ffcccc'
    """
    parts = zip(bytes.fromhex(colour[1:]), bytes.fromhex(LIGHT["paper"][1:]), strict=True)
    return "#" + bytes(round(share * ink + (1 - share) * ground) for ink, ground in parts).hex()


def _flatten_image(address: str, opacity: float) -> str:
    """Return a picture as it appears on paper, with each pixel enlarged to several."""
    pixels = svg.decode_png(address)
    share = opacity * pixels[..., 3:] / 255
    covered = share * pixels[..., :3] + (1 - share) * np.frombuffer(bytes.fromhex(LIGHT["paper"][1:]), np.uint8)
    sharp = np.round(covered).astype(np.uint8)
    for axis in (0, 1):
        sharp = sharp.repeat(max(1, SIDE // sharp.shape[axis]), axis)
    return svg.encode_png(sharp)
