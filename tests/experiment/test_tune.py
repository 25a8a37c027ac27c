"""``perfed tune``: the same grid for every method, chosen on validation data alone, continued after an interruption."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import EXPERIMENT, TINY, is_plain, perfed

from perfed.data.federation import Federation
from perfed.datasets import catalogue, load
from perfed.experiment import factory
from perfed.experiment.comparison import ComparisonSpec
from perfed.experiment.config import Experiment, find_experiment, read, validate
from perfed.experiment.overrides import override, parse_value
from perfed.experiment.search import Search
from perfed.experiment.study import Study
from perfed.methods.titles import display_name

GRID = ("--methods", "local,flic-class", "--grid", "lr=1e-3,1e-1", "--grid", "batch_size=4,100")


@pytest.fixture
def scored(monkeypatch):
    """Runs score 0.928 where this says that the experiment is the best one, else 0.5; nothing is trained."""
    judge: dict[str, Callable[[Experiment], bool]] = {}

    def score(experiment: Experiment) -> dict[str, Any]:
        return {"metrics": {"accuracy": {"mean": 0.928 if judge["is_best"](experiment) else 0.5}}}

    def start(experiment: Experiment, **options: Any) -> Any:
        return SimpleNamespace(execute=lambda: score(experiment))

    monkeypatch.setattr(factory, "start", start)
    return judge


def test_a_method_under_a_policy_keeps_its_own_choice(tmp_path, scored):
    """Also where that is the experiment's value and the method alone has chosen another one."""
    table = override(find_experiment(EXPERIMENT), ["lr=0.01"], ["fedrep"])
    best = {"fedrep": 0.1, "fedrep+srpfl": 0.01}
    scored["is_best"] = lambda experiment: experiment.built_method.lr == best[experiment.method]
    Study(tmp_path, Search(table, list(best), [0], [["lr=0.1"], ["lr=0.01"]])).choose()
    chosen = read((tmp_path / "chosen.toml").read_text(), "chosen.toml")
    for name, rate in best.items():
        assert chosen.model_copy(update={"method": name}).built_method.lr == rate


@pytest.mark.long
def test_tune_gives_every_method_the_same_grid_and_never_looks_at_test_data(tmp_path, monkeypatch):
    started = []
    start = factory.start

    def recording(experiment: Any, **options: Any) -> Any:
        started.append(experiment)
        return start(experiment, **options)

    monkeypatch.setattr(factory, "start", recording)
    result = perfed("tune", EXPERIMENT, *TINY, *GRID, "--out", tmp_path / "out")
    assert (result.code, result.err) == (0, "")
    assert is_plain(result.out)
    assert all(experiment.evaluation.split == "validation" for experiment in started)
    assert all(experiment.data.options["validation_fraction"] == 0.25 for experiment in started)

    grid = json.loads((tmp_path / "out" / "grid.json").read_text())
    keys = {"method", "settings", "metric", "scores", "mean"}
    assert all(set(point) - {"notes"} == keys and point["metric"] == "accuracy" for point in grid)
    assert [point["method"] for point in grid if "notes" in point] == ["local", "flic-class"]  # those that were chosen
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
def scrambled_test_labels(forgotten):
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


@pytest.fixture
def noise(forgotten):
    """A data set whose labels say nothing about the inputs, and one whose target is the first input."""

    def drawn(seed: int, regression: bool) -> Federation:
        generator = np.random.default_rng([seed, 7])
        clients = {}
        for i in range(20):
            x = generator.normal(size=(280, 5)).astype(np.float32)
            y = x[:, 0] if regression else np.concatenate([generator.permutation(np.arange(n) % 4) for n in (80, 200)])
            parts = {"train": slice(0, 80), "test": slice(80, None)}
            clients[f"{i:02d}"] = {
                f"{k}_{name}": v[part] for name, part in parts.items() for k, v in (("x", x), ("y", y))
            }
        return Federation.from_arrays(clients, num_classes=None if regression else 4)

    @catalogue.dataset("noise")
    def noise(seed: int, data_dir: Path | None) -> Federation:
        """Labels by chance, as many of each class at every client."""
        return drawn(seed, regression=False)

    @catalogue.dataset("line", task="regression")
    def line(seed: int, data_dir: Path | None) -> Federation:
        """A regression."""
        return drawn(seed, regression=True)


def small(file: Path, data: str, more: str = "") -> Path:
    """An experiment on the data set ``data``."""
    model = 'body = { kind = "mlp", hidden = [16], out = 8 }\nhead = "linear"'
    text = f'method = "fedavg"\nrounds = 8\n[data]\nname = "{data}"\n[model]\n{model}\n[training]\nlocal_epochs = 3\n'
    file.write_text(text + more)
    return file


@pytest.mark.long
def test_pure_noise_is_scored_at_chance_also_where_a_method_uses_validation_data(tmp_path, noise):
    """FedFomo combines models by their losses on validation data: not on those samples that are scored."""
    file = small(tmp_path / "x.toml", "noise")
    grid = ("--methods", "fedfomo,local", "--grid", "lr=1e-2", "--seeds", "0..2")
    result = perfed("tune", file, "plan.threads=1", *grid, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    fomo, local = json.loads((tmp_path / "out" / "grid.json").read_text())
    for point, scored in ((fomo, 200), (local, 400)):  # of 80 training samples at each of 20 clients
        deviation = (0.25 * 0.75 / (scored * len(point["scores"]))) ** 0.5
        assert abs(point["mean"] - 0.25) < 3 * deviation

    note = "uses validation data, so chosen.toml has data.validation_fraction = 0.125 for every method"
    assert fomo["notes"] == [note] and f"FedFomo: {note}" in result.said and local["notes"] == []
    chosen = read((tmp_path / "out" / "chosen.toml").read_text(), "chosen.toml")
    run = factory.start(chosen)
    assert chosen.method == "fedfomo" and chosen.evaluation.split == "test"
    assert {len(client.validation or ()) for client in run.federation} == {10}  # what it had in the search
    assert {len(client.test or ()) for client in run.federation} == {200} and run.notes == []


def test_what_a_method_weighs_and_what_is_scored_are_halves_of_the_validation_data(noise):
    """Class by class, nothing twice; and the run says so, and where a client has none."""
    table = {"method": "fedfomo", "rounds": 1, "data": {"name": "noise", "validation_fraction": 0.5}}
    table |= {"model": {"head": "linear"}, "evaluation": {"split": "validation"}}
    whole = load("noise", {"validation_fraction": 0.5}, seed=0)
    lone = replace(whole.clients[0], validation=whole.clients[0].validation.take(torch.tensor([3])))
    run = factory.start(validate(table), federation=replace(whole, clients=(lone, *whole.clients[1:])))
    for before, after in zip(whole.clients[1:], run.federation.clients[1:], strict=True):
        rows = [{tuple(x.tolist()) for x in split.x} for split in (after.validation, after.test, before.validation)]
        assert rows[0] | rows[1] == rows[2] and not rows[0] & rows[1] and len(rows[0]) == len(rows[1]) == 20
        counts = [torch.bincount(split.y, minlength=4) for split in (after.validation, after.test)]
        assert int((counts[0] - counts[1]).abs().max()) <= 2
        assert torch.equal(after.train.x, before.train.x)
    first = run.federation.clients[0]
    assert first.validation is None and first.test is not None and len(first.test) == 1
    assert run.notes == [
        "half of the validation samples are fedfomo's own; the scores are on the others",
        "1 of 20 clients have no validation data for fedfomo, which uses their training data in place of them "
        "(data.validation_fraction)",
    ]
    assert run.execute()["notes"][-2:] == run.notes
    local = factory.start(validate(table | {"method": "local"}))
    assert local.federation.clients[0].validation is not None and len(local.federation.clients[0].validation) == 40


@pytest.mark.long
def test_a_choice_on_the_edge_of_its_grid_is_named(tmp_path, noise):
    """Also for errors, of which the lowest is chosen; not where the setting allows nothing further."""
    grid = ("--methods", "local,fedavg", "--grid", "lr=1e-5,1e-4,1e-3", "--grid", "momentum=0", "--grid", "rounds=1")
    file = small(tmp_path / "x.toml", "line")
    result = perfed("tune", file, "plan.threads=1", *grid, "--out", tmp_path / "out")
    assert result.code == 2 and "give one method" in result.err
    grid = grid[:-2]
    result = perfed("tune", file, "plan.threads=1", *grid, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    points = json.loads((tmp_path / "out" / "grid.json").read_text())
    for method in ("local", "fedavg"):
        mine = [point for point in points if point["method"] == method]
        assert [point["mean"] for point in mine] == sorted((p["mean"] for p in mine), reverse=True)
        assert mine[-1]["mean"] > 0 and mine[-1]["metric"] == "mse"
        note = f"lr = 1e-3 is the largest value of the grid (validation mse {mine[-1]['mean']:.4g}); try larger ones"
        assert mine[-1]["notes"] == [note] and f"{display_name(method)}: {note}" in result.said
    chosen = read((tmp_path / "out" / "chosen.toml").read_text(), "chosen.toml")
    assert chosen.built_method.lr == 1e-3


@pytest.mark.parametrize(
    ("tried", "best", "said"),
    [
        ("lr=1e-3,1e-2,1e-1", "lr=1e-2", ""),
        ("lr=1e-3,1e-2,1e-1", "lr=1e-3", "lr = 1e-3 is the smallest value of the grid"),
        ("lr=1e-1,1e-3", "lr=1e-1", "lr = 1e-1 is the largest value of the grid"),
        ("lr=1e-2", "lr=1e-2", ""),
        ("lr=0,1e-2", "lr=0", ""),  # nothing is below it
        ("batch_size=1,10", "batch_size=1", ""),
        ("batch_size=2,10", "batch_size=2", "batch_size = 2 is the smallest value of the grid"),
        ("momentum=0.5,0.9", "momentum=0.9", "momentum = 0.9 is the largest value of the grid"),
        ("optimizer=adam,sgd", "optimizer=sgd", ""),
    ],
)
def test_edges_are_those_of_the_grid_not_of_what_is_allowed(tmp_path, scored, tried, best, said):
    key, _, value = best.partition("=")
    scored["is_best"] = lambda experiment: getattr(experiment.built_method, key) == parse_value(value)
    search = Search.from_grid(ComparisonSpec(find_experiment(EXPERIMENT), ["local"], [0]), [tried])
    choice = Study.create(tmp_path / "out", search).choose()["local"]
    assert choice.settings == [best] and len(choice.notes) == bool(said)
    assert all(note.startswith(f"{said} (validation accuracy 92.8 %); try ") for note in choice.notes)


@pytest.mark.long
def test_data_are_read_once_for_all_points_that_have_them(tmp_path, forgotten):
    """Tables of many sites take longer to read than a run to train."""
    asked = []

    @catalogue.dataset("counted")
    def counted(seed: int, data_dir: Path | None, *, clients: int = 20) -> Federation:
        """Digits, and how often they were asked for."""
        asked.append((seed, clients))
        return load("digits", {"clients": clients}, seed=seed)

    plan = {"engine": "stacked", "threads": 1}
    table = {"rounds": 1, "data": {"name": "counted"}, "model": {"head": "linear"}, "plan": plan}
    search = Search.from_grid(ComparisonSpec(table, ["local", "fedavg"], [3]), ["lr=1e-3,1e-2"])
    tuned = Study.create(tmp_path / "a", search)
    asked.clear()
    tuned.choose()
    assert asked == [(3, 20)]
    search = Search.from_grid(ComparisonSpec(table, ["local"], [3]), ["clients=20,30", "lr=1e-3,1e-2"])
    tuned = Study.create(tmp_path / "b", search)
    asked.clear()
    tuned.choose()
    assert asked == [(3, 20), (3, 30)]


@pytest.mark.long
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


@pytest.mark.long
def test_an_interrupted_search_goes_on_where_it_was(tmp_path, monkeypatch):
    whole = perfed("tune", EXPERIMENT, *TINY, *GRID, "plan.threads=1", "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    begun = []
    start = factory.start

    def interrupted(experiment: Any, **options: Any) -> Any:
        begun.append(experiment.to_toml())
        if len(begun) == 4:
            raise KeyboardInterrupt
        return start(experiment, **options)

    monkeypatch.setattr(factory, "start", interrupted)
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
    assert broken.code == 0, broken.err  # its points are trained again
    assert (tmp_path / "cut" / "grid.json").read_text() == (tmp_path / "whole" / "grid.json").read_text()


@pytest.mark.long
def test_what_was_chosen_is_for_the_methods_that_were_tried(tmp_path):
    grid = ("--methods", "local", "--grid", "lr=1e-3,1e-2")
    assert perfed("tune", EXPERIMENT, *TINY, *grid, "--out", tmp_path / "out").code == 0
    assert read((tmp_path / "out" / "chosen.toml").read_text(), "chosen.toml").method == "local"
    refused = perfed("tune", EXPERIMENT, *TINY, "--methods", "local", "--grid", "seed=1,2", "--out", tmp_path / "no")
    assert refused.code == 2 and "--methods and --seeds" in refused.err
    report = perfed("report", tmp_path / "out")
    assert report.code == 2 and "so a search (perfed tune)" in report.err


@pytest.mark.long
def test_baselines_have_as_many_tries_as_the_grid_has_points(tmp_path):
    assert perfed("tune", EXPERIMENT, *TINY, "rounds=1", *GRID, "--out", tmp_path / "out").code == 0
    chosen = tmp_path / "out" / "chosen.toml"
    assert read(chosen.read_text(), "chosen.toml").baseline_tries == 4
    names = "local,sklearn:logistic,sklearn:random-forest"
    done = perfed("compare", chosen, "--methods", names, "rounds=1", "--out", tmp_path / "made")
    assert done.code == 0, done.err
    for name, setting in (("logistic", "C"), ("random-forest", "min_samples_leaf")):
        notes = json.loads((tmp_path / "made" / f"sklearn.{name}" / "seed-0" / "summary.json").read_text())["notes"]
        assert any(f"{setting} chosen on a quarter of the training samples, 4 tries: " in note for note in notes)
    refused = perfed("compare", EXPERIMENT, *TINY, "baseline_tries=0", "--methods", names, "--out", tmp_path / "no")
    assert refused.code == 2 and "baseline_tries" in refused.err


@pytest.mark.long
def test_a_grid_over_the_model_goes_to_the_methods_own_model(tmp_path):
    grid = ("--methods", "local", "--grid", "model.embedding.out=3,5", "--grid", "rounds=1,2")
    result = perfed("tune", EXPERIMENT, *TINY, *grid, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    tried = json.loads((tmp_path / "out" / "grid.json").read_text())
    best = dict(item.split("=") for item in max(tried, key=lambda point: point["mean"])["settings"])
    chosen = tomllib.loads((tmp_path / "out" / "chosen.toml").read_text())
    assert chosen["rounds"] == int(best["rounds"])
    assert chosen["methods"]["local"]["model"]["embedding"]["out"] == int(best["model.embedding.out"])
    assert chosen["model"]["embedding"]["out"] == 64
