"""What only some systems have: perfed imports and runs without it."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import weakref
from importlib import metadata
from pathlib import Path

import pytest
import torch
from command_line import EXPERIMENT, TINY

from perfed import Model, Run, build_method, linear
from perfed.system import extra_command, freeze_objects, peak_memory_mb
from perfed.testing.federations import make_blobs
from perfed.training.plan import describe_arithmetic

# Python on Windows has neither of them, and no folder can be opened there.
HIDDEN = """
import os, sys
for name in ("fcntl", "resource"):
    sys.modules[name] = None
open_file = os.open
def refusing(path, *given, **more):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return open_file(path, *given, **more)
os.open = refusing
"""
# Its locks of files, kept by those of this system.
MSVCRT = """
import fcntl, types, torch  # what asks for msvcrt to know the system has asked
def locking(handle, mode, size):
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None
sys_modules = __import__("sys").modules
sys_modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
"""
PROGRAM = """
from pathlib import Path
from perfed.cli import main
def perfed(*arguments):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as done:
        assert done.code == 0, arguments

out, *options = sys.argv[1:]
place = Path(out, "local", "seed-0")
perfed("compare", *options, "--out", out)
place.joinpath("summary.json").rename(place / "first.json")
place.joinpath("checkpoint", "state-000003.json").unlink()
perfed("resume", str(place))
perfed("report", out)
"""


def without(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A program where modules are hidden; it fails where a file's encoding is left to the system."""
    strict = 'import warnings\nwarnings.filterwarnings("error", category=EncodingWarning, module="perfed")\n'
    command = [sys.executable, "-X", "warn_default_encoding", "-c", strict + program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("before", [HIDDEN, MSVCRT + HIDDEN], ids=["no locks", "locks of Windows"])
def test_everything_works_without_modules_that_windows_does_not_have(tmp_path, before):
    out = tmp_path / "out"
    done = without(before + PROGRAM, out, EXPERIMENT, *TINY, "--methods", "local,flic-class")
    assert done.returncode == 0, done.stderr
    names = ("first.json", "summary.json")
    first, summary = (json.loads((out / "local" / "seed-0" / name).read_text()) for name in names)
    assert "peak_memory_mb" not in first and first["rounds"] == 3
    assert not list(out.rglob(".lock"))
    assert summary["metrics"] == first["metrics"]


@pytest.mark.long
def test_locks_of_windows_keep_other_processes_out(tmp_path):
    program = MSVCRT + HIDDEN + "\nfrom pathlib import Path\nfrom perfed.system import lock_folder\n"
    program += f"folder = Path({str(tmp_path)!r})\nwith lock_folder(folder):\n"
    inner = "    try:\n        with lock_folder(folder):\n            print('twice')\n"
    done = without(program + inner + "    except BlockingIOError:\n        print('refused')\n")
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    assert without(program + "    print('free again')\n").stdout == "free again\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_no_folder_is_opened_where_there_are_no_locks(tmp_path):
    program = HIDDEN + "\nfrom pathlib import Path\nfrom perfed.system import sync_folder, write_atomic\n"
    program += f"write_atomic(Path({str(tmp_path)!r}, 'a'), 'whole')\nsync_folder(Path({str(tmp_path)!r}))\n"
    done = without(program)
    assert done.returncode == 0 and (tmp_path / "a").read_text() == "whole", done.stderr


@pytest.mark.long
def test_memory_is_in_mebibytes_on_every_system(monkeypatch):
    status = Path("/proc/self/status")
    peak = peak_memory_mb()
    assert peak is not None and peak > 100  # torch alone
    if status.exists():
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        assert peak == pytest.approx(int(line.split()[1]) / 1024, rel=0.05)
    monkeypatch.setattr(sys, "platform", "darwin")  # says bytes
    assert peak_memory_mb() == pytest.approx(peak / 1024, rel=0.05)
    done = without(HIDDEN + "\nfrom perfed.system import peak_memory_mb\nprint(peak_memory_mb())")
    assert done.stdout == "None\n", done.stderr


def test_what_last_digits_depend_on_names_processor_instructions_and_torch(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    plain = describe_arithmetic(torch.device("cpu"))
    assert torch.backends.cpu.get_cpu_capability() in plain and plain.endswith(f"torch {torch.__version__}")
    if Path("/proc/cpuinfo").exists():
        names = [line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "name" in line]
        assert plain.startswith(f"{names[0]}, ")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert "oneDNN up to SSE41" in describe_arithmetic(torch.device("cpu")) != plain


# In a process of its own: where Ray was begun, its handler stays, and exit_on_sigterm leaves that as it is.
ENDED = """
import os, signal
from perfed.system import TERMINATED, is_sigterm_exit, exit_on_sigterm
with exit_on_sigterm():
    assert not is_sigterm_exit(SystemExit(1)) and is_sigterm_exit(SystemExit(TERMINATED))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    except SystemExit as ended:
        assert ended.code == TERMINATED and is_sigterm_exit(SystemExit(1)) and not is_sigterm_exit(SystemExit(2))
        print("ended")
with exit_on_sigterm():
    assert not is_sigterm_exit(SystemExit(1))
"""


@pytest.mark.long
def test_a_program_that_a_signal_ends_is_known_whatever_code_is_made_of_it():
    """Ray raises SystemExit(1) in the place of what the handler raises while it waits."""
    done = without(ENDED)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


class _Circle:
    def __init__(self, ended: list[str], name: str) -> None:
        self.itself, self.ended, self.name = self, ended, name

    def __del__(self) -> None:
        self.ended.append(self.name)


@pytest.mark.long
def test_what_is_made_while_objects_are_frozen_is_collected_and_the_rest_afterwards():
    gc.collect()
    ended: list[str] = []
    _Circle(ended, "before")
    with freeze_objects():
        _Circle(ended, "inside")
        gc.collect()
        assert ended == ["inside"]
        with freeze_objects():  # a run inside a run
            pass
        assert gc.get_freeze_count()
    gc.collect()
    assert ended == ["inside", "before"]
    assert not gc.get_freeze_count()


@pytest.mark.long
def test_a_run_freezes_what_was_there():
    found = []
    run = Run(make_blobs((9, 8)), build_method("fedavg"), Model(head=linear(3)), rounds=1)
    run.execute(lambda *_: found.append(gc.get_freeze_count() > 10_000))
    assert found == [True, True]
    assert not gc.get_freeze_count()


def test_nothing_of_a_run_waits_for_the_collector():
    """Which is asked less often than Python would: clients' states would pile up from run to run."""
    gc.disable()
    try:
        run = Run(make_blobs((9, 8)), build_method("ditto"), Model(head=linear(3)), rounds=1)
        run.execute()
        server = weakref.ref(run.server)
        del run
        assert server() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (
            {"url": "file:///srv/perfed-0.2.0-py3-none-any.whl"},
            "pip install '/srv/perfed-0.2.0-py3-none-any.whl[onnx]'",
        ),
        (
            {"url": "file:///home/me/my%20clone", "dir_info": {"editable": True}},
            "pip install '/home/me/my clone[onnx]'",
        ),
        ({"url": "https://example.org/perfed.whl"}, "pip install 'FILE[onnx]', with the wheel or the checkout"),
        (None, "pip install 'FILE[onnx]', with the wheel or the checkout"),
    ],
)
def test_an_extra_is_added_from_the_file_that_perfed_came_from(monkeypatch, direct_url, command):
    """perfed is on no package index, where anybody could register its name."""

    class Installed:
        def read_text(self, name):
            return None if direct_url is None else json.dumps(direct_url)

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert extra_command("onnx").startswith(command)


def test_no_command_installs_perfed_by_its_name_alone():
    root = Path(__file__).parents[1]
    sources = [*(root / "perfed").rglob("*"), *(root / "docs").rglob("*.md"), *root.glob("*.md")]
    texts = {file: file.read_text() for file in sources if file.suffix in (".py", ".md", ".yaml", ".sh", ".toml")}
    by_name = re.compile(r"""pip install (-\S+ )*['"`]?perfed\b(?!-)""")
    assert [str(file) for file, text in texts.items() if by_name.search(text)] == []
