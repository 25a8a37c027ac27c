"""A site leaves: a mark in its folder, by which it answers nothing more and does not start again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from perfed.errors import PerfedError
from perfed.sites.flower.audit_log import OutgoingLog
from perfed.sites.flower.hash_chain import LOG
from perfed.system import create_private_files, lock_folder, write_atomic

MARK = "left"
"""File of a site's folder that says since when it has left; without it the site may start again."""


def left(folder: Path) -> str:
    """Since when the site in ``folder`` has left; empty where it has not."""
    try:
        return (folder / MARK).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


@create_private_files()
def leave(folder: Path) -> bool:
    """Let the site in ``folder`` leave; whether a process is the site now, which writes that into the log itself.

    Raises:
        PerfedError: it has left already, or its log is broken.
    """
    if since := left(folder):
        raise PerfedError(f"{folder}: this site has left already, at {since}")
    write_atomic(folder / MARK, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n")
    try:
        with lock_folder(folder):
            pass
    except BlockingIOError:
        return True
    with OutgoingLog(folder / LOG) as log:
        log.add_note(said(folder))
    return False


def said(folder: Path) -> str:
    """What the log says of a site that has left."""
    return f"the site has left, at {left(folder)}"


def check_stays(folder: Path) -> None:
    """Do nothing where the site has not left.

    Raises:
        PerfedError: it has; says how it may come back.
    """
    if since := left(folder):
        raise PerfedError(f"this site has left, at {since}; to take part again, remove {folder / MARK}")
