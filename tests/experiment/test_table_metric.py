"""Comparisons on tables go by log loss unless told otherwise, and say what else they measured."""

import json

import numpy as np
import pandas
import pytest
from sklearn.metrics import log_loss

import perfed
from perfed.report import first_tables, load_runs, verdict
from perfed.report.page.write import write_report


def frames(sick=0.3, target="ill"):
    rng, found = np.random.default_rng(0), {}
    for site in ("east", "north", "west"):
        x = rng.normal(size=(40, 2))
        ill = x[:, 0] + rng.normal(size=40) > np.quantile(x[:, 0], 1 - sick)
        values = {"ill": np.where(ill, "yes", "no"), "days": 3 * x[:, 0] + rng.normal(size=40)}
        found[site] = pandas.DataFrame({"age": x[:, 0], "dose": x[:, 1], target: values[target]})
    return found


def compared(folder, federation):
    methods = ["local", "sklearn:logistic", "sklearn:svc"]
    perfed.compare(federation, methods, model={"head": "linear"}, rounds=2, seeds=[0], out=folder)
    return json.loads((folder / "comparison.json").read_text())["verdict"]


@pytest.mark.long
def test_tables_with_classes_are_compared_by_log_loss_and_what_has_none_is_named(tmp_path):
    federation = perfed.Federation.from_frames(frames(), target="ill", columns="common", seed=0)
    found = compared(tmp_path / "made", federation)
    assert found["metric"] == "log-loss" and [of["method"] for of in found["methods"]] in (
        ["local"],
        ["sklearn:logistic"],
    )
    said = "Compared by log-loss, lower is better; evaluation.compare_by chooses another metric."
    assert found["sentences"][1] == said
    assert "Not compared, for lack of log-loss: SVC per client." in found["warnings"]
    assert 'compare_by = "log-loss"' in (tmp_path / "made" / "local" / "seed-0" / "config.toml").read_text()
    runs = load_runs(sorted(file.parent for file in (tmp_path / "made").rglob("summary.json")))
    beside = first_tables(runs, verdict(runs))[1]
    assert beside.header == ["Method", "Accuracy (%)", "auc", "log-loss, lower is better"]
    (run,) = [run for run in runs if run.method == "local"]
    file = np.load(run.directory / "predictions" / "round-0002.npz")
    ends = np.cumsum(file["counts"])[:-1]
    p = [np.exp(o) / np.exp(o).sum(1)[:, None] for o in np.split(file["outputs"], ends)]
    each = [log_loss(y, own, labels=[0, 1]) for y, own in zip(np.split(file["targets"], ends), p, strict=True)]
    (row,) = [row for row in beside.rows if row[0] == "Local"]
    assert float(row[3]) == pytest.approx(np.mean(each), abs=1e-4)
    page = write_report(runs, tmp_path / "r.html", title="t").read_text()
    assert "Accuracy and the frequencies of the classes" in page


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "metric"), [("asked", "accuracy"), ("arrays", "accuracy"), ("values", "mse"), ("auc", "auc")]
)
def test_what_is_asked_and_what_is_no_table_with_classes_goes_by_its_own(tmp_path, kind, metric):
    more = {"evaluation": {"compare_by": metric}} if kind in ("asked", "auc") else {}
    if kind == "arrays":
        rng = np.random.default_rng(1)
        rows = {site: (rng.normal(size=(30, 2)), rng.integers(0, 2, 30)) for site in "ab"}
        clients = {
            i: {"x_train": x[:20], "y_train": y[:20], "x_test": x[20:], "y_test": y[20:]} for i, (x, y) in rows.items()
        }
        federation = perfed.Federation.from_arrays(clients)
    else:
        target = "days" if kind == "values" else "ill"
        federation = perfed.Federation.from_frames(frames(target=target), target=target, columns="common", seed=0)
    folder = tmp_path / "made"
    methods = ["local", "sklearn:ridge" if kind == "values" else "sklearn:logistic"]
    perfed.compare(federation, methods, model={"head": "linear"}, rounds=2, seeds=[0], out=folder, **more)
    assert json.loads((folder / "comparison.json").read_text())["verdict"]["metric"] == metric
