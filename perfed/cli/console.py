"""Where the commands print, and how they end when they are interrupted."""

from __future__ import annotations

import sys

from rich.console import Console

from perfed.machine import TERMINATED

console = Console(width=None if sys.stdout.isatty() else 150, emoji=False)

CTRL_C = 130
INTERRUPTED = {CTRL_C: "interrupted", TERMINATED: "terminated"}
"""What is said, by exit code."""


class Stopped(Exception):
    """Message and exit code of a command that was interrupted."""
