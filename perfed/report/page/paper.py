"""A drawing as a file of its own for papers: light colours on white, none see-through, in a font that is named.

What reads a figure after a browser (LaTeX, a venue's check, svglib) may know nothing of transparency, so every colour
is what it is on white paper. An area covers what was drawn before it, hence comes first.
"""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from perfed.report.page import svg
from perfed.report.page.style import LIGHT, use_light_colours

FAMILY = "DejaVu Sans"
"""The font of PDFs; SVGs name one that is as wide beside it."""
FONT = f"'{FAMILY}', Verdana, sans-serif"
FONT_SIZE = 11  # its letters are wider than those of the page's fonts
SIDE = 600  # pixels along a picture's side: programs that smooth what they enlarge then smooth its edges alone
SPACE = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", SPACE)

_WORDS = (f"{{{SPACE}}}title", f"{{{SPACE}}}desc")

Paint = dict[str, tuple[str, float]]
"""Of ``fill`` and ``stroke`` the colour and how much of it covers, as elements inherit them."""


def make_standalone(drawn: str) -> str:
    """A drawing of :mod:`perfed.report.page.svg` as the text of a file."""
    root = ElementTree.fromstring(use_light_colours(drawn))
    root.attrib |= {"font-family": FONT, "font-size": str(FONT_SIZE)}
    ground = ElementTree.Element(f"{{{SPACE}}}rect", {"width": "100%", "height": "100%", "fill": LIGHT["paper"]})
    root.insert(2, ground)  # behind its title and description
    _apply_opacity(root, 1.0, {"fill": ("#000000", 1.0), "stroke": ("none", 1.0)})
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _apply_opacity(element: ElementTree.Element, opacity: float, above: Paint) -> None:
    """Give an element and what is in it the colours that they have on paper."""
    if element.tag in _WORDS:
        return
    opacity *= float(element.attrib.pop("opacity", 1))
    own = {
        kind: (element.get(kind, colour), float(element.attrib.pop(f"{kind}-opacity", share)))
        for kind, (colour, share) in above.items()
    }
    for kind, (colour, share) in own.items():
        if share * opacity < 1 and colour != "none":
            element.set(kind, _blend_with_paper(colour, share * opacity))
    if element.tag == f"{{{SPACE}}}image":
        element.set("href", _flatten_image(element.attrib["href"], opacity))
    for child in element:
        _apply_opacity(child, opacity, own)


def _blend_with_paper(colour: str, share: float) -> str:
    """``colour`` where it covers a share of the paper.

    Example:
        >>> _blend_with_paper("#ff0000", 0.2)
        '#ffcccc'
    """
    parts = zip(bytes.fromhex(colour[1:]), bytes.fromhex(LIGHT["paper"][1:]), strict=True)
    return "#" + bytes(round(share * own + (1 - share) * ground) for own, ground in parts).hex()


def _flatten_image(address: str, opacity: float) -> str:
    """A picture on paper, each of its pixels as several."""
    pixels = svg.decode_png(address)
    share = opacity * pixels[..., 3:] / 255
    covered = share * pixels[..., :3] + (1 - share) * np.frombuffer(bytes.fromhex(LIGHT["paper"][1:]), np.uint8)
    sharp = np.round(covered).astype(np.uint8)
    for axis in (0, 1):
        sharp = sharp.repeat(max(1, SIDE // sharp.shape[axis]), axis)
    return svg.encode_png(sharp)
