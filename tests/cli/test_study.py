"""``perfed init`` and ``perfed check``: from files to an experiment that runs as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import perfed
from data_files import require_file

CODES = {
    "sex": {0: "female", 1: "male"},
    "cp": {1: "typical", 2: "atypical", 3: "non-anginal", 4: "asymptomatic"},
    "thal": {3: "normal", 6: "fixed", 7: "reversable"},
    "slope": {1: "up", 2: "flat", 3: "down"},
}


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Four CSV files: strings, missing values and columns that differ, as the hospitals have them."""
    folder = tmp_path / "hospitals"
    folder.mkdir()
    with np.load(require_file("heart_disease.npz")) as data:
        table = pd.DataFrame(data["x"], columns=data["feature_names"])
        table = table.assign(**{name: table[name].map(names) for name, names in CODES.items()})
        table = table.assign(disease=np.where(data["y"] > 0, "yes", "no"))
        for number, name in enumerate(data["hospital_names"]):
            rows = table[data["hospital"] == number]
            rows.loc[:, rows.isna().mean() < 0.9].to_csv(folder / f"{name}.csv", index=False)
    return folder


@pytest.mark.long
def test_from_a_folder_to_a_comparison(hospitals, monkeypatch):
    monkeypatch.chdir(hospitals.parent)
    made = perfed("init", "hospitals", "--target", "disease", "--domain", "sex", "--categories", "restecg")
    assert made.code == 0, made.err
    study = tomllib.loads(Path("study.toml").read_text())
    assert study["data"]["files"] == ["hospitals"] and study["data"]["categories"] == ["restecg"]
    assert (study["data"]["folds"], study["data"]["columns"]) == (5, "named")
    checked = perfed("check", "study.toml")
    assert checked.code == 0 and made.out.startswith(checked.out)
    for file in hospitals.iterdir():
        frame = pd.read_csv(file)
        parts = [line.split() for line in checked.out.splitlines() if line.startswith(f"{file.stem} ")]
        line = [*parts[0], *(cell for part in parts[1:] for cell in part[1:])]
        assert int(line[1]) + int(line[2]) == len(frame)
        values = (("disease", "no"), ("disease", "yes"), ("sex", "female"), ("sex", "male"))
        assert [int(number) for number in line[-4:]] == [(frame[column] == value).sum() for column, value in values]
    monkeypatch.chdir("/")  # files are beside the experiment, wherever it is run from
    short = ("rounds=1", "plan.engine=stacked", "plan.threads=1")
    run = perfed("run", hospitals.parent / "study.toml", *short, "--out", hospitals.parent / "run")
    assert run.code == 0, run.err
    config = tomllib.loads((hospitals.parent / "run" / "config.toml").read_text())
    assert config["data"]["files"] == [str(hospitals)]
    names = "local,mixed,sklearn:logistic"
    out = hospitals.parent / "compared"
    result = perfed(
        "compare", hospitals.parent / "study.toml", *short, "--methods", names, "--seeds", "0..4", "--out", out
    )
    assert result.code == 0, result.err
    tested = [csv["n_test"].sum() for csv in map(pd.read_csv, sorted(out.glob("local/seed-*/clients.csv")))]
    assert len(tested) == 5 and sum(tested) == 920
    assert {entry["method"] for entry in json.loads((out / "comparison.json").read_text())["runs"]} == set(
        names.split(",")
    )


def write(folder: Path, change: Callable[[pd.DataFrame], pd.DataFrame] = lambda frame: frame) -> None:
    """Two small sites in one file, with the same columns."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "ward": ["north"] * 20 + ["south"] * 16,
            "patient": np.repeat(np.arange(18), 2),
            "age": rng.integers(20, 90, 36),
            "dose": rng.normal(size=36).round(3),
            "outcome": rng.normal(size=36).round(3),
        }
    )
    change(frame).to_csv(folder / "all.csv", index=False)


ASKED = ("--site-column", "ward", "--target", "outcome", "--group", "patient")


@pytest.mark.long
def test_one_file_with_a_site_column_groups_and_values_to_predict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    made = perfed("init", "all.csv", *ASKED, "--out", "wards.toml")
    assert made.code == 0, made.err
    study = tomllib.loads(Path("wards.toml").read_text())
    assert study["name"] == "wards" and study["data"]["columns"] == "named" and study["data"]["group"] == "patient"
    result = perfed("run", "wards.toml", "rounds=1", "plan.engine=stacked", "plan.threads=1", "--out", "run")
    assert result.code == 0 and "mse" in result.out, result.err


@pytest.mark.long
def test_few_rows_have_a_part_to_test_on_in_place_of_folds_and_test_files_neither(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, lambda frame: frame[(frame["ward"] == "north") | (frame["patient"] > 15)])
    assert perfed("init", "all.csv", *ASKED).code == 0
    assert tomllib.loads(Path("study.toml").read_text())["data"]["test_fraction"] == 0.2
    Path("later").mkdir()
    write(Path("later"))
    made = perfed("init", "all.csv", "--test", "later", *ASKED[:4], "--drop", "patient", "--out", "s.toml")
    data = tomllib.loads(Path("s.toml").read_text())["data"]
    assert made.code == 0 and not {"folds", "test_fraction"} & set(data) and data["test_files"] == ["later"]
    assert [int(line.split()[2]) for line in made.out.splitlines() if line[:5] in ("north", "south")] == [20, 16]


def test_nothing_is_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    Path("study.toml").write_text("mine")
    result = perfed("init", "all.csv", *ASKED)
    assert result.code == 2 and result.err.startswith(
        "perfed: study.toml is there already; name another file with --out"
    )
    assert Path("study.toml").read_text() == "mine"
    assert perfed("init", "all.csv", *ASKED, "--out", "none/study.toml").code == 2


def test_a_folder_that_is_not_there_is_said_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text("mine")
    result = perfed("init", "../lab", *ASKED)
    assert (result.code, result.err) == (2, "perfed: ../lab: no such file or folder\n")


def centres(folder: Path, **constant: int) -> None:
    """Two sites with times and events; a column of the first is constant but in a row that is tested on or not."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name, rows in (("east", 60), ("west", 50)):
        x = rng.normal(size=rows)
        days = np.ceil(200 * rng.exponential(size=rows) * np.exp(-1.5 * x)) + 1
        died = (rng.uniform(size=rows) < 0.67).astype(int)
        table = pd.DataFrame({"x": x, "noise": rng.normal(size=rows), "flag": 0, "days": days, "died": died})
        table.loc[: 0 if name == "east" else 20, "flag"] = 1
        table.assign(**(constant if name == "east" else {})).to_csv(folder / f"{name}.csv", index=False)


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"grade": 1}])
def test_a_survival_study_has_settings_that_learn(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    centres(tmp_path / "centres")
    if more:
        frame = pd.read_csv("centres/west.csv")
        frame.assign(grade=frame["x"].round()).to_csv("centres/west.csv", index=False)
    made = perfed("init", "centres", "--target", "days", "--event", "died")
    assert made.code == 0 and "events" in made.out, made.err
    study = tomllib.loads(Path("study.toml").read_text())
    assert study["data"]["columns"] == "named"
    assert study["training"]["batch_size"] >= 256 and study["training"]["weight_decay"] <= 1e-3
    assert "methods" not in study and "flic" not in Path("study.toml").read_text()
    short = ("plan.engine=stacked", "plan.threads=1", "evaluation.every=30")
    for method in ("local", study["method"]):
        done = perfed("run", "study.toml", *short, "--method", method, "--out", method)
        assert done.code == 0, done.err
        assert json.loads(Path(method, "summary.json").read_text())["metrics"]["c-index"]["mean"] > 0.65


def scores_at_sites(folder: Path) -> None:
    """Sixteen sites that share what a score depends on, each with a level of its own; the noise has variance 1."""
    rng, slopes = np.random.default_rng(0), np.array([2.0, -2.0, 1.0, 1.0, 0.5])
    for number in range(16):
        x = rng.normal(size=(30, 5))
        y = x @ slopes + 3 * rng.normal() + rng.normal(size=30)
        pd.DataFrame(x, columns=list("abcde")).assign(score=y).to_csv(folder / f"{number:02d}.csv", index=False)


def kinds_at_sites(folder: Path) -> None:
    """Eight sites with four of ten kinds each, fifteen rows of a kind, in columns that are a site's own."""
    rng = np.random.default_rng(0)
    for number in range(8):
        y = np.repeat(rng.choice(10, size=4, replace=False), 15)
        x = rng.normal(size=(10, 12))[y] * 1.5 + rng.normal(size=(60, 12))
        names = [f"{'abcdefgh'[number]}{column}" for column in range(12)]
        table = pd.DataFrame(x, columns=names).assign(kind=[f"kind {value}" for value in y])
        table.to_csv(folder / f"{number}.csv", index=False)


def rare_at_sites(folder: Path) -> None:
    """Three sites, a seventh of whose rows are cases, and one column each that the others do not have."""
    rng = np.random.default_rng(0)
    for name in ("north", "south", "west"):
        x = rng.normal(size=(300, 6))
        case = x @ np.array([0.8, 0.6, 0.4, 0.4, 0.4, 0.2]) + 1.5 * rng.normal(size=300) > 2.0
        table = pd.DataFrame(x, columns=[*"abcde", name]).assign(case=np.where(case, "yes", "no"))
        table.to_csv(folder / f"{name}.csv", index=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "target", "methods", "settings", "metric"),
    [
        (scores_at_sites, "score", "fedrep,sklearn:ridge", ["data.columns=common"], "mse"),
        (scores_at_sites, "score", "mixed,sklearn:ridge", [], "mse"),
        (kinds_at_sites, "kind", "hetfedrep,sklearn:logistic", [], "accuracy"),
        (rare_at_sites, "case", "fedpac,sklearn:logistic", ["data.columns=union"], "auc"),
    ],
)
def test_what_init_writes_learns_what_a_linear_model_does(
    tmp_path, monkeypatch, make, target, methods, settings, metric
):
    """Else the verdict is of a rate too low or a weight decay too high, and not of what sites have in common."""
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    make(Path("sites"))
    assert perfed("init", "sites", "--target", target).code == 0
    short = ("plan.engine=stacked", "plan.threads=1", "evaluation.every=60")
    done = perfed("compare", "study.toml", "--methods", methods, *settings, *short, "--out", "made")
    assert done.code == 0, done.err
    runs = json.loads(Path("made/comparison.json").read_text())["runs"]
    method, linear = (run["metrics"][metric]["mean"] for run in runs)
    assert method < 1.25 * linear if metric == "mse" else method > linear - 0.03, (method, linear)


@pytest.mark.long
def test_init_says_how_rate_and_weight_decay_are_chosen(tmp_path, monkeypatch):
    """And what it says is a command."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    made = perfed("init", "all.csv", *ASKED)
    assert made.code == 0, made.err
    said = [" ".join(line.split()) for line in made.out.replace("\\\n", "").splitlines()]
    (line,) = [line for line in said if line.startswith("perfed tune ")]
    tune, compare = [line for line in Path("study.toml").read_text().splitlines() if line.startswith("#   perfed ")]
    assert tune == f"#   {line} --out tuned" and "weight_decay=" in line
    short = ("rounds=1", "plan.engine=stacked", "plan.threads=1")
    done = perfed(*tune.split()[2:], *short)
    assert done.code == 0, done.err
    done = perfed(*compare.split()[2:-1], "0", *short, "--out", "compared")
    assert done.code == 0, done.err
    assert {run["method"] for run in json.loads(Path("compared/comparison.json").read_text())["runs"]} > {"local"}


@pytest.mark.parametrize(("ill", "named"), [(0.05, True), (0.4, False)])
def test_the_most_frequent_class_is_compared_with_where_most_rows_have_it(tmp_path, monkeypatch, ill, named):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    for site in ("north", "south"):
        x = rng.normal(size=200)
        answer = np.where(np.argsort(np.argsort(x)) < ill * 200, "yes", "no")
        pd.DataFrame({"x": x + rng.normal(size=200), "z": rng.normal(size=200), "ill": answer}).to_csv(
            f"{site}.csv", index=False
        )
    made = perfed("init", "north.csv", "south.csv", "--target", "ill")
    assert made.code == 0 and ("sklearn:majority" in made.out) is named
    assert ("sklearn:majority" in Path("study.toml").read_text()) is named


@pytest.mark.long
def test_tables_with_the_same_columns_share_them_where_some_do_not_vary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    centres(tmp_path / "centres", flag=0)
    made = perfed("init", "centres", "--target", "days", "--event", "died", "--json")
    assert made.code == 0, made.err
    assert tomllib.loads(Path("study.toml").read_text())["data"]["columns"] == "named"
    assert [site["shared"] for site in json.loads(made.out)["sites"]] == [3, 3]
    alone = perfed("check", "study.toml", "data.columns=own", "method=local", "--json")
    sites = json.loads(alone.out)["sites"]
    assert [(site["shared"], site["own"], site["constant"]) for site in sites] == [(3, 0, 1), (3, 0, 0)]
    forgotten = perfed("init", "centres", "--target", "days", "--out", "values.toml")
    assert "column 'died': is this survival? --event died" in forgotten.out


def test_every_problem_is_said_with_file_column_and_row_and_no_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in {
        "a": "code,age,dose,y\nK1,61,1.5,0\nK2,sixty,2,1\nK3,48,inf,0\nK4,50,1,1\n",
        "b": "code,age,dose,y\nK5,44,1.5,0\nK6,39,2,\n",
        "c": "code,age,dose,y\n",
        "d": "code,age,dose,y\nK7,44,1.5,0\n",
    }.items():
        Path(f"{name}.csv").write_text(rows)
    stages = [
        (["c.csv: there are no rows; every site needs some"], "c"),
        (["b.csv: column 'y', the target, is missing in row 3; leave these rows out"], "b"),
        (
            [
                "a.csv: column 'age' holds numbers, and something else in row 3; "
                "write numbers alone, put what means a missing value into missing, or name the column in categories",
                "a.csv: column 'dose' holds infinity in row 4; numbers must be finite, or missing",
                "d.csv: it has 1 rows; at least 2 are needed (to train on and to test on)",
            ],
            "",
        ),
    ]
    for expected, mended in stages:
        result = perfed("init", ".", "--target", "y")
        assert (result.code, result.out.splitlines()) == (2, expected)
        assert result.err.startswith(f"perfed: {len(expected)} problem") and not Path("study.toml").exists()
        assert not any(cell in result.out for cell in ("K1", "sixty", "61"))
        Path(f"{mended}.csv").unlink(missing_ok=True)


@pytest.mark.long
def test_check_finds_what_has_become_wrong_and_what_no_method_can_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    assert perfed("init", "all.csv", *ASKED).code == 0
    refused = perfed("check", "study.toml", "method=feddar-wa")
    assert refused.code == 2 and "domain" in refused.err and "north" in refused.out
    write(tmp_path, lambda frame: frame.rename(columns={"outcome": "result"}))
    gone = perfed("check", "study.toml")
    assert gone.code == 2 and "all.csv (ward = north) (and 1 more): target: no column 'outcome'" in gone.out
    for setting, expected in (
        ("data.folds=1", "folds = 1 is not allowed"),
        ("data.columns=mine", "data.columns = 'mine' is not allowed"),
        ("data.target=''", "data.target is needed"),
        ("data.test_fraction=0.5", "are two ways to split; leave one of them out"),
    ):
        result = perfed("check", "study.toml", setting)
        assert result.code == 2 and expected in result.err and result.err.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("program", ["import perfed", "import perfed.data.federation", "import perfed.cli.entry"])
def test_pandas_is_imported_where_tables_are(program):
    code = f"import sys; {program}; print('pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_pandas_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    (tmp_path / "a.csv").write_text("age,y\n1,0\n2,1\n")
    result = perfed("init", tmp_path / "a.csv", "--target", "y", "--out", tmp_path / "s.toml")
    assert result.code == 2 and "[tables]" in result.out + result.err


def test_a_column_that_counts_up_is_a_number_where_it_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, lambda frame: frame.assign(day=[*range(1, 21), *range(1, 17)]))
    refused = perfed("init", "all.csv", *ASKED)
    assert refused.code == 2 and "column 'day' looks like an id" in refused.out and "or numbers if it is" in refused.out
    made = perfed("init", "all.csv", *ASKED, "--numbers", "day")
    assert made.code == 0 and "number: age, dose, day" in made.out, made.err
    assert tomllib.loads(Path("study.toml").read_text())["data"]["numbers"] == ["day"]
