"""Which perfed wrote a directory of results, and in which format.

A run has it in ``version.json``, a study in its marker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from perfed.data.reading import checked, read_json
from perfed.errors import PerfedError
from perfed.system import installed_version

FORMAT = 3
"""The format that is written, and the only one that is read. Raise it when older directories would be misread."""

FILE = "version.json"


class Layout(BaseModel):
    """The version of perfed that wrote a directory, and the number of the directory's format."""

    perfed: str = Field(default_factory=installed_version, description="version that wrote the directory")
    format: int = Field(FORMAT, description="of the directory's files")


def check_layout(path: Path, content: Any, file: Path) -> Layout:
    """Return the layout of ``path``, whose fields ``file`` has.

    Raises:
        PerfedError: the directory has another format; the message names the perfed that reads it.
    """
    if isinstance(content, dict) and not Layout.model_fields.keys() <= content.keys():
        raise PerfedError(f"{file}: does not have the format of the directory; this perfed reads format {FORMAT} only")
    layout = checked(Layout, content, file)
    if layout.format != FORMAT:
        remedy = "install" if layout.format > FORMAT else "read it with"
        raise PerfedError(
            f"{path}: was written by perfed {layout.perfed} in format {layout.format}; perfed {installed_version()} "
            f"reads format {FORMAT} only: {remedy} perfed {layout.perfed}"
        )
    return layout


def read_layout(path: Path, content: bytes | None = None) -> Layout:
    """Return the layout of the run in ``path``; that of this perfed where there is no run.

    ``content``: of the run's ``version.json``, if it was read before.

    Raises:
        PerfedError: as :func:`check_layout`, or ``version.json`` is missing or cannot be read.
    """
    file = path / FILE
    if content is not None or file.is_file():
        return check_layout(path, read_json(file, content), file)
    if (path / "config.toml").exists():
        raise PerfedError(f"{file}: is missing; this perfed reads runs of format {FORMAT} only")
    return Layout()
