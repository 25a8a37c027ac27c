"""The command line from end to end on tiny settings: exit codes, files, names of keys and columns, what is printed."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import EXPERIMENT, TINY, contents, is_plain, perfed, run_tiny

from perfed import compare
from perfed.config import experiment_names, find_experiment, read
from perfed.datasets import catalogue, dataset_names, load
from perfed.federation import Federation
from perfed.overrides import override
from perfed.registry import method_names, preset_names

SPREAD = {"mean", "std", "min", "p10", "max"}


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
    assert "flic-class: accuracy %: mean" in result.out
    assert result.out.splitlines()[-1] == f"report: {directory}/report.html"
    return directory


def test_run_leaves_exactly_these_files(run_dir):
    files = ["checkpoint", "clients.csv", "config.toml", "report.html", "rounds.jsonl", "snapshots", "summary.json"]
    assert sorted(file.name for file in run_dir.iterdir()) == files
    assert [file.name for file in (run_dir / "snapshots").iterdir()] == ["round-0000.npz"]


def test_rounds_have_the_agreed_keys(run_dir):
    always = {"round", "wall_seconds", "virtual_time", "participants", "train_loss"}
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
    expected = {"method", "dataset", "seed", "rounds", "metrics", "accuracy", "wall_seconds", "virtual_time"}
    assert expected | {"peak_memory_mb", "plan", "notes", "versions", "evaluation"} == set(summary)
    assert (summary["method"], summary["dataset"], summary["seed"]) == ("flic-class", "digits-views", 0)
    assert set(summary["metrics"]) == {"accuracy", "loss"}
    assert summary["accuracy"] == summary["metrics"]["accuracy"]
    values = [float(row["accuracy_before"]) for row in table(run_dir / "clients.csv")]
    assert math.isclose(summary["accuracy"]["mean"], sum(values) / 4)
    assert (summary["accuracy"]["min"], summary["accuracy"]["max"]) == (min(values), max(values))


def test_the_configuration_is_complete(run_dir):
    kept = read((run_dir / "config.toml").read_text(), "config.toml")
    assert (kept.rounds, kept.seed, kept.participation.rate) == (3, 0, 0.5)
    assert kept.data["samples_per_client"] == 12
    assert kept.plan["threads"] == 1


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


def test_seeds_are_inclusive_and_every_run_has_its_directory(compared):
    directory, _ = compared
    runs = sorted(str(file.parent.relative_to(directory)) for file in directory.rglob("summary.json"))
    assert runs == [f"{method}/seed-{seed}" for method in ("flic-class", "local") for seed in (0, 1, 2)]
    for run in runs:
        config = tomllib.loads((directory / run / "config.toml").read_text())
        assert run == f"{config['method']}/seed-{config['seed']}"


def test_the_comparison_is_a_list_with_the_keys_of_the_summaries(compared):
    directory, _ = compared
    rows = json.loads((directory / "comparison.json").read_text())
    assert [(row["method"], row["seed"]) for row in rows] == [(m, s) for m in ("local", "flic-class") for s in range(3)]
    for row in rows:
        assert set(row) == {"method", "seed", "metrics", "accuracy", "wall_seconds", "virtual_time"}
        summary = json.loads((directory / row["method"] / f"seed-{row['seed']}" / "summary.json").read_text())
        assert all(row[key] == summary[key] for key in row)
    assert (directory / "report.html").stat().st_size > 1e6


def test_the_table_is_printed_plainly(compared):
    directory, printed = compared
    assert is_plain(printed)
    assert "local seed 2:" in printed
    assert "± std" in printed and "flic-class" in printed
    assert printed.splitlines()[-1] == f"report: {directory}/report.html"


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


# tune --------------------------------------------------------------------------------------------------------


GRID = ("--methods", "local,flic-class", "--grid", "lr=1e-3,1e-1", "--grid", "batch_size=4,100")


def test_a_method_under_a_policy_keeps_its_own_choice(tmp_path):
    """Also where that is the experiment's value and the method alone has chosen another one."""
    table = override(find_experiment(EXPERIMENT), ["lr=0.01"], ["fedrep"])
    names = ["fedrep", "fedrep+srpfl"]
    search = compare.Search(tmp_path, table, table, names, [0], [])
    search._write_chosen({"fedrep": ["lr=0.1"], "fedrep+srpfl": ["lr=0.01"]})
    chosen = read((tmp_path / "chosen.toml").read_text(), "chosen.toml")
    for name, rate in zip(names, (0.1, 0.01), strict=True):
        assert chosen.model_copy(update={"method": name}).build_method().lr == rate


def test_tune_gives_every_method_the_same_grid_and_never_looks_at_test_data(tmp_path, monkeypatch):
    started = []
    start = compare.start

    def recording(experiment: Any, **options: Any) -> Any:
        started.append(experiment)
        return start(experiment, **options)

    monkeypatch.setattr(compare, "start", recording)
    result = perfed("tune", EXPERIMENT, *TINY, *GRID, "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    assert is_plain(result.out)
    assert all(experiment.evaluation.split == "validation" for experiment in started)
    assert all(experiment.data["validation_fraction"] == 0.25 for experiment in started)

    grid = json.loads((tmp_path / "out" / "grid.json").read_text())
    assert all(set(point) == {"method", "settings", "scores", "mean"} for point in grid)
    points = [[f"lr={lr}", f"batch_size={size}"] for lr in ("1e-3", "1e-1") for size in (4, 100)]
    for method in ("local", "flic-class"):
        assert [point["settings"] for point in grid if point["method"] == method] == points

    text = (tmp_path / "out" / "chosen.toml").read_text()
    chosen = tomllib.loads(text)
    for method in ("local", "flic-class"):
        best = max((point for point in grid if point["method"] == method), key=lambda point: point["mean"])
        given = {key: chosen["methods"][method].get(key) for key in ("lr", "batch_size")}
        shared = read(text, "chosen.toml").training
        for assignment in best["settings"]:
            key, _, value = assignment.partition("=")
            assert (given[key] if given[key] is not None else shared[key]) == float(value)
    assert perfed("run", tmp_path / "out" / "chosen.toml", "--out", tmp_path / "run").code == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["evaluation"]["split"] == "test"


@pytest.fixture
def scrambled_test_labels():
    """A data set whose test labels may be made worthless."""

    @catalogue.dataset("scrambled")
    def scrambled(seed: int, data_dir: Path | None, *, scramble: bool = False) -> Federation:
        """Digits with random test labels."""
        options = {"clients": 4, "samples_per_client": 20}
        federation = load("digits-views", options, seed=seed)
        if not scramble:
            return federation
        clients = []
        for client in federation:
            assert client.test is not None
            clients.append(replace(client, test=replace(client.test, y=torch.full_like(client.test.y, 9))))
        return replace(federation, clients=tuple(clients))

    yield
    del catalogue._entries["scrambled"]


def test_the_choice_does_not_depend_on_the_test_labels(tmp_path, scrambled_test_labels):
    file = tmp_path / "x.toml"
    model = 'embedding = { kind = "mlp", hidden = [8], out = 4 }\nhead = "linear"'
    file.write_text(f'method = "local"\nrounds = 2\n[data]\nname = "scrambled"\n[model]\n{model}\n')
    grid = ("--methods", "local,hetfedrep", "--grid", "lr=1e-4,1e-2", "--seeds", "0,1")
    for scramble in ("false", "true"):
        result = perfed("tune", file, f"scramble={scramble}", "plan.threads=1", *grid, "--out", tmp_path / scramble)
        assert result.code == 0, result.err
    assert (tmp_path / "true" / "grid.json").read_text() == (tmp_path / "false" / "grid.json").read_text()
    chosen = [tomllib.loads((tmp_path / which / "chosen.toml").read_text()) for which in ("true", "false")]
    assert chosen[0].get("methods") == chosen[1].get("methods") != {}


def test_a_grid_over_the_model_goes_to_the_methods_own_model(tmp_path):
    grid = ("--methods", "local", "--grid", "model.embedding.out=3,5", "--grid", "rounds=1,2")
    result = perfed("tune", EXPERIMENT, *TINY, *grid, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    grid_points = json.loads((tmp_path / "out" / "grid.json").read_text())
    best = dict(item.split("=") for item in max(grid_points, key=lambda point: point["mean"])["settings"])
    chosen = tomllib.loads((tmp_path / "out" / "chosen.toml").read_text())
    assert chosen["rounds"] == int(best["rounds"])
    assert chosen["methods"]["local"]["model"]["embedding"]["out"] == int(best["model.embedding.out"])
    assert chosen["model"]["embedding"]["out"] == 64


# list, report, help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "names", "keys"),
    [
        ("methods", lambda: [*method_names(), *preset_names()], {"name", "summary", "settings"}),
        ("datasets", dataset_names, {"name", "summary", "task", "files", "options"}),
        ("experiments", experiment_names, {"name", "summary", "method", "data"}),
    ],
)
def test_list(what, names, keys):
    plain, as_json = perfed("list", what), perfed("list", what, "--json")
    assert plain.code == as_json.code == 0
    assert is_plain(plain.out)
    items = json.loads(as_json.out)
    assert [item["name"] for item in items] == names()
    assert all(set(item) - {"base", "policy"} == keys and item["summary"] for item in items)
    assert all(f"{name} " in plain.out for name in names())


def test_list_describes_every_setting():
    methods = {item["name"]: item for item in json.loads(perfed("list", "methods", "--json").out)}
    lambda1 = methods["flic-hl"]["settings"]["lambda1"]
    assert lambda1["default"] == 1e-3 and "alignment" in lambda1["description"]
    assert all(setting["description"] for item in methods.values() for setting in item["settings"].values())


def test_report_of_a_run(run_dir):
    before = {name: data for name, data in contents(run_dir).items() if name != "report.html"}
    (run_dir / "report.html").unlink()
    result = perfed("report", run_dir)
    assert (result.code, result.out) == (0, f"report: {run_dir}/report.html\n")
    assert (run_dir / "report.html").exists()
    assert {name: data for name, data in contents(run_dir).items() if name != "report.html"} == before


def test_help_and_no_arguments():
    assert perfed("--help").code == 0
    for command in ("run", "compare", "resume", "tune", "list", "report"):
        result = perfed(command, "--help")
        assert result.code == 0 and "Usage: perfed" in result.out
    assert "runs/NAME-TIME" in " ".join(perfed("run", "--help").out.split())
    nothing = perfed()
    assert nothing.code == 2 and nothing.err == "" and "Usage: perfed" in nothing.out


def test_the_version_is_that_of_the_package():
    result = perfed("--version")
    assert result.code == 0
    assert result.out == f"perfed {metadata.version('perfed')}\n"


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare.Run, "execute", interrupt)
    result = perfed("run", EXPERIMENT, *TINY, "--out", tmp_path / "out")
    assert (result.code, result.out) == (130, f"results: {tmp_path}/out\n")
    assert (
        result.err
        == "perfed: interrupted; 'perfed resume DIR' continues a run or comparison from its last checkpoint\n"
    )


def test_the_module_is_a_program_too():
    program = [sys.executable, "-m", "perfed.cli", "list", "methods", "--json"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [item["name"] for item in json.loads(done.stdout)] == [*method_names(), *preset_names()]
