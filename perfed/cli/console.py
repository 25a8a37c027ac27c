"""Where the commands print, and how they end when they are interrupted."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from perfed.system import TERMINATED

PIPE_WIDTH = 80
"""Columns where there is no terminal to ask, and the environment does not say (``COLUMNS``)."""


def fixed_width() -> int | None:
    """Return the width of a pipe; a terminal, or the environment, is asked anew for each line."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH


console = Console(width=fixed_width(), emoji=False, markup=False, highlight=False)

CTRL_C = 130
INTERRUPTED = {CTRL_C: "interrupted", TERMINATED: "terminated"}
"""What is said, by exit code."""


class Stopped(Exception):
    """Message and exit code of a command that was interrupted."""


def visible(text: str) -> str:
    r"""``text`` with what would move a terminal's cursor, or hide something, written out: others may have chosen it.

    Example:
        >>> print(visible("north\x1b[2K"))
        north\x1b[2K
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def say(text: str, style: str = "") -> None:
    """Print a sentence, broken between words."""
    for line in textwrap.wrap(visible(text), console.width, break_long_words=False, break_on_hyphens=False):
        console.print(line, style=style, soft_wrap=True)


def say_whole(text: str, style: str = "") -> None:
    """Print a line that is to be copied or searched for, however long it is: a path, a problem."""
    console.print(visible(text), style=style, soft_wrap=True)


def say_where(what: str, path: Path) -> None:
    """Print where something is."""
    say_whole(f"{what}: {path}")


def command_lines(text: str) -> list[str]:
    """Return a command over as many lines as it needs, as a shell takes them.

    Example:
        >>> command_lines("perfed show fedpac")
        ['  perfed show fedpac']
    """
    lines = textwrap.wrap(text, console.width - 6, break_long_words=False, break_on_hyphens=False)
    goes_on = " \\"
    return [f"  {'  ' * (at > 0)}{line}{goes_on * (at < len(lines) - 1)}" for at, line in enumerate(lines)]


@contextmanager
def alone_on_stdout(asked: bool) -> Iterator[None]:
    """With ``--json`` everything but the JSON goes to standard error."""
    before, console.stderr = console.stderr, asked or console.stderr
    try:
        yield
    finally:
        console.stderr = before


def print_json(content: Any) -> None:
    """Print JSON on standard output."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
