"""Directories say which perfed wrote them, in which format: older ones go on, and what cannot is refused in a line."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
from command_line import EXPERIMENT, TINY, Outcome, contents, perfed

import perfed as package
from perfed.run.layout import FORMAT, OLDEST

SHORT = (*TINY, "rounds=1", "evaluation.every=1")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A comparison of a method with a model of scikit-learn."""
    out = tmp_path_factory.mktemp("layout") / "out"
    done = perfed("compare", EXPERIMENT, *SHORT, "--methods", "local,sklearn:svc", "--seeds", "0", "--out", out)
    assert done.code == 0, done.err
    return Path(out)


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture
def run(copy) -> Path:
    return copy / "local/seed-0"


def says(run: Path, perfed_: str, format_: int) -> None:
    (run / "version.json").write_text(json.dumps({"perfed": perfed_, "format": format_}))


def refused(found: Outcome, *parts: str) -> None:
    assert found.code == 2
    (line,) = found.err.strip().splitlines()
    assert all(part in line for part in parts), line


def test_a_run_and_a_study_say_who_wrote_them(copy):
    now = {"perfed": package.__version__, "format": FORMAT}
    for name in ("local", "sklearn.svc"):
        assert json.loads((copy / name / "seed-0/version.json").read_text()) == now
    assert now.items() <= tomllib.loads((copy / "comparisons.toml").read_text()).items()


@pytest.mark.parametrize("newer", [True, False])
def test_what_cannot_be_read_is_refused_in_a_line_that_says_which_perfed_can(run, tmp_path, newer):
    version, format_ = ("9.1.0", FORMAT + 1) if newer else ("0.0.7", OLDEST - 1)
    says(run, version, format_)
    before = contents(run)
    way = f"install perfed {version} or newer" if newer else f"finish it with perfed {version}"
    rows = tmp_path / "rows.csv"
    rows.write_text("a\n1\n")
    for command in (
        ("resume", run),
        ("resume", run, "rounds=2"),
        ("report", run),
        ("predict", run, rows, "--site", "000", "--out", tmp_path / "said.csv"),
        ("export", run, "--site", "000", "--out", tmp_path / "model.onnx"),
        ("join", run, rows, "--site", "new"),
    ):
        refused(perfed(*command), str(run), f"perfed {version} in format {format_}", way, package.__version__)
    assert contents(run) == before
    models = run.parents[1] / "sklearn.svc/seed-0"
    says(models, version, format_)
    refused(perfed("export", models, "--site", "000", "--out", tmp_path / "model.onnx"), str(models), way)


def test_a_report_leaves_out_the_run_that_it_cannot_read(copy, run):
    says(run, "9.1.0", FORMAT + 1)
    told = perfed("report", copy)
    assert told.code == 0 and re.search(r"left out: \S+/local/seed-0: was written by perfed 9\.1\.0", told.said)


@pytest.mark.parametrize("command", ["resume", "report", "extend"])
def test_a_study_of_a_newer_format_is_refused(copy, command):
    marker = copy / "comparisons.toml"
    content = tomllib.loads(marker.read_text())
    marker.write_text(tomli_w.dumps({**content, "perfed": "9.1.0", "format": FORMAT + 1}))
    words = ("compare", "--extend", copy, "--seeds", "1") if command == "extend" else (command, copy)
    refused(perfed(*words), str(copy), "perfed 9.1.0", "install perfed 9.1.0 or newer")


@pytest.mark.parametrize("said", [None, ("0.1.0", 1), ("0.2.0rc1", FORMAT)])
def test_a_run_of_the_last_minor_version_goes_on_and_is_then_of_this_one(run, said):
    if said is None:
        (run / "version.json").unlink()
    else:
        says(run, *said)
    more = perfed("resume", run, "rounds=2")
    assert more.code == 0, more.err
    assert json.loads((run / "version.json").read_text()) == {"perfed": package.__version__, "format": FORMAT}
    summary = json.loads((run / "summary.json").read_text())
    before = said[0] if said else "0.1"
    assert summary["rounds"] == 2
    assert any(f"begun with perfed {before}, continued with {package.__version__}" in note for note in summary["notes"])
    assert perfed("report", run).code == 0


def test_a_run_of_this_version_says_nothing_of_versions(run):
    assert perfed("resume", run, "rounds=2").code == 0
    assert not [note for note in json.loads((run / "summary.json").read_text())["notes"] if "begun with perfed" in note]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "two"}', '{"perfed": 1, "format": 1}'])
def test_a_damaged_file_is_named(run, text):
    (run / "version.json").write_text(text)
    for command in ("resume", "report"):
        refused(perfed(command, run), "version.json")


STUDY = """
name = "wards"
method = "local"
rounds = 1
[data]
name = "tables"
files = ["north.csv"]
target = "ill"
[model]
head = "linear"
[plan]
engine = "stacked"
threads = 1
"""


@pytest.mark.long
@pytest.mark.parametrize("grades", [("NA", "low", "high"), ("mild", "low", "high")])
def test_an_empty_list_of_missing_values_means_in_an_old_run_what_it_meant(tmp_path, monkeypatch, grades):
    """``missing = []`` was written by ``init``, beside texts that meant missing nevertheless."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{at % 7},{grades[at % 3]},{'yes' if at % 5 else 'no'}" for at in range(60)]
    Path("north.csv").write_text("\n".join(["age,grade,ill", *rows]))
    Path("study.toml").write_text(STUDY if "NA" in grades else STUDY.replace("target", "missing = []\ntarget"))
    assert perfed("run", "study.toml", "--out", "old").code == 0
    config = Path("old/config.toml")
    if "NA" in grades:  # the list is not in the checkpoint
        config.write_text(config.read_text().replace('target = "ill"', 'target = "ill"\nmissing = []'))
    assert "missing = []" in config.read_text()
    says(Path("old"), "0.2.0", 2)
    resumed = perfed("resume", "old", "rounds=2")
    assert resumed.code == 0, resumed.err
    Path("study.toml").write_text(STUDY.replace("rounds = 1", "rounds = 2"))
    assert perfed("run", "study.toml", "--out", "whole").code == 0
    expected = json.loads(Path("whole/summary.json").read_text())["metrics"]
    assert json.loads(Path("old/summary.json").read_text())["metrics"] == expected
    assert "missing =" not in config.read_text()
    Path("study.toml").write_text(STUDY.replace("target", "missing = []\ntarget"))
    assert perfed("run", "study.toml", "--out", "new").code == 0
    assert "missing = []" in Path("new/config.toml").read_text()
