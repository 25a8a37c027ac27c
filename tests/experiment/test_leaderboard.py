"""Leaderboards: theirs beside ours, what is done is skipped, and settings chosen on validation rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import pytest
from command_line import perfed
from data_files import require_file

from perfed.errors import PerfedError
from perfed.experiment import published as module
from perfed.experiment.config import validate
from perfed.experiment.jobs import execute_in_turn
from perfed.experiment.leaderboard import conclude_leaderboard, leaderboard_of, run_leaderboard
from perfed.experiment.published import Board, Leaderboard, board_names, find_board
from perfed.experiment.search import Search
from perfed.experiment.start import resume
from perfed.experiment.study import Study, read_comparison
from perfed.report.board import UNFINISHED, Figure, board_notes, board_table

TINY = {
    "title": "Digits",
    "source": "nobody",
    "metric": "accuracy",
    "best_over_test": True,
    "seeds": 2,
    "experiment": {
        "rounds": 3,
        "data": {"name": "digits", "clients": 3, "samples": 20},
        "model": {"head": "linear"},
        "training": {"optimizer": "sgd", "lr": 0.3, "batch_size": 5, "local_epochs": 1},
        "evaluation": {"every": 1},
        "plan": {"engine": "stacked", "threads": 1},
    },
    "rows": [
        {"name": "FedAvg", "method": "fedavg", "theirs_mean": 0.5, "theirs_std": 0.1, "note": "made up"},
        {"name": "FedAvg, slow", "method": "fedavg", "experiment": {"training": {"lr": 1e-6}, "rounds": 1}},
        {"name": "NotOurs", "theirs_mean": 0.9, "theirs_std": 0.1, "note": "we lack it"},
        {"name": "Local, tuned", "method": "local", "grid": ["lr=1e-6,0.3"]},
    ],
}


@pytest.fixture
def board(monkeypatch):
    """A leaderboard of four rows, in place of those that come with the package."""
    content = json.loads(json.dumps(TINY))
    monkeypatch.setattr(module, "find_board", lambda name: Board.model_validate(content))
    return content


def create(path: Path, seeds: int | None, settings: Sequence[str] = (), rows: Sequence[str] = ()) -> Study:
    return Study.create(path, Leaderboard.from_names("digits", seeds, settings, rows))


def execute(study: Study) -> list[str]:
    """Run what is left; what was worked on."""
    worked = []

    def executed(what, runs):
        worked.append(what)
        return execute_in_turn

    assert run_leaderboard(study, executed) == []
    return worked


@pytest.mark.long
def test_theirs_stand_beside_ours(tmp_path, board):
    made = create(tmp_path / "digits", None, [])
    assert execute(made) == ["FedAvg", "FedAvg, slow", "tuning Local, tuned", "Local, tuned"]
    rows = {row["method"]: row for row in json.loads((made.path / "leaderboard.json").read_text())}
    runs = read_comparison(made.path / "fedavg")
    summaries = [json.loads((runs.directory("fedavg", seed) / "summary.json").read_text()) for seed in (0, 1)]
    last = [summary["metrics"]["accuracy"]["mean"] for summary in summaries]
    lines = [(runs.directory("fedavg", seed) / "rounds.jsonl").read_text().splitlines() for seed in (0, 1)]
    best = [max(json.loads(line)["metrics"]["accuracy"]["mean"] for line in of) for of in lines]
    fedavg = rows["FedAvg"]
    assert fedavg["ours_mean"] == pytest.approx(fmean(last)) and fedavg["ours_std"] == pytest.approx(stdev(last))
    assert fedavg["ours_best_mean"] == pytest.approx(fmean(best)) and fedavg["rounds"] == 3 and fedavg["seeds"] == 2
    assert (fedavg["theirs_mean"], fedavg["theirs_std"], fedavg["note"]) == (0.5, 0.1, "made up")
    assert rows["FedAvg, slow"]["rounds"] == 1 and rows["FedAvg, slow"]["ours_mean"] < fedavg["ours_mean"]
    assert rows["NotOurs"]["ours_mean"] is None and rows["NotOurs"]["theirs_mean"] == 0.9
    assert rows["Local, tuned"]["chosen"] == "lr=0.3"
    page = (made.path / "report.html").read_text()
    assert "we lack it" in page and "lr=0.3" in page and "best over test" in page

    assert execute(create(made.path, None, [])) == ["tuning Local, tuned"]  # of which none is left
    more = execute(create(made.path, 3, []))
    assert more == ["FedAvg", "FedAvg, slow", "tuning Local, tuned", "Local, tuned"]
    assert {row["seeds"] for row in json.loads((made.path / "leaderboard.json").read_text())} == {0, 3}
    assert all((made.path / "fedavg" / "fedavg" / f"seed-{seed}" / "summary.json").is_file() for seed in range(3))


@pytest.mark.long
def test_a_row_goes_further_than_the_others(tmp_path, board):
    board["rows"] = board["rows"][:2]
    made = create(tmp_path / "digits", 2, ["rounds=1"])
    execute(made)
    before = {figure.method: figure for figure in conclude_leaderboard(made)[0]}
    for seed in (0, 1):
        resume(made.path / "fedavg" / "fedavg" / f"seed-{seed}", rounds=4).execute()
    assert execute(create(made.path, 2, ["rounds=1"])) == []
    after = {figure.method: figure for figure in conclude_leaderboard(made)[0]}
    assert (before["FedAvg"].rounds, after["FedAvg"].rounds) == (1, 4)
    assert after["FedAvg"].ours_best_mean > before["FedAvg"].ours_best_mean
    assert after["FedAvg, slow"] == before["FedAvg, slow"]


@pytest.mark.long
def test_one_row_is_run_of_many(tmp_path, board):
    made = create(tmp_path / "digits", 1, [], ["FedAvg, slow"])
    assert execute(made) == ["FedAvg, slow"]
    assert leaderboard_of(Study.read(made.path)).rows == (
        "FedAvg, slow",
    )  # 'perfed resume' goes on with no other either
    seeds = {figure.method: figure.seeds for figure in conclude_leaderboard(made)[0]}
    assert seeds == {"FedAvg": 0, "FedAvg, slow": 1, "NotOurs": 0, "Local, tuned": 0}
    not_run = "digits runs no row 'NotOurs'; it runs 'FedAvg', "
    for name, why in (("NotOurs", not_run), ("Local, tunes", "did you mean")):
        with pytest.raises(PerfedError, match=f"--row: .*{why}"):
            create(made.path, 1, [], [name])
    assert leaderboard_of(Study.read(made.path)).rows == ("FedAvg, slow",)
    assert execute(create(made.path, 1, [])) == ["FedAvg", "tuning Local, tuned", "Local, tuned"]


@pytest.mark.long
def test_searches_see_validation_rows_alone(tmp_path, board):
    made = create(tmp_path / "digits", 1, [])
    execute(made)
    search = Study.read(made.path / "tuning" / "local--tuned").spec
    assert isinstance(search, Search)
    assert search.held_out["evaluation"]["split"] == "validation" and search.held_out["data"]["validation_fraction"] > 0
    run = read_comparison(made.path / "local--tuned")
    assert not run.table["data"].get("validation_fraction")  # what was chosen is trained on all training rows


@pytest.mark.long
def test_what_was_run_otherwise_is_not_taken_for_the_same(tmp_path, board):
    made = create(tmp_path / "digits", 1, ["rounds=1"])
    execute(made)
    with pytest.raises(PerfedError, match="holds digits with other settings; choose another --out"):
        create(made.path, 1, ["rounds=2"])
    board["rows"][0]["experiment"] = {"training": {"lr": 0.2}}
    (problem,) = run_leaderboard(made, lambda what, runs: execute_in_turn)
    assert problem.startswith("FedAvg: ") and "was started with another experiment" in problem


def test_distances_are_in_their_deviations_and_of_what_they_report():
    figure = Figure("A", 0.70, 0.01, 0.80, 0.05, ours_best_mean=0.75, ours_best_std=0.02, rounds=9, seeds=5)
    last = board_table([figure], "T", "accuracy", best_over_test=False)
    assert last.rows[0][1:] == ["80.00 ± 5.00", "70.00 ± 1.00", "-10.0", "-2.0", "9"]
    best = board_table([figure], "T", "accuracy", best_over_test=True)
    assert best.rows[0][1:] == ["80.00 ± 5.00", "70.00 ± 1.00", "75.00 ± 2.00", "-5.0", "-1.0", "9"]


def test_rows_of_fewer_rounds_than_theirs_are_marked_and_not_compared():
    figure = Figure("A", 0.60, None, 0.97, 0.0005, rounds=10, their_rounds=2000)
    (row,) = board_table([figure], "T", "accuracy", best_over_test=False).rows
    assert row[1:] == ["97.00 ± 0.05", "60.00", "–", "–", "10 of 2000"]
    assert board_notes([figure]) == [f"rounds: {UNFINISHED}"]
    (whole,) = board_table([replace(figure, rounds=2000)], "T", "accuracy", best_over_test=False).rows
    assert whole[3:] == ["-37.0", "-740.0", "2000"]
    boards = [find_board(name) for name in board_names()]
    assert {board.title for board in boards if board.their_rounds} == {b.title for b in boards if "PFLlib" in b.title}


@pytest.mark.parametrize("name", board_names())
def test_every_row_of_every_leaderboard_can_be_run(name):
    board = find_board(name)
    for row in board.run:
        built = validate({**board.table(row), "method": row.method})
        assert built.rounds >= 1
        for assignment in (axis.partition(",")[0] for axis in row.grid):
            validate({**board.table(row, [assignment]), "method": row.method})
    assert all((row.theirs_mean is None) == (row.theirs_std is None) for row in board.rows)
    assert all(row.method or row.note for row in board.rows)


def test_the_command_line_knows_them(tmp_path):
    assert "flamby-heart" in perfed("list", "leaderboards").out
    said = perfed("show", "flamby-tcga").said
    assert "flamby-tcga (data set)" in said and "flamby-tcga (leaderboard)" in said and "theirs: " in said
    wrong = perfed("leaderboard", "flamby-hart", "--out", tmp_path / "none")
    assert wrong.code == 2 and "unknown leaderboard 'flamby-hart' (did you mean 'flamby-heart'?)" in wrong.err
    assert not (tmp_path / "none").exists()


@pytest.mark.long
def test_flambys_protocol_runs_and_resumes(tmp_path, board):
    require_file("heart_disease.npz")
    board |= find_board("flamby-heart").model_dump(mode="json", exclude={"rows"}, exclude_none=True)
    rows = [row for row in find_board("flamby-heart").rows if row.name in ("FedYogi", "Cyclic", "SCAFFOLD")]
    board["rows"] = [row.model_dump(mode="json", exclude_none=True) for row in rows]
    out, two = tmp_path / "heart", ("--row", "FedYogi", "--row", "SCAFFOLD")
    first = perfed("leaderboard", "flamby-heart", "local_steps=3", "rounds=2", "--seeds", 1, *two, "--out", out)
    assert first.code == 0 and "FedYogi" in first.out and "73.14 ± 1.25" in first.out
    again = perfed("resume", out, "--json")
    rows = {row["method"]: row for row in json.loads(again.out)["rows"]}
    assert (rows["Cyclic"]["rounds"], rows["SCAFFOLD"]["rounds"]) == (None, 2)
    assert rows["FedYogi"]["rounds"] == 2 and 0 < rows["FedYogi"]["ours_mean"] < 1
