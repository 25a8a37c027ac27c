"""The wheel, installed away from the source tree, is whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pypdfium2
import pytest
from test_pages import MY_METHODS

from perfed.data.originals.sources import SOURCES

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


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server with the files of ``folder``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def publish(folder: Path) -> None:
    """The files of FLIC's FEMNIST, of four writers with a sample of each digit in either half."""
    (folder / "femnist62").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, original in enumerate(SOURCES["femnist62"].originals):
        writers = [f"w{number}"] if number in range(4) else [f"w{number - 20}"] if number in range(20, 24) else []
        held = {name: {"x": rng.random((10, 784)).round(3).tolist(), "y": [*range(10)]} for name in writers}
        (folder / "femnist62" / original.name).write_text(json.dumps({"users": writers, "user_data": held}))


@pytest.mark.long
def test_a_researcher_gets_from_the_wheel_to_a_figure(installed, tmp_path):
    """A paper's data set by one command, the tutorial's method beside FedPAC and FLIC, a table, and figures as PDF."""
    publish(tmp_path / "published")
    here = tmp_path / "here"
    here.mkdir()
    (here / "my_methods.py").write_text(MY_METHODS)

    def perfed(*arguments: object) -> str:
        told = {"PYTHONPATH": str(installed), "HOME": str(tmp_path), "PERFED_DATA": "", "OMP_NUM_THREADS": "1"}
        return python("-m", "perfed", *arguments, cwd=here, **told)

    with served(tmp_path / "published") as address:
        assert "femnist_digits.npz" in perfed("data", "get", "flic-femnist", "--mirror", address)
    own = "my_methods:my-fedper"
    options = ("data.clients=4", "participation.rate=1", "rounds=2", "plan.engine=stacked", "plan.threads=1")
    said = perfed("compare", "flic-femnist", "--methods", f"{own},fedpac,flic-class", *options, "--out", "runs")
    assert all(f"\n{name} " in said for name in (own, "FedPAC", "FLIC-Class"))
    perfed("report", "runs", "--figures", "figures", "--latex", "table.tex")
    assert r"my\_methods:my-fedper" in (here / "table.tex").read_text()
    drawn = {file.stem: file for file in (here / "figures").glob("*.pdf")}
    assert {"gains", "curves-mean"} <= drawn.keys()
    for file in drawn.values():
        svg = ElementTree.parse(file.with_suffix(".svg")).getroot()
        words = ["".join(of.itertext()).split() for of in svg.iter("{http://www.w3.org/2000/svg}text")]
        page = pypdfium2.PdfDocument(file)[0]
        there = "".join(page.get_textpage().get_text_range().split())
        assert words and all("".join(word) in there for word in words), file
        texts = [part for part in page.get_objects() if isinstance(part, pypdfium2.PdfTextObj)]
        assert texts and all(part.get_font().is_embedded for part in texts), file
