"""Leaving a study: a marker file in the site's folder, with which the site refuses all messages and does not start."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from perfed.errors import PerfedError
from perfed.sites.flower.audit_log import OutgoingLog
from perfed.sites.flower.hash_chain import LOG
from perfed.system import create_private_files, lock_folder, write_atomic

MARKER = "left"
"""File in the folder of a site that has left, with the time; the site can start again once the file is removed."""


def read_leaving_time(folder: Path) -> str:
    """Return when the site in ``folder`` has left, or an empty text if it has not."""
    try:
        return (folder / MARKER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


@create_private_files()
def leave_study(folder: Path) -> bool:
    """Mark the site in ``folder`` as having left, and log it.

    Returns:
        Whether a process acts as the site at present. If so, that process writes the log entry.

    Raises:
        PerfedError: the site has already left, or its log is damaged.
    """
    if since := read_leaving_time(folder):
        raise PerfedError(f"{folder}: this site has left already, at {since}")
    write_atomic(folder / MARKER, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n")
    try:
        with lock_folder(folder):
            pass
    except BlockingIOError:
        return True
    with OutgoingLog(folder / LOG) as log:
        log.add_note(format_leaving_note(folder))
    return False


def format_leaving_note(folder: Path) -> str:
    """Return the log entry for a site that has left."""
    return f"the site has left, at {read_leaving_time(folder)}"


def check_not_left(folder: Path) -> None:
    """Check that the site in ``folder`` has not left.

    Raises:
        PerfedError: the site has left; the message says how it can take part again.
    """
    if since := read_leaving_time(folder):
        raise PerfedError(f"this site has left, at {since}; to take part again, remove {folder / MARKER}")
