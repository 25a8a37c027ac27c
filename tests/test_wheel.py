"""The wheel, installed away from the source tree, is whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "perfed"


def python(*arguments: object, cwd: Path, **environment: str) -> str:
    """What ``python ARGUMENTS`` prints."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_under_the_gpl_is_for_tests_alone():
    """quadprog: tests compare with it, and who installs perfed does not get it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: needed for name, needed in project["optional-dependencies"].items() if name != "test"}
    assert "quadprog" not in json.dumps([project["dependencies"], extras])
    imports = re.compile(r"^\s*(import|from) quadprog", re.MULTILINE)
    assert not [file for file in PACKAGE.rglob("*.py") if imports.search(file.read_text())]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the installed wheel, built where torch is: it has what ``perfed list`` says."""
    built, target = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("installed")
    python("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", built, ROOT, cwd=built)
    (wheel,) = built.glob("*.whl")
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel, cwd=built)
    return target


@pytest.mark.long
def test_every_file_of_the_package_is_in_it(installed):
    def files(folder: Path) -> set[str]:
        found = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc")
        return {str(file.relative_to(folder)) for file in found}

    assert files(installed / "perfed") == {*files(PACKAGE), "cli/index.json"}
    assert {"data/shipped/NOTICE.md", "data/shipped/heart_disease.npz", "data/shipped/parkinsons.npz"} <= files(PACKAGE)
    assert {"py.typed", "__init__.pyi", "experiment/shipped/digits-label-skew.toml"} <= files(PACKAGE)
    assert {item.name.partition("-")[0] for item in installed.iterdir()} == {"perfed", "bin"}


@pytest.mark.long
def test_it_lists_and_trains_outside_the_source_tree(installed, tmp_path):
    def perfed(*arguments: object) -> str:
        return python("-m", "perfed", *arguments, cwd=tmp_path, PYTHONPATH=str(installed), HOME=str(tmp_path))

    where = python("-c", "import perfed; print(perfed.__file__)", cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
    assert "FedAvg" in perfed("list", "methods") and "stacked" in perfed("run", "--help")
    assert not (tmp_path / ".cache").exists(), "the lists of the wheel were not taken"
    shipped = python(
        "-m", "perfed", "check", "heart-disease", cwd=tmp_path, PYTHONPATH=str(installed), HOME=str(tmp_path),
        PERFED_DATA="",
    )  # fmt: skip
    assert "cleveland" in shipped and "switzerland" in shipped
    tiny = ("rounds=1", "clients=3", "plan.engine=stacked", "plan.threads=1")
    perfed("run", "digits-label-skew", *tiny, "--out", "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["rounds"] == 1
