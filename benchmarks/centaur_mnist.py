"""CENTAUR's curve in small: accuracy against epsilon on MNIST with private clients (Shen et al. 2023, section 6).

``python benchmarks/centaur_mnist.py [SEEDS]``

1,000 clients of 60 images of five digits; images are pooled to 14 x 14, and the model is 196-64-16-10 (theirs: 784-256-
128-16-10 on EMNIST digits). All clients take part in each of 40 rounds, delta 1e-5, changes cut to .25. FedRep shares
the representation alone (CENTAUR), FedAvg-FT the whole model; Local sends nothing. Numbers are kept in
``docs/results/centaur-mnist.json``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from perfed import Federation, Model, Run, build_method, linear
from perfed.datasets import load
from perfed.privacy.apply import privately
from perfed.privacy.settings import Privacy
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan

FILE = Path(__file__).parent.parent / "docs/results/centaur-mnist.json"
CLIENTS, ROUNDS, DELTA, CLIP = 1000, 40, 1e-5, 0.25
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, None)
TRAINING = {"optimizer": "sgd", "lr": 0.1, "batch_size": 20}
# Epochs of the head and of the representation; of the whole model, and of fine-tuning it.
METHODS: dict[str, dict[str, Any]] = {
    "fedrep": {"local_epochs": 5, "body_epochs": 2},
    "fedavg-ft": {"local_epochs": 2, "finetune_epochs": 5},
    "local": {"local_epochs": 2},
}


def body(shape: tuple[int, ...]) -> nn.Module:
    """Images ``(1, 28, 28)`` to 16 numbers."""
    layers = (nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), *layers)


def federation(seed: int) -> Federation:
    """All images of MNIST at clients of five digits."""
    options = {"partition": "pathological", "clients": CLIENTS, "samples": 0, "classes_per_client": 5}
    return load("mnist", options, seed=seed)


def accuracy(name: str, epsilon: float | None, seed: int, clients: Federation, **changed: Any) -> float:
    """Mean accuracy over the clients after the last round."""
    method = build_method(name, TRAINING | METHODS[name] | changed)
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


def main(say: Callable[..., None] = print) -> None:
    """Run all, and keep the accuracies."""
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in METHODS}
    for seed in seeds:
        clients = federation(seed)
        for name in METHODS:
            for epsilon in (None,) if name == "local" else EPSILONS:
                before = time.perf_counter()
                score = accuracy(name, epsilon, seed, clients)
                found[name].setdefault("inf" if epsilon is None else f"{epsilon:g}", []).append(score)
                say(f"{seed} {name} {epsilon}: {score:.4f} ({time.perf_counter() - before:.0f} s)", flush=True)
    for name, scores in found.items():
        say(name, {epsilon: round(float(np.mean(of)), 4) for epsilon, of in scores.items()})
    if len(seeds) >= 3:
        kept = {"command": "python benchmarks/centaur_mnist.py", "accuracy": found}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
