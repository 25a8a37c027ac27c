"""``perfed sweep`` and ``perfed campaign``: the runs of their comparisons, whatever happens meanwhile."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, contents, kill_when, perfed
from data_files import write_images

from perfed.datasets import load
from perfed.experiment import jobs
from perfed.experiment.config import find_experiment
from perfed.experiment.planned import parse_names, parse_seeds, plan_sweep, read_campaign
from perfed.report.intervals import estimate_gain

ROOT = Path(__file__).parents[2]
SHORT = (*TINY, "rounds=2", "evaluation.every=1")
CHOSEN = ("--methods", "local,sklearn:svc", "--seeds", "0..2")
VALUES = (12, 16)
NAMES = {"sklearn:svc": "SVC per client", "local": "Local"}  # the better one first
RUNS = [f"{method}/seed-{seed}" for method in ("local", "sklearn.svc") for seed in (0, 1, 2)]
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


@pytest.mark.long
def test_a_sweep_is_the_comparisons_that_differ_in_its_key(made, tmp_path):
    for value in VALUES:
        alone = tmp_path / str(value)
        settings = [*SHORT, f"samples_per_client={value}"]
        assert perfed("compare", EXPERIMENT, *settings, *CHOSEN, "--out", alone).code == 0
        for run in RUNS:
            assert summary(made / folder(value) / run)["metrics"] == summary(alone / run)["metrics"]
        tables = [tomllib.loads((place / "comparisons.toml").read_text()) for place in (made / folder(value), alone)]
        assert tables[0] == tables[1]


def test_the_table_has_the_means_over_the_seeds(made, tmp_path):
    told = perfed("report", made, "--csv", tmp_path / "t.csv", "--latex", tmp_path / "t.tex")
    assert told.code == 0, told.err
    rows = [row for row in csv.DictReader((tmp_path / "t.csv").open()) if row["metric"] == "accuracy"]
    assert [(row["samples_per_client"], row["method"]) for row in rows] == [
        (str(value), method) for value in VALUES for method in ("local", "sklearn:svc")
    ]
    latex = (tmp_path / "t.tex").read_text()
    assert f"\\label{{tab:{EXPERIMENT}-accuracy-by-samples-per-client}}" in latex
    commands = [
        line for line in latex.splitlines() if line.startswith(f"% runs: perfed compare {EXPERIMENT} --methods")
    ]
    assert [command.split("samples_per_client=")[1].split()[0] for command in commands] == [*map(str, VALUES)]
    for row in rows:
        place = made / folder(row["samples_per_client"]) / row["method"].replace(":", ".")
        means = [summary(place / f"seed-{seed}")["accuracy"]["mean"] for seed in (0, 1, 2)]
        assert float(row["mean"]) == pytest.approx(np.mean(means)) and float(row["std"]) == pytest.approx(
            np.std(means, ddof=1)
        )
        cell = f"{100 * np.mean(means):.2f} ± {100 * np.std(means, ddof=1):.2f}"
        assert cell in told.out and cell.replace("±", r"$\pm$") in latex


DOT = re.compile(r'<circle cx="(\S+)" cy="(\S+)"[^>]*><title>([^<]+?), [\w.]+ = ([^,<]+?)(?:, round (\d+))?: ([^<]+)<')


def drawn(file: Path) -> dict[tuple[str, ...], list[float]]:
    """What a figure's dots say, by method, value (and round); they lie on its lines, in their order right and up."""
    text, found, places = file.read_text(), {}, {}
    corners = "L".join(re.findall(r'<path d="M([^"]+)" stroke-linejoin', text)).split("L")
    for x, y, method, value, round_, told in DOT.findall(text):
        assert f"{x} {y}" in corners
        key = (method, value, round_) if round_ else (method, value)
        found[key] = [float(number) for number in re.findall(r"\d[\d.]*(?:e-\d+)?", told)]
        places[key] = (float(x), -float(y))
    for one, other in permutations(found, 2):
        if one[:-1] == other[:-1] and float(one[-1]) < float(other[-1]):
            assert places[one][0] < places[other][0], (one, other)
        if found[one][0] < found[other][0]:
            assert places[one][1] <= places[other][1], (one, other)
    return found


@pytest.fixture(scope="module")
def figures(made) -> Path:
    place = Path(made.parent, "figures")
    assert perfed("report", made, "--figures", place).code == 0
    return place


def runs_of(out: Path, value: str, method: str) -> list[Path]:
    return [out / value / method.replace(":", ".") / f"seed-{seed}" for seed in (0, 1, 2)]


def of_clients(run: Path) -> np.ndarray:
    return np.array([100 * float(row["accuracy_before"]) for row in csv.DictReader((run / "clients.csv").open())])


def over_seeds(values: Sequence[float]) -> Any:
    return pytest.approx([np.mean(values), min(values), max(values)], rel=1e-3)


@pytest.mark.long
def test_figures_have_a_line_per_method_with_the_verdicts_intervals(made, figures):
    names = {path.stem for path in figures.glob("*.svg")}
    assert names == {"sweep-mean", "sweep-tenth", "sweep-seconds", "curves-local"}
    means, tenths = (drawn(figures / f"sweep-{name}.svg") for name in ("mean", "tenth"))
    assert [*means] == [*tenths] == [(method, str(value)) for method in NAMES.values() for value in VALUES]
    registered = {shown: method for method, shown in NAMES.items()}
    for method, value in means:
        values = np.array([of_clients(run) for run in runs_of(made, folder(value), registered[method])])
        right = estimate_gain(values, np.ones(values.shape[1]))
        ends = np.clip([right.low, right.high], 0, 100)
        assert means[method, value] == pytest.approx([right.mean, *ends], rel=1e-3)
        assert tenths[method, value] == pytest.approx([np.percentile(values, 10, axis=1).mean()], rel=1e-3)
    page = (made / "report.html").read_text()
    assert "sweep over samples_per_client · 2 of 2 comparisons finished" in page
    assert all(f'href="{folder(value)}/report.html"' in page for value in VALUES)


def test_figures_have_the_times_and_the_rounds_of_every_value(made, figures):
    seconds, curves = (drawn(figures / f"{name}.svg") for name in ("sweep-seconds", "curves-local"))
    assert [*curves] == [("Local", str(value), str(number)) for value in VALUES for number in (1, 2)]
    registered = {shown: method for method, shown in NAMES.items()}
    for method, value in seconds:
        runs = runs_of(made, folder(value), registered[method])
        assert seconds[method, value] == over_seeds([summary(run)["training_seconds"] for run in runs])
    for method, value, number in curves:
        runs = runs_of(made, folder(value), registered[method])
        lines = [json.loads((run / "rounds.jsonl").read_text().splitlines()[int(number) - 1]) for run in runs]
        means = [100 * line["metrics"]["accuracy"]["mean"] for line in lines]
        assert curves[method, value, number] == over_seeds(means)
    assert {*seconds} == {(method, str(value)) for method in NAMES.values() for value in VALUES}
    assert means == pytest.approx([of_clients(run).mean() for run in runs])  # after the last round


@pytest.mark.long
@pytest.mark.parametrize(
    ("experiment", "options", "worst"),
    [
        ("feddar-synthetic", {"clients": 4, "dim": 4, "samples_low": 20, "samples_high": 30, "alpha": 5.0}, max),
        ("feddar-digits", {"clients": 3, "samples": 24, "alpha": 0.5, "domains": ["mnist", "font_digits"]}, min),
    ],
)
def test_figures_have_the_mean_and_the_worst_of_the_domains(tmp_path, monkeypatch, experiment, options, worst):
    """Squared errors and accuracies, from what every run keeps of its predictions."""
    monkeypatch.setenv("PERFED_DATA", str(tmp_path))
    for number, name in enumerate(("mnist", "font_digits")):
        write_images(tmp_path, f"{name}.npz", y_test=np.random.default_rng(number).integers(0, 10, 60))
    short = ("rounds=1", "local_epochs=1", "evaluation.every=1", "plan.engine=stacked", "plan.threads=1")
    given = [*short, *(f"{key}={value}" for key, value in options.items())]
    chosen = ("--methods", "feddar-sa,local", "--seeds", "0..2", "--out", tmp_path / "out")
    assert perfed("sweep", experiment, "model.body.out=2,4", *given, *chosen).code == 0
    assert perfed("report", tmp_path / "out", "--figures", tmp_path).code == 0
    means, worsts = (drawn(tmp_path / f"sweep-{name}.svg") for name in ("domains", "worst-domain"))
    registered = {"FedDAR-SA": "feddar-sa", "Local": "local"}
    assert {*means} == {*worsts} == {(method, value) for method in registered for value in ("2", "4")}
    for method, value in means:
        tables = []
        for seed, run in enumerate(runs_of(tmp_path / "out", f"model.body.out={value}", registered[method])):
            federation = load(find_experiment(experiment)["data"]["name"], options, seed=seed)
            domain = np.concatenate([client.test.domain for client in federation])
            told = np.load(next((run / "predictions").iterdir()))
            right = 100.0 * (told["outputs"].argmax(1) == told["targets"])
            score = right if federation.num_classes else (told["outputs"][:, 0] - told["targets"]) ** 2
            tables.append([score[domain == number].mean() for number in range(federation.num_domains)])
        assert means[method, value] == over_seeds([np.mean(table) for table in tables])
        assert worsts[method, value] == over_seeds([worst(table) for table in tables])


@pytest.mark.long
def test_a_killed_sweep_goes_on(made, tmp_path):
    out = tmp_path / "out"
    first = out / folder(VALUES[0]) / "sklearn.svc" / "seed-2" / "summary.json"
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


@pytest.mark.long
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


@pytest.mark.long
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
    methods = {*planned["fashion-20"].methods, *planned["fashion-20-pfedme"].methods}
    assert methods == {"fedpac", "fedavg-ft", "fedrep", "ditto", "pfedme", "fedrod", "local"}
    for name in ("fashion-20", "fashion-20-pfedme", "ablation", "concept-shift"):
        assert planned[name].table["rounds"] == 200 and planned[name].seeds == [0, 1]
    digits = [plan.table["data"] for name, plan in planned.items() if name.startswith("digits-")]
    assert {(data["clients"], data.get("shared_shards", False)) for data in digits} == {
        (clients, shared) for clients in (100, 200) for shared in (True, False)
    }


@pytest.mark.long
def test_the_sweeps_of_the_papers_figures_are_valid():
    page = (ROOT / "docs" / "howto" / "sweep.md").read_text()
    commands = re.findall(r"`perfed sweep (\S+) (\S+=\S+) --methods (\S+)(?: --seeds (\S+?))?[` ]", page)
    assert len(commands) == 7
    for experiment, axis, methods, seeds in commands:
        key, planned = plan_sweep(find_experiment(experiment), axis, parse_names(methods), parse_seeds(seeds or "0"))
        assert len(planned) >= 3 and all(name.startswith(f"{key}=") for name in planned)
