"""``perfed report`` of several directories in whatever state, and files for papers; on hand-made runs."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import contents, perfed
from PIL import Image

from perfed import report as reports
from perfed.engine.evaluate import spread
from perfed.experiment.config import find_experiment
from perfed.methods.titles import display_name
from perfed.report.papers import CSV_COLUMNS, escape_latex
from perfed.run.directory import RunDirectory, write_marker

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100" viewBox="0 0 200 100"><title>t</title>'
    '<line x1="10" y1="90" x2="190" y2="10" stroke="#123456"/><text x="20" y="50">flic-hl – 2.0 ± 0.1</text></svg>'
)


def made(directory: Path, method: str, seed: int, **changed: Any) -> Path:
    """A finished run of five clients with accuracies of their own."""
    rng = np.random.default_rng([seed, len(method)])
    values = np.round(rng.uniform(0.3, 0.9, 5), 3)
    settings = {"rounds": 4, "lr": 0.1, "dataset": "toy", "metrics": ["accuracy"], **changed}
    directory.mkdir(parents=True)
    config = (
        f'method = "{method}"\nseed = {seed}\nrounds = {settings["rounds"]}\n[data]\nname = "{settings["dataset"]}"\n'
    )
    RunDirectory(directory).write_config(f"{config}[training]\nlr = {settings['lr']}\n")
    over = spread(list(values))
    over = {key: float(value) for key, value in over.items()}
    metrics = dict.fromkeys(settings["metrics"], over)
    lines = [{"round": n, "metrics": metrics, "virtual_time": float(n)} for n in (2, 4)]
    (directory / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (directory / "clients.csv").open("w", newline="") as file:
        main = settings["metrics"][0]
        table = csv.writer(file)
        table.writerow(["id", "n_train", "n_test", f"{main}_before", f"{main}_after"])
        table.writerows([f"{k:03d}", 10, 10, value, value] for k, value in enumerate(values))
    summary = {"method": method, "dataset": settings["dataset"], "seed": seed, "rounds": 4, "wall_seconds": 1.5}
    (directory / "summary.json").write_text(json.dumps({**summary, "metrics": metrics}))
    return directory


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for method in ("local", "fed_avg"):
        for seed in (0, 1):
            made(Path("a") / method / f"seed-{seed}", method, seed)
        made(Path("b") / method / "seed-2", method, 2)
    return Path(tmp_path)


@pytest.fixture
def drawn(monkeypatch) -> None:
    """In place of the report's own drawings."""
    monkeypatch.setattr(reports, "figures", lambda runs: {"leaderboard": SVG, "curves": SVG})


def table_of(*arguments: object) -> dict[str, dict[str, Any]]:
    result = perfed("report", *arguments, "--json")
    assert result.code == 0, result.err
    return {row["method"]: row for row in json.loads(result.out)["table"]}


@pytest.mark.long
def test_new_seeds_are_found_and_merged(here):
    found = table_of("a", "b", "--out", "both.html")
    assert {method: row["seeds"] for method, row in found.items()} == {"local": [0, 1, 2], "fed_avg": [0, 1, 2]}
    means = [json.loads(f.read_text())["metrics"]["accuracy"]["mean"] for f in here.glob("*/local/*/summary.json")]
    assert found["local"]["mean"] == pytest.approx(np.mean(means))
    assert Path("both.html").is_file() and not Path("a/report.html").exists()
    made(Path("a/local/seed-7"), "local", 7)
    assert table_of("a")["local"]["seeds"] == [0, 1, 7] and Path("a/report.html").is_file()
    assert perfed("report", "a", "b").code == 0
    assert len(list(Path("runs").glob("report-*.html"))) == 1  # nobody's report is written over


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "left out: c: local with seed 0 is in a/local/seed-0 already; counted once"),
        ({"lr": 0.2}, "left out: c: training.lr is 0.2, not 0.1 as in a/local/seed-0"),
        ({"rounds": 9}, "left out: c: rounds is 9, not 4 as in a/local/seed-0"),
        ({"dataset": "other"}, "left out: c: data set 'other', not 'toy' as in a/local/seed-0"),
    ],
)
def test_what_cannot_stand_beside_the_others_is_one_line(change, said):
    made(Path("c"), "local", 0, **change)
    result = perfed("report", "a", "c", "--out", "r.html")
    assert result.code == 0 and said in result.out.splitlines()
    assert table_of("a", "c", "--out", "r.html")["local"]["seeds"] == [0, 1]


def test_the_same_run_twice_is_counted_once():
    result = perfed("report", "a", "a/local/seed-1", "--out", "r.html")
    assert result.code == 0 and "left out: a/local/seed-1: given twice; counted once" in result.out.splitlines()


def test_half_a_run_an_older_one_and_nothing(here):
    half = made(Path("a/local/seed-5"), "local", 5)
    for name in ("summary.json", "clients.csv"):
        (half / name).unlink()
    (half / "rounds.jsonl").write_text((half / "rounds.jsonl").read_text()[:-20])
    old = made(Path("a/local/seed-6"), "local", 6)
    (old / "summary.json").write_text('{"method": "local", "acc": 0.5}')
    Path("empty").mkdir()
    result = perfed("report", "a", "empty", "--out", "r.html")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert "not finished, so not in the tables: local seed 5" in lines
    (older,) = [line for line in lines if "seed-6" in line]
    assert older.startswith("left out: a/local/seed-6/summary.json: dataset: field required")
    assert "left out: empty: no config.toml, so not a run directory" in lines
    alone = perfed("report", "empty")
    assert (alone.code, alone.err) == (2, "perfed: empty: no config.toml, so not a run directory\n")
    assert perfed("report", "nowhere").code == 2


def test_other_metrics_are_said():
    made(Path("c/third/seed-0"), "third", 0, metrics=["accuracy", "auc"])
    result = perfed("report", "a", "c", "--out", "r.html")
    assert result.code == 0 and "not measured in every run: auc (in 1 of 5 runs)" in result.out.splitlines()
    made(Path("d/fourth/seed-0"), "fourth", 0, metrics=["mse"])
    result = perfed("report", "a", "d", "--out", "r.html", "--all-metrics")
    assert result.code == 0 and "mse (lower is better)" in result.out and "fourth" in result.out


def test_a_reference_of_ones_own_and_one_that_is_not_there():
    assert table_of("a")["fed_avg"]["difference"]["reference"] == "local"
    other = table_of("a", "--reference", "fed_avg")
    assert other["local"]["difference"]["reference"] == "fed_avg" and other["fed_avg"]["difference"] is None
    before = contents(Path("a"))
    missing = perfed("report", "a", "--reference", "ditto")
    assert missing.code == 2 and contents(Path("a")) == before
    assert missing.err == "perfed: --reference ditto: there is no finished run of it; there are: fed_avg, local\n"


def test_latex(here):
    """Rows as long as the head, the best first and bold, braces balanced, names escaped, a label, short heads."""
    result = perfed("report", "a", "b", "--latex", "t.tex", "--out", "r.html")
    assert result.code == 0 and "written: t.tex" in result.out
    text = Path("t.tex").read_text()
    first, *runs = [line for line in text.splitlines() if line.startswith("% ") and "usepackage" not in line]
    assert first == "% table: perfed report a b --latex t.tex --out r.html"
    files = here.glob("[ab]/*/seed-*/config.toml")
    assert sorted(runs) == sorted(f"% runs: perfed run {file.relative_to(here)}" for file in files)
    assert text.count("\\label{tab:toy-accuracy}") == 1 and text.index("\\caption") < text.index("\\label")
    body = text.partition("\\toprule\n")[2].partition("\\bottomrule")[0]
    rows = [line.removesuffix(" \\\\").split(" & ") for line in body.splitlines() if "&" in line]
    assert {len(row) for row in rows} == {4} and "\\begin{tabular}{lrrr}" in text
    assert text.count("{") == text.count("}") and "fed\\_avg" in text and "fed_avg" not in text.partition("\\begin")[2]
    assert rows[0] == ["Method", "Accuracy (\\%)", "$\\Delta$ [95 \\%]", "Worst"]
    found = table_of("a", "b", "--out", "r.html")
    best = max(found, key=lambda method: found[method]["mean"])
    known = {display_name(method): method for method in found}
    means = [found[known[row[0].replace("\\_", "_")]]["mean"] for row in rows[1:]]
    assert means == sorted(means, reverse=True) and len(means) == len(found)
    assert "$\\Delta$: difference to Local [95 \\% interval over clients and seeds]. Worst: the worst client." in text
    for row in rows[1:]:
        name = known[row[0].replace("\\_", "_")]
        value = f"{100 * found[name]['mean']:.2f} $\\pm$ {100 * found[name]['mean_std']:.2f}"
        assert row[1] == (f"\\textbf{{{value}}}" if name == best else value)
    gap = found["fed_avg"]["difference"]
    cell = "${:+.2f}$ [${:+.2f}$, ${:+.2f}$]".format(*(100 * gap[key] for key in ("mean", "low", "high")))
    assert cell in text
    assert escape_latex(r"a_b%c\d") == r"a\_b\%c\textbackslash{}d"


def test_latex_of_errors_has_the_least_first_and_a_label_for_each_metric():
    for number, method in enumerate(("first", "second", "third")):
        made(Path(f"c/{method}/seed-0"), method, number, metrics=["mse", "mae"])
    assert perfed("report", "c", "--latex", "t.tex", "--all-metrics").code == 0
    text = Path("t.tex").read_text()
    assert re.findall(r"\\label\{(.+)\}", text) == ["tab:toy-mse", "tab:toy-mae"]
    for part in text.split("\\midrule")[1:]:
        values = [float(cell) for cell in re.findall(r"^\w+ & (?:\\textbf\{)?([\d.]+)", part, flags=re.MULTILINE)]
        assert len(values) == 3 and values == sorted(values)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digits-label-skew", "perfed compare digits-label-skew --methods local,fed_avg --seeds 0..1 rounds=4"),
        ("of my own", "with the settings in c/comparisons.toml"),
    ],
)
def test_latex_says_which_command_made_a_comparison(name, said):
    shutil.copytree("a", "c")
    table = {**find_experiment("digits-label-skew"), "rounds": 4, "name": name}
    write_marker(Path("c"), "comparison", {"methods": ["local", "fed_avg"], "seeds": [0, 1], "experiment": table})
    assert perfed("report", "c", "--latex", "t.tex").code == 0
    assert Path("t.tex").read_text().splitlines()[:2] == ["% table: perfed report c --latex t.tex", f"% runs: {said}"]


def test_csv():
    assert perfed("report", "a", "--csv", "t.csv").code == 0
    with Path("t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_COLUMNS and [row["method"] for row in rows] == ["fed_avg", "local"]
    found = table_of("a")
    for row in rows:
        of = found[row["method"]]
        assert float(row["mean"]) == of["mean"] and float(row["std"]) == of["mean_std"] and row["seeds"] == "2"
        for key, name in (("difference", "mean"), ("low", "low"), ("high", "high")):
            value = None if of["difference"] is None else of["difference"][name]  # two seeds have no interval
            assert row[key] == ("" if value is None else str(value))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (("--latex", "gone/t.tex"), "--latex gone/t.tex: there is no folder gone"),
        (("--csv", "gone/t.csv"), "--csv gone/t.csv: there is no folder gone"),
        (("--figures", "gone/figures"), "--figures gone/figures: there is no folder gone"),
        (("--out", "gone/r.html"), "--out gone/r.html: there is no folder gone"),
        (("--latex", "a"), "--latex a: is a folder; give the name of a file"),
    ],
)
def test_a_place_that_is_not_there_is_said_before_anything_is_written(here, option, problem):
    before = contents(here)
    result = perfed("report", "a", "--csv", "fine.csv", *option)
    assert (result.code, result.err) == (2, f"perfed: {problem}\n") and contents(here) == before


@pytest.mark.long
def test_figures_are_svg_pdf_and_png_and_it_is_said_which_is_which(drawn):
    result = perfed("report", "a", "--figures", "figures")
    assert result.code == 0, result.err
    assert sorted(p.name for p in Path("figures").iterdir()) == [
        *(f"curves.{kind}" for kind in ("pdf", "png", "svg")),
        "index.html",
        *(f"leaderboard.{kind}" for kind in ("pdf", "png", "svg")),
    ]
    assert "  curves (svg, pdf, png): t" in result.out.splitlines()
    assert Image.open("figures/curves.png").format == "PNG"
    assert ElementTree.parse("figures/curves.svg").getroot().tag.endswith("svg")
    page = Path("figures/curves.pdf").read_bytes()
    assert page.startswith(b"%PDF-") and re.search(rb"/MediaBox \[ ?0 0 (200|150) (100|75)", page)
    assert result.err == ""


@pytest.mark.parametrize("library", ["svglib.svglib", "matplotlib", "pypdfium2"])
def test_without_a_library_svgs_are_there_and_the_extra_is_named(drawn, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    result = perfed("report", "a", "--figures", "figures")
    assert result.code == 0 and "[figures]" in result.said
    assert sorted(path.name for path in Path("figures").iterdir()) == ["curves.svg", "index.html", "leaderboard.svg"]
    assert re.findall('href="([^"]+)"', Path("figures/index.html").read_text()) == ["leaderboard.svg", "curves.svg"]


def test_a_comparison_keeps_its_order_and_its_file(here):
    shutil.copytree("a", "c")
    content = {"methods": ["local", "fed_avg"], "seeds": [0, 1], "experiment": {"name": "x", "rounds": 4}}
    write_marker(Path("c"), "comparison", content)
    made(Path("c/local/seed-9"), "local", 9)
    assert list(table_of("c")) == ["local", "fed_avg"]
    kept = json.loads(Path("c/comparison.json").read_text())["runs"]
    assert [run["seed"] for run in kept if run["method"] == "local"] == [0, 1, 9]
