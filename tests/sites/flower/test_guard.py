"""Nothing that was started outlives whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perfed.sites.flower import guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
# A child with a child of its own; both ignore SIGTERM if they are told to.
FAMILY = """
import os, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def note():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
note()
if os.fork() == 0:
    note()
time.sleep(60)
"""


def start(file: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", FAMILY, str(file), *words]
    return subprocess.Popen([sys.executable, "-I", "-S", guard.__file__, *command], stdin=subprocess.PIPE)


def family(file: Path) -> list[int]:
    ends = time.monotonic() + 20
    while not file.exists() or file.read_text().count("\n") < 2:
        assert time.monotonic() < ends
        time.sleep(0.02)
    return [int(line) for line in file.read_text().split()]


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended, and that nobody has asked for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


def test_the_end_of_standard_input_ends_the_family(tmp_path):
    process = start(tmp_path / "pids")
    pids = family(tmp_path / "pids")
    process.stdin.close()
    assert process.wait(5) == 128 + signal.SIGTERM
    assert gone(pids, 1)


@pytest.mark.long
def test_who_ignores_sigterm_is_killed(tmp_path):
    process = start(tmp_path / "pids", "stubborn")
    pids = family(tmp_path / "pids")
    process.terminate()
    process.wait(guard.GRACE + 3)
    assert gone(pids, 1)


@pytest.mark.parametrize("who", ["parent", "guard", "child"])
def test_nobody_is_left_when_one_of_them_is_killed(tmp_path, who):
    script = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, *{sys.path!r}]\n"
    script += f"import test_guard, pathlib, time\np = test_guard.start(pathlib.Path({str(tmp_path / 'pids')!r}))\n"
    script += "print(p.pid, flush=True); p.wait(); time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    own = int(parent.stdout.readline())
    pids = family(tmp_path / "pids")
    os.kill({"parent": parent.pid, "guard": own, "child": pids[0]}[who], signal.SIGKILL)
    still = pids[:1] if who == "guard" else pids  # a guard that is killed takes only its own child along
    assert gone(still, 5)
    parent.kill()
    parent.wait()
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def test_the_exit_code_is_the_commands():
    for code in (0, 49):
        command = [sys.executable, "-I", "-S", guard.__file__, sys.executable, "-S", "-c", f"raise SystemExit({code})"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.wait(20) == code
