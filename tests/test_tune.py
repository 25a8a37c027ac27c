"""``perfed tune``: the same grid for every method, chosen on validation data alone, continued after an interruption."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import EXPERIMENT, TINY, is_plain, perfed

from perfed import search
from perfed.config import find_experiment, read
from perfed.datasets import catalogue, load
from perfed.federation import Federation
from perfed.overrides import override

GRID = ("--methods", "local,flic-class", "--grid", "lr=1e-3,1e-1", "--grid", "batch_size=4,100")


def test_a_method_under_a_policy_keeps_its_own_choice(tmp_path):
    """Also where that is the experiment's value and the method alone has chosen another one."""
    table = override(find_experiment(EXPERIMENT), ["lr=0.01"], ["fedrep"])
    names = ["fedrep", "fedrep+srpfl"]
    grid = search.Search(tmp_path, table, names, [0], [])
    grid._write_chosen({"fedrep": ["lr=0.1"], "fedrep+srpfl": ["lr=0.01"]})
    chosen = read((tmp_path / "chosen.toml").read_text(), "chosen.toml")
    for name, rate in zip(names, (0.1, 0.01), strict=True):
        assert chosen.model_copy(update={"method": name}).build_method().lr == rate


def test_tune_gives_every_method_the_same_grid_and_never_looks_at_test_data(tmp_path, monkeypatch):
    started = []
    start = search.start

    def recording(experiment: Any, **options: Any) -> Any:
        started.append(experiment)
        return start(experiment, **options)

    monkeypatch.setattr(search, "start", recording)
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
    plan = ("plan.engine=stacked", "plan.threads=1")  # choices by timing would differ between the two
    grid = ("--methods", "local,hetfedrep", "--grid", "lr=1e-4,1e-2", "--seeds", "0,1")
    for scramble in ("false", "true"):
        result = perfed("tune", file, f"scramble={scramble}", *plan, *grid, "--out", tmp_path / scramble)
        assert result.code == 0, result.err
    assert (tmp_path / "true" / "grid.json").read_text() == (tmp_path / "false" / "grid.json").read_text()
    chosen = [tomllib.loads((tmp_path / which / "chosen.toml").read_text()) for which in ("true", "false")]
    assert chosen[0].get("methods") == chosen[1].get("methods") != {}


def test_an_interrupted_search_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = perfed("tune", EXPERIMENT, *TINY, *GRID, "plan.threads=1", "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    begun = []
    start = search.start

    def interrupted(experiment: Any, **options: Any) -> Any:
        begun.append(experiment.to_toml())
        if len(begun) == 4:
            raise KeyboardInterrupt
        return start(experiment, **options)

    monkeypatch.setattr(search, "start", interrupted)
    stopped = perfed("tune", EXPERIMENT, *TINY, *GRID, "plan.threads=1", "--out", tmp_path / "cut")
    assert stopped.code == 130
    assert stopped.err == f"perfed: interrupted; 'perfed resume {tmp_path / 'cut'}' continues\n"
    refused = perfed("tune", EXPERIMENT, *TINY, *GRID, "--out", tmp_path / "cut")
    assert refused.code == 2 and f"'perfed resume {tmp_path / 'cut'}'" in refused.err
    resumed = perfed("resume", tmp_path / "cut")
    assert resumed.code == 0, resumed.err
    assert len(begun) == 9 and begun[3] == begun[4] and len(set(begun)) == 8
    for name in ("grid.json", "chosen.toml"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()

    (tmp_path / "cut" / "grid.json").write_text("[{")
    broken = perfed("resume", tmp_path / "cut")
    assert broken.code == 2 and "grid.json: cannot be read" in broken.err and broken.err.count("\n") == 1


def test_what_was_chosen_is_for_the_methods_that_were_tried(tmp_path):
    grid = ("--methods", "local", "--grid", "lr=1e-3,1e-2")
    assert perfed("tune", EXPERIMENT, *TINY, *grid, "--out", tmp_path / "out").code == 0
    assert read((tmp_path / "out" / "chosen.toml").read_text(), "chosen.toml").method == "local"
    refused = perfed("tune", EXPERIMENT, *TINY, "--methods", "local", "--grid", "seed=1,2", "--out", tmp_path / "no")
    assert refused.code == 2 and "--methods and --seeds" in refused.err
    report = perfed("report", tmp_path / "out")
    assert report.code == 2 and "so a search (perfed tune)" in report.err


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
