"""The results of runs are read once, also where verdict, warnings, tables and page use the same file."""

import builtins
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_up_runs import write

from perfed.data.federation import Federation
from perfed.engine.metrics import compute_metric
from perfed.experiment.result import compare
from perfed.experiment.study import read_comparison
from perfed.report import load_runs
from perfed.report.run_results import load_run

METHODS = ["local", "fedavg", "sklearn:logistic"]


def two_classes(clients=3, rows=24):
    rng = np.random.default_rng(0)
    data = {}
    for number in range(clients):
        x = rng.normal(size=(rows, 3)).astype(np.float32)
        y = (x[:, 0] + rng.normal(size=rows) > 0).astype(np.int64)
        half = rows // 2
        data[f"site-{number}"] = {"x_train": x[:half], "y_train": y[:half], "x_test": x[half:], "y_test": y[half:]}
    return Federation.from_arrays(data)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    path = tmp_path_factory.mktemp("comparison") / "runs"
    compare(two_classes(), METHODS, model={"head": "linear"}, rounds=2, seeds=[0, 1], out=path)
    return path


@pytest.fixture
def opened_files(monkeypatch):
    """How often each file is opened from here on, by Python itself, pathlib, numpy or zipfile."""
    counts, plain_open = Counter(), io.open

    def count_and_open(file, *args, **options):
        if isinstance(file, str | Path):
            counts[Path(file)] += 1
        return plain_open(file, *args, **options)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", count_and_open)
    return counts


@pytest.mark.long
def test_concluding_a_comparison_opens_each_file_of_a_run_once(comparison, opened_files):
    assert read_comparison(comparison).conclude().verdict is not None
    files = {file.relative_to(comparison): count for file, count in opened_files.items() if "seed-" in str(file)}
    assert {file: count for file, count in files.items() if count > 1} == {}
    for run in comparison.glob("*/seed-*"):
        for name in ("config.toml", "summary.json", "clients.csv", "federation.json", "predictions/*.npz"):
            (file,) = run.glob(name)
            assert file.relative_to(comparison) in files


def test_the_results_of_a_run_that_is_not_finished_are_read_once(comparison, opened_files):
    run = comparison / "fedavg" / "seed-0"
    names = ("summary.json", "SHA256SUMS")
    contents = {name: (run / name).read_bytes() for name in names}
    for name in names:
        (run / name).unlink()
    opened_files.clear()
    try:
        assert load_run(run).summary is None
        counts = {
            file.relative_to(run): count for file, count in opened_files.items() if "checkpoint" not in file.parts
        }
        assert counts[Path("rounds.jsonl")] == 1 and max(counts.values()) == 1
    finally:
        for name, content in contents.items():
            (run / name).write_bytes(content)


def test_the_participants_of_rounds_are_those_of_the_file(tmp_path):
    run = write(tmp_path, "fedavg", 0, [0.5] * 11, curve=[0.4, 0.5])
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for line, names in zip(lines, (["site-3", "site-10"], ["site-0", "site-3", "left-long-ago"]), strict=True):
        line["participants"] = names
    (run / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    participation = load_run(run).participation
    used = [[site for site, there in zip(participation.ids, row, strict=True) if there] for row in participation.used]
    assert used == [["site-3", "site-10"], ["site-0", "site-3"]]
    assert participation.used_shares == {1: 2 / 11, 2: 3 / 11}


@pytest.mark.parametrize("metric", ["accuracy", "auc"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_predictions_reduced_to_a_metric_reproduce_it(tmp_path, metric, dtype):
    rng, counts = np.random.default_rng(0), [7, 12]
    y, outputs = rng.integers(0, 2, sum(counts)), rng.normal(size=(sum(counts), 2)).astype(dtype)
    ends = np.cumsum(counts)
    values = [
        compute_metric(metric, y[end - n : end], outputs[end - n : end]) for n, end in zip(counts, ends, strict=True)
    ]
    run = write(tmp_path, "fedavg", 0, [0.5, 0.5])
    (run / "predictions").mkdir()
    ids, marks = np.array(["site-0", "site-1"]), np.array([3, 4], dtype=np.uint32)
    file = run / "predictions" / "round-0002.npz"
    np.savez(file, ids=ids, counts=np.array(counts), marks=marks, targets=y, outputs=outputs)
    (results,) = load_runs([run])
    predictions = results.predictions_by(metric)
    assert predictions.marks == (("site-0", 3), ("site-1", 4)) and predictions.at_site("site-2") is None
    for site, value, count in zip(ids.tolist(), values, counts, strict=True):
        at_site = predictions.at_site(site)
        assert at_site.rows == count and at_site.reproduces(value) and not at_site.reproduces(value + 0.01)
