"""What needs no training imports none of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command_line import EXPERIMENT, TINY, perfed

HEAVY = ("torch", "sklearn", "scipy", "scipy.stats")
COMMANDS = (
    "run",
    "compare",
    "resume",
    "tune",
    "partition",
    "export",
    "predict",
    "join",
    "list",
    "show",
    "report",
    "deploy",
)
# Ends as the command does and says last which of the heavy modules there are.
PROGRAM = f"""
import atexit, sys
atexit.register(lambda: print("imported:", *(name for name in {HEAVY} if name in sys.modules)))
from perfed.cli import main
main()
"""


def imported(*arguments: object, code: int = 0) -> list[str]:
    """The heavy modules that ``perfed ARGUMENTS`` has imported when it ends."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    first, *modules = done.stdout.splitlines()[-1].split()
    assert first == "imported:"
    return modules


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        *((command, "--help") for command in COMMANDS),
        *(("list", what) for what in ("methods", "datasets", "experiments", "extensions")),
        ("list", "methods", "--json"),
        ("show", "heart-disease"),
        ("data", "--help"),
        ("data", "list"),
        ("data", "where"),
        ("data", "get", "heart-disease"),
    ],
    ids=" ".join,
)
def test_what_only_says_something_imports_nothing_heavy(arguments):
    assert imported(*arguments) == []


def test_who_looks_after_a_site_or_submits_a_run_does_not_wait_for_torch(tmp_path):
    (tmp_path / "site.json").write_text("{}")
    (tmp_path / "outgoing.jsonl").touch()
    assert imported("site", "log", "--dir", tmp_path) == []
    assert imported("submit", tmp_path, code=2) == []


@pytest.mark.long
def test_a_command_that_trains_imports_what_it_needs(tmp_path):
    assert "torch" in imported("run", EXPERIMENT, *TINY, "--method", "local", "--out", tmp_path / "out")
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.long
def test_a_model_is_written_without_what_trains_scikit_learns_models(tmp_path):
    out = tmp_path / "out"
    assert perfed("run", EXPERIMENT, *TINY, "--method", "local", "--out", out).code == 0
    site = (out / "clients.csv").read_text().splitlines()[1].split(",")[0]
    written = ("export", out, "--site", site, "--format", "safetensors", "--out", tmp_path / "model.safetensors")
    heavy = imported(*written)
    assert "torch" in heavy and not {"sklearn", "scipy.stats"} & set(heavy), heavy
