"""Names are accepted in any case and as papers print them; what is written has them as perfed knows them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from command_line import perfed as command
from command_line import run_tiny

import perfed
from perfed.datasets import dataset_names, describe
from perfed.errors import PerfedError
from perfed.experiment.config import experiment_names, find_experiment, validate
from perfed.experiment.overrides import override
from perfed.experiment.planned import parse_names
from perfed.experiment.published import Leaderboard
from perfed.experiment.study import Study
from perfed.method.extension import extension_class, extension_names
from perfed.method.registry import entry, known_names, method_id
from perfed.methods.titles import display_name

DIGITS = ("clients=3", "samples=12", "test_samples=8", "rounds=1", "local_epochs=1", "plan.engine=stacked")
LEADERBOARDS = [
    (name, 1, (), (row,)) for name, row in (("FLamby-Heart", "ditto, Tuned"), ("flamby-heart", "Ditto, tuned"))
]
TABLE = {
    "method": "fedrep",
    "rounds": 2,
    "data": {"name": "digits", "clients": 4},
    "model": {"body": {"kind": "mlp", "hidden": [8], "out": 4}, "head": "linear"},
    "methods": {"fedrep": {"lr": 0.5, "extensions": ["proximal"], "mu": 0.1}},
    "participation": {"policy": "srpfl"},
}


@pytest.mark.parametrize("name", [name for name in known_names() if entry(name).module.startswith("perfed.")])
def test_a_method_is_known_in_any_case_and_as_it_is_printed(name):
    for written in (name.upper(), name.title(), display_name(name), display_name(name).lower()):
        assert method_id(written) == name and entry(written).name == name


def test_no_two_display_names_are_alike():
    titles = [display_name(name).casefold() for name in known_names()]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("local", "Local"),
        ("fedavg-ft", "FedAvg-FT"),
        ("fedpac", "FedPAC"),
        ("flic-hl", "FLIC-HL"),
        ("knnper", "kNN-Per"),
        ("fedrep-srpfl", "FedRep-SRPFL"),
        ("fedpac+srpfl", "FedPAC+SRPFL"),
        ("fedpac+deadline", "FedPAC+deadline"),
        ("sklearn:logistic", "logistic regression per client"),
        ("pooled:svc", "SVC (data brought together)"),
        ("sklearn:sklearn.dummy.DummyClassifier", "sklearn.dummy.DummyClassifier per client"),
        ("nobody:knows", "nobody:knows"),
        ("nobody:fedpac", "nobody:fedpac"),
    ],
)
def test_display_names(name, printed):
    assert display_name(name) == printed


def test_a_policy_a_term_a_data_set_and_an_experiment_in_any_case():
    assert method_id("FedPAC+SRPFL") == "fedpac+srpfl" and entry("FedPAC+SRPFL").policy == "srpfl"
    assert perfed.Participation(policy="FLANP") == perfed.Participation(policy="flanp")
    assert [extension_class(name.title()) for name in extension_names()] == [
        extension_class(name) for name in extension_names()
    ]
    assert [describe(name.upper()) for name in dataset_names()] == [describe(name) for name in dataset_names()]
    assert perfed.load("Digits", {"clients": 9}, seed=0).name == "digits"
    for name in experiment_names():
        assert find_experiment(name.upper()) == find_experiment(name)


def test_python_builds_what_it_builds_by_the_name_in_small_letters():
    assert perfed.build_method("FedPAC", {"lr": 0.03}) == perfed.build_method("fedpac", {"lr": 0.03})
    extensions = [perfed.build_method("FedAvg", {"extensions": [name]}).extensions for name in ("Proximal", "proximal")]
    assert extensions[0] == extensions[1]


def test_a_table_in_another_spelling_is_the_same_experiment():
    other = {
        **TABLE,
        "method": "FedRep",
        "data": {"name": "Digits", "clients": 4},
        "methods": {"FEDREP": {"lr": 0.5, "extensions": ["Proximal"], "mu": 0.1}},
        "participation": {"policy": "SRPFL"},
    }
    assert validate(other).to_toml() == validate(TABLE).to_toml()


def test_what_is_said_last_of_a_method_counts_however_it_is_spelt():
    """The tables of both spellings are one, of which a later key wins."""
    twice = {**TABLE, "methods": {"FedRep": {"lr": 0.1, "body_epochs": 3}, "fedrep": {"lr": 0.2}}}
    assert validate(twice).methods == {"fedrep": {"lr": 0.2, "body_epochs": 3}}
    assert override(TABLE, ["methods.FedRep.lr=0.7"], ["fedrep"])["methods"]["fedrep"]["lr"] == 0.7
    in_capitals = {**TABLE, "methods": {"FedRep": {"lr": 0.5}}}
    changed = override(in_capitals, ["lr=0.7"], ["fedrep"])
    assert validate(changed).built_method.lr == 0.7


def test_unknown_names_are_said_as_before():
    with pytest.raises(PerfedError, match=r"unknown method 'FedPAK'; did you mean: fedpac"):
        entry("FedPAK")
    with pytest.raises(PerfedError, match=r"unknown method 'flick'"):
        validate({**TABLE, "methods": {"flick": {"lr": 1.0}}})
    with pytest.raises(PerfedError, match=r"there is no data set 'Digit'"):
        validate({**TABLE, "data": {"name": "Digit"}})


def test_baselines_in_any_case_and_names_that_are_twice_there():
    assert parse_names("Local,sklearn:SVC,sklearn:sklearn.svm.SVC", baselines=True) == [
        "local",
        "sklearn:svc",
        "sklearn:sklearn.svm.SVC",
    ]
    with pytest.raises(PerfedError, match="named twice"):
        parse_names("FedPAC,fedpac")


def test_a_method_of_ones_own(forgotten, tmp_path, monkeypatch):
    text = """
import perfed

@perfed.register("My-FedX", title="FedX")
class Mine(perfed.Method):
    "Mine."
"""
    (tmp_path / "mine_spelt.py").write_text(text)
    (tmp_path / "mine_taken.py").write_text(text.replace('"My-FedX", title="FedX"', '"FedPAC"'))
    monkeypatch.syspath_prepend(tmp_path)
    assert display_name("mine_spelt:My-FedX") == "mine_spelt:My-FedX"  # nobody has imported it
    for written in ("My-FedX", "my-fedx", "FEDX"):
        assert method_id(f"mine_spelt:{written}") == "mine_spelt:My-FedX"
    assert display_name("mine_spelt:My-FedX") == "FedX"
    table = {**TABLE, "method": "mine_spelt:my-fedx", "methods": {"mine_spelt:fedx": {"lr": 0.25}}}
    made = validate(table)
    assert (made.method, list(made.methods)) == ("mine_spelt:My-FedX", ["mine_spelt:My-FedX"])
    assert made.built_method.lr == 0.25
    with pytest.raises(PerfedError, match=r"method 'FedPAC' is registered twice, by 'perfed\.methods\.fedpac"):
        method_id("mine_taken:FedPAC")


def files(directory: Path) -> set[str]:
    return {str(file.relative_to(directory)) for file in directory.rglob("*")}


@pytest.mark.long
def test_a_comparison_leaves_the_same_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out, experiment, methods in (
        ("printed", "Digits-Label-Skew", "Local,FedAvg-FT,sklearn:Logistic"),
        ("known", "digits-label-skew", "local,fedavg-ft,sklearn:logistic"),
    ):
        done = command("compare", experiment, *DIGITS, "--methods", methods, "--out", out)
        assert done.code == 0, done.err
    assert files(tmp_path / "printed") == files(tmp_path / "known")
    texts = [(tmp_path / out / "comparisons.toml").read_text() for out in ("printed", "known")]
    assert texts[0] == texts[1]
    runs = [json.loads((tmp_path / out / "comparison.json").read_text())["runs"] for out in ("printed", "known")]
    assert [run["method"] for run in runs[0]] == ["local", "fedavg-ft", "sklearn:logistic"]
    assert [run["metrics"] for run in runs[0]] == [run["metrics"] for run in runs[1]]
    reports = [command("report", "known", "--reference", name) for name in ("FedAvg-FT", "fedavg-ft")]
    assert reports[0].code == 0 and reports[0].out == reports[1].out
    assert "Difference to FedAvg-FT" in reports[0].said
    assert "there is no finished run" in command("report", "known", "--reference", "FedPAC").err


@pytest.mark.long
def test_a_run_and_a_campaign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_tiny(tmp_path / "run", "--method", "FedRep-tSNE", "method=Local", "--method", "LOCAL")
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["method"] == "local"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["method"] == "local"
    text = '[[comparison]]\nexperiment = "Digits-Label-Skew"\nmethods = ["Local", "FedAvg"]\n'
    (tmp_path / "both.toml").write_text(text)
    done = command("campaign", "both.toml", *DIGITS, "--out", "campaign")
    assert done.code == 0, done.err
    (made,) = (tmp_path / "campaign").glob("*/comparisons.toml")
    assert tomllib.loads(made.read_text())["methods"] == ["local", "fedavg"]


def test_python_s_comparison():
    clients = perfed.load("Digits", {"clients": 9}, seed=0)
    methods = {"Local": {}, "FedAvg": {"lr": 0.25}}
    made = perfed.compare(clients, methods, model={"head": "linear"}, rounds=1, seeds=[0])
    assert made.methods == ("local", "fedavg")
    assert made.run("FedAvg", 0).name == "fedavg" and made.run("LOCAL", 0).name == "local"
    config = tomllib.loads((made.path / "fedavg" / "seed-0" / "config.toml").read_text())
    assert config["methods"] == {"fedavg": {"lr": 0.25}}
    with pytest.raises(PerfedError, match="there is no run of 'FedPAC'"):
        made.run("FedPAC", 0)


def test_a_leaderboard_and_its_rows(tmp_path):
    specs = [Leaderboard.from_names(*names) for names in LEADERBOARDS]
    studies = [Study.create(tmp_path, spec) for spec in specs]  # the second goes on with the first
    assert studies[0] == studies[1] == Study.read(tmp_path)
    assert (specs[0].name, specs[0].rows) == ("flamby-heart", ("Ditto, tuned",))


@pytest.mark.parametrize(
    ("written", "known"),
    [
        (("list", "Extensions"), ("list", "extensions")),
        (("show", "FedPAC"), ("show", "fedpac")),
        (("show", "kNN-Per"), ("show", "knnper")),
        (("show", "Digits"), ("show", "digits")),
        (("show", "FLamby-Heart", "--json"), ("show", "flamby-heart", "--json")),
    ],
)
def test_what_is_listed_and_shown(written, known):
    found, expected = command(*written), command(*known)
    assert found.code == 0 and found.out == expected.out
