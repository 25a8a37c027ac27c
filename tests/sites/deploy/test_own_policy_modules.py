"""A deployment names the module of a user's own participation policy, so that sites can allow it."""

from __future__ import annotations

import sys

import pytest

from perfed import validate
from perfed.experiment.config import find_experiment
from perfed.participation.policy import POLICIES
from perfed.sites.deploy.part import own_modules

POLICY = """
from pydantic import Field
from perfed.participation import Policy, PolicySettings, register_policy


class Settings(PolicySettings):
    skip: int = Field(ge=0, description="row of the client that never takes part")


@register_policy("skipping", settings=Settings, title="Skipping")
class Skipping(Policy[Settings]):
    def select(self, round_, ask):
        return ask(self.draw_invited(round_))
"""


@pytest.mark.parametrize(
    "changes",
    [
        {"participation": {"policy": "own_policy:skipping", "skipping": {"skip": 1}}},
        {"method": "fedavg+own_policy:skipping", "participation": {"own_policy:skipping": {"skip": 1}}},
    ],
)
def test_a_deployment_names_the_module_of_a_policy(changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_policy.py").write_text(POLICY)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    sys.modules.pop("own_policy", None)
    try:
        assert own_modules(validate({**find_experiment("digits-label-skew"), **changes})) == ["own_policy"]
    finally:
        sys.modules.pop("own_policy", None)
        POLICIES.pop("skipping", None)
