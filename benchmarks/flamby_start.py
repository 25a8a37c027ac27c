"""How much of FLamby's Fed-TCGA-BRCA the initial model decides: its protocol in plain numpy, without perfed's engine.

``python benchmarks/flamby_start.py`` trains FedAdam and FedAdagrad from the five initial models of FLamby's seeds
(torch's generator with 42 to 46, then a linear layer 39 -> 1), three times each, and from 30 others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perfed.data.federation import Federation
from perfed.datasets import load
from perfed.engine.scores import c_index

Array = NDArray[Any]
ROUNDS, STEPS, BATCH, LR = 5, 100, 8, 0.01
THEIRS, OTHERS = range(42, 47), range(1000, 1030)
# Method -> step of the server, and whether v forgets.
SERVERS = {"fedadam": (0.1, True), "fedadagrad": (1.0, False)}


def initial(seed: int) -> Array:
    """The weights, then the bias, of FLamby's linear layer."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(39, 1)
    return np.append(layer.weight.detach().numpy(), layer.bias.item()).astype(np.float64)


def gradient(w: Array, x: Array, y: Array) -> Array:
    """Of the Cox loss of one mini-batch, the mean over its samples."""
    order = np.argsort(-y[:, 0], kind="stable")
    x, event = x[order], y[order, 1]
    h = x @ w
    risk = np.exp(h - h.max())
    mean = (risk[:, None] * x).cumsum(0) / risk.cumsum()[:, None]
    return np.asarray(((mean - x) * event[:, None]).sum(0) / len(x))


def batches(count: int, draw: np.random.Generator) -> Iterator[Array]:
    """Rows of mini-batches, shuffle after shuffle."""
    while True:
        order = draw.permutation(count)
        yield from (order[at : at + BATCH] for at in range(0, count, BATCH))


def trained(w: Array, federation: Federation, method: str, draw: np.random.Generator) -> float:
    """Mean of the regions' C-indices after FLamby's rounds."""
    rate, forgets = SERVERS[method]
    data = [(_inputs(client.train.x), client.train.y.numpy().astype(np.float64)) for client in federation]
    loaders = [batches(len(x), draw) for x, _ in data]
    sizes = np.array([len(x) for x, _ in data], np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for _ in range(ROUNDS):
        changes = []
        for (x, y), loader in zip(data, loaders, strict=True):
            own = w.copy()
            for _ in range(STEPS):
                rows = next(loader)
                own -= LR * gradient(own, x[rows], y[rows])
            changes.append(own - w)
        delta = sizes @ np.array(changes) / sizes.sum()
        m = 0.9 * m + 0.1 * delta
        v = 0.999 * v + 0.001 * delta**2 if forgets else v + delta**2
        w = w + rate * m / (np.sqrt(v) + 1e-8)
    tests = [client.test for client in federation if client.test is not None]
    return float(np.mean([c_index(part.y.numpy(), (_inputs(part.x) @ w)[:, None]) for part in tests]))


def _inputs(x: torch.Tensor) -> Array:
    return np.append(x.numpy().astype(np.float64), np.ones((len(x), 1)), axis=1)


def main() -> None:
    """Print means and deviations."""
    federation = load("flamby-tcga", {}, seed=0)
    for method in SERVERS:
        ways = {
            "FLamby's five initial models, three times": [(seed, again) for seed in THEIRS for again in range(3)],
            "30 other initial models": [(seed, 0) for seed in OTHERS],
        }
        for name, starts in ways.items():
            draws = (np.random.default_rng([seed, again]) for seed, again in starts)
            found = [
                trained(initial(seed), federation, method, draw) for (seed, _), draw in zip(starts, draws, strict=True)
            ]
            print(f"{method}, {name}: {np.mean(found):.3f} ± {np.std(found, ddof=1):.3f}", flush=True)


if __name__ == "__main__":
    main()
