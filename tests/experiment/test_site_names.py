"""Sites whose names would mean something in a path: every method trains, is written and is resumed with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.experiment.comparison import federated
from perfed.experiment.config import find_experiment, validate
from perfed.experiment.overrides import override
from perfed.experiment.start import resume, start
from perfed.method.registry import known_names
from perfed.report.run_results import load_clients
from perfed.testing.runs import measure_difference

SMALL = ["rounds=2", "local_epochs=1", "clients=4", "samples=8", "test_samples=8", "plan.engine=stacked"]
SMALL += ["plan.threads=1", "checkpoint_seconds=0"]
NAMES = ["Kiel/Nord", "Kiel//empty", "~1", "a\nb"]


@pytest.mark.long
@pytest.mark.every_method("method")
@pytest.mark.parametrize("method", known_names())
def test_a_run_is_resumed_to_the_same_bits_whatever_its_sites_are_called(tmp_path, method):
    table = override(find_experiment("digits-all-methods"), SMALL, federated([method]))
    experiment = validate({**table, "method": method})
    federation = experiment.data.load(0, None)
    renamed = [replace(client, id=name) for client, name in zip(federation, NAMES, strict=True)]
    federation = replace(federation, clients=tuple(renamed))
    whole = start(experiment.model_copy(update={"rounds": 3}), federation=federation)
    whole.execute()
    start(experiment, federation=federation, out=tmp_path / "run").execute()
    resumed = resume(tmp_path / "run", federation=federation, rounds=3)
    resumed.execute()
    assert measure_difference(resumed.server, whole.server) == 0
    clients = load_clients(tmp_path / "run" / "clients.csv", {})
    assert clients is not None and sorted(clients.ids) == sorted(NAMES)


@pytest.mark.parametrize("name", ["", "__metadata__"])
def test_names_that_no_file_can_hold_are_refused_before_training(name):
    arrays = {"x_train": np.eye(4), "y_train": np.array([0, 1, 0, 1])}
    with pytest.raises(PerfedError, match="client id"):
        Federation.from_arrays({name: arrays, "b": arrays})
