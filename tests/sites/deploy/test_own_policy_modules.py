"""A deployment names the module of a user's own participation policy, so that sites can allow it."""

from __future__ import annotations

import sys

import pytest
from documents import blocks

from perfed import validate
from perfed.experiment.config import find_experiment
from perfed.sites.deploy.part import list_user_modules

NAME = "my_policies:large-clients"


@pytest.mark.parametrize(
    "changes",
    [
        {"participation": {"policy": NAME, "large-clients": {"samples": 30}}},
        {"method": f"fedavg+{NAME}", "participation": {NAME: {"samples": 30}}},
    ],
)
def test_a_deployment_names_the_module_of_a_policy(changes, tmp_path, monkeypatch, forgotten):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_policies.py").write_text(blocks("docs/howto/policy.md", "python")[0])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert list_user_modules(validate({**find_experiment("digits-label-skew"), **changes})) == ["my_policies"]
