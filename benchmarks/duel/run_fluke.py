"""fluke's side of the duel (``pip install fluke-fl``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import problem as duel
import torch

# fluke imports torchvision for data sets that are not used here; torchvision has no wheel for torch's CPU build.
for name in ("torchvision", "torchvision.transforms", "torchvision.datasets", "torchvision.models"):
    sys.modules[name] = MagicMock()

from fluke import DDict, FlukeENV
from fluke.algorithms.ditto import Ditto
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedrep import FedRep
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.nets import EncoderHeadNet
from fluke.utils import FederationObserver

ALGORITHMS = {"fedavg": FedAVG, "fedrep": FedRep, "ditto": Ditto}


class Laps(FederationObserver):  # type: ignore[misc]
    """Mark the clock at the end of each round."""

    def __init__(self) -> None:
        self.clock = duel.Clock()

    def end_round(self, round: int) -> None:
        """Mark one round."""
        self.clock.lap()


def own_models(algorithm: Any, model: torch.nn.Module) -> Any:
    """Return the algorithm with a copy of the model for each client; fluke gives all of them one object."""

    def client_class(self: Any) -> Callable[..., Any]:
        made = algorithm.get_client_class(self)
        return lambda **given: made(**{**given, "model": deepcopy(model)})

    return type(algorithm.__name__, (algorithm,), {"get_client_class": client_class})


def run(folder: Path) -> dict[str, Any]:
    """Train and return the clock's result."""
    problem, train, test, weights = duel.read(folder)
    FlukeENV().set_seed(problem.seed)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
    classes = duel.CLASSES[problem.model]
    loaders = [
        FastDataLoader(
            torch.from_numpy(x), torch.from_numpy(y), num_labels=classes, batch_size=problem.batch, shuffle=True
        )
        for x, y in train
    ]
    network = duel.build(problem.model)
    network.load_state_dict(weights)
    model = EncoderHeadNet(network.body, network.head)
    client = {"batch_size": problem.batch, "local_epochs": 1, "loss": "CrossEntropyLoss",
              "optimizer": {"name": "SGD", "lr": problem.rate},
              "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0}}  # fmt: skip
    if problem.method == "fedrep":
        client |= {"local_epochs": problem.head_epochs, "tau": 1}
    if problem.method == "ditto":
        client |= {"tau": 1, "lam": problem.pull, "model": model}
    algorithm = ALGORITHMS[problem.method]
    federation = (algorithm if problem.method == "fedavg" else own_models(algorithm, model))(
        problem.clients,
        DataSplitter(DummyDataContainer(loaders, [None] * len(loaders), None, classes)),
        DDict(client=client, server={"weighted": True}, model=network.body if problem.method == "fedrep" else model),
    )
    laps = Laps()
    federation.set_callbacks(laps)
    laps.clock = duel.Clock()
    federation.run(problem.rounds, 1.0, finalize=False)
    if problem.method == "fedavg":
        return laps.clock.result(duel.accuracy(lambda _: federation.server.model, test))
    own = [c.personalized_model if problem.method == "ditto" else c.model for c in federation.clients]
    return laps.clock.result(duel.accuracy(own.__getitem__, test))


if __name__ == "__main__":
    duel.main(run)
