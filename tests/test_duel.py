"""What the duel of programs says of its results."""

import json

import duel
import duel_tables
import pytest


def row(program, accuracy=0.5, seconds=1.0, **more):
    return {"model": "cnn", "method": "ditto", "program": program, "accuracy": accuracy, "round": seconds, **more}


def test_a_row_is_void_where_accuracies_are_apart_or_a_program_failed():
    failed = {"model": "cnn", "method": "ditto", "program": "pfl", "error": "not done"}
    rows = [row("perfed"), row("fluke", 0.519, 3.0), row("flower", 0.521, 3.0), row("pfllib", 0.479, 3.0), failed]
    assert [found["times"] for found in duel.compared(rows)] == [1.0, 3.0, None, None, None]
    lost = {**failed, "program": "perfed"}
    assert [found["times"] for found in duel.compared([lost, *rows[1:]])] == [None] * 5
    assert [found["times"] for found in duel.compared(rows[1:])] == [None] * 4


def test_what_mini_batches_alone_explain_makes_no_row_void():
    rows = [row("perfed", spread=0.03), row("fluke", 0.58), row("flower", 0.59)]  # two deviations of a difference: .085
    assert [found["times"] for found in duel.compared(rows)] == [1.0, 1.0, None]
    rows[0]["spread"] = 0.001
    assert [found["times"] for found in duel.compared([*rows, row("pfllib", 0.519)])] == [1.0, None, None, 1.0]


def test_a_part_that_is_run_again_takes_the_place_of_its_results(tmp_path):
    file = tmp_path / "duel.json"
    duel.keep(file, [row("perfed"), row("fluke", seconds=4.0)])
    duel.keep(file, [row("perfed", seconds=2.0)])
    kept = json.loads(file.read_text())
    assert [(found["program"], found["round"], found["times"]) for found in kept] == [
        ("perfed", 2.0, 1.0),
        ("fluke", 4.0, 2.0),
    ]


def test_the_pages_tables_say_ratios_voids_and_misses(monkeypatch, tmp_path):
    more = {"first_round": 2.25, "peak_mb": 300.4, "load": 1.0}
    rows = [row("perfed", **more), row("fluke", seconds=1.4, **more), row("pfllib", 0.9, seconds=0.1, **more)]
    rows = [{**found, "method": method} for method in ("fedavg", "fedrep") for found in rows]
    monkeypatch.setattr(duel_tables, "KEPT", tmp_path / "duel.json")
    duel.keep(duel_tables.KEPT, rows)
    line = next(line for line in duel_tables.rounds().splitlines() if "CNN" in line)
    assert line == "| CNN 16-32, 128 | FedAvg | 1000 | 1400 (1.4 ×) | 100 (void) |  |  |  |"
    assert "| 2.2 s, 300 MB | 2.2 s, 300 MB |" in duel_tables.needs()
    small, large, *cnn = duel_tables.aims().splitlines()[-4:]
    assert "| void |" in small and "| void |" in large
    assert cnn == [
        "| CNN 16-32, 128, FedAvg | 1.5 × | 1.4 × (fluke, FedAvg) to 1.4 × | **missed** |",
        "| CNN 16-32, 128, FedRep | 5 × | 1.4 × (fluke, FedRep) to 1.4 × | **missed** |",
    ]


def test_kept_ratios_are_those_of_the_kept_times():
    kept = json.loads(duel_tables.KEPT.read_text())
    for found, again in zip(kept, duel.compared(kept), strict=True):
        assert found["times"] == pytest.approx(again["times"]), (found["model"], found["method"], found["program"])
