"""One shipped experiment on which every method runs, whatever differs between its clients."""

import pytest

from perfed.experiment.comparison import ComparisonSpec, federated
from perfed.experiment.config import find_experiment
from perfed.experiment.overrides import override
from perfed.experiment.study import Study
from perfed.method.registry import known_names

SMALL = [
    "rounds=1",
    "local_epochs=1",
    "clients=4",
    "samples=8",
    "test_samples=8",
    "plan.engine=stacked",
    "plan.threads=1",
]


@pytest.mark.every_method("method")
@pytest.mark.parametrize("method", known_names())
def test_every_method_runs_on_it_without_a_further_setting(tmp_path, method):
    table = override(find_experiment("digits-all-methods"), SMALL, federated([method]))
    study = Study.create(tmp_path / "made", ComparisonSpec(table, [method], [0]))
    assert study.runs()("", method, 0).execute()["rounds"] == 1
