"""``--help`` of a benchmark that has no options: what its file begins with, and nothing is computed."""

from __future__ import annotations

import sys


def usage(text: str | None) -> None:
    """Print ``text`` and end where help is asked for."""
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        print((text or "").strip())
        raise SystemExit
