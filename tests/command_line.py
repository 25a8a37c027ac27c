"""The command line in tests, on experiments that take a fraction of a second."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from perfed.cli import main
from perfed.experiment import jobs

EXPERIMENT = "flic-digits-views"
TINY = (
    "rounds=3",
    "clients=4",
    "samples_per_client=12",
    "local_epochs=1",
    "participation.rate=0.5",
    "evaluation.every=2",
    "snapshots.rounds=[]",
    "methods.flic-class.pretrain_epochs=1",
    "plan.engine=stacked",
    "plan.threads=1",
)


@dataclass(frozen=True)
class Outcome:
    """Exit code and what was printed."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What was printed, wherever lines were broken."""
        return " ".join(self.out.split())

    @property
    def is_refusal(self) -> bool:
        """Whether the command ended as for an error of the user: exit code 2 and one line."""
        return self.code == 2 and self.err.count("\n") == 1 and "Traceback" not in self.err


def perfed(*arguments: object) -> Outcome:
    """``perfed ARGUMENTS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["perfed", *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as done:
            return Outcome(int(done.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("the program must end with an exit code")


def run_tiny(out: Path, *arguments: object) -> Outcome:
    """A tiny run that must succeed."""
    result = perfed("run", EXPERIMENT, *TINY, *arguments, "--out", out)
    assert result.code == 0, result.err
    return result


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["perfed.cli.execution", "perfed.methods"])


def another_process(*arguments: object, while_it_runs: Callable[[BaseProcess], None] | None = None) -> Outcome:
    """``perfed ARGUMENTS`` in a process of its own.

    It is forked from one that has imported perfed and nothing else: that takes longer than what is tested.
    """
    with TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("out", "err")]
        process = _FORKS.Process(target=_program, args=([*map(str, arguments)], said, Path.cwd(), dict(os.environ)))
        process.start()
        if while_it_runs is not None:
            while_it_runs(process)
        process.join()
        assert process.exitcode is not None
        return Outcome(process.exitcode, *(file.read_text() if file.exists() else "" for file in said))


def _program(arguments: list[str], said: list[Path], folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # Jobs in the background ignore it; where workers of a comparison were the server's first forks, it is held too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    for number, file in enumerate(said, start=1):
        with file.open("wb") as handle:
            os.dup2(handle.fileno(), number)
    sys.argv = ["perfed", *arguments]
    jobs.START_METHOD = "fork"
    main()


def stop_when(condition: Callable[[], bool], number: signal.Signals, *arguments: object) -> Outcome:
    """Start ``perfed ARGUMENTS`` as a process of its own and send it the signal as soon as ``condition`` holds."""

    def stop(process: BaseProcess) -> None:
        while process.is_alive() and not condition():
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, number)

    found = another_process(*arguments, while_it_runs=stop)
    assert found.code != 0, f"it ended before it could be stopped: {found.err}"
    return found


def kill_when(condition: Callable[[], bool], *arguments: object) -> None:
    """:func:`stop_when` with SIGKILL."""
    assert stop_when(condition, signal.SIGKILL, *arguments).code < 0


def lines_of(directory: Path) -> int:
    """Finished rounds, as ``rounds.jsonl`` has them."""
    file = directory / "rounds.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def contents(directory: Path) -> Mapping[str, bytes]:
    """Every file below ``directory``."""
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def is_plain(text: str) -> bool:
    """No escape codes and no lines written over, as progress bars have them."""
    return not re.search(r"[\x1b\r]", text)


HEAVY = ("torch", "sklearn", "scipy", "scipy.stats")
# Ends as the command does, and prints which of the heavy modules have been imported.
IMPORT_PROGRAM = f"""
import atexit, sys
atexit.register(lambda: print("imported:", *(name for name in {HEAVY} if name in sys.modules)))
from perfed.cli import main
main()
"""


def heavy_imports(*arguments: object, code: int = 0) -> list[str]:
    """Return the heavy modules that ``perfed ARGUMENTS`` has imported when it ends."""
    command = [sys.executable, "-c", IMPORT_PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    first, *modules = done.stdout.splitlines()[-1].split()
    assert first == "imported:"
    return modules
