"""pfl-research's side of the duel: FedAvg (``pip install pfl torch``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import problem as duel
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Network(duel.Chain):
    """The network with the loss and the (empty) metrics that pfl asks for."""

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        """Return the mean cross-entropy."""
        self.train()
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
        """Return nothing: only the end is evaluated."""
        return {}


class Laps(TrainingProcessCallback):  # type: ignore[misc]
    """Mark the clock at the end of each round."""

    def __init__(self) -> None:
        self.clock = duel.Clock()

    def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
        """Mark one round."""
        self.clock.lap()
        return False, Metrics()


def run(folder: Path) -> dict[str, Any]:
    """Train and return the clock's result."""
    problem, train, test, weights = duel.read(folder)
    rng = np.random.default_rng(problem.seed)
    made = duel.build(problem.model)
    network = Network(made.body, made.head)
    network.load_state_dict(weights)

    def client(i: int) -> Any:  # pfl does not shuffle rows; every other program does
        order = rng.permutation(problem.rows)
        return Dataset([torch.from_numpy(part[order]) for part in train[i]], user_id=str(i))

    data = FederatedDataset(client, get_user_sampler("minimize_reuse", list(range(problem.clients))))
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    laps = Laps()
    laps.clock = duel.Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(problem.rounds, problem.rounds + 1, problem.clients, 0),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(problem.batch, 1, problem.rate),
        callbacks=[laps],
        send_metrics_to_platform=False,
    )
    return laps.clock.result(duel.accuracy(lambda _: network, test))


if __name__ == "__main__":
    duel.main(run)
