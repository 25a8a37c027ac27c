"""What a release says of itself: one version everywhere, and files that the forge reads."""

from __future__ import annotations

import re
import sys
import tomllib
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


def test_the_public_interface_is_this_list():
    assert sorted(perfed.__all__) == sorted(PUBLIC.split())


def test_a_name_of_the_last_minor_version_works_with_a_warning():
    perfed.__dict__.pop("Term", None)
    sys.modules.pop("perfed.terms", None)
    with pytest.warns(FutureWarning, match="extensions"):
        assert perfed.Term is perfed.Extension


def test_what_is_deprecated_is_not_overdue():
    """The changelog says until which version an old name works; that version has it no longer."""
    unreleased = (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2].partition("\n## [")[0]
    ends = re.findall(r"until (\d+)\.(\d+)", unreleased)
    now = tuple(int(part) for part in PROJECT["version"].split(".")[:2])
    assert ends and all((int(major), int(minor)) > now for major, minor in ends)
