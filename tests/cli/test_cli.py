"""The command line from end to end on tiny settings: exit codes, files, names of keys and columns, what is printed."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, contents, is_plain, perfed, run_tiny

from perfed.datasets import dataset_names
from perfed.experiment.config import experiment_names, read
from perfed.method.extension import extension_names
from perfed.method.registry import method_names, preset_names
from perfed.run.run import Run

SPREAD = {"mean", "std", "min", "p10", "p90", "max"}


def table(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Three rounds of FLIC, evaluated in rounds 2 and 3, with a snapshot of the start."""
    directory = tmp_path_factory.mktemp("run") / "out"
    result = run_tiny(directory, "snapshots.rounds=[0]", "snapshots.clients=1")
    assert result.err == ""
    assert is_plain(result.out)
    assert "FLIC-Class: before local training, last round, test data" in result.out
    assert result.out.splitlines()[-1] == f"report: {directory}/report.html"
    return directory


@pytest.mark.long
def test_the_terminal_says_the_worst_clients_of_every_metric(run_dir):
    """By the clients' values in clients.csv: of a loss those with the highest ones."""
    printed = perfed("resume", run_dir).out.splitlines()
    assert "FLIC-Class: before local training, last round, test data" in printed
    with (run_dir / "clients.csv").open(newline="") as file:
        clients = list(csv.DictReader(file))
    for title, column, scale, worst, best, tenth in (
        ("Accuracy (%)", "accuracy_before", 100, min, max, 10),
        ("loss", "loss_before", 1, max, min, 90),
    ):
        values = [scale * float(client[column]) for client in clients if client[column]]
        (line,) = [line for line in printed if line.startswith(title)]
        assert line.split()[-3:] == [f"{v:.4g}" for v in (worst(values), np.percentile(values, tenth), best(values))]


def test_run_leaves_exactly_these_files(run_dir):
    files = [
        "SHA256SUMS",
        "checkpoint",
        "clients.csv",
        "config.toml",
        "federation.json",
        "predictions",
        "report.html",
        "rounds.jsonl",
    ]
    assert sorted(file.name for file in run_dir.iterdir()) == [*files, "snapshots", "summary.json", "version.json"]
    assert [file.name for file in (run_dir / "snapshots").iterdir()] == ["round-0000.npz"]


def test_rounds_have_the_agreed_keys(run_dir):
    always = {"round", "wall_seconds", "training_seconds", "virtual_time", "participants", "train_loss"}
    always |= {"exchanges", "bytes_up", "bytes_down"}
    lines = records(run_dir / "rounds.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert set(lines[0]) == always
    for line in lines[1:]:
        assert set(line) == always | {"metrics", "accuracy"}
        assert set(line["accuracy"]) == SPREAD
        assert line["accuracy"] == line["metrics"]["accuracy"]
        assert set(line["metrics"]) == {"accuracy", "loss", "accuracy_after", "loss_after"}
    assert [len(line["participants"]) for line in lines] == [2, 2, 4]  # half of them, everyone in the last round


def test_clients_have_the_agreed_columns(run_dir):
    rows = table(run_dir / "clients.csv")
    columns = ["id", "n_train", "n_test", "accuracy_before", "accuracy_after", "loss_before", "loss_after", "rounds"]
    assert list(rows[0]) == columns
    assert [row["id"] for row in rows] == ["000", "001", "002", "003"]
    assert all(row["n_train"] == "12" and 0 <= float(row["accuracy_before"]) <= 1 for row in rows)
    assert sum(int(row["rounds"]) for row in rows) == 2 + 2 + 4


def test_the_summary_has_the_agreed_keys_and_agrees_with_the_clients(run_dir):
    summary = json.loads((run_dir / "summary.json").read_text())
    expected = {"method", "dataset", "seed", "rounds", "metrics", "accuracy"}
    expected |= {"wall_seconds", "training_seconds", "virtual_time"}
    assert expected | {"peak_memory_mb", "settings", "plan", "notes", "versions", "evaluation"} == set(summary)
    assert (summary["method"], summary["dataset"], summary["seed"]) == ("flic-class", "digits-views", 0)
    assert set(summary["metrics"]) == {"accuracy", "loss"}
    assert summary["settings"].items() >= {"optimizer": "adam", "lambda1": 0.001, "batch_size": 100}.items()
    assert summary["accuracy"] == summary["metrics"]["accuracy"]
    values = [float(row["accuracy_before"]) for row in table(run_dir / "clients.csv")]
    assert math.isclose(summary["accuracy"]["mean"], sum(values) / 4)
    assert (summary["accuracy"]["min"], summary["accuracy"]["max"]) == (min(values), max(values))


def test_the_configuration_is_complete(run_dir):
    kept = read((run_dir / "config.toml").read_text(), "config.toml")
    assert (kept.rounds, kept.seed, kept.participation.rate) == (3, 0, 0.5)
    assert kept.data.options["samples_per_client"] == 12
    assert kept.plan.threads == 1


@pytest.mark.long
def test_options_win_over_settings_and_settings_over_the_experiment(tmp_path):
    run_tiny(tmp_path / "out", "method=fedrep", "seed=5", "--method", "local", "--seed", 7, "--engine", "sequential")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["method"], summary["seed"]) == ("local", 7)
    assert summary["plan"]["engine"] == "sequential"
    assert sum(record["bytes_up"] for record in records(tmp_path / "out" / "rounds.jsonl")) == 0


def test_the_last_rounds_may_be_averaged(tmp_path):
    run_tiny(tmp_path / "out", "evaluation.last=2", "--method", "local")
    lines = records(tmp_path / "out" / "rounds.jsonl")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    mean = (lines[1]["accuracy"]["mean"] + lines[2]["accuracy"]["mean"]) / 2
    assert math.isclose(summary["accuracy"]["mean"], mean)


@pytest.mark.long
def test_without_out_the_results_go_to_a_new_directory_in_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert perfed("run", EXPERIMENT, *TINY, "--method", "local").code == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert made.name.startswith(f"{EXPERIMENT}-")


# compare -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("compare") / "out"
    chosen = ("--methods", "local,flic-class", "--seeds", "0..2")
    result = perfed("compare", EXPERIMENT, *TINY, *chosen, "--out", directory)
    assert (result.code, result.err) == (0, "")
    return directory, result.out


@pytest.mark.long
def test_seeds_are_inclusive_and_every_run_has_its_directory(compared):
    directory, _ = compared
    runs = sorted(str(file.parent.relative_to(directory)) for file in directory.rglob("summary.json"))
    assert runs == [f"{method}/seed-{seed}" for method in ("flic-class", "local") for seed in (0, 1, 2)]
    for run in runs:
        config = tomllib.loads((directory / run / "config.toml").read_text())
        assert run == f"{config['method']}/seed-{config['seed']}"


def test_the_comparison_is_a_list_with_the_keys_of_the_summaries(compared):
    directory, _ = compared
    rows = json.loads((directory / "comparison.json").read_text())["runs"]
    assert [(row["method"], row["seed"]) for row in rows] == [(m, s) for m in ("local", "flic-class") for s in range(3)]
    for row in rows:
        assert set(row) == {"method", "seed", "metrics", "accuracy", "wall_seconds", "virtual_time"}
        summary = json.loads((directory / row["method"] / f"seed-{row['seed']}" / "summary.json").read_text())
        assert all(row[key] == summary[key] for key in row)
    assert 5e4 < (directory / "report.html").stat().st_size < 6e5


def test_the_table_is_printed_plainly(compared):
    directory, printed = compared
    assert is_plain(printed)
    assert "local seed 2:" in printed
    assert "± std" in printed and "FLIC-Class" in printed
    assert f"report: {directory}/report.html" in printed.splitlines()
    sentences = json.loads((directory / "comparison.json").read_text())["verdict"]["sentences"]
    assert " ".join(printed.split()).endswith(" ".join(sentences))


@pytest.mark.long
def test_an_interrupted_comparison_is_completed(compared, tmp_path):
    """Finished runs are kept as they are, the others done; report writes the report anew."""
    directory, _ = compared
    kept = contents(directory / "local" / "seed-0")
    summary = (directory / "flic-class" / "seed-2" / "summary.json").read_text()
    (directory / "flic-class" / "seed-2" / "summary.json").unlink()
    assert perfed("resume", directory).code == 0
    assert contents(directory / "local" / "seed-0") == kept
    again = json.loads((directory / "flic-class" / "seed-2" / "summary.json").read_text())
    assert again["metrics"] == json.loads(summary)["metrics"]
    (directory / "report.html").unlink()
    assert perfed("report", directory).code == 0
    assert (directory / "report.html").exists()


# list, report, help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "names", "keys"),
    [
        (
            "methods",
            lambda: [*method_names(), *preset_names()],
            {"name", "title", "summary", "differs", "paper", "parameters", "needs", "try", "settings"},
        ),
        ("datasets", dataset_names, {"name", "summary", "about", "paper", "task", "files", "experiments", "options"}),
        (
            "experiments",
            experiment_names,
            {"name", "summary", "method", "data", "rounds", "files", "model", "training", "try"},
        ),
        ("extensions", extension_names, {"name", "summary", "settings"}),
    ],
)
def test_list(what, names, keys):
    plain, as_json = perfed("list", what), perfed("list", what, "--json")
    assert plain.code == as_json.code == 0
    assert is_plain(plain.out)
    items = json.loads(as_json.out)
    assert [item["name"] for item in items] == names()
    assert all(set(item) - {"base", "policy"} == keys and item["summary"] for item in items)
    assert {item.get("title", item["name"]) for item in items} <= set(plain.out.split())


def test_list_describes_every_setting():
    methods = {item["name"]: item for item in json.loads(perfed("list", "methods", "--json").out)}
    lambda1 = methods["flic-hl"]["settings"]["lambda1"]
    assert lambda1["default"] == 1e-3 and "alignment" in lambda1["description"]
    extensions = json.loads(perfed("list", "extensions", "--json").out)
    for item in (*methods.values(), *extensions):
        assert all(setting["description"] for setting in item["settings"].values())


def test_report_of_a_run(run_dir):
    before = {name: data for name, data in contents(run_dir).items() if name != "report.html"}
    (run_dir / "report.html").unlink()
    result = perfed("report", run_dir)
    assert result.code == 0 and result.out.splitlines()[-1] == f"report: {run_dir}/report.html"
    assert (run_dir / "report.html").exists()
    assert {name: data for name, data in contents(run_dir).items() if name != "report.html"} == before


@pytest.mark.long
def test_help_and_no_arguments():
    assert perfed("--help").code == 0
    for command in ("run", "compare", "resume", "tune", "list", "show", "report"):
        result = perfed(command, "--help")
        assert result.code == 0 and "Usage: perfed" in result.out
    assert "runs/NAME-TIME" in " ".join(perfed("run", "--help").out.split())
    nothing = perfed()
    assert nothing.code == 2 and nothing.err == "" and "Usage: perfed" in nothing.out


def test_the_version_is_that_of_the_package():
    result = perfed("--version")
    assert result.code == 0
    assert result.out == f"perfed {metadata.version('perfed')}\n"


@pytest.mark.long
def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "execute", interrupt)
    result = perfed("run", EXPERIMENT, *TINY, "--out", tmp_path / "out")
    assert (result.code, result.out) == (130, f"results: {tmp_path}/out\n")
    assert result.err == f"perfed: interrupted; 'perfed resume {tmp_path}/out' continues\n"
    (tmp_path / "my data").mkdir()
    options = ("--data-dir", tmp_path / "my data", "--out", tmp_path / "other")
    result = perfed("compare", EXPERIMENT, "--methods", "local", *TINY, *options)
    assert result.err == (
        f"perfed: interrupted; 'perfed resume {tmp_path}/other --data-dir '{tmp_path}/my data'' continues\n"
    )
    again = perfed("resume", tmp_path / "out", "--device", "cpu")
    assert again.err == f"perfed: interrupted; 'perfed resume {tmp_path}/out --device cpu' continues\n"


@pytest.mark.long
def test_the_module_is_a_program_too():
    program = [sys.executable, "-m", "perfed", "list", "methods", "--json"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [item["name"] for item in json.loads(done.stdout)] == [*method_names(), *preset_names()]
