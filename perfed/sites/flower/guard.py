"""``python guard.py COMMAND...``: run a command, and end all that it started when it or the parent ends.

A program by itself, so that it starts in no time; perfed holds its standard input open for as long as the command may
run. The end of that file, or SIGTERM, ends the command: first with SIGTERM, five seconds later with SIGKILL. Its exit
code is the command's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

POLL, GRACE = 0.1, 5.0
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl of Linux


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _reap(wanted: int) -> int | None:
    """The exit code of ``wanted`` once it has one; whatever else has ended is taken from the system's table too."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended == wanted:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if ended == 0:
            return None


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # only what has ended but is not yet reaped is left (macOS)
        return False
    return True


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main(command: list[str]) -> int:
    """Run ``command`` in a process group of its own until it, or whoever holds our standard input, ends."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_SET_SUBREAPER, 1)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL),
    )
    code: int | None = None
    try:
        while code is None:
            if select.select([0], [], [], POLL)[0] and not os.read(0, 1):
                break
            code = _reap(child.pid)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 1.0)):
            ends = time.monotonic() + seconds
            _signal(child.pid, number)
            while _alive(child.pid) and time.monotonic() < ends:
                found = _reap(child.pid)
                code = found if code is None else code
                time.sleep(POLL / 5)
        child.returncode = 0  # it is reaped here, not by Popen
    return 128 + signal.SIGKILL if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
