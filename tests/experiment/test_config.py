"""Experiments as TOML: what is shipped, how settings are changed, and what every mistake says."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import torch
from torch import nn

from perfed.datasets import catalogue, describe, load
from perfed.errors import PerfedError
from perfed.experiment import config
from perfed.experiment.build import build_stage
from perfed.experiment.config import experiment_names, find_experiment, read, validate
from perfed.experiment.overrides import find_setting_paths, override, parse_value
from perfed.experiment.start import start
from perfed.method import registry
from perfed.method.registry import method_names
from perfed.methods.build import build_method
from perfed.methods.extensions.proximal import Proximal
from perfed.methods.fedavg import FedAvg
from perfed.methods.flic.anchors import Anchors
from perfed.training.plan import Path, PlanSettings

SMALL = """
method = "flic-class"
rounds = 2
[data]
name = "toy-noisy-features"
clients = 3
[model]
embedding = { kind = "mlp", hidden = [4], out = 3 }
head = "linear"
"""


def small(*assignments: str, methods: tuple[str, ...] = ("flic-class",)) -> dict[str, Any]:
    table = find_experiment("flic-toy-noisy")
    return override(table, assignments, methods)


def tiny_head(shape: tuple[int, ...], width: int = 2) -> nn.Module:
    """A stage of a user's own."""
    return nn.Linear(shape[0], width)


def not_a_module(shape: tuple[int, ...]) -> str:
    return "a module, honestly"


# Shipped experiments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", experiment_names())
def test_shipped_experiments_are_valid_for_every_method_and_round_trip(name):
    experiment = validate(find_experiment(name))
    assert experiment.description
    again = read(experiment.to_toml(), "config.toml")
    assert again == experiment
    assert again.to_toml() == experiment.to_toml()
    for method in method_names():
        validate({**find_experiment(name), "method": method})


def test_a_recorded_plan_round_trips():
    paths = {"fit head": {"chunk": 8, "threads": 1}}
    table = small("plan.engine=auto") | {"plan": {"engine": "auto", "chunk": 0, "threads": 2, "paths": paths}}
    experiment = read(validate(table).to_toml(), "config.toml")
    assert experiment.plan.build().to_dict() == table["plan"]


def test_what_was_given_is_written_as_it_was_given():
    """The same keys and values in the same order, whatever the types of the tables say."""
    plan = '[plan]\nthreads = 2\nengine = "stacked"\n'
    training = "[training]\nmomentum = 0\nlr = 1\n"
    model = '[model]\nhead = "linear"\n\n[model.embedding]\nout = 4\nkind = "mlp"\nhidden = [\n    3,\n]\n'
    data = '[data]\nclients = 3\nname = "toy-noisy-features"\nvalidation_fraction = 0\n'
    text = f'method = "local"\nrounds = 1\n{plan}{training}{model}{data}'
    written = read(text, "x.toml").to_toml()
    assert all(table in written for table in (plan, training, model, data)), written
    absent = {**tomllib.loads(text), "model": {"head": "linear", "body": None}}
    assert '[model]\nhead = "linear"\n\n' in validate(absent).to_toml()


def test_tables_are_what_they_describe():
    experiment = validate(small("clients=3", "validation_fraction=0.5", "plan.threads=1"))
    given = {"clients": 3, "validation_fraction": 0.5}
    own = {key: value for key, value in small()["data"].items() if key != "name"}
    defaults = {option.name: option.default for option in describe("toy-noisy-features").options}
    assert experiment.data.options == defaults | own | given
    loaded = load("toy-noisy-features", own | given, seed=7)
    assert experiment.data.load(7).fingerprint == loaded.fingerprint
    assert experiment.plan == PlanSettings(threads=1)
    first, second = experiment.plan.build(), experiment.plan.build()
    first.paths["forward"] = Path(1, 1)
    assert not second.paths and not experiment.plan.paths  # a plan's choices are its own


def test_methods_are_made_and_options_checked_once(monkeypatch):
    """From the table to the run: what validation has made is what runs."""
    made, checked = [], []
    build, check = config.build_method, catalogue.check_options
    monkeypatch.setattr(config, "build_method", lambda name, *given: made.append(name) or build(name, *given))
    monkeypatch.setattr(catalogue, "check_options", lambda name, given: checked.append(name) or check(name, given))
    experiment = validate(small("clients=3", "methods.local.lr=0.5"))
    run = start(experiment)
    assert len(made) == len(set(made)) and {"flic-class", "local"} <= {*made} and checked == ["toy-noisy-features"]
    assert run.server.method is experiment.built_method


# Values and keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("[0, 5]", [0, 5]),
        ("{head = 0.1}", {"head": 0.1}),
        ('"3"', "3"),
        ("flic-hl", "flic-hl"),
        ("samples", "samples"),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_values_are_toml_or_else_text(text, value):
    found = parse_value(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "places"),
    [
        ("rounds", [("rounds",)]),
        ("data.clients", [("data", "clients")]),
        ("clients", [("data", "clients")]),
        ("rate", [("participation", "rate")]),
        ("split", [("evaluation", "split")]),
        ("lr", [("training", "lr")]),
        ("lr.head", [("training", "lr", "head")]),
        ("lambda1", [("methods", "flic-class", "lambda1"), ("methods", "flic-hl", "lambda1")]),
        ("body_epochs", [("methods", m, "body_epochs") for m in ("flic-class", "flic-hl", "hetfedrep")]),
        ("methods.flic-hl.lambda1", [("methods", "flic-hl", "lambda1")]),
        ("model.embedding.out", [("model", "embedding", "out")]),
    ],
)
def test_where_a_key_belongs(key, places):
    table = {"rounds": 1, "data": {"name": "toy-noisy-features"}, "model": {}}
    assert find_setting_paths(table, key, ["flic-class", "flic-hl", "hetfedrep"]) == places


def test_a_training_setting_reaches_methods_with_a_value_of_their_own():
    table = small("methods.local.lr=0.5", "lr=0.25", methods=("local", "fedrep"))
    assert table["training"]["lr"] == 0.25
    assert table["methods"]["local"]["lr"] == 0.25
    assert "fedrep" not in table["methods"]


def test_a_training_setting_reaches_the_table_of_a_method_of_ones_own_under_a_policy(forgotten):
    registry.register("avg")(FedAvg)
    table = {"methods": {"tests:avg": {"lr": 0.5}}}
    assert find_setting_paths(table, "lr", ["avg+deadline"]) == [("training", "lr"), ("methods", "tests:avg", "lr")]


def test_added_terms_bring_their_settings():
    table = small('extensions=["proximal"]', "mu=0.5", methods=("hetfedrep",))
    method = validate({**table, "method": "hetfedrep"}).built_method
    assert [type(extension) for extension in method.extensions] == [Proximal]
    assert method.extensions[0].mu == 0.5


def test_overriding_does_not_change_the_table_and_the_last_value_wins():
    table = find_experiment("flic-toy-noisy")
    before = find_experiment("flic-toy-noisy")
    assert override(table, ["rounds=7", "clients=9", "rounds=8"], [])["rounds"] == 8
    assert table == before


def test_an_ambiguous_key_lists_the_places(forgotten):
    @catalogue.dataset("clash")
    def clash(seed: int, data_dir: object, *, rate: int = 1) -> Any:
        """Has an option that participation has too."""

    with pytest.raises(PerfedError, match=r"'rate' is ambiguous; write one of: data\.rate, participation\.rate"):
        override({"data": {"name": "clash"}}, ["rate=1"], [])
    toy = {"data": {"name": "toy-noisy-features"}}
    with pytest.raises(PerfedError, match="'covariance' is ambiguous") as refused:
        override(toy, ["covariance=full"], ["flic-class", "flic-hl"])
    offered = str(refused.value).rpartition(": ")[2].split(", ")
    assert offered == ["data.covariance", "methods.flic-class.covariance", "methods.flic-hl.covariance"]
    assert override(toy, [f"{offered[1]}=full"], ["flic-class"])["methods"]["flic-class"]["covariance"] == "full"


# Methods, extensions and stages -----------------------------------------------------------------------------------


def test_settings_are_split_between_the_method_and_its_terms():
    method = build_method("flic-hl", {"lambda1": 0.5, "body_epochs": 3, "lr": 0.1}, {"lr": 0.2, "batch_size": 7})
    (anchors,) = method.extensions
    assert isinstance(anchors, Anchors)
    assert anchors.lambda1 == 0.5
    assert (method.body_epochs, method.lr, method.batch_size) == (3, 0.1, 7)


def test_a_preset_of_a_stage_says_what_it_needs():
    with pytest.raises(PerfedError, match=r"model\.body\.out: is needed for kind 'linear'"):
        build_stage("model.body", "linear", 3)
    assert build_stage("model.head", "linear", 3) is not None  # a head has as many outputs as there are classes


def test_a_method_may_have_a_model_of_its_own():
    table = small("methods.local.model.body=none", "model.body={kind='hidden-layer', out=5}")
    assert "body" in validate({**table, "method": "fedrep"}).build_model(3).factories
    assert "body" not in validate({**table, "method": "local"}).build_model(3).factories


def test_a_stage_may_be_a_function_of_the_users_own():
    table = small(f"model.head={{kind='{__name__}:tiny_head', width=4}}")
    head = validate(table).build_model(3).factories["head"]((6,))
    assert head(torch.zeros(1, 6)).shape == (1, 4)


def test_a_function_that_returns_no_module_says_so():
    model = validate(small(f"model.head={{kind='{__name__}:not_a_module'}}")).build_model(3)
    with pytest.raises(PerfedError, match=r"model\.head.*returned str, not a torch\.nn\.Module"):
        model.factories["head"]((6,))


# Mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("roundz=3", "unknown key 'roundz'; did you mean: rounds"),
        ("zzz=3", "unknown key 'zzz'; allowed: .*lambda1"),
        ("lamda1=3", "did you mean: lambda1"),
        ("lambda1", "'lambda1' is not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("rounds.a=3", "unknown key 'rounds.a': 'rounds' is a value"),
        ("rounds=0", r"rounds: .*greater than or equal to 1 \(given: 0\)"),
        ("rounds=2.5", r"rounds: .*integer.*\(given: 2.5\)"),
        ("rounds=many", "rounds: .*integer.*'many'"),
        ("seed=-1", "seed: .*greater than or equal to 0"),
        ("dtype=float16", "dtype: .*'float32' or 'float64'"),
        ("data=5", "data: .*dictionary"),
        ("data.name=nope", "no data set 'nope'; available: .*digits-views"),
        ("data.nope=3", "data.nope is not an option .*clients"),
        ("clients=0", "data.clients = 0 is not allowed; it must be: integer >= 1"),
        ("clients=-3", "data.clients = -3"),
        ("clients=true", "data.clients = True"),
        ("batch_size=0", r"batch_size: .*at least 1|batch_size: .*greater than or equal to 1"),
        ("local_epochs=-1", "local_epochs: .*greater than or equal to 0"),
        ("lr=-1", "lr: must be a finite number, at least 0"),
        ("lr=nan", "lr: input should be a finite number"),
        ("lr={neck = 1.0}", "'neck' is not a stage; allowed: embedding, body, head"),
        ("lambda1=-1", r"methods\.flic-class\.lambda1: .*\(given: -1\)"),
        ("optimizer=lion", "optimizer: .*'adam' or 'sgd'"),
        ("training.optimiser=sgd", r"unknown key 'training\.optimiser'; allowed: .*optimizer"),
        ("methods.zzz.lr=1", "unknown method 'zzz'; 'perfed list methods' lists"),
        ("methods.flic-hl.lamda1=1", r"unknown key 'methods\.flic-hl\.lamda1'; allowed: .*lambda1"),
        ("methods.flic-class=3", r"methods\.flic-class: .*dictionary"),
        ("methods.local.model=3", r"methods\.local\.model: must be a table \(given: 3\)"),
        ("methods.local.model={neck=3}", r"unknown key 'model\.neck'; allowed: embedding, body, head"),
        ("methods.flic-class.extensions=proximal", "extensions: must be a list of names"),
        (
            'extensions=["nope"]',
            "unknown extension 'nope'; allowed: anchors, clip, prototypes, proximal, server-optimizer, top-k",
        ),
        ("rate=0", "participation.rate: .*greater than 0"),
        ("rate=1.5", "participation.rate: .*less than or equal to 1"),
        ("participation.share=1", r"unknown key 'participation\.share'; allowed: policy, rate, last_round, fit_unused"),
        ("evaluation.evry=1", r"unknown key 'evaluation\.evry' \(did you mean 'every'\?\); allowed: every"),
        ("every=0", "evaluation.every: .*greater than or equal to 1"),
        ("split=tset", "evaluation.split: .*'test', 'validation' or 'train'"),
        ("snapshots.clients=-1", "snapshots.clients"),
        ("model.neck=linear", "unknown key 'model.neck'; allowed: embedding, body, head"),
        ("model.head=lineer", "model.head.kind: unknown 'lineer'; allowed: none, mlp"),
        ("model.head={out = 3}", "model.head: needs a kind, one of"),
        ("model.embedding.out=0", "model.embedding.out: must be an integer, at least 1"),
        ("model.embedding.hidden=[4, 0]", "model.embedding.hidden: must be a list of positive integers"),
        ("model.embedding.hiden=[4]", "unknown key 'model.embedding.hiden'; allowed: kind, hidden"),
        ("model.head={kind='nowhere.at.all:f'}", "model.head.kind: cannot load 'nowhere.at.all:f'"),
        ("model.head={kind='torch.nn:nope'}", "model.head.kind: cannot load"),
        (
            "model.head={kind='test_config:tiny_head', widht=3}",
            r"model\.head: tiny_head\(.*unexpected keyword .* 'widht'",
        ),
        ("plan.engine=warp", "plan.engine: .*'auto', 'stacked', 'sequential' or 'ray'"),
        ("plan.thread=1", r"unknown key 'plan\.thread' \(did you mean 'threads'\?\); allowed: engine"),
        ("plan.threads=two", "plan.threads: .*integer"),
        ("plan=3", r"plan: input should be a valid dictionary \(given: 3\)"),
        ("plan.paths=3", "plan.paths: .*dictionary"),
        ("plan.paths.forward={chunk=1, threads=0}", "plan.paths.forward.threads: .*greater than or equal to 1"),
        ("plan.paths.forward={chunk=1.0, threads=1}", r"plan.paths.forward.chunk: .*integer \(given: 1.0\)"),
        ("plan.paths.forward={chunk=1, threads=1, core=2}", "unknown key 'plan.paths.forward.core'"),
        ("nope.rounds=3", "unknown key 'nope'; "),
    ],
)
def test_every_mistake_names_the_key_and_what_is_allowed(assignment, says):
    with pytest.raises(PerfedError, match=says) as error:
        validate(small(assignment))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rounds = = 3", "x.toml: not valid TOML: .*line 1"),
        (SMALL.replace("rounds = 2", ""), "x.toml: rounds: field required"),
        (SMALL.replace("rounds", "roundz"), "x.toml: rounds: field required|unknown key 'roundz'"),
        (SMALL.replace('name = "toy-noisy-features"', ""), "x.toml: data: needs 'name', one of: adult, bci-common"),
        (SMALL.replace("flic-class", "flic"), "x.toml: unknown method 'flic'; did you mean: flic-class, flic-hl"),
        (SMALL + "[extra]\n", r"x.toml: unknown key 'extra'; allowed: name"),
    ],
)
def test_a_file_with_a_mistake_is_named(text, says):
    with pytest.raises(PerfedError, match=says):
        read(text, "x.toml")


def test_an_experiment_that_is_not_there(tmp_path):
    with pytest.raises(PerfedError, match=r"unknown experiment 'flic-digit-views' \(did you mean 'flic-digits-views'"):
        find_experiment("flic-digit-views")
    binary = tmp_path / "x.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PerfedError, match=r"x\.toml: cannot be read"):
        find_experiment(str(binary))


def test_an_experiment_may_extend_another(tmp_path):
    base = tmp_path / "base.toml"
    base.write_text('rounds = 3\n[data]\nname = "a"\nx = 1\n[training]\nlr = 0.1\n[training.deep]\na = 1\nb = 2\n')
    own = tmp_path / "own.toml"
    own.write_text(f'extends = "{base}"\nseed = 4\n[data]\nname = "b"\n[training.deep]\nb = 3\n')
    assert find_experiment(str(own)) == {
        "rounds": 3,
        "seed": 4,
        "data": {"name": "b"},  # as a whole
        "training": {"lr": 0.1, "deep": {"a": 1, "b": 3}},
    }
    base.write_text("[model]\nhead = 'linear'\nbody = { kind = 'mlp', hidden = [3], out = 2 }\n")
    own.write_text(f"extends = '{base}'\n[model]\nbody = {{ kind = 'lstm', width = 4 }}\n")
    assert find_experiment(str(own))["model"] == {"head": "linear", "body": {"kind": "lstm", "width": 4}}
    own.write_text(f"extends = '{base}'\n[model]\nbody = {{ out = 4 }}\n")
    assert find_experiment(str(own))["model"]["body"] == {"kind": "mlp", "hidden": [3], "out": 4}
    base.write_text(f'extends = "{own}"\n')
    with pytest.raises(PerfedError, match="extends itself"):
        find_experiment(str(own))
    own.write_text("extends = 3\n")
    with pytest.raises(PerfedError, match="extends must be the name of an experiment"):
        find_experiment(str(own))
    own.write_text('extends = "nothing-like-this"\n')
    with pytest.raises(PerfedError, match="unknown experiment 'nothing-like-this'"):
        find_experiment(str(own))
