"""``python guard.py COMMAND...`` runs a command and stops all its processes when it ends or the parent ends.

This is a program without imports from perfed, so that it starts quickly. perfed keeps the program's standard input open
as long as the command may run. At the end of that input, or on SIGTERM, the program stops the command with SIGTERM, and
five seconds later with SIGKILL. The exit code is that of the command.
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


def _set_process_option(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _reap_children(process: int) -> int | None:
    """Remove all ended children from the system's table; return the exit code of ``process`` if it was among them."""
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended == process:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if ended == 0:
            return None


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # only processes that have ended but are not yet reaped are in the group (macOS)
        return False
    return True


def _send_signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main(command: list[str]) -> int:
    """Run ``command`` in its own process group until it ends or standard input is closed; return its exit code.

    A command that is killed by a signal has the exit code 128 plus the number of the signal, as in a shell.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_process_option(_SET_SUBREAPER, 1)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _set_process_option(_SET_DEATH_SIGNAL, signal.SIGKILL),
    )
    code: int | None = None
    try:
        while code is None:
            if select.select([0], [], [], POLL)[0] and not os.read(0, 1):
                break
            code = _reap_children(child.pid)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 1.0)):
            ends = time.monotonic() + seconds
            _send_signal(child.pid, number)
            while _is_alive(child.pid) and time.monotonic() < ends:
                exit_code = _reap_children(child.pid)
                code = exit_code if code is None else code
                time.sleep(POLL / 5)
        child.returncode = 0  # Popen must not wait for it, because it was reaped above
    return 128 + signal.SIGKILL if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
