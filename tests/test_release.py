"""What a release says of itself: one version everywhere, and files that the forge reads."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import perfed

PUBLIC = """
    Callback Client Clock Evaluation Extension Federation Method Model PERSONAL Participation PerfedError Reply Run
    SHARED Split build_method cnn compare digits_cnn hidden_layer linear load load_site metric mlp register resume start
    use_workers validate weighted_mean
"""
"""What people import from perfed: a name is taken out of it only after a minor version in which it was deprecated."""

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_citation_and_package_have_one_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]


def test_what_is_installed_from_a_wheel_is_this_version_with_the_tested_torch():
    (line,) = re.findall(r"^pip install (torch==\S+) .*\.whl.*$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert line in (ROOT / "constraints.txt").read_text().splitlines()
    assert f'"./perfed-{PROJECT["version"]}-py3-none-any.whl[tables,figures]"' in (ROOT / "docs/install.md").read_text()


def test_the_changelog_has_its_sections_and_every_version_once():
    versions = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased" and len(set(versions)) == len(versions)
    sections = re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {*sections} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_calls_targets_that_are_there(file):
    targets = re.findall(r"^([\w-]+)[\w -]*:(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load(file.read_text())["jobs"]
    called = [
        m
        for job in jobs.values()
        for step in job.get("steps", [])
        for m in re.findall(r"make ([\w-]+)", step.get("run", ""))
    ]
    assert {*called} <= {*targets, "test"} and len(WORKFLOWS) == 2


def test_each_python_of_the_classifiers_is_tested():
    told = [
        c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["wheel"]["strategy"]["matrix"]
    assert told == matrix["python"]


NINE = ["Install", "Versions", "Stability", "Licence", "Security", "Privacy", "GPU", "Trackers", "Support"]
PERMISSIVE = re.compile(r"\b(BSD|MIT|Apache|0BSD|BSL|Zlib|CC0)\b")


def test_nine_answers_are_on_one_page_and_one_click_away():
    assert re.findall(r"^## (.+)$", (ROOT / "docs/platform.md").read_text(), re.MULTILINE) == NINE
    assert "(docs/platform.md)" in (ROOT / "README.md").read_text()
    assert "(platform.md)" in (ROOT / "docs/index.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/platform.md"])
def test_pages_name_the_pythons_of_the_classifiers(page):
    told = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: Python :: 3." in c]
    assert f"Python {', '.join(told[:-1])} or {told[-1]}" in (ROOT / page).read_text()


def test_the_install_page_has_the_wheel_and_every_extra():
    text = (ROOT / "docs/install.md").read_text()
    assert {*re.findall(r"perfed-(.+?)-py3-none-any", text)} == {PROJECT["version"]}
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    extras = re.findall(r"`([\w-]+)`", " ".join(rows))
    assert sorted(extras) == sorted({*PROJECT["optional-dependencies"]} - {"site", "test"})


def test_required_packages_have_the_licences_that_the_page_says():
    for needed in PROJECT["dependencies"]:
        about = metadata.metadata(re.split(r"[<>=\[]", needed)[0])
        older = [c for c in about.get_all("Classifier") or () if c.startswith("License")]
        said = about.get("License-Expression") or " ".join([(about.get("License") or "")[:30], *older])
        assert PERMISSIVE.search(said) and not re.search(r"GPL|MPL|Proprietary", said), (needed, said)


def test_the_public_interface_is_this_list():
    assert sorted(perfed.__all__) == sorted(PUBLIC.split())


def test_what_is_deprecated_is_not_overdue():
    """The changelog says until which version an old name works; that version has it no longer."""
    unreleased = (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2].partition("\n## [")[0]
    ends = re.findall(r"until (\d+)\.(\d+)", unreleased)
    now = tuple(int(part) for part in PROJECT["version"].split(".")[:2])
    assert all((int(major), int(minor)) > now for major, minor in ends)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_run_actions_by_their_commits(file):
    """A tag can be moved to other code, a commit cannot."""
    actions = re.findall(r"uses: (.+)", file.read_text())
    assert actions
    for action in actions:
        pinned = re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)
        assert pinned or action.startswith("./.github/"), action
