"""What every command prints into a pipe of 80 columns: plain, no line longer, every number whole, the verdict last."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command_line import EXPERIMENT, TINY, Outcome, is_plain, perfed
from rich.console import Console

from perfed.cli import entry  # noqa: F401 - it adds all commands
from perfed.cli.app import app
from perfed.cli.console import console, fixed_width
from perfed.cli.index import LISTS, index
from perfed.cli.table import fit_lines, print_table
from perfed.datasets import load
from perfed.methods.titles import display_name
from perfed.report import first_tables, load_runs, verdict
from perfed.report.comparison import compare_with_reference
from perfed.report.run_results import RunResults
from perfed.report.text import TextTable

METHODS = "local,flic-class,sklearn:logistic"
GRID = ("--methods", "local", "--grid", "lr=1e-3,1e-2")
NUMBER = r"[-+]?\d+\.\d+"


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> Path:
    """A folder with a comparison, ``c``, whose first runs are runs as others, a search, ``t``, and tables."""
    folder = tmp_path_factory.mktemp("screens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made = perfed("compare", EXPERIMENT, *TINY, "--methods", METHODS, "--seeds", "0..2", "--out", "c")
        assert made.code == 0, made.err
        Path("compare.txt").write_text(made.out)
        tuned = perfed("tune", EXPERIMENT, *TINY, "rounds=1", *GRID, "--out", "t")
        assert tuned.code == 0, tuned.err
        Path("tune.txt").write_text(tuned.out)
        rng = np.random.default_rng(0)
        for name in ("a-hospital-with-a-long-name", "south"):
            frame = pd.DataFrame({f"measurement_{k}": rng.normal(size=30).round(3) for k in range(3)})
            frame.assign(outcome=rng.choice(["recovered", "died"], 30)).to_csv(f"{name}.csv", index=False)
    return folder


@pytest.fixture(autouse=True)
def inside(request, monkeypatch) -> None:
    if "there" in request.fixturenames:
        monkeypatch.chdir(request.getfixturevalue("there"))


def check(text: str, width: int = 80) -> list[str]:
    """The lines of what was printed, which are plain and fit."""
    assert is_plain(text) and not re.search(r"[\u2500-\u257f]", text)  # no boxes
    lines = text.splitlines()
    assert not (long := [line for line in lines if len(line) > width]), long
    assert all(line == line.rstrip() for line in lines)
    return lines


def done(*arguments: object) -> Outcome:
    result = perfed(*arguments)
    assert result.code == 0, result.err
    return result


def runs_of(comparison: Path) -> list[RunResults]:
    folders = [comparison / name.replace(":", ".") for name in METHODS.split(",")]
    return load_runs([folder / f"seed-{seed}" for folder in folders for seed in (0, 1, 2)])


def cells(text: str, name: str) -> list[str]:
    """The cells of the first row of a table that begins with ``name``."""
    rows = (re.split(r"\s{2,}", line) for line in text.splitlines())
    return next(row for row in rows if row[0] == name and len(row) > 1)


@pytest.mark.long
def test_compare_and_report(there):
    for text in (Path("compare.txt").read_text(), done("report", "c").out, done("resume", "c").out):
        check(text)
        runs = runs_of(Path("c"))
        found = verdict(runs)
        assert " ".join(text.split()).endswith(" ".join(" ".join(found.sentences).split()))
        for row in compare_with_reference(runs, found):
            if row.metric == "accuracy":
                mean, *others, worst = cells(text, display_name(row.method))[1:]
                assert mean == f"{100 * row.mean:.2f} ± {100 * row.mean_std:.2f}" and worst == f"{100 * row.worst:.2f}"
                gap = row.difference and (row.difference.mean, row.difference.low, row.difference.high)
                assert others == ["–" if gap is None else "{:+.2f} [{:+.2f}, {:+.2f}]".format(*(100 * v for v in gap))]


@pytest.mark.long
def test_the_table_says_what_the_verdict_says(there):
    """Reference and interval of a row are those of the sentence about the same method."""
    found = verdict(runs_of(Path("c")))
    text = done("report", "c").out
    assert "Difference to" in text and display_name(found.reference) in " ".join(text.split())
    for judged in found.methods:
        mean, low, high = (f"{100 * value:+.2f}" for value in (judged.gain.mean, judged.gain.low, judged.gain.high))
        assert cells(text, display_name(judged.method))[2] == f"{mean} [{low}, {high}]"


@pytest.mark.long
def test_all_metrics(there):
    first, every = done("report", "c").out, done("report", "c", "--all-metrics").out
    check(every)
    assert (
        "loss (lower" not in first and "loss (lower is better)" in every and "Wall" in every and "10 % worst" in every
    )


@pytest.mark.long
@pytest.mark.parametrize("command", [("report", "c"), ("resume", "c/local/seed-0"), ("report", "c", "--all-metrics")])
def test_a_terminal_of_40_columns_has_every_number_too(there, monkeypatch, command):
    wide = done(*command).out
    monkeypatch.setattr(console, "width", 40)
    narrow = done(*command).out
    check(narrow, 40)
    assert sorted(re.findall(NUMBER, narrow)) == sorted(re.findall(NUMBER, wide))
    assert "…" in narrow or "resume" in command


def test_the_best_is_bold_on_a_terminal_alone(monkeypatch):
    table = TextTable("accuracy", ["Method", "Accuracy (%)"], [["a", "1.00"], ["b", "2.00"]], best=frozenset({1}))
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    monkeypatch.setattr("perfed.cli.table.console", terminal)
    print_table(table)
    bold = re.findall(r"\x1b\[1m(.*?)\x1b\[0m", terminal.file.getvalue())
    assert bold == ["b           2.00"]


def test_which_row_is_the_best(there):
    runs = runs_of(Path("c"))
    table = first_tables(runs, verdict(runs))[0]
    means = {row.method: row.mean for row in compare_with_reference(runs, None) if row.metric == "accuracy"}
    assert [table.rows[at][0] for at in table.best] == [display_name(max(means, key=means.__getitem__))]


@pytest.mark.long
def test_a_run_and_its_plan(there, tmp_path):
    plain = done("resume", "c/local/seed-0").out
    check(plain)
    assert "engine: " not in plain and "clients stacked" not in plain
    assert "engine: stacked, 1 threads" in done("resume", "c/local/seed-0", "-v").out
    ran = done("run", EXPERIMENT, *TINY, "rounds=1", "--method", "local", "--out", "one")
    lines = check(ran.out)
    assert lines[0] == "results: one" and lines[-1] == "report: one/report.html"
    assert len(cells(ran.out, "Accuracy (%)")) == 6


def test_tune(there):
    for text in (Path("tune.txt").read_text(), done("resume", "t").out):
        lines = check(text)
        assert any(line.startswith("Local") and "lr=" in line for line in lines)
        assert lines[-2:] == ["chosen settings: t/chosen.toml", "whole grid: t/grid.json"]


@pytest.mark.long
def test_export_predict_and_join(there, tmp_path):
    """Paths are whole words that no line breaks, so they are short here."""
    run, rng = Path("c/local/seed-0"), np.random.default_rng(0)
    client = load("digits-views", {"clients": 4, "samples_per_client": 12}, seed=0).clients[0]
    names = ",".join(f"x{number}" for number in range(client.train.x.shape[1]))
    np.savetxt("new.csv", client.test.x.numpy(), delimiter=",", header=names, comments="")
    np.savez("west.npz", x_train=rng.normal(size=(12, 64)).astype(np.float32), y_train=np.arange(12) % 4)
    for command in (
        ("export", run, "--site", client.id, "--format", "safetensors", "--out", "e/north.safetensors"),
        ("predict", run, "new.csv", "--site", client.id, "--out", "said.csv"),
        ("join", run, "west.npz", "--site", "west"),
    ):
        assert len(check(done(*command).out)) >= 1


@pytest.mark.long
def test_init_check_and_partition(there):
    made = done("init", "a-hospital-with-a-long-name.csv", "south.csv", "--target", "outcome")
    checked = done("check", "study.toml")
    lines = check(made.out)
    assert lines[: len(check(checked.out))] == check(checked.out)
    assert lines[len(check(checked.out)) :][:2] == ["experiment: study.toml", "next:"]
    assert "number: measurement_0, measurement_1, measurement_2" in checked.out
    shown = check(done("partition", EXPERIMENT, "clients=12", "--show", "--out", "p.html").out)
    assert shown[-1] == "picture: p.html" and sum(line.startswith("011 ") for line in shown) == 2
    Path("study.toml").unlink()


@pytest.mark.parametrize("what", LISTS)
def test_list(what):
    lines = check(done("list", what).out)
    names = [item.get("title", item["name"]) for item in index()[what]]
    assert [word for line in lines for word in line.split()[:1] if word in names] != []
    assert set(names) <= {word for line in lines for word in line.split()}


@pytest.mark.long
@pytest.mark.parametrize("what", LISTS)
def test_show(what):
    for item in index()[what]:
        check(done("show", item["name"]).out)


@pytest.mark.long
def test_help():
    names = [command.name for command in app.registered_commands]
    assert {"compare", "show", "report", "join"} <= set(names)
    for name in names:
        text = done(name, "--help").out
        check(text)
        assert re.search(rf"Examples?: perfed {name} ", " ".join(text.split())), name
    assert not [name for name in names if f"  {name} " not in done("--help").out]


@pytest.mark.long
def test_json_is_alone_on_stdout(there, tmp_path):
    """And has the keys that the page on scripts names."""
    keys = {
        ("report", "c"): {"runs", "table", "verdict", "oracle_accuracy", "report", "notes", "files"},
        ("resume", "c"): {"runs", "table", "verdict", "oracle_accuracy", "report", "failed"},
        ("resume", "c/local/seed-0"): {"directory", "summary", "report"},
        ("resume", "t"): {"directory", "runs", "chosen"},
        ("check", EXPERIMENT, "clients=4"): {"sites", "classes", "domains", "columns", "told", "remarks"},
        ("partition", EXPERIMENT, "clients=4"): {
            "dataset",
            "summary",
            "classes",
            "domains",
            "held_out",
            "clients",
            "picture",
        },
        ("show", "heart-disease"): {"data set", "experiment"},
    }
    page = (Path(__file__).parents[2] / "docs" / "howto" / "scripts.md").read_text()
    for command, expected in keys.items():
        content: dict[str, Any] = json.loads(done(*command, "--json").out)
        assert set(content) == expected, command
        assert all(f"`{key}`" in page for key in expected), command
    table = json.loads(done("report", "c", "--json").out)["table"]
    assert {row["method"] for row in table} == set(METHODS.split(","))
    made = done("compare", EXPERIMENT, *TINY, "rounds=1", "--methods", "local", "--out", tmp_path / "j", "--json")
    assert json.loads(made.out)["failed"] == [] and "local seed 0:" in made.err


def test_a_cell_is_never_broken():
    long = TextTable(
        "",
        ["Method", "a header of many words and-one-that-is-as-long-as-many " * 2],
        [["m" * 90, "-1.2345 [-2.0, +3.0]"]] * 2,
    )
    for width in (80, 40, 34):
        lines = [str(line) for line in fit_lines(long, width)]
        assert max(map(len, lines)) <= width and sum("-1.2345 [-2.0, +3.0]" in line for line in lines) == 2


def test_a_terminal_is_asked_for_its_width_and_a_pipe_is_not(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    for terminal, width in ((True, None), (False, 80)):
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda terminal=terminal: terminal))
        assert fixed_width() == width
    monkeypatch.setenv("COLUMNS", "60")
    assert fixed_width() is None
