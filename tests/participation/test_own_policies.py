"""Policies in a file of the user's: one file is enough, wherever a policy may be named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import perfed
from test_policies import IDS, selection

from perfed import validate
from perfed.cli.complete import methods, several_methods, shown
from perfed.cli.index import index
from perfed.errors import PerfedError
from perfed.experiment.config import find_experiment, read
from perfed.method.registry import entry, method_id
from perfed.methods.presets import split_method_name
from perfed.methods.titles import display_name
from perfed.participation import (
    POLICIES,
    Participation,
    Policy,
    PolicySettings,
    policy_names,
    register_policy,
)

OWN = '''
"""A policy of the user's."""
from pydantic import Field
from perfed.participation import Policy, PolicySettings, register_policy, take_first


class Settings(PolicySettings):
    skip: int = Field(ge=0, description="row of the client that never takes part")


@register_policy("skipping", settings=Settings, title="Skipping")
class Skipping(Policy[Settings]):
    """One client is skipped in every second round."""

    def select(self, round_, ask):
        self.state["rounds"] = self.state.get("rounds", 0) + 1
        rows = self.draw_invited(round_)
        return take_first(ask(rows[rows != self.settings.skip] if self.state["rounds"] % 2 else rows))
'''
RUN = ("digits-label-skew", "data.clients=3", "rounds=4", "local_epochs=1", "plan.engine=stacked", "plan.threads=1")
EVERY_ROUND = ("evaluation.every=1", "last_round=sampled", "checkpoint_seconds=0")
SKIP = ("participation.skipping.skip=1",)


@pytest.fixture
def here(tmp_path, monkeypatch, forgotten) -> Path:
    """The working directory, with the user's file in it, which nobody has imported yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_policy.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return tmp_path


def participants(run: Path) -> list[list[str]]:
    return [json.loads(line)["participants"] for line in (run / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_run_with_it_is_recorded_and_read_again(here):
    command = ("run", *RUN, *EVERY_ROUND, "participation.policy=own_policy:skipping", *SKIP, "--out", "out")
    result = perfed(*command)
    assert result.code == 0, result.err
    used = participants(here / "out")
    assert [len(ids) for ids in used] == [2, 3, 2, 3] and used[0] == used[2]
    recorded = read((here / "out" / "config.toml").read_text(), "config.toml").participation
    assert recorded.policy == "own_policy:skipping" and recorded.policy_settings.skip == 1
    for file in ("rounds.jsonl", "checkpoint"):
        assert (here / "out" / file).exists()


@pytest.mark.long
def test_a_directory_that_names_it_runs_no_code_without_trust(here):
    settings = ("participation.policy=own_policy:skipping", *SKIP)
    assert perfed("run", *RUN, *EVERY_ROUND, *settings, "--out", "whole").code == 0
    assert perfed("run", *RUN, *EVERY_ROUND, *settings, "rounds=1", "--out", "part").code == 0
    sys.modules.pop("own_policy", None)
    POLICIES.pop("skipping")
    refused = perfed("resume", "part", "rounds=4")
    assert refused.code == 2 and refused.err.count("\n") == 1, refused.err
    assert "'own_policy' is not imported: part names it, and its code would run; --trust imports it" in refused.err
    assert "own_policy" not in sys.modules
    trusted = perfed("resume", "part", "rounds=4", "--trust")
    assert trusted.code == 0, trusted.err
    assert participants(here / "part") == participants(here / "whole")
    summaries = [json.loads((here / run / "summary.json").read_text())["metrics"] for run in ("whole", "part")]
    assert summaries[0] == summaries[1]


@pytest.mark.long
def test_methods_are_compared_under_it(here):
    names = "fedavg,fedavg+own_policy:skipping"
    result = perfed("compare", *RUN, *EVERY_ROUND, *SKIP, "--methods", names, "--out", "out")
    assert result.code == 0, result.err
    assert (
        participants(next((here / "out").glob("*skipping*/seed-0")))[0] != participants(here / "out/fedavg/seed-0")[0]
    )
    assert "FedAvg+Skipping" in result.out
    shutil.rmtree(here / "out" / "fedavg")  # another process, in which nobody has imported the module, goes on
    sys.modules.pop("own_policy")
    POLICIES.pop("skipping")
    refused = perfed("resume", "out")
    assert refused.code == 2 and "'own_policy' is not imported: out names it" in refused.err
    assert perfed("resume", "out", "--trust").code == 0
    assert (here / "out/fedavg/seed-0/summary.json").exists()


@pytest.mark.long
def test_it_is_a_sweep_s_value(here):
    text = 'extends = "digits-label-skew"\nrounds = 1\n[participation."own_policy:skipping"]\nskip = 1\n'
    (here / "study.toml").write_text(text)
    values = "participation.policy=uniform,own_policy:skipping"
    result = perfed("sweep", "study.toml", values, "--methods", "fedavg", "--out", "out")
    assert result.code == 0, result.err


def test_names_of_methods_under_it(here):
    assert entry("FedAvg+own_policy:Skipping").policy == "own_policy:skipping"
    assert method_id("FedAvg+own_policy:Skipping") == "fedavg+own_policy:skipping" == method_id("fedavg+skipping")
    assert split_method_name("mine:avg+own_policy:skipping") == ("avg", "own_policy:skipping")
    assert display_name("fedavg+own_policy:skipping") == "FedAvg+Skipping"
    with pytest.raises(PerfedError, match=r"unknown method"):
        entry("fedrep-srpfl+own_policy:skipping")
    POLICIES.pop("skipping")
    assert display_name("fedavg+own_policy:skipping") == "FedAvg+own_policy:skipping"


def table(**participation) -> dict:
    return {**find_experiment("digits-label-skew"), "participation": participation}


@pytest.mark.parametrize("key", ["skipping", "own_policy:skipping"])
def test_its_table_has_either_name(here, key):
    made = validate(table(policy="own_policy:skipping", **{key: {"skip": 2}})).participation
    assert made.policy_settings.skip == 2
    assert made == Participation.model_validate(made.model_dump(exclude_none=True))


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (
            {"policy": "own_policy:skiping"},
            r"policy 'own_policy:skiping': 'own_policy' registers no 'skiping'; it has: sk",
        ),
        ({"policy": "no_policy:skipping"}, r"policy 'no_policy:skipping': cannot import 'no_policy'"),
        ({"policy": "own_policy:skipping"}, r"participation\.own_policy:skipping\.skip: field required"),
        ({"policy": "own_policy:skipping", "skipping": {"skip": -1}}, r"skipping\.skip: input should be greater"),
        (
            {"policy": "own_policy:skipping", "skipping": {"skip": 1, "skp": 1}},
            r"skp' \(did you mean 'skip'\?\); allowed: skip",
        ),
        (
            {"policy": "skipping"},
            r"participation\.policy = 'skipping': there is no such policy.*; allowed: cyclic, dead",
        ),
        ({"skipping": {"skip": 1}}, r"unknown key 'participation\.skipping'.*; allowed: policy, rate"),
    ],
)
def test_mistakes_are_one_line(here, participation, message):
    with pytest.raises(PerfedError, match=message) as error:
        validate(table(**participation))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["rate", "policy", "a+b", "a:b", "a.b", ""])
def test_a_policy_cannot_have_the_name_of_a_setting_or_a_sign_that_separates_names(name):
    with pytest.raises(PerfedError, match=rf"policy '{name.replace('+', '.')}': a name has no"):
        register_policy(name)(Policy)


def test_two_modules_cannot_register_one_name():
    class Mine(Policy[PolicySettings]):
        """Mine."""

    with pytest.raises(PerfedError, match=r"policy 'SRPFL' is registered twice"):
        register_policy("SRPFL")(Mine)


# All policies ----------------------------------------------------------------------------------------------------

NEEDED = {
    "deadline": {"deadline": {"seconds": 2.0}},
    "srpfl": {"srpfl": {"rule": "fixed", "stage_rounds": 2, "first": 2}},
    "flanp": {"flanp": {"rule": "fixed", "stage_rounds": 2, "first": 2}},
    "dropout": {"dropout": {"probability": 0.5}},
}


def settings_of(name: str, tmp_path: Path) -> dict:
    (tmp_path / "dropouts.csv").write_text("round,client\n1,c0\n4,c1\n")
    trace = {"dropout_trace": {"file": str(tmp_path / "dropouts.csv")}}
    return {"policy": name, **NEEDED.get(name, trace if name == "dropout_trace" else {})}


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_goes_on_from_its_state_and_uses_only_those_whom_it_asks(name, tmp_path):
    clock, policy = {"speeds": "dynamic"}, {**settings_of(name, tmp_path), "rate": 0.8}
    whole, choices = selection(policy, clock, rounds=8), []
    for round_ in range(1, 9):
        if round_ == 5:
            state = json.loads(json.dumps(whole.policy.state))
        choices.append(whole.choose(round_))
        whole.policy.observe(1.0, None, 10)
    assert all(set(choice.ids) <= set(choice.replied) <= set(IDS) for choice in choices)
    assert all(choice.ids == sorted(choice.ids) and np.isfinite(choice.seconds) for choice in choices)
    resumed = selection(policy, clock, rounds=8)
    resumed.policy.check_state(state)
    resumed.policy.state.clear()
    resumed.policy.state.update(state)
    for round_ in range(5, 9):
        assert resumed.choose(round_) == choices[round_ - 1]
        resumed.policy.observe(1.0, None, 10)


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_is_listed_shown_and_completed(name):
    (item,) = [item for item in index()["policies"] if item["name"] == name]
    summary = item["summary"].replace("``", "").partition(" (")[0]
    assert summary and f"{item['title']} {summary}" in perfed("list", "policies").said
    said = perfed("show", name).said
    assert "(policy): " in said and f'[participation] policy = "{name}"' in said
    assert all(f"{key} = " in said for key in item["settings"])
    assert (
        name in shown(name[:3]) and f"fedavg+{name}" in methods("fedavg+") and f"a,b+{name}" in several_methods("a,b+")
    )


def test_a_policy_of_one_s_own_is_shown(here):
    said = perfed("show", "own_policy:skipping").said
    assert "Skipping (policy): One client is skipped in every second round." in said and "skip = " in said
