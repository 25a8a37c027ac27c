"""The documents' pages, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md"))]
"""Every page for users by its path in the repository."""

_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?!\w)")


def blocks(page: str, language: str = "") -> list[str]:
    """The blocks of code of a page in a language; without one those that name none."""
    text = (ROOT / page).read_text()
    return [code for of, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if of == language]


def alike(shown: str, said: str, tolerance: float) -> bool:
    """Whether all lines that are shown were said in this order: the same words, numbers within a tolerance."""
    rest = iter(said.splitlines())
    return all(any(_same(line, other, tolerance) for other in rest) for line in shown.splitlines() if line.strip())


def _same(shown: str, said: str, tolerance: float) -> bool:
    words = [" ".join(_NUMBER.sub("#", line).split()) for line in (shown, said)]
    numbers = zip(_NUMBER.findall(shown), _NUMBER.findall(said), strict=False)
    return words[0] == words[1] and all(abs(float(one) - float(other)) <= tolerance for one, other in numbers)
