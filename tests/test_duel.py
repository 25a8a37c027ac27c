"""What the duel of programs says of its results."""

import json

import duel


def row(program, accuracy=0.5, seconds=1.0, **more):
    return {"model": "cnn", "method": "ditto", "program": program, "accuracy": accuracy, "round": seconds, **more}


def test_a_row_is_void_where_accuracies_are_apart_or_a_program_failed():
    failed = {"model": "cnn", "method": "ditto", "program": "pfl", "error": "not done"}
    rows = [row("perfed"), row("fluke", 0.519, 3.0), row("flower", 0.521, 3.0), row("pfllib", 0.479, 3.0), failed]
    assert [found["times"] for found in duel.compared(rows)] == [1.0, 3.0, None, None, None]
    lost = {**failed, "program": "perfed"}
    assert [found["times"] for found in duel.compared([lost, *rows[1:]])] == [None] * 5
    assert [found["times"] for found in duel.compared(rows[1:])] == [None] * 4


def test_a_part_that_is_run_again_takes_the_place_of_its_results(tmp_path):
    file = tmp_path / "duel.json"
    duel.keep(file, [row("perfed"), row("fluke", seconds=4.0)])
    duel.keep(file, [row("perfed", seconds=2.0)])
    kept = json.loads(file.read_text())
    assert [(found["program"], found["round"], found["times"]) for found in kept] == [
        ("perfed", 2.0, 1.0),
        ("fluke", 4.0, 2.0),
    ]
