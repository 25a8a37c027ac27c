"""The scripts in examples/ run as they stand, and print something that their readers look for."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from documents import ROOT

SAYS = {
    "first_comparison": ("FedPAC is ahead of", "client 003 takes: "),
    "images": ("<Federation", "6 clients", "client-runs"),
    "my_methods": ("MyFedPer passes the checks", "client-runs"),
    "one_machine": ("round 3 of 3", "north"),
    "privacy": ("without privacy: accuracy", "epsilon spent at most"),
    "tables": ("client-runs", "north's model on its first three patients: "),
}


def test_every_example_is_run():
    assert {file.stem for file in (ROOT / "examples").glob("*.py")} == {*SAYS}


@pytest.mark.long
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name, tmp_path):
    if name == "one_machine" and not find_spec("flwr"):
        pytest.skip("needs the extra flower")
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = str(ROOT / "examples" / f"{name}.py")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=known, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert not [text for text in SAYS[name] if text not in said], said
