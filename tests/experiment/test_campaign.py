"""``perfed sweep`` and ``perfed campaign``: the runs of their comparisons, whatever happens meanwhile."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, contents, kill_when, perfed

from perfed.experiment import jobs
from perfed.experiment.config import find_experiment
from perfed.experiment.names import parse_names, parse_seeds
from perfed.experiment.planned import read_campaign, swept
from perfed.report.gains import interval

ROOT = Path(__file__).parents[2]
SHORT = (*TINY, "rounds=2", "evaluation.every=1")
CHOSEN = ("--methods", "local,sklearn:svc", "--seeds", "0..1")
VALUES = (12, 16)
RUNS = [f"{method}/seed-{seed}" for method in ("local", "sklearn.svc") for seed in (0, 1)]
FILE = """
[[comparison]]
experiment = "flic-digits-views"
methods = ["local", "hetfedrep"]
settings = ["samples_per_client=16"]

[[comparison]]
name = "labels: few"
experiment = "mine.toml"
methods = ["sklearn:svc"]
seeds = "0..1"
"""


def sweep(*arguments: object) -> tuple[object, ...]:
    axis = f"samples_per_client={','.join(map(str, VALUES))}"
    return ("sweep", EXPERIMENT, axis, *SHORT, *CHOSEN, *arguments)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "out"
    done = perfed(*sweep("--out", out))
    assert done.code == 0, done.err
    return Path(out)


def folder(value: object) -> str:
    return f"samples_per_client={value}"


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def lasting(directory: Path) -> Mapping[str, bytes]:
    """What runs leave, without reports, which say the day's versions."""
    return {name: text for name, text in contents(directory).items() if "/seed-" in name}


def test_a_sweep_is_the_comparisons_that_differ_in_its_key(made, tmp_path):
    for value in VALUES:
        alone = tmp_path / str(value)
        settings = [*SHORT, f"samples_per_client={value}"]
        assert perfed("compare", EXPERIMENT, *settings, *CHOSEN, "--out", alone).code == 0
        for run in RUNS:
            assert summary(made / folder(value) / run)["metrics"] == summary(alone / run)["metrics"]
        tables = [tomllib.loads((place / "comparison.toml").read_text()) for place in (made / folder(value), alone)]
        assert tables[0] == tables[1]


def test_the_table_has_the_means_over_the_seeds(made, tmp_path):
    told = perfed("report", made, "--csv", tmp_path / "t.csv", "--latex", tmp_path / "t.tex")
    assert told.code == 0, told.err
    rows = [row for row in csv.DictReader((tmp_path / "t.csv").open()) if row["metric"] == "accuracy"]
    assert [(row["samples_per_client"], row["method"]) for row in rows] == [
        (str(value), method) for value in VALUES for method in ("local", "sklearn:svc")
    ]
    latex = (tmp_path / "t.tex").read_text()
    for row in rows:
        place = made / folder(row["samples_per_client"]) / row["method"].replace(":", ".")
        means = [summary(place / f"seed-{seed}")["accuracy"]["mean"] for seed in (0, 1)]
        assert float(row["mean"]) == pytest.approx(np.mean(means)) and float(row["std"]) == pytest.approx(
            np.std(means, ddof=1)
        )
        cell = f"{100 * np.mean(means):.2f} ± {100 * np.std(means, ddof=1):.2f}"
        assert cell in told.out and cell.replace("±", r"$\pm$") in latex


def test_figures_have_a_line_per_method_with_the_verdicts_intervals(made, tmp_path):
    assert perfed("report", made, "--figures", tmp_path / "figures").code == 0
    names = {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    assert names == {"sweep-mean", "sweep-tenth", "sweep-seconds", "curves-local"}
    drawn = (tmp_path / "figures" / "sweep-mean.svg").read_text()
    hints = re.findall(r"<title>([\w:]+), samples_per_client = (\d+): ([\d.]+) % \(([\d.]+) to ([\d.]+)\)", drawn)
    assert [(method, value) for method, value, *_ in hints] == [
        (method, str(value)) for method in ("local", "sklearn:svc") for value in VALUES
    ]
    for method, value, *numbers in hints:
        place = made / folder(value) / method.replace(":", ".")
        table = [list(csv.DictReader((place / f"seed-{seed}" / "clients.csv").open())) for seed in (0, 1)]
        values = np.array([[float(row["accuracy_before"]) for row in rows] for rows in table])
        right = interval(100 * values, np.ones(values.shape[1]))
        assert [float(number) for number in numbers] == pytest.approx([right.mean, right.low, right.high], rel=1e-3)
    page = (made / "report.html").read_text()
    assert "sweep over samples_per_client · 2 of 2 comparisons finished" in page
    assert all(f'href="{folder(value)}/report.html"' in page for value in VALUES)


def test_a_killed_sweep_goes_on(made, tmp_path):
    out = tmp_path / "out"
    first = out / folder(VALUES[0]) / "sklearn.svc" / "seed-1" / "summary.json"
    kill_when(first.exists, *sweep("--out", out))
    done = lasting(out / folder(VALUES[0]))
    assert not (out / folder(VALUES[1]) / RUNS[-1] / "summary.json").exists()
    assert "resume" in perfed(*sweep("--out", out / folder(VALUES[0]))).err  # a folder of it is a comparison
    again = perfed("resume", out)
    assert again.code == 0, again.err
    assert f"{folder(VALUES[0])}: local seed 0" not in again.out
    assert lasting(out / folder(VALUES[0])) == done
    for value in VALUES:
        for run in RUNS:
            assert summary(out / folder(value) / run)["metrics"] == summary(made / folder(value) / run)["metrics"]


def test_a_value_more_and_side_by_side(made, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "START_METHOD", "forkserver")
    out, chosen = tmp_path / "out", ("--methods", "local", "--out", tmp_path / "out")
    assert perfed("sweep", EXPERIMENT, "samples_per_client=16,12", *SHORT, *chosen, "--jobs", "2").code == 0
    before = lasting(out)
    more = perfed("sweep", EXPERIMENT, "samples_per_client=12,16,20", *SHORT, *chosen, "--json")
    assert more.code == 0, more.err
    assert {name: text for name, text in lasting(out).items() if not name.startswith(folder(20))} == before
    told = json.loads(more.out)
    names = [row["comparison"] for row in told["table"] if row["metric"] == "accuracy"]
    assert names == [folder(value) for value in (12, 16, 20)] and told["key"] == "samples_per_client"
    for value in VALUES:
        run = f"{folder(value)}/local/seed-0"
        assert summary(out / run)["metrics"] == summary(made / run)["metrics"]


@pytest.mark.parametrize(
    ("axis", "problem"),
    [
        ("samples_per_clent=12,16", "unknown key 'samples_per_clent'; did you mean: samples_per_client"),
        ("samples_per_client=12,many", "data.samples_per_client = 'many' is not allowed; it must be: integer"),
        ("samples_per_client=12,16,12", "12 is given twice"),
        ("data.samples_per_client=12,012", "must be"),
        ("lr=0.1,1e-1", "1e-1 is given twice"),
        ("samples_per_client=12", "a sweep needs two values or more"),
        ("samples_per_client", "must be key=v1,v2,..."),
        ("name=a,b", "name=a and name=b make no difference to local"),
        ("methods.fedpac.lr=1,2", "make no difference to local"),
        ("seed=0,1", "methods and seeds are given with --methods and --seeds here"),
        ("classes_per_client=4,11", "classes_per_client=11: "),
    ],
)
def test_what_cannot_be_swept_is_one_line_and_nothing_is_written(axis, problem, tmp_path):
    found = perfed("sweep", EXPERIMENT, axis, *SHORT, "--methods", "local", "--out", tmp_path / "out")
    assert found.code == 2 and problem in found.err and found.err.count("\n") == 1, found.err
    assert not (tmp_path / "out").exists()


def test_a_campaign_makes_its_comparisons_and_later_what_is_new(tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "digits-label-skew"\nname = "mine"\n')
    file, out = tmp_path / "all.toml", tmp_path / "out"
    file.write_text(FILE)
    done = perfed("campaign", file, "rounds=1", "plan.engine=stacked", "plan.threads=1", "--out", out)
    assert done.code == 0, done.err
    runs = {str(path.parent.relative_to(out)) for path in out.rglob("summary.json")}
    assert runs == {f"flic-digits-views/{name}/seed-0" for name in ("local", "hetfedrep")} | {
        f"labels..few/sklearn.svc/seed-{seed}" for seed in (0, 1)
    }
    config = tomllib.loads((out / "flic-digits-views" / "local" / "seed-0" / "config.toml").read_text())
    assert config["data"]["samples_per_client"] == 16 and config["rounds"] == 1
    before = lasting(out)
    file.write_text(FILE.replace('methods = ["sklearn:svc"]', 'methods = ["sklearn:svc", "local"]'))
    more = perfed("campaign", file, "rounds=1", "plan.engine=stacked", "plan.threads=1", "--out", out)
    assert more.code == 0, more.err
    assert before.items() <= lasting(out).items()
    assert (out / "labels..few" / "local" / "seed-1" / "summary.json").exists()
    assert "svc seed" not in more.out and "labels: few: local seed 1:" in more.out
    changed = perfed("campaign", file, "rounds=2", "--out", out)
    assert changed.code == 2 and "rounds is 2 and was 1 in the runs that are there" in changed.err
    alone = perfed("report", out, out / "labels..few")
    assert alone.code == 2 and "reported alone" in alone.err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no comparison"),
        ("rounds = 1\n" + FILE, "unknown key 'rounds'"),
        ("[[comparison]]\nmethods = []\n", "comparison 1.experiment: field required"),
        (FILE.replace("local", "lokal"), "comparison 'flic-digits-views': methods: unknown method 'lokal'"),
        (FILE.replace("mine.toml", "none.toml"), "comparison 'labels: few': unknown experiment"),
        (FILE.replace("samples_per_client=16", "samples=x"), "unknown key 'samples'"),
        (FILE.replace('"0..1"', '"1..0"'), "seeds 1..0: must be like"),
        (FILE + '[[comparison]]\nexperiment = "flic-digits-views"\nmethods = ["local"]', "two comparisons are called"),
        (FILE.replace("settings", "setings"), "unknown key 'comparison 1.setings'"),
        ("[[comparison", "cannot be read as a campaign"),
    ],
)
def test_a_bad_campaign_is_one_line_and_nothing_is_written(text, problem, tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "digits-label-skew"\n')
    (tmp_path / "all.toml").write_text(text)
    found = perfed("campaign", tmp_path / "all.toml", "--out", tmp_path / "out")
    assert found.code == 2 and problem in found.err and found.err.count("\n") == 1, found.err
    assert not (tmp_path / "out").exists()


def test_the_campaign_of_the_papers_tables_is_valid():
    planned = read_campaign(ROOT / "benchmarks" / "papers.toml")
    assert {"fedpac", "fedavg-ft", "fedrep", "ditto", "pfedme", "fedrod", "local"} == {*planned["fashion-20"].methods}
    assert planned["fashion-20"].table["rounds"] == 200 and planned["fashion-20"].seeds == [0, 1]


def test_the_sweeps_of_the_papers_figures_are_valid():
    guide = (ROOT / "docs" / "guide.md").read_text()
    commands = re.findall(r"`perfed sweep (\S+) (\S+=\S+) --methods (\S+)(?: --seeds (\S+?))?[` ]", guide)
    assert len(commands) == 6
    for experiment, axis, methods, seeds in commands:
        key, planned = swept(find_experiment(experiment), axis, parse_names(methods), parse_seeds(seeds or "0"))
        assert len(planned) >= 3 and all(name.startswith(f"{key}=") for name in planned)
