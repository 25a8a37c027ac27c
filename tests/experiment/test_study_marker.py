"""A study of any kind has one marker file, from which it is read and resumed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_line import EXPERIMENT, TINY, perfed

from perfed.run.directory import write_marker

TABLE = {"rounds": 1, "data": {"name": "digits", "clients": 3, "samples": 20}, "model": {"head": "linear"}}
COMPARISON = {"methods": ["local"], "seeds": [0], "experiment": TABLE}
MARKERS: dict[str, dict[str, Any]] = {
    "comparison": COMPARISON,
    "search": {**COMPARISON, "points": [["lr=0.1"]]},
    "campaign": {"key": "", "comparisons": {"one": "one"}},
    "leaderboard": {"name": "flamby-heart", "seeds": 1, "settings": [], "rows": []},
}


def refuse(path: Path) -> str:
    outcome = perfed("resume", path)
    assert outcome.is_refusal, outcome
    return outcome.err


@pytest.mark.parametrize("kind", MARKERS)
def test_a_marker_that_has_changed_is_refused(tmp_path, kind):
    write_marker(tmp_path, kind, MARKERS[kind])
    marker = tmp_path / "comparisons.toml"
    marker.write_text(f"more = 1\n{marker.read_text()}")
    assert "comparisons.toml: has changed since it was written" in refuse(tmp_path)


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, content in MARKERS.items() for key in content])
def test_a_marker_without_a_key_is_refused(tmp_path, kind, key):
    write_marker(tmp_path, kind, {name: value for name, value in MARKERS[kind].items() if name != key})
    assert f"comparisons.toml: cannot be read: {key}: field required" in refuse(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (("compare", "--methods", "local"), "comparison"),
        (("tune", "--methods", "local", "--grid", "lr=1e-3,1e-2"), "search"),
        (("sweep", "lr=1e-3,1e-2"), "campaign"),
    ],
)
def test_a_finished_study_is_resumed_to_the_same_results(tmp_path, command, kind):
    name, *options = command
    assert perfed(name, EXPERIMENT, *options, *TINY, "--out", tmp_path / "out").code == 0
    marker = tmp_path / "out" / "comparisons.toml"
    content = tomllib.loads(marker.read_text())
    assert content["kind"] == kind and MARKERS[kind].keys() <= content.keys()
    files = [marker, *(tmp_path / "out").rglob("summary.json"), *(tmp_path / "out").rglob("grid.json")]
    before = {file: file.read_bytes() for file in files}
    assert perfed("resume", tmp_path / "out").code == 0
    assert {file: file.read_bytes() for file in files} == before


@pytest.mark.long
def test_a_search_with_a_failed_point_is_resumed(tmp_path):
    """The failed point has no metric; it is not trained again, and another point is chosen."""
    options = ("--methods", "local", "--grid", "lr=1e-3,1e30", "optimizer=sgd", "--out", tmp_path / "out")
    assert perfed("tune", EXPERIMENT, *TINY, *options).code == 0
    points = {point["settings"][0]: point for point in json.loads((tmp_path / "out" / "grid.json").read_text())}
    assert points["lr=1e30"]["metric"] is None and points["lr=1e-3"]["mean"] is not None
    resumed = perfed("resume", tmp_path / "out")
    assert resumed.code == 0, resumed.err
    assert tomllib.loads((tmp_path / "out" / "chosen.toml").read_text())["methods"]["local"]["lr"] == 1e-3
