"""Which perfed wrote a directory of results, in which format, and whether this one reads it.

A run says it in ``version.json``, a study in its marker. What says nothing is of version 0.1, and in format 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from perfed.data.reading import checked, read_json
from perfed.errors import PerfedError
from perfed.system import installed_version

FORMAT = 3
"""Of directories that are written now. It grows with a change after which an older perfed would read them wrongly."""

OLDEST = 1
"""The oldest format that is read and resumed: that of the last minor version at least."""

_ALL_TEXTS_OFF = 3  # from this format on, no text such as NA means missing with ``missing = []``

FILE = "version.json"
FIRST = "0.1"  # version of perfed that wrote format 1


class Layout(BaseModel):
    """Who wrote a directory: the version of perfed, and the number of the format."""

    perfed: str = Field(FIRST, description="version that wrote the directory")
    format: int = Field(1, description="of the directory's files")


def written_now() -> dict[str, Any]:
    """Return what a directory that is written now says of itself.

    Example:
        >>> written_now()["format"] == FORMAT
        True
    """
    return Layout(perfed=installed_version(), format=FORMAT).model_dump()


def layout_of(path: Path, content: bytes | None = None) -> Layout:
    """Return who wrote the run in ``path``, from the content of its ``version.json``, which may have been read before.

    Raises:
        PerfedError: its format is not one of those that are read, or what it says of itself cannot be read.
    """
    file = path / FILE
    if content is None and not file.is_file():
        return readable_layout(path, {}, file)
    return readable_layout(path, checked(dict[str, Any], read_json(file, content), file), file)


def readable_layout(path: Path, said: Mapping[str, Any], file: Path) -> Layout:
    """Return who wrote ``path``, of which ``file`` says ``said``.

    Raises:
        PerfedError: its format is older or newer than those that are read; says which perfed reads it.
    """
    found = checked(Layout, said, file)
    if OLDEST <= found.format <= FORMAT:
        return found
    way = (
        f"install perfed {found.perfed} or newer" if found.format > FORMAT else f"finish it with perfed {found.perfed}"
    )
    raise PerfedError(
        f"{path}: was written by perfed {found.perfed} in format {found.format}; perfed {installed_version()} reads "
        f"formats {OLDEST} to {FORMAT}: {way}"
    )


def current_settings(settings: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the settings of a directory, nested or not, converted to their meaning in this version of perfed.

    Up to format 2, ``missing = []`` of tables meant what its absence means today.

    Example:
        >>> current_settings({"data": {"name": "tables", "missing": []}}, Layout(format=2))
        {'data': {'name': 'tables'}}
    """
    if layout.format >= _ALL_TEXTS_OFF:
        return dict(settings)
    return {
        key: current_settings(value, layout) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if not (key == "missing" and value == [] and settings.get("name") == "tables")
    }
