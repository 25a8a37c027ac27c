"""``perfed compare --extend``: methods and seeds added to a comparison; what is done stays as it is."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from command_line import EXPERIMENT, TINY, contents, perfed

from perfed.run.directory import read_marker, write_marker

SHORT = (*TINY, "rounds=1", "evaluation.every=1")


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("extend") / "out"
    made = perfed("compare", EXPERIMENT, *SHORT, "--methods", "local,sklearn:svc", "--seeds", "0", "--out", out)
    assert made.code == 0, made.err
    return Path(out)


@pytest.fixture
def copy(first, tmp_path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "copy"))


@pytest.mark.long
def test_an_extended_comparison_is_the_one_that_had_all_from_the_start(copy, tmp_path):
    done = {run: contents(copy / run) for run in ("local/seed-0", "sklearn.svc/seed-0")}
    more = perfed("compare", "--extend", copy, "--methods", "local,hetfedrep", "--seeds", "0..1")
    assert more.code == 0, more.err
    assert "local seed 0:" not in more.out and "local seed 1:" in more.out and "hetfedrep seed 0:" in more.out
    assert {run: contents(copy / run) for run in done} == done
    whole = tmp_path / "whole"
    names = "local,sklearn:svc,hetfedrep"
    assert perfed("compare", EXPERIMENT, *SHORT, "--methods", names, "--seeds", "0..1", "--out", whole).code == 0
    assert tomllib.loads((copy / "comparisons.toml").read_text()) == tomllib.loads(
        (whole / "comparisons.toml").read_text()
    )
    found = [json.loads((place / "comparison.json").read_text()) for place in (copy, whole)]
    for content in found:
        for run in content["runs"]:
            del run["wall_seconds"]
    assert found[0] == found[1]


@pytest.mark.long
def test_a_new_method_may_have_settings_of_its_own(copy):
    more = perfed(
        "compare", "--extend", copy, "methods.ditto.lam=0.5", "methods.ditto.model.body='none'", "--methods", "ditto"
    )
    assert (
        more.code == 2 and "shape differs between clients" in more.err
    )  # it has no personal embedding; nothing is written
    assert "ditto" not in (copy / "comparisons.toml").read_text()
    more = perfed(
        "compare", EXPERIMENT, *SHORT, "methods.hetfedrep.lr=0.01", "--methods", "hetfedrep", "--extend", copy
    )
    assert more.code == 0, more.err
    summary = json.loads((copy / "hetfedrep" / "seed-0" / "summary.json").read_text())
    assert summary["settings"]["lr"] == 0.01


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--methods", "local"), "nothing to add; it has the methods local, sklearn:svc and the seeds 0;"),
        (("rounds=2", "--methods", "hetfedrep"), "rounds is 2 and was 1 in the runs that are there"),
        (("clients=5", "--seeds", "1"), "data.clients is 5 and was 4 in the runs that are there"),
        (("methods.local.lr=1", "--seeds", "1"), "methods.local.lr is 1 and was 0.001"),
        (("--methods", "fedpak"), "unknown method 'fedpak'"),
        (("--seeds", "1", "--out", "other"), "--out other: a comparison is extended where it is"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(first, arguments, problem):
    before = contents(first)
    result = perfed("compare", "--extend", first, *arguments)
    assert result.code == 2 and problem in result.err and result.err.count("\n") == 1
    assert contents(first) == before


def test_no_comparison_no_experiment_and_other_data(first, copy, tmp_path):
    missing = perfed("compare", "--extend", tmp_path, "--seeds", "1")
    assert missing.code == 2 and "no comparison is there" in missing.err
    assert "an experiment is needed" in perfed("compare", "--methods", "local").err
    kind, content = read_marker(copy)
    content["experiment"]["data"]["samples_per_client"] = 13  # as if the data set had changed
    write_marker(copy, kind, content)
    other = perfed("compare", "--extend", copy, "--seeds", "1")
    assert other.code == 2 and other.err.count("\n") == 1 and "the data have other clients" in other.err
    assert not (copy / "local" / "seed-1").exists()
