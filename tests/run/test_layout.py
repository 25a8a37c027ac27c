"""Directories have the perfed that wrote them and their format; other formats are refused in one line."""

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
from perfed.run.layout import FORMAT

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


@pytest.mark.long
def test_a_run_and_a_study_say_who_wrote_them(copy):
    now = {"perfed": package.__version__, "format": FORMAT}
    for name in ("local", "sklearn.svc"):
        assert json.loads((copy / name / "seed-0/version.json").read_text()) == now
    assert now.items() <= tomllib.loads((copy / "comparisons.toml").read_text()).items()


@pytest.mark.long
@pytest.mark.parametrize("newer", [True, False])
def test_what_cannot_be_read_is_refused_in_a_line_that_says_which_perfed_can(run, tmp_path, newer):
    version, format_ = ("9.1.0", FORMAT + 1) if newer else ("0.0.7", FORMAT - 1)
    says(run, version, format_)
    before = contents(run)
    way = f"install perfed {version}" if newer else f"read it with perfed {version}"
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
    refused(perfed(*words), str(copy), "perfed 9.1.0", "install perfed 9.1.0")


@pytest.mark.parametrize("command", ["resume", "report"])
def test_a_run_or_a_study_without_a_format_is_refused(copy, run, command):
    (run / "version.json").unlink()
    refused(perfed(command, run), "version.json: is missing", f"reads runs of format {FORMAT} only")
    marker = copy / "comparisons.toml"
    content = tomllib.loads(marker.read_text())
    marker.write_text(tomli_w.dumps({key: value for key, value in content.items() if key != "format"}))
    refused(perfed(command, copy), "comparisons.toml: does not have the format", f"reads format {FORMAT} only")


def test_a_run_of_another_version_with_the_same_format_goes_on_and_is_then_of_this_one(run):
    says(run, "0.2.0rc1", FORMAT)
    more = perfed("resume", run, "rounds=2")
    assert more.code == 0, more.err
    assert json.loads((run / "version.json").read_text()) == {"perfed": package.__version__, "format": FORMAT}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert any(f"started with perfed 0.2.0rc1, resumed with {package.__version__}" in note for note in summary["notes"])
    assert perfed("report", run).code == 0


def test_a_run_of_this_version_says_nothing_of_versions(run):
    assert perfed("resume", run, "rounds=2").code == 0
    assert not [
        note for note in json.loads((run / "summary.json").read_text())["notes"] if "started with perfed" in note
    ]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": "two"}', '{"perfed": "0.2.0", "format": "two"}', '{"perfed": 1, "format": 1}']
)
def test_a_damaged_file_is_named(run, text):
    (run / "version.json").write_text(text)
    for command in ("resume", "report"):
        refused(perfed(command, run), "version.json")
