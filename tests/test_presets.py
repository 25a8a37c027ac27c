"""Presets: a method and a policy under one name."""

from __future__ import annotations

import json

import pytest
from command_line import EXPERIMENT, TINY, perfed

from perfed.config import find_experiment, validate
from perfed.errors import PerfedError
from perfed.method import entry, method_names, preset_names
from perfed.overrides import override
from perfed.presets import base_of


def experiment(*settings: str, method: str = "fedrep-srpfl"):
    return validate(override({**find_experiment(EXPERIMENT), "method": method}, settings, [method]))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_its_method_with_a_policy(name):
    preset, base = entry(name), entry(base_of(name))
    assert preset.method is base.method and base.name in method_names() and not base.policy
    built = experiment(method=name)
    assert type(built.build_method()) is base.method
    assert built.build_participation().policy == preset.policy != built.participation.policy
    assert built.model_copy(update={"method": base.name}).build_participation().policy == "uniform"


def test_settings_of_the_method_hold_for_the_preset_and_its_own_win():
    built = experiment("methods.fedrep={body_epochs=3, average='uniform'}", "methods.fedrep-srpfl={body_epochs=2}")
    assert built.build_method().model_dump(include={"body_epochs", "average"}) == {
        "body_epochs": 2,
        "average": "uniform",
    }
    assert experiment("body_epochs=4").build_method().body_epochs == 4
    changed = experiment("methods.fedrep={lr=0.5}", "lr=0.25")  # a bare key is for the method that runs
    assert changed.build_method().lr == 0.25


def test_a_stage_of_the_methods_own_model_holds_for_the_preset():
    table = {**find_experiment(EXPERIMENT), "method": "lg-srpfl"}
    table["methods"] = {"lg-fedavg": {"model": {"head": {"kind": "mlp", "hidden": [7]}}}}
    head = validate(table).build_model(3).build((16,)).head
    assert next(head.parameters()).shape[0] == 7


def test_a_table_of_the_preset_is_merged_into_that_of_its_method():
    table = {**find_experiment(EXPERIMENT), "method": "lg-srpfl"}
    table["methods"] = {
        "lg-fedavg": {"model": {"body": {"kind": "hidden-layer", "out": 9}}},
        "lg-srpfl": {"model": {"head": "linear"}},
    }
    assert validate(table).build_model(3).build((16,)).body is not None


def test_a_preset_refuses_another_policy():
    with pytest.raises(PerfedError, match=r"participation\.policy = 'deadline': fedrep-srpfl is under 'srpfl'"):
        experiment("participation.policy=deadline")
    assert experiment("participation.policy=srpfl").build_participation().policy == "srpfl"


def test_unknown_names_are_told_of_presets():
    with pytest.raises(PerfedError, match=r"unknown method 'fedrep-fast'; allowed: .*, fedrep-srpfl, flanp"):
        experiment(method="fedrep-fast")


def test_a_comparison_with_its_base_says_the_speed_up(tmp_path):
    settings = ("clock.speeds=fixed", "rate=1.0", "srpfl={first=1, rule='fixed', stage_rounds=1}", "targets=[0.01]")
    settings = (*settings, "methods.fedrep.placement={embedding='personal'}")
    given = ("compare", EXPERIMENT, *TINY, *settings, "--methods", "fedrep,fedrep-srpfl", "--out", tmp_path / "out")
    result = perfed(*given)
    assert result.code == 0, result.err
    assert "over fedrep" in result.out and "Speed-up at 1 %" in result.out
    rows = {row["method"]: row for row in json.loads((tmp_path / "out" / "comparison.json").read_text())}
    assert rows["fedrep-srpfl"]["virtual_time"] < rows["fedrep"]["virtual_time"]
    used = [
        [len(json.loads(line)["participants"]) for line in (tmp_path / "out" / name / "seed-0" / "rounds.jsonl").open()]
        for name in ("fedrep", "fedrep-srpfl")
    ]
    assert used == [[4, 4, 4], [1, 2, 4]]
