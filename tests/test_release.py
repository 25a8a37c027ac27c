"""What a release says of itself: one version everywhere, and files that the forge reads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_citation_and_package_have_one_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]


def test_the_changelog_has_its_sections_and_every_version_once():
    versions = re.findall(r"^## \[(.+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased" and len(set(versions)) == len(versions)
    sections = re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {*sections} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


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
