"""Tables and curves of hand-made runs: time to accuracy, domains, slower and faster clients, axes of the curves."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from test_report import read_page, spread, write_run

from perfed.report import all_tables, comparison_rows, load_runs, write_report
from perfed.report.curves import find_axes, metric_curves, used_curves
from perfed.report.page.page_data import ReportData
from perfed.report.page.speeds import speed_figures
from perfed.report.tables import domain_tables, speed_table, target_table
from perfed.run.directory import RunDirectory

ROUNDS = (1, 2, 4)
# seconds, rounds taken part, accuracy: in seed 1 everything is twice as slow and 0.1 better
CLIENTS = [("a", 4.0, 1, 0.3), ("b", 1.0, 4, 0.9), ("c", 3.0, 2, 0.5), ("d", 2.0, 4, 0.7), ("e", 2.5, 3, 0.1)]


def made(
    directory: Path,
    method: str,
    seed: int,
    *,
    times: Mapping[float, float | None] | None = None,
    domains: Mapping[str, Mapping[str, float]] | None = None,
    seconds: bool = False,
    clock: bool = False,
) -> Path:
    """A finished run of five clients whose rounds 1, 2 and 4 were evaluated; accuracy 0.5, 0.6, 0.7 plus seed / 10."""
    directory.mkdir()
    RunDirectory(directory).write_config(f'method = "{method}"\nseed = {seed}\n')
    lines = []
    for number in range(1, 5):
        clocked = 10.0 * number * (1 + seed) if clock else float(number)
        sizes = {"bytes_up": 1_000_000, "bytes_down": 500_000 * (1 + seed)}
        lines.append({"round": number, "training_seconds": 0.5 * number, "virtual_time": clocked, **sizes})
        if number in ROUNDS:
            value = spread(0.5 + 0.1 * ROUNDS.index(number) + 0.1 * seed)
            lines[-1] |= {"metrics": {"accuracy": value}, "accuracy": value}
    (directory / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (directory / "clients.csv").open("w", newline="") as file:
        table = csv.writer(file)
        columns = ["id", "n_train", "n_test", "accuracy_before", "accuracy_after", "rounds"]
        table.writerow([*columns, *(["seconds"] if seconds else [])])
        for name, own, part, accuracy in CLIENTS:
            time = [(1 + seed) * own] if seconds else []
            table.writerow([name, 20, 10, accuracy + 0.1 * seed, accuracy + 0.2, part, *time])
        table.writerow(["late", 20, 0, "", "", 0, *([""] if seconds else [])])
    found = spread(0.7 + 0.1 * seed)
    summary: dict[str, Any] = {"method": method, "dataset": "toy", "seed": seed, "rounds": 4, "wall_seconds": 2.0}
    summary |= {"metrics": {"accuracy": found}, "accuracy": found, "virtual_time": lines[-1]["virtual_time"]}
    if times is not None:
        summary["targets"] = [
            {"accuracy": target, "round": time and 2, "virtual_time": time, "training_seconds": time and 1.0}
            for target, time in times.items()
        ]
    if domains is not None:
        summary["domains"] = domains
    (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def clocked(tmp_path: Path) -> list[Path]:
    times: dict[str, Sequence[Mapping[float, float | None]]] = {
        "fedrep": [{0.7: 100.0, 0.8: 200.0, 0.9: None}, {0.7: 120.0, 0.8: 260.0, 0.9: None}],
        "fedrep-srpfl": [{0.7: 50.0, 0.8: 80.0, 0.9: None}, {0.7: 40.0, 0.8: None, 0.9: None}],
        "local": [{0.7: None, 0.8: None, 0.9: None}, {0.7: None, 0.8: None, 0.9: None}],
    }
    return [
        made(tmp_path / f"{method}-{seed}", method, seed, times=of, seconds=True, clock=True)
        for method, each in times.items()
        for seed, of in enumerate(each)
    ]


def test_time_to_accuracy_and_speed_up_over_the_base_method(tmp_path):
    table = target_table(load_runs(clocked(tmp_path)))
    assert table is not None
    assert table.header == [
        "Method",
        *(f"Virtual time to {target} %" for target in (70, 80, 90)),
        *(f"Speed-up at {target} %" for target in (70, 80, 90)),
    ]
    # Sample standard deviations of 100, 120 and 200, 260: 20 and 60 over the square root of 2.
    assert table.rows[0] == ["FedRep", "110 ± 14.14", "230 ± 42.43", "not reached", "–", "–", "–"]
    # Speed-ups of the seeds: 100 / 50 and 120 / 40; not 110 / 45.
    speed_ups = ["2.50 ± 0.71 over FedRep", "2.50 (1 of 2 seeds) over FedRep", "–"]
    assert table.rows[1] == ["FedRep-SRPFL", "45 ± 7.071", "reached by 1 of 2 seeds: 80", "not reached", *speed_ups]
    assert table.rows[2] == ["Local", "not reached", "not reached", "not reached", "–", "–", "–"]


def test_the_base_of_a_method_of_ones_own_is_found_by_name_alone(tmp_path):
    """A report needs no module of the user's; ``+uniform`` is no policy to be faster than."""
    times = {0.7: 30.0}, {0.7: 10.0}
    names = "gone:mine", "gone:mine+srpfl", "fedrep+uniform", "fedrep-srpfl"
    runs = [made(tmp_path / str(i), name, 0, times=times[i % 2]) for i, name in enumerate(names)]
    table = target_table(load_runs(runs))
    assert [row[2] for row in table.rows] == ["–", "3.00 over gone:mine", "–", "3.00 over FedRep+uniform"]


def test_a_table_says_that_fitting_takes_no_time(tmp_path):
    (run,) = load_runs([made(tmp_path / "run", "fedrep", 0, times={0.7: 30.0})])
    for text, said in (("", False), ("policy = 'srpfl'", True), ("policy = 'srpfl'\nfit_unused = false", False)):
        one = replace(run, config_text=f"method = 'fedrep'\n[participation]\n{text}")
        assert ("takes no virtual time" in target_table([one]).note) == said


def test_without_a_base_method_there_is_no_speed_up_and_without_targets_no_table(tmp_path):
    alone = made(tmp_path / "srpfl", "fedrep-srpfl", 0, times={0.7: 50.0}, clock=True)
    other = made(tmp_path / "other", "local", 0, times={0.8: 1234.56}, clock=True)
    table = target_table(load_runs([alone, other]))
    assert table is not None and table.header == ["Method", "Virtual time to 70 %", "Virtual time to 80 %"]
    assert table.rows == [["FedRep-SRPFL", "50", "–"], ["Local", "–", "1235"]]
    assert target_table(load_runs([made(tmp_path / "none", "local", 0)])) is None


def test_comparison_rows_say_virtual_time_and_targets_with_their_nulls(tmp_path):
    first, second = comparison_rows(
        load_runs([made(tmp_path / "a", "fedrep", 0, times={0.8: None}, clock=True), made(tmp_path / "b", "local", 0)])
    )
    assert first["virtual_time"] == 40.0
    when = ("round", "virtual_time", "training_seconds", "bytes_up", "bytes_down")
    assert first["targets"] == [{"accuracy": 0.8, **dict.fromkeys(when)}]
    assert second["virtual_time"] == 4.0 and "targets" not in second


def domain_values(a: float, b: float) -> dict[str, float]:
    return {"a": a, "b": b, "mean": (a + b) / 2, "min": min(a, b), "max": max(a, b)}


def test_minimum_over_domains_is_taken_per_run_and_then_averaged(tmp_path):
    first = {"accuracy": domain_values(0.5, 0.7), "auc": {**domain_values(0.9, 0.8)}}
    # No AUC of b where all its test samples are of one class.
    second = {"accuracy": domain_values(0.8, 0.6), "auc": {"a": 0.7, "mean": 0.7, "min": 0.7, "max": 0.7}}
    runs = [made(tmp_path / str(seed), "feddar", seed, domains=of) for seed, of in enumerate((first, second))]
    one = made(tmp_path / "one", "local", 0, domains={"accuracy": domain_values(0.25, 0.75)})
    accuracy, auc = domain_tables(load_runs([*runs, one]))
    assert accuracy.header == ["Method", "a", "b", "mean", "min", "max"]
    # a: 50 and 80, b: 70 and 60. The minimum of the averages would be 65.
    averages = ["65.00 ± 21.21", "65.00 ± 7.07", "65.00 ± 7.07", "55.00 ± 7.07", "75.00 ± 7.07"]
    assert accuracy.rows == [["feddar", *averages], ["Local", "25.00", "75.00", "50.00", "25.00", "75.00"]]
    assert auc.title == "auc by domain"
    assert auc.rows == [
        ["feddar", "0.8 ± 0.1414", "0.8 (1 of 2 seeds)", "0.775 ± 0.1061", "0.75 ± 0.07071", "0.8 ± 0.1414"]
    ]
    assert domain_tables(load_runs([made(tmp_path / "none", "local", 0)])) == []


def test_slower_and_faster_half_of_the_clients(tmp_path):
    runs = [made(tmp_path / str(seed), "fedrep", seed, seconds=True) for seed in (0, 1)]
    table = speed_table(load_runs(runs), "accuracy")
    assert table is not None
    titles = ["Rounds, slower half", "Rounds, faster half", "Accuracy (%), slower half", "Accuracy (%), faster half"]
    assert table.header == ["Method", *titles]
    # Slower: a and c, faster: b and d; e is in the middle. Accuracy 40 and 50 against 80 and 90 in seeds 0 and 1.
    assert table.rows == [["FedRep", "1.5 ± 0", "4 ± 0", "45.00 ± 7.07", "85.00 ± 7.07"]]
    drawn = speed_figures(ReportData.from_runs(load_runs(runs)))["metric-by-speed"]
    said = re.findall(r"FedRep, client (\w), seed (\d): ([\d.]+), ([\d.]+) s", drawn)
    assert len(said) == 10 and ("a", "1", "40", "8") in said and ("b", "0", "90", "1") in said


def test_clients_of_one_speed_have_no_slower_half(tmp_path):
    without = made(tmp_path / "without", "fedrep", 0)
    equal = made(tmp_path / "equal", "local", 0, seconds=True)
    text = (equal / "clients.csv").read_text()
    (equal / "clients.csv").write_text(re.sub(r",[0-9.]+(?=\r?$)", ",1.0", text, flags=re.MULTILINE))
    runs = load_runs([without, equal])
    assert runs[1].clients is not None and runs[1].clients.seconds[0] == 1.0
    assert speed_table(runs, "accuracy") is None and "metric-by-speed" not in speed_figures(ReportData.from_runs(runs))
    assert [table.title for table in all_tables(runs)] == ["accuracy"]


def test_curves_can_be_shown_over_rounds_times_and_bytes(tmp_path):
    runs = load_runs([made(tmp_path / str(seed), "fedrep", seed, clock=True) for seed in (0, 1)])
    (curve,) = metric_curves(runs, "accuracy")
    assert [axis.button for axis in find_axes(runs, "accuracy")] == ["Virtual time", "Rounds", "Wall time", "Bytes"]
    assert curve.rounds == (1, 2, 4)
    np.testing.assert_allclose(curve.values, [[50, 60, 70], [60, 70, 80]])
    # 10 and 20 seconds, 1.5 and 2 MB a round.
    expected = {"Rounds": [1, 2, 4], "Virtual time": [15, 30, 60], "Wall time": [0.5, 1, 2], "Bytes": [1.75, 3.5, 7]}
    for button, x in expected.items():
        np.testing.assert_allclose(curve.x[button], x)
    (worst,) = metric_curves(runs, "accuracy", "p10")
    np.testing.assert_allclose(worst.values, curve.values - 10)
    text = write_report(load_runs([run.directory for run in runs]), tmp_path / "report.html", title="t").read_text()
    assert "FedRep, round 2: 65 % (seeds 60 to 70), Virtual time (s): 30" in text


def test_clients_used_so_far_and_a_last_round_with_everybody(tmp_path):
    runs = [made(tmp_path / "fedrep", "fedrep", 0), made(tmp_path / "local", "local", 0)]
    assert used_curves(load_runs(runs), "accuracy") == []
    for run, some in zip(runs, (["a", "b"], "abcde"), strict=True):
        lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
        there = [some[:1], some[1:2], some[:1], ["a", "b", "c", "d", "e", "late"]]
        new = [line | {"participants": [*who]} for line, who in zip(lines, there, strict=True)]
        (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in new))
    found = used_curves(load_runs(runs), "accuracy")
    np.testing.assert_allclose(found[0].values, [[100 / 6, 200 / 6, 200 / 6, 100]])
    text = write_report(load_runs(runs), tmp_path / "report.html", title="t").read_text()
    assert "FedRep: the last round, in which everybody took part" in text and "A ring is a last round" in text


def test_without_a_clock_there_is_no_virtual_time(tmp_path):
    """It would be the number of the round, called seconds."""
    runs = [
        made(tmp_path / name, name, 0, times={0.7: time}) for name, time in (("fedrep", 4.0), ("fedrep-srpfl", 2.0))
    ]
    assert [axis.button for axis in find_axes(load_runs(runs), "accuracy")] == ["Rounds", "Wall time", "Bytes"]
    table = target_table(load_runs(runs))
    assert table is not None and table.title == "rounds to accuracy"
    assert table.header == ["Method", "Rounds to 70 %", "Speed-up in rounds at 70 %"]
    assert table.rows == [["FedRep", "4", "–"], ["FedRep-SRPFL", "2", "2.00 over FedRep"]]
    page = read_page(write_report(load_runs(runs), tmp_path / "report.html", title="t"))
    assert "irtual time at" not in page.words and "Virtual time (s)" not in (tmp_path / "report.html").read_text()


def test_an_axis_that_a_run_lacks_is_not_offered(tmp_path):
    old = write_run(tmp_path / "old", "fedavg", 0)  # no virtual time, no bytes
    runs = [run for place in (old, made(tmp_path / "new", "fedrep", 0, clock=True)) for run in load_runs([place])]
    assert [axis.button for axis in find_axes(runs, "accuracy")] == ["Rounds", "Wall time"]
    assert [curve.rounds for curve in metric_curves(runs, "accuracy")] == [(1, 3), (1, 2, 4)]
    file = old / "rounds.jsonl"
    lines = [{**json.loads(line), "training_seconds": None} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [axis.button for axis in find_axes(load_runs([old]), "accuracy")] == ["Rounds"]


def test_the_page_has_the_tables_and_the_new_figures(tmp_path):
    runs = clocked(tmp_path)
    summary = runs[0] / "summary.json"
    domains = {"domains": {"accuracy": domain_values(0.123, 0.5)}}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | domains))
    page = read_page(write_report(load_runs(runs), tmp_path / "report.html", title="t"))
    sections = ["verdict", "leaderboard", "gains", "curves", "speeds", "domains", "federation", "reproduce"]
    assert page.sections == sections
    assert {"Time to accuracy", "Clients by their speed", "Accuracy (%) by domain"} <= {*page.figures}
    cells = [cell for row in page.rows for cell in row]
    for table in all_tables(load_runs(runs))[1:]:
        assert all(cell in cells for row in table.rows for cell in row)
    assert "12.30" in cells and "2.50 ± 0.71 over FedRep" in cells


def test_a_dot_plot_of_domains_says_gap_and_samples(tmp_path):
    values = [{"accuracy": domain_values(0.5, best)} for best in (0.7, 0.8)]
    runs = [made(tmp_path / str(seed), "feddar", seed, domains=of) for seed, of in enumerate(values)]
    for run in runs:
        summary = json.loads((run / "summary.json").read_text()) | {"domain_samples": {"a": 40, "b": 12}}
        (run / "summary.json").write_text(json.dumps(summary))
    text = write_report(load_runs(runs), tmp_path / "report.html", title="t").read_text()
    # Seeds: 50 and 70, 50 and 80.
    assert "feddar (gap 25)" in text and "feddar, b (n = 12): 75, seeds 70 to 80" in text
