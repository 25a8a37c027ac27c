"""Run directories of other people run no code, and neither do files that happen to lie in the working directory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import perfed

OWN = """
from pathlib import Path
from torch import nn

Path("ran").touch()

def head(shape):
    return nn.Linear(shape[0], 2)
"""


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A finished run whose model has a stage from a module of the user, and a table of a further site."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("own_stage", None)
    Path("own_stage.py").write_text(OWN)
    rng = np.random.default_rng(0)
    for site in ("north", "south", "west"):
        rows = [f"{age},{sugar},{'yes' if age > 0 else 'no'}" for age, sugar in rng.normal(size=(30, 2)).round(3)]
        Path(f"{site}.csv").write_text("\n".join(["age,sugar,sick", *rows]) + "\n")
    assert perfed("init", "north.csv", "south.csv", "--target", "sick", "--out", "study.toml").code == 0
    settings = ("method=fedavg", 'model={head={kind="own_stage:head"}}', "rounds=2", "columns=common")
    done = perfed("run", "study.toml", *settings, "--out", "mine")
    assert done.code == 0, done.err
    Path("ran").unlink()
    sys.modules.pop("own_stage", None)
    return Path("mine")


COMMANDS = {
    "export": ("export", "mine", "--site", "north", "--out", "model.onnx"),
    "predict": ("predict", "mine", "north.csv", "--site", "north", "--out", "said.csv"),
    "join": ("join", "mine", "west.csv", "--site", "west"),
    "resume": ("resume", "mine", "rounds=3"),
}


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_imports_a_module_that_a_run_directory_names_unless_it_is_trusted(run, command):
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    refused = perfed(*command)
    assert refused.code == 2 and refused.err.count("\n") == 1, refused
    assert "'own_stage' is not imported: mine names it, and its code would run; --trust imports it" in refused.err
    assert not Path("ran").exists() and "own_stage" not in sys.modules
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    trusted = perfed(*command, "--trust")
    assert trusted.code == 0 and Path("ran").exists(), trusted.err


@pytest.mark.long
def test_a_comparison_that_names_a_module_is_resumed_if_it_is_trusted(run):
    settings = ('model={head={kind="own_stage:head"}}', "rounds=2", "columns=common")
    compared = perfed("compare", "study.toml", "--methods", "local,fedavg", *settings, "--out", "both")
    assert compared.code == 0, compared.err
    shutil.rmtree("both/fedavg")
    sys.modules.pop("own_stage", None)
    Path("ran").unlink()
    assert perfed("resume", "both").code == 2 and not Path("ran").exists()
    assert perfed("resume", "both", "--trust").code == 0 and Path("both/fedavg").exists()


@pytest.mark.long
def test_files_in_the_working_directory_are_not_imported(tmp_path):
    """Optional packages are looked for by name: a file of that name must not take their place."""
    for name in ("dill", "cloudpickle", "numexpr", "bottleneck", "tomli", "jax", "cupy", "my_own"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    rows = "\n".join(f"{n % 7 + 0.5},{'yes' if n % 2 else 'no'}" for n in range(40))
    (tmp_path / "north.csv").write_text(f"age,sick\n{rows}\n")
    words = [sys.executable, "-m", "perfed", "init", "north.csv", "--target", "sick"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
