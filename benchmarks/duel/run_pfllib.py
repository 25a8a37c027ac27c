"""PFLlib's side of the duel, where a checkout is given: the environment variable ``PFLLIB`` is its folder.

Its servers train as they are. Its clients read their rows from a file in each round; here they get them from memory.
Nothing is evaluated or written between rounds. Names and arguments are those of its commit 487a29e.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import problem as duel
import torch

if "PFLLIB" not in os.environ:
    sys.exit("PFLLIB is not set: the folder of a checkout of PFLlib")
sys.path.insert(0, str(Path(os.environ["PFLLIB"]) / "system"))

SERVERS = {"fedavg": "FedAvg", "fedrep": "FedRep", "ditto": "Ditto"}


def server_class(base: Any) -> Any:
    """Return PFLlib's server without evaluations and files, which marks its clock at the end of each round."""

    class Timed(base):  # type: ignore[misc]
        clock: duel.Clock

        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            self.clock.lap()

        def evaluate(self, *_: Any) -> None:
            self.rs_test_acc.append(0.0)  # train() prints the best one at its end

        def evaluate_personalized(self, *_: Any) -> None:
            """Do nothing."""

        def save_results(self) -> None:
            """Do nothing."""

        save_global_model = save_results

    return Timed


def arguments(problem: duel.Problem, model: torch.nn.Module) -> SimpleNamespace:
    """Return what PFLlib's command line would: all clients in every round, none slow, nothing but training."""
    return SimpleNamespace(
        model=model, device="cpu", dataset="duel", algorithm=problem.method, goal="duel", save_folder_name="duel",
        num_classes=duel.CLASSES[problem.model], num_clients=problem.clients, join_ratio=1.0, random_join_ratio=False,
        batch_size=problem.batch, local_epochs=1, local_learning_rate=problem.rate, mu=problem.pull,
        plocal_epochs=problem.head_epochs if problem.method == "fedrep" else 1,
        learning_rate_decay=False, learning_rate_decay_gamma=1.0,
        global_rounds=problem.rounds - 1,  # it trains one more
        client_drop_rate=0.0, train_slow_rate=0.0, send_slow_rate=0.0, time_select=False, time_threthold=1e9,
        eval_gap=1, auto_break=False, top_cnt=100, dlg_eval=False, dlg_gap=1, batch_num_per_client=1,
        num_new_clients=0, fine_tuning_epoch_new=0, few_shot=0, privacy=False, dp_sigma=0.0,
    )  # fmt: skip


def run(folder: Path) -> dict[str, Any]:
    """Train and return the clock's result."""
    problem, train, test, weights = duel.read(folder)
    random.seed(problem.seed)
    np.random.seed(problem.seed)
    torch.manual_seed(problem.seed)
    rows = {
        kind: [list(zip(torch.from_numpy(x), torch.from_numpy(y), strict=True)) for x, y in of]
        for kind, of in ((True, train), (False, test))
    }

    def read_client_data(dataset: str, client: int, is_train: bool = True, **_: Any) -> list[Any]:
        return rows[is_train][client]

    module = importlib.import_module(f"flcore.servers.server{problem.method.removeprefix('fed')}")
    for name in ("flcore.servers.serverbase", "flcore.clients.clientbase"):
        importlib.import_module(name).read_client_data = read_client_data  # type: ignore[attr-defined]
    network = duel.build(problem.model)
    network.load_state_dict(weights)
    split = importlib.import_module("flcore.trainmodel.models").BaseHeadSplit(network.body, network.head)
    server = server_class(getattr(module, SERVERS[problem.method]))(arguments(problem, split), 0)
    clock = server.clock = duel.Clock()
    server.train()
    server.send_models()
    if problem.method == "fedavg":
        return clock.result(duel.accuracy(lambda _: server.global_model, test))
    own = [client.model_per if problem.method == "ditto" else client.model for client in server.clients]
    return clock.result(duel.accuracy(own.__getitem__, test))


if __name__ == "__main__":
    duel.main(run)
