"""The console of the commands, and the exit codes of interrupted commands."""

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
"""The width of the output if it is not a terminal and the environment variable ``COLUMNS`` is not set."""


def fixed_width() -> int | None:
    """Return the width if the output is a pipe; ``None`` if a terminal or ``COLUMNS`` determines it for each line."""
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH


console = Console(width=fixed_width(), emoji=False, markup=False, highlight=False)

CTRL_C = 130
INTERRUPTED = {CTRL_C: "interrupted", TERMINATED: "terminated"}
"""The message of an interrupted command, by exit code."""


class Stopped(Exception):
    """The error of an interrupted command; its arguments are the message and the exit code."""


def escape_controls(text: str) -> str:
    r"""Return ``text`` with escaped control characters, so that text from other people cannot manipulate the terminal.

    Example:
        >>> print(escape_controls("north\x1b[2K"))
        north\x1b[2K
    """
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def say(text: str, style: str = "") -> None:
    """Print a text, wrapped between words to the width of the console."""
    for line in textwrap.wrap(escape_controls(text), console.width, break_long_words=False, break_on_hyphens=False):
        console.print(line, style=style, soft_wrap=True)


def say_whole(text: str, style: str = "") -> None:
    """Print a line without wrapping, so that it can be copied or searched for, such as a path or an error."""
    console.print(escape_controls(text), style=style, soft_wrap=True)


def say_where(label: str, path: Path) -> None:
    """Print a label and a path."""
    say_whole(f"{label}: {path}")


def command_lines(text: str) -> list[str]:
    """Return a shell command as lines that fit the console, joined by backslashes.

    Example:
        >>> command_lines("perfed show fedpac")
        ['  perfed show fedpac']
    """
    lines = textwrap.wrap(text, console.width - 6, break_long_words=False, break_on_hyphens=False)
    continuation = " \\"
    return [
        f"  {'  ' * (number > 0)}{line}{continuation * (number < len(lines) - 1)}" for number, line in enumerate(lines)
    ]


@contextmanager
def reserve_stdout(is_json: bool) -> Iterator[None]:
    """Print to standard error while the context is open if ``is_json``, so that stdout has only JSON (``--json``)."""
    before, console.stderr = console.stderr, is_json or console.stderr
    try:
        yield
    finally:
        console.stderr = before


def print_json(content: Any) -> None:
    """Print ``content`` as JSON on standard output."""
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
