"""Accuracy of honest clients beside dishonest ones, with each kind of aggregation.

    python benchmarks/robust.py [SEEDS]

Twenty clients have 200 pictures of Fashion-MNIST each, 80 % of them of four classes. In every round all of them train.
A share of the clients, 0, 10 or 30 %, is dishonest in one of two ways. "sign": such a client trains as all do, and
sends the server's model moved by -10 times its change. "labels": it trains on wrong labels, 9 - y in place of y. The
score is the mean test accuracy of the honest clients' models after the last round; it is missing where training
diverged. ``docs/results/robust.json`` keeps the scores; runs that are in it are not repeated. Needs ``PERFED_DATA``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field
from usage import usage

from perfed import Evaluation, Federation, Model, Reply, Run, build_method, linear, load, mlp
from perfed.aggregation import Aggregation
from perfed.errors import ClientsDiverged
from perfed.method.extension import Extension
from perfed.training.cohort import Cohort
from perfed.training.plan import Plan

RESULTS = Path(__file__).parent.parent / "docs/results/robust.json"
CLIENTS, ROUNDS, SEEDS = 20, 30, 5
DATA = {"partition": "dominant", "clients": CLIENTS, "samples": 200, "test_samples": 200, "overlap": "test"}
DATA |= {"uniform": 20.0}
TRAINING = {"optimizer": "sgd", "lr": 0.1, "batch_size": 20, "local_epochs": 1}
METHODS = ("fedavg", "fedrep", "ditto")
KINDS = {
    "mean": Aggregation(),
    "median": Aggregation(kind="median"),
    "trimmed-mean": Aggregation(kind="trimmed-mean", trim=0.3),
    "norm-bound": Aggregation(kind="norm-bound", bound=0.5),
}
DISHONEST = (("none", 0), ("sign", 2), ("sign", 6), ("labels", 2), ("labels", 6))
"""The attacks, with how many of the clients are dishonest."""


class SignFlip(Extension):
    """Makes clients send the server's model moved by ``-scale`` times their change."""

    name: ClassVar[str] = "sign-flip"

    clients: tuple[str, ...] = Field((), description="ids of the dishonest clients")
    scale: float = Field(10.0, description="how much longer than the change it is")

    def outgoing(self, cohort: Cohort, reply: Reply) -> Reply:
        """Return the reply in which the dishonest clients' changes are flipped and scaled."""
        shared = {name: tensor.clone() for name, tensor in reply["shared"].items()}
        for row, client in enumerate(cohort.ids):
            if client in self.clients:
                for name, tensor in shared.items():
                    before = cohort.delivered["shared"][name][row]
                    tensor[row] = before - self.scale * (tensor[row] - before)
        return Reply({**reply, "shared": shared})


def choose_dishonest(ids: list[str], count: int, seed: int) -> tuple[str, ...]:
    """Return the ids of ``count`` dishonest clients; fewer are among more of the same seed."""
    return tuple(sorted(np.random.default_rng(seed).permutation(ids)[:count].tolist()))


def flip_labels(federation: Federation, clients: tuple[str, ...]) -> Federation:
    """Return the federation in which the training labels y of ``clients`` are 9 - y."""
    flipped = (
        replace(client, train=replace(client.train, y=9 - client.train.y)) if client.id in clients else client
        for client in federation
    )
    return replace(federation, clients=tuple(flipped))


def measure_accuracy(method: str, kind: str, attack: str, count: int, federation: Federation, seed: int) -> float:
    """Return the mean test accuracy of the honest clients after the last round, in percent."""
    dishonest = choose_dishonest(federation.ids, count, seed)
    if attack == "labels":
        federation = flip_labels(federation, dishonest)
    built = build_method(method, TRAINING)
    if attack == "sign":
        built = built.model_copy(update={"extensions": (*built.extensions, SignFlip(clients=dishonest))})
    run = Run(
        federation,
        built,
        Model(body=mlp((64,)), head=linear(10)),
        rounds=ROUNDS,
        seed=seed,
        evaluation=Evaluation(every=ROUNDS),
        plan=Plan(engine="stacked", threads=1),
        aggregation=KINDS[kind],
    )
    run.execute()
    honest = [client for client in federation.ids if client not in dishonest]
    metrics = run.server.evaluate("test", honest, ROUNDS)
    return round(100 * float(np.mean([values["accuracy"] for values in metrics.values()])), 3)


def main() -> None:
    """Run what is not in the file yet, seed by seed."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    scores: dict[str, list[float | None]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in range(seeds):
        federation = load("fashion-mnist", DATA, seed=seed)
        for method, (attack, count), kind in product(METHODS, DISHONEST, KINDS):
            values = scores.setdefault(f"{method}, {kind}, {attack} {100 * count // CLIENTS} %", [])
            if len(values) > seed:
                continue
            began = time.perf_counter()
            try:
                values.append(measure_accuracy(method, kind, attack, count, federation, seed))
            except ClientsDiverged:
                values.append(None)
            RESULTS.write_text(json.dumps(scores, indent=1) + "\n")
            print(seed, method, kind, attack, count, values[-1], f"{time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
