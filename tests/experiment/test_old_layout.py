"""Directories that were begun when every kind of study had a marker file of its own are read, for one version.

``old_layout/`` was made by the program of that time and then cut: ``whole.json`` has what the runs that are missing
had given. They are tiny: two clients, two rounds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import contents, perfed

from perfed.experiment import published
from perfed.experiment.published import Board

OLD = Path(__file__).with_name("old_layout")
WHOLE: dict[str, Any] = json.loads((OLD / "whole.json").read_text())


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """The directories, and the leaderboard that one of them is of."""
    board = Board.model_validate(json.loads((OLD / "board.json").read_text()))
    monkeypatch.setattr(published, "find_board", lambda name: board)
    return Path(shutil.copytree(OLD, tmp_path / "old"))


@pytest.mark.parametrize("kind", ["comparison", "sweep", "campaign", "leaderboard"])
def test_it_goes_on_to_what_it_would_have_been(copy, kind):
    done = {name: text for name, text in contents(copy / kind).items() if "/seed-" in name}
    resumed = perfed("resume", copy / kind)
    assert resumed.code == 0, resumed.err
    assert done.items() <= contents(copy / kind).items()  # runs that were done are as they were
    missing = [place for place in WHOLE if place.startswith(f"{kind}/")]
    assert missing
    for place in missing:
        summary = json.loads((copy / place / "summary.json").read_text())
        assert summary["metrics"] == {
            name: pytest.approx(of, nan_ok=True) for name, of in WHOLE[place]["metrics"].items()
        }
        file = copy / place / "rounds.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        assert [line["train_loss"] for line in lines] == pytest.approx(WHOLE[place]["train_loss"], rel=1e-6)
    assert (copy / kind / "report.html").is_file()


def test_a_search_goes_on_with_the_points_that_are_left(copy):
    resumed = perfed("resume", copy / "search")
    assert resumed.code == 0, resumed.err
    points = json.loads((copy / "search" / "grid.json").read_text())
    assert [{key: value for key, value in point.items() if key != "notes"} for point in points] == WHOLE["search"]
    assert (copy / "search" / "chosen.toml").is_file()


@pytest.mark.parametrize("kind", ["comparison", "sweep", "campaign"])
def test_its_report_is_written(copy, kind):
    told = perfed("report", copy / kind, "--json")
    assert told.code == 0, told.err
    assert Path(json.loads(told.out)["report"]).is_file()


def test_a_comparison_gets_more_seeds(copy):
    more = perfed("compare", "--extend", copy / "comparison", "--seeds", "2")
    assert more.code == 0, more.err
    assert (copy / "comparison" / "local" / "seed-2" / "summary.json").is_file()
    again = perfed("resume", copy / "comparison", "--json")
    assert again.code == 0 and {run["seed"] for run in json.loads(again.out)["runs"]} == {0, 1, 2}


@pytest.mark.parametrize("kind", ["comparison", "sweep", "search"])
def test_nothing_new_is_begun_in_it(copy, kind):
    taken = perfed("run", "digits-label-skew", "--out", copy / kind)
    assert taken.code == 2 and f"'perfed resume {copy / kind}'" in taken.err
