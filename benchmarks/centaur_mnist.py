"""CENTAUR's curve in small: accuracy against epsilon on MNIST with private clients (Shen et al. 2023, section 6).

``python benchmarks/centaur_mnist.py [SEEDS]``

The claim: where clients are many, hold few rows and few labels, a shared representation under personal heads (FedRep,
of which the representation alone is private and leaves) loses less to noise than a whole model (FedAvg-FT), and is
ahead of clients that train alone (Local). 2,000 clients of 35 images of five digits here, 30 of them for training, all
in each of 20 rounds, delta 1e-5. Images are pooled to 7 x 7, and the model is 49-32-16-10, so that a run takes half a
minute (theirs: 784-256-128-16-10, 40 rounds, presumably digits of EMNIST). Each method has six tries at epsilon
1, on another division of the images, scored on a fifth of the training rows; the best is used at every epsilon. A
client of CENTAUR fits its head to the last representation, as at the beginning of any round. Numbers are kept in
``docs/results/centaur-mnist.json``; what is there is not run again.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import avg_pool2d
from usage import usage

from perfed import Federation, Model, Run, linear
from perfed.data.client import Client, Split
from perfed.datasets import load
from perfed.method.disclosure import Disclosure
from perfed.method.method import Method
from perfed.methods.fedavg_ft import FedAvgFT
from perfed.methods.fedrep import FedRep
from perfed.methods.local import Local
from perfed.privacy.apply import make_private
from perfed.privacy.settings import Privacy
from perfed.run.settings import Evaluation
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan

FILE = Path(__file__).parent.parent / "docs/results/centaur-mnist.json"
CLIENTS, ROUNDS, DELTA, TUNED_AT, TUNED_ON = 2000, 20, 1e-5, 1.0, 100
EPSILONS = (0.5, 1.0, 4.0, None)


class Centaur(FedRep):
    """FedRep whose clients fit their heads to the representation that they are evaluated with."""

    disclosure: ClassVar[Disclosure | None] = FedRep.disclosure

    def personalise(self, cohort: Cohort, **payload: Any) -> None:
        """What a client does first in a round; nothing leaves."""
        cohort.load(payload["shared"])
        cohort.fit(self.head_parameters(cohort), epochs=self.local_epochs)


METHODS: dict[str, type[Method]] = {"centaur": Centaur, "fedavg-ft": FedAvgFT, "local": Local}
# Rates and norms to which changes are cut; epochs of head and representation, of the model and fine-tuning, of all.
TRIES: dict[str, list[tuple[float, float]]] = {
    "centaur": [*product((0.1, 0.3, 1.0), (0.5, 2.0))],
    "fedavg-ft": [*product((0.1, 0.3, 1.0), (0.5, 2.0))],
    "local": [(lr, 1.0) for lr in (0.03, 0.06, 0.1, 0.3, 0.6, 1.0)],
}
EPOCHS: dict[str, dict[str, int]] = {
    "centaur": {"local_epochs": 5, "body_epochs": 2},
    "fedavg-ft": {"local_epochs": 2, "finetune_epochs": 20},
    "local": {"local_epochs": 5},
}


def body(shape: tuple[int, ...]) -> nn.Module:
    """49 pixels to 16 numbers."""
    return nn.Sequential(nn.Linear(49, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())


def federation(seed: int, *, held_out: bool = False) -> Federation:
    """All images of MNIST at clients of five digits; ``held_out``: a fifth of the training rows are the test's."""
    options = {"partition": "pathological", "clients": CLIENTS, "samples": 0, "classes_per_client": 5}
    clients, draw = [], np.random.default_rng(seed)
    for client in load("mnist", options, seed=seed):
        train, test = _pooled(client.train), _pooled(client.test)
        if held_out:
            order = torch.from_numpy(draw.permutation(len(train)))
            rest, held = order[len(train) // 5 :], order[: len(train) // 5]
            train, test = Split(train.x[rest], train.y[rest]), Split(train.x[held], train.y[held])
        clients.append(Client(client.id, train, test))
    return Federation(tuple(clients), num_classes=10)


def _pooled(split: Split | None) -> Split:
    assert split is not None
    return Split(avg_pool2d(split.x, 4).flatten(1), split.y)


def accuracy(name: str, number: int, epsilon: float | None, seed: int, clients: Federation) -> float:
    """Mean accuracy over the clients after the last round, with the settings of try ``number``."""
    lr, clip = TRIES[name][number]
    method = METHODS[name].model_validate({"optimizer": "sgd", "lr": lr, "batch_size": 10, **EPOCHS[name]})
    if epsilon is not None:
        settings = Privacy(unit="client", epsilon=epsilon, delta=DELTA, clip=clip)
        method = make_private(method, settings, ROUNDS, [len(client.train) for client in clients], name=name).method
    run = Run(
        clients,
        method,
        Model(body=body, head=linear(10)),
        name=name,
        rounds=ROUNDS,
        seed=seed,
        evaluation=Evaluation(every=ROUNDS),
        plan=Plan("stacked", 0, threads=1),
    )
    return float(run.execute()["metrics"]["accuracy"]["mean"])


def main() -> None:
    """Try what was not tried yet, and run what is not kept yet, a seed at a time."""
    empty: dict[str, Any] = {"tries": {}, "accuracy": {}}
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else empty

    def add(found: list[float], *of: Any) -> None:
        before = time.perf_counter()
        found.append(round(accuracy(*of), 6))
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
        print(*of[:4], f"{found[-1]:.4f} ({time.perf_counter() - before:.0f} s)", flush=True)

    tuning, best = federation(TUNED_ON, held_out=True), {}
    for name, tries in TRIES.items():
        found = kept["tries"].setdefault(name, [])
        for number in range(len(found), len(tries)):
            add(found, name, number, None if name == "local" else TUNED_AT, TUNED_ON, tuning)
        best[name] = int(np.argmax(found))
    kept["chosen"] = {name: TRIES[name][number] for name, number in best.items()}
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
        clients = federation(seed)
        for name, number in best.items():
            for epsilon in (None,) if name == "local" else EPSILONS:
                found = (
                    kept["accuracy"].setdefault(name, {}).setdefault("none" if epsilon is None else f"{epsilon:g}", [])
                )
                if len(found) <= seed:
                    add(found, name, number, epsilon, seed, clients)


if __name__ == "__main__":
    usage(__doc__)
    main()
