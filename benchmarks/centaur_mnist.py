"""CENTAUR's curve in small: accuracy against epsilon on MNIST with private clients (Shen et al. 2023, section 6).

``python benchmarks/centaur_mnist.py [SEEDS]``

1,000 clients of 60 images of five digits; images are pooled to 14 x 14, and the model is 196-64-16-10 (theirs: 784-256-
128-16-10 on EMNIST digits, 40 rounds). All clients take part in each of 20 rounds, delta 1e-5, changes cut to .25.
FedRep shares the representation alone (CENTAUR), FedAvg-FT the whole model; Local sends nothing. Numbers are kept in
``docs/results/centaur-mnist.json``; what is there is not run again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.functional import avg_pool2d

from perfed import Federation, Model, Run, build_method, linear
from perfed.data.client import Client, Split
from perfed.datasets import load
from perfed.privacy.apply import privately
from perfed.privacy.settings import Privacy
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan

FILE = Path(__file__).parent.parent / "docs/results/centaur-mnist.json"
CLIENTS, ROUNDS, DELTA, CLIP = 1000, 20, 1e-5, 0.25
EPSILONS = (1.0, 2.0, 4.0, 8.0, None)
TRAINING = {"optimizer": "sgd", "lr": 0.2, "batch_size": 60}
# Epochs of the head and of the representation; of the whole model, and of fine-tuning it.
METHODS: dict[str, dict[str, Any]] = {
    "fedrep": {"local_epochs": 5, "body_epochs": 2},
    "fedavg-ft": {"local_epochs": 2, "finetune_epochs": 5},
    "local": {"local_epochs": 5},
}


def body(shape: tuple[int, ...]) -> nn.Module:
    """196 pixels to 16 numbers."""
    return nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())


def federation(seed: int) -> Federation:
    """All images of MNIST at clients of five digits."""
    options = {"partition": "pathological", "clients": CLIENTS, "samples": 0, "classes_per_client": 5}
    found = load("mnist", options, seed=seed)
    return Federation(tuple(Client(c.id, _pooled(c.train), _pooled(c.test)) for c in found), num_classes=10)


def _pooled(split: Split | None) -> Split:
    assert split is not None
    return Split(avg_pool2d(split.x, 2).flatten(1), split.y)


def accuracy(name: str, epsilon: float | None, seed: int, clients: Federation) -> float:
    """Mean accuracy over the clients after the last round."""
    method = build_method(name, TRAINING | METHODS[name])
    if epsilon is not None:
        settings = Privacy(unit="client", epsilon=epsilon, delta=DELTA, clip=CLIP)
        method = privately(method, settings, ROUNDS, [len(client.train) for client in clients], name=name).method
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
    """Run what is not kept yet, a seed at a time."""
    kept: dict[str, dict[str, list[float]]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        clients = federation(seed)
        for name in METHODS:
            for epsilon in (None,) if name == "local" else EPSILONS:
                found = kept.setdefault(name, {}).setdefault("none" if epsilon is None else f"{epsilon:g}", [])
                if len(found) > seed:
                    continue
                before = time.perf_counter()
                found.append(round(accuracy(name, epsilon, seed, clients), 6))
                FILE.write_text(json.dumps(kept, indent=1) + "\n")
                print(f"{seed} {name} {epsilon}: {found[-1]:.4f} ({time.perf_counter() - before:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
