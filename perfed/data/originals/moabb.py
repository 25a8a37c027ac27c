"""Recordings of EEG, which MOABB downloads to its folder."""

from __future__ import annotations

from typing import Any

from perfed.data.files import optional_package
from perfed.data.originals.reading import Files

_ALL = ("AlexMI", "BNCI2014_001", "BNCI2014_002", "BNCI2014_004", "Weibo2014", "Zhou2016")


def download_recordings(files: Files, names: tuple[str, ...] = _ALL) -> dict[str, Any]:
    """Download the recordings of all people of each data set, and return no arrays for a file.

    Raises:
        PerfedError: if MOABB is not installed.
    """
    sets = optional_package("moabb.datasets", "recordings of EEG", "bci")
    for name in names:
        getattr(sets, name)().download()
    return {}


def download_iv_2a(files: Files) -> dict[str, Any]:
    """Download only BCI competition IV 2a, as :func:`download_recordings`."""
    return download_recordings(files, ("BNCI2014_001",))
