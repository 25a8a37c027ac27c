"""Presets: a method and a policy under one name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from command_line import EXPERIMENT, TINY, perfed

from perfed.errors import PerfedError
from perfed.experiment.config import find_experiment, validate
from perfed.experiment.overrides import override
from perfed.method.registry import entry, method_names, preset_names
from perfed.methods.presets import split_method_name
from perfed.report import change_communication, load_runs


def experiment(*settings: str, method: str = "fedrep-srpfl"):
    return validate(override({**find_experiment(EXPERIMENT), "method": method}, settings, [method]))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_its_method_with_a_policy(name):
    preset, base = entry(name), entry(split_method_name(name)[0])
    assert preset.method is base.method and base.name in method_names() and not base.policy
    built = experiment(method=name)
    assert type(built.built_method) is base.method
    assert built.build_participation().policy == preset.policy != built.participation.policy
    assert built.model_copy(update={"method": base.name}).build_participation().policy == "uniform"


def test_settings_of_the_method_hold_for_the_preset_and_its_own_win():
    built = experiment("methods.fedrep={body_epochs=3, average='uniform'}", "methods.fedrep-srpfl={body_epochs=2}")
    assert built.built_method.model_dump(include={"body_epochs", "average"}) == {
        "body_epochs": 2,
        "average": "uniform",
    }
    assert experiment("body_epochs=4").built_method.body_epochs == 4
    changed = experiment("methods.fedrep={lr=0.5}", "lr=0.25")  # a bare key is for the method that runs
    assert changed.built_method.lr == 0.25


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
    with pytest.raises(PerfedError, match=r"participation\.policy = 'deadline': fedrep-srpfl has 'srpfl'"):
        experiment("participation.policy=deadline")
    assert experiment("participation.policy=srpfl").build_participation().policy == "srpfl"


def test_unknown_names_are_told_of_presets():
    with pytest.raises(PerfedError, match=r"unknown method 'fedrep-srpf'; did you mean: .*fedrep-srpfl"):
        experiment(method="fedrep-srpf")


def test_any_method_goes_with_any_policy_by_a_plus():
    built = experiment("srpfl={first=1}", method="fedpac+srpfl")
    assert type(built.built_method) is entry("fedpac").method
    assert split_method_name("fedpac+srpfl") == split_method_name("mine:fedpac+srpfl") == ("fedpac", "srpfl")
    assert built.build_participation().policy == "srpfl"
    for wrong in ("fedpac+fast", "fedpac+"):
        with pytest.raises(PerfedError, match=r"unknown method '.*'; '.*' is no policy; allowed: cyclic, .*uniform"):
            entry(wrong)
    for wrong, said in (
        ("quickest+srpfl", "'perfed list methods' lists all methods"),
        ("fedrep-srpfl+srpfl", "did you mean: fedrep-srpfl"),
        ("+srpfl", "'perfed list methods'"),
    ):
        with pytest.raises(PerfedError, match=rf"unknown method '.*'; {said}"):
            entry(wrong)


def test_of_an_unknown_name_the_nearest_are_said_and_no_others():
    for wrong, said in (("flic", "flic-class, flic-hl?"), ("fedpack", "fedpac"), ("fedaper", "fedper")):
        with pytest.raises(PerfedError) as error:
            entry(wrong)
        assert str(error.value).startswith(f"unknown method '{wrong}'; did you mean: ") and said in str(error.value)
        assert str(error.value).count(",") <= 2


@pytest.mark.long
def test_a_policy_for_all_and_one_of_a_methods_own_do_not_mix(tmp_path):
    """The method without a policy of its own would run under the same one, and the speed-up would be 1."""
    command = ("compare", EXPERIMENT, *TINY, "participation.policy=srpfl", "srpfl={first=1}", "--out", tmp_path / "out")
    refused = perfed(*command, "--methods", "fedrep,fedrep-srpfl")
    assert refused.code == 2 and refused.err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert "participation.policy = 'srpfl' is for all methods, and fedrep-srpfl brings a policy" in refused.err
    assert perfed(*command, "--methods", "hetfedrep,local").code == 0
    wrong = perfed("compare", EXPERIMENT, *TINY, "participation=5", "--methods", "fedrep,fedrep-srpfl")
    assert wrong.code == 2 and "participation" in wrong.err and wrong.err.count("\n") == 1


@pytest.mark.long
def test_a_report_with_another_cost_of_communication_is_that_of_runs_that_had_it(tmp_path):
    settings = ("clock.speeds=fixed", "rate=1.0", "srpfl={first=1, rule='fixed', stage_rounds=1}", "targets=[0.01]")
    names = "hetfedrep,hetfedrep+srpfl,flic-hl+srpfl"
    for cost in (2, 5):
        given = (f"clock.communication={cost}", "methods.flic-hl.realign_epochs=1")  # an exchange with everybody
        out = tmp_path / str(cost)
        result = perfed("compare", EXPERIMENT, *TINY, *settings, *given, "--methods", names, "--out", out)
        assert result.code == 0, result.err
    moved = load_runs([tmp_path / "2" / name / "seed-0" for name in names.split(",")])
    moved = [change_communication(run, 5.0) for run in moved]
    real = load_runs([tmp_path / "5" / name / "seed-0" for name in names.split(",")])
    for one, other in zip(moved, real, strict=True):
        assert [r.virtual_time for r in one.rounds] == pytest.approx([r.virtual_time for r in other.rounds])
        assert one.summary.virtual_time == pytest.approx(other.summary.virtual_time)
        assert one.summary.targets[0].virtual_time == pytest.approx(other.summary.targets[0].virtual_time)
        np.testing.assert_allclose(one.clients.seconds, other.clients.seconds)
    result = perfed("report", tmp_path / "2", "--communication", "5")
    assert result.code == 0 and "Speed-up" in result.out
    assert "5 s of communication" in (tmp_path / "2" / "report-communication-5.html").read_text()
    assert perfed("report", tmp_path / "2", "--communication", "-1").code == 2
    lines = (tmp_path / "2" / "hetfedrep" / "seed-0" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "2" / "hetfedrep" / "seed-0" / "rounds.jsonl").write_text(lines[0] + lines[2])
    damaged = perfed("report", tmp_path / "2", "--communication", "5")
    assert "left out" in damaged.out and "rounds.jsonl" in damaged.out.replace("\n", "")


@pytest.mark.long
def test_a_comparison_with_its_base_says_the_speed_up(tmp_path):
    settings = ("clock.speeds=fixed", "rate=1.0", "srpfl={first=1, rule='fixed', stage_rounds=1}", "targets=[0.01]")
    settings = (*settings, "methods.fedrep.placement={embedding='personal'}")
    given = ("compare", EXPERIMENT, *TINY, *settings, "--methods", "fedrep,fedrep-srpfl", "--out", tmp_path / "out")
    result = perfed(*given)
    assert result.code == 0, result.err
    assert "over FedRep" in result.said and "Speed-up" in result.out
    rows = {row["method"]: row for row in json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"]}
    assert rows["fedrep-srpfl"]["virtual_time"] < rows["fedrep"]["virtual_time"]
    used = [
        [len(json.loads(line)["participants"]) for line in (tmp_path / "out" / name / "seed-0" / "rounds.jsonl").open()]
        for name in ("fedrep", "fedrep-srpfl")
    ]
    assert used == [[4, 4, 4], [1, 2, 4]]
