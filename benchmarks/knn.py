"""kNN-Per's memory search: 20 clients with 600 remembered samples and 600 queries each, 128 features, 10 classes.

``python benchmarks/knn.py [--threads N] [--json FILE]`` prints the fastest of some runs of three ways: perfed's
batched search, scikit-learn's classifier with the same weights one client after another (brute force), and the whole
evaluation of the same clients by perfed (features of the memory and of the queries, search, softmax).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import limits
import numpy as np
import torch
from sklearn.neighbors import KNeighborsClassifier
from threadpoolctl import threadpool_limits

from perfed.data.federation import Federation
from perfed.engine.initial import Initialiser
from perfed.engine.server import Server
from perfed.methods.knnper import KNNPer, Memory
from perfed.model.chain import Model
from perfed.model.presets import linear, mlp
from perfed.participation.settings import Participation
from perfed.training.plan import Plan

CLIENTS, SAMPLES, QUERIES, WIDTH, CLASSES, NEIGHBOURS = 20, 600, 600, 128, 10, 10
ALLOWED = 1.0


def fastest(work: Callable[[], object], runs: int = 5) -> float:
    """Seconds of the fastest of ``runs``, after one that does not count."""
    work()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def search() -> tuple[Callable[[], torch.Tensor], Callable[[], np.ndarray]]:
    """The search of perfed and of scikit-learn on the same features: functions that return the votes."""
    features = torch.randn(CLIENTS, SAMPLES, WIDTH)
    labels = torch.randint(CLASSES, (CLIENTS, SAMPLES))
    queries = torch.randn(CLIENTS, QUERIES, WIDTH)
    memory = Memory(features, labels, torch.ones(CLIENTS, SAMPLES, dtype=torch.bool))
    similarity = KNNPer().similarity

    def one_by_one() -> np.ndarray:
        votes = []
        for x, y, asked in zip(features.numpy(), labels.numpy(), queries.numpy(), strict=True):
            knn = KNeighborsClassifier(NEIGHBOURS, weights=lambda d: np.exp(-d), algorithm="brute")
            votes.append(knn.fit(x, y).predict_proba(asked))
        return np.stack(votes)

    return lambda: memory.vote(queries, CLASSES, NEIGHBOURS, similarity), one_by_one


def evaluation() -> Callable[[], object]:
    """The evaluation of a whole federation, its images 784 numbers each."""
    generator = np.random.default_rng(0)
    clients = {
        f"{i:02d}": {
            f"{name}_{split}": values
            for split, count in (("train", SAMPLES), ("test", QUERIES))
            for name, values in (
                ("x", generator.normal(size=(count, 784)).astype(np.float32)),
                ("y", generator.integers(CLASSES, size=count)),
            )
        }
        for i in range(CLIENTS)
    }
    model = Model(body=mlp((), WIDTH, final_activation=True), head=linear(CLASSES))
    initialiser = Initialiser(KNNPer(neighbours=NEIGHBOURS), model, 0, torch.float32)
    federation = Federation.from_arrays(clients, num_classes=CLASSES)
    server = Server(federation, initialiser, Plan("stacked"), Participation(rate=1.0), 1)
    return lambda: server.evaluate("test")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: torch's)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    batched, one_by_one = search()
    with threadpool_limits(options.threads):
        difference = float(np.abs(batched().numpy() - one_by_one()).max())
        seconds = {
            "perfed, all clients together": fastest(batched),
            "scikit-learn, one by one": fastest(one_by_one),
            "perfed, evaluation of all clients": fastest(evaluation()),
        }
    print(f"{CLIENTS} clients x {SAMPLES} remembered x {QUERIES} queries, {WIDTH} features, {options.threads} threads")
    for name, value in seconds.items():
        print(f"{name:36}{value:8.3f} s")
    print(f"largest difference between the votes {difference:.1e}")
    print(f"the search: {limits.measure().share(*limits.counted(batched), seconds['perfed, all clients together'])}")
    verdict = "under" if seconds["perfed, all clients together"] < ALLOWED else "NOT UNDER"
    print(f"the search is {verdict} {ALLOWED:g} s")
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
