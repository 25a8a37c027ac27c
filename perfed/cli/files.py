"""The files for papers that ``perfed report`` writes beside the page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from perfed.cli.console import say
from perfed.cli.pictures import write_figures
from perfed.errors import PerfedError
from perfed.machine import write_atomic


def command_line() -> str:
    """The command as it was given."""
    return shlex.join(["perfed", *sys.argv[1:]])


@dataclass(frozen=True)
class Files:
    """What ``perfed report`` writes beside what it always does."""

    out: Path | None = None
    latex: Path | None = None
    csv: Path | None = None
    figures: Path | None = None

    def check(self) -> None:
        """Refuse what cannot be written, before anything is.

        Raises:
            PerfedError: a folder that is not there, or a folder in a file's place.
        """
        for option, path in (("--out", self.out), ("--latex", self.latex), ("--csv", self.csv)):
            if path is not None and path.is_dir():
                raise PerfedError(f"{option} {path}: is a folder; give the name of a file")
        named = (("--out", self.out), ("--latex", self.latex), ("--csv", self.csv), ("--figures", self.figures))
        for option, path in named:
            if path is not None and not path.parent.is_dir():
                raise PerfedError(f"{option} {path}: there is no folder {path.parent}")
        if self.figures is not None and self.figures.exists() and not self.figures.is_dir():
            raise PerfedError(f"--figures {self.figures}: is a file; give the name of a folder")

    def write(
        self, latex: Callable[[], str], csv: Callable[[], str], figures: Callable[[], Mapping[str, str]]
    ) -> list[Path]:
        """Make and write what was asked for, except for the page; the paths."""
        written = []
        for path, text in ((self.latex, latex), (self.csv, csv)):
            if path is not None:
                write_atomic(path, text())
                written.append(path)
        if self.figures is not None:
            made, problems = write_figures(figures(), self.figures, command_line())
            written += made
            for problem in problems:
                say(problem, style="yellow")
        return written
