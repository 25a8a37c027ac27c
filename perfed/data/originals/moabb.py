"""Recordings of EEG, which MOABB downloads to its own folder."""

from __future__ import annotations

from typing import Any

from perfed.data.files import optional_package
from perfed.data.originals.reading import Files

_ALL = ("AlexMI", "BNCI2014_001", "BNCI2014_002", "BNCI2014_004", "Weibo2014", "Zhou2016")


def recordings(files: Files, names: tuple[str, ...] = _ALL) -> dict[str, Any]:
    """Nothing for a file of perfed's: each data set's recordings, of everybody, are downloaded.

    Raises:
        PerfedError: MOABB is not installed.
    """
    sets = optional_package("moabb.datasets", "recordings of EEG", "bci")
    for name in names:
        getattr(sets, name)().download()
    return {}


def recordings_of_iv_2a(files: Files) -> dict[str, Any]:
    """As :func:`recordings`, BCI competition IV 2a alone."""
    return recordings(files, ("BNCI2014_001",))
