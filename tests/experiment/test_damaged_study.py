"""A comparison or a search with a file that is damaged goes on to the same results, or is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import EXPERIMENT, TINY, perfed
from damage import DAMAGES

DAMAGED = pytest.mark.parametrize("damage", [*DAMAGES, "of another"], ids=lambda how: getattr(how, "__name__", how))
BASELINE = Path("sklearn.logistic", "seed-0")
BASELINE_FILES = ("clients.csv", "federation.json", "config.toml", "predictions/round-0000.npz")


@pytest.fixture(scope="module")
def studies(tmp_path_factory) -> Path:
    """A comparison and a search, and others with other settings."""
    place = tmp_path_factory.mktemp("studies")
    for name, more in (("comparison", ()), ("other-comparison", ("samples_per_client=14", "lr=0.5"))):
        arguments = (*TINY, *more, "--methods", "local,sklearn:logistic", "--out", place / name)
        assert perfed("compare", EXPERIMENT, *arguments).code == 0
    for name, rates in (("search", "1e-3,1e-1"), ("other-search", "1e-2,1")):
        arguments = (*TINY, "--methods", "local", "--grid", f"lr={rates}", "--out", place / name)
        assert perfed("tune", EXPERIMENT, *arguments).code == 0
    return place


def damaged_copy(studies: Path, study: str, name: Path | str, damage: Any, to: Path) -> Path:
    out = Path(shutil.copytree(studies / study, to / study))
    if damage == "of another":
        shutil.copy(studies / f"other-{study}" / name, out / name)
    else:
        damage(out / name)
    return out


def metrics(study: Path) -> dict[str, Any]:
    return {
        str(f.parent.relative_to(study)): json.loads(f.read_text())["metrics"] for f in study.glob("*/*/summary.json")
    }


@DAMAGED
@pytest.mark.parametrize("study", ["comparison", "search"])
def test_a_damaged_marker_is_refused(studies, tmp_path, study, damage):
    out = damaged_copy(studies, study, "comparisons.toml", damage, tmp_path)
    assert perfed("resume", out).is_refusal


@DAMAGED
@pytest.mark.parametrize("name", [*BASELINE_FILES, "summary.json"])
def test_a_baseline_is_trained_again(studies, tmp_path, name, damage):
    if damage == "of another" and name == "config.toml":
        pytest.skip("the comparison is then refused, as with a marker of another one")
    out = damaged_copy(studies, "comparison", BASELINE / name, damage, tmp_path)
    told = perfed("report", out / BASELINE)
    assert told.is_refusal and name in told.err
    resumed = perfed("resume", out)
    assert resumed.is_refusal or resumed.code == 0, resumed
    if resumed.code == 0:
        assert metrics(out) == metrics(studies / "comparison")
        for file in BASELINE_FILES:
            assert (out / BASELINE / file).read_bytes() == (studies / "comparison" / BASELINE / file).read_bytes()
        assert perfed("report", out / BASELINE).code == 0


@DAMAGED
def test_points_of_a_damaged_grid_are_trained_again(studies, tmp_path, damage):
    out = damaged_copy(studies, "search", "grid.json", damage, tmp_path)
    resumed = perfed("resume", out)
    assert resumed.code == 0, resumed.err
    assert (out / "grid.json").read_bytes() == (studies / "search" / "grid.json").read_bytes()
    assert (out / "chosen.toml").read_bytes() == (studies / "search" / "chosen.toml").read_bytes()
