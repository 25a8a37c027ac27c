"""The problems of the duel: the same arrays, first weights, epochs and rates for every program.

A problem is a folder: ``problem.json`` (model, method, epochs, rates) and ``arrays.npz`` (rows of all clients, whose
they are, and the first weights). Only numpy and torch are needed to read one, so that every program can.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Arrays = tuple[np.ndarray, np.ndarray]  # x (rows, *shape) float32, y (rows,) int64

SHAPES = {"mlp-small": (15,), "mlp-large": (784,), "cnn": (1, 28, 28)}
ROWS = {"mlp-small": 60, "mlp-large": 60, "cnn": 40}
"""Of a client."""
CLASSES = {"mlp-small": 20, "mlp-large": 10, "cnn": 10}


@dataclass(frozen=True)
class Problem:
    """What every program trains.

    Attributes:
        model: ``"mlp-small"`` (15-64-64-20), ``"mlp-large"`` (784-256-128-64-10) or ``"cnn"`` (16-32, then 128).
        method: ``"fedavg"``, ``"fedrep"`` (``head_epochs`` of the head, then one of the body) or ``"ditto"``
            (one epoch of the shared model, one of the client's own with the pull ``pull``).
        rows, batch: of one client; every client is in every round.
        rate: of plain SGD.
        seed: of rows and first weights.
        order: seed of perfed's mini-batches.
    """

    model: str
    method: str
    clients: int = 100
    rows: int = 60
    batch: int = 10
    head_epochs: int = 5
    rate: float = 0.05
    pull: float = 0.1
    rounds: int = 10
    seed: int = 0
    order: int = 0


class Chain(nn.Module):
    """A body and a head; the same attributes in all programs that train torch modules."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (rows, classes)."""
        out: Tensor = self.head(self.body(x))
        return out


def build(model: str) -> Chain:
    """Return the network of a problem, with torch's own first weights."""
    if model == "cnn":
        return Chain(
            nn.Sequential(
                nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(512, 128), nn.ReLU(),
            ),
            nn.Linear(128, 10),
        )  # fmt: skip
    sizes = {"mlp-small": (15, 64, 64), "mlp-large": (784, 256, 128, 64)}[model]
    layers: list[nn.Module] = []
    for i, size in enumerate(sizes[1:]):
        layers += [nn.Linear(sizes[i], size), nn.ReLU()]
    return Chain(nn.Sequential(*layers), nn.Linear(sizes[-1], CLASSES[model]))


# ------------------------------------------------------------------------------------------ making and reading


def make(problem: Problem, folder: Path, data_dir: Path) -> None:
    """Write the folder of a problem: every client holds four classes, its test rows are of the same four."""
    rng = np.random.default_rng(problem.seed)
    x, y = _rows(problem, rng, data_dir)
    each = {c: rng.permutation(np.flatnonzero(y == c)) for c in range(CLASSES[problem.model])}
    used = dict.fromkeys(each, 0)
    train, test = [], []
    for _ in range(problem.clients):
        for c in rng.choice(len(each), 4, replace=False):
            start, number = used[c], problem.rows // 4
            used[c] += 2 * number
            taken = np.take(each[c], np.arange(start, start + 2 * number), mode="wrap")
            train.append(taken[:number])
            test.append(taken[number:])
    torch.manual_seed(problem.seed)
    weights = {f"w:{k}": v.numpy() for k, v in build(problem.model).state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    rows = {"train": np.concatenate(train), "test": np.concatenate(test)}
    arrays = {f"x_{k}": x[v] for k, v in rows.items()} | {f"y_{k}": y[v] for k, v in rows.items()}
    np.savez(folder / "arrays.npz", **arrays, **weights)
    (folder / "problem.json").write_text(json.dumps(asdict(problem)))


def _rows(problem: Problem, rng: np.random.Generator, data_dir: Path) -> Arrays:
    if problem.model == "mlp-small":
        means = rng.normal(size=(20, 15)) * 0.8
        y = np.repeat(np.arange(20), 4000)
        return (means[y] + rng.normal(size=(len(y), 15))).astype(np.float32), y
    with np.load(data_dir / "mnist.npz") as file:
        x, y = file["x_train"].astype(np.float32) / 255, file["y_train"].astype(np.int64)
    return x.reshape(len(x), *SHAPES[problem.model]), y


def read(folder: Path) -> tuple[Problem, list[Arrays], list[Arrays], dict[str, Tensor]]:
    """Return the problem, the training and the test rows of each client, and the first weights."""
    problem = Problem(**json.loads((folder / "problem.json").read_text()))
    with np.load(folder / "arrays.npz") as file:
        arrays = {k: file[k] for k in file.files}

    def split(kind: str) -> list[Arrays]:
        parts = np.split(arrays[f"x_{kind}"], problem.clients), np.split(arrays[f"y_{kind}"], problem.clients)
        return [(np.ascontiguousarray(a), b) for a, b in zip(*parts, strict=True)]

    weights = {k[2:]: torch.from_numpy(v) for k, v in arrays.items() if k.startswith("w:")}
    return problem, split("train"), split("test"), weights


# ------------------------------------------------------------------------------------------ measuring


class Clock:
    """The wall and the processor's time of each round, children included; the look at the clock is in neither."""

    def __init__(self) -> None:
        self.laps: list[tuple[float, float]] = []
        self._used = self._processor()
        self._began = time.perf_counter()

    def _processor(self) -> float:
        import psutil

        own = psutil.Process()
        times = [p.cpu_times() for p in (own, *own.children(recursive=True)) if p.is_running()]
        return float(sum(t.user + t.system for t in times))

    def lap(self) -> None:
        """Mark the end of a round, and the beginning of the next."""
        wall = time.perf_counter() - self._began
        used = self._processor()
        self.laps.append((wall, used - self._used))
        self._used = used
        self._began = time.perf_counter()

    def result(self, accuracy: float) -> dict[str, Any]:
        """Return seconds of the first round, medians of the others, seconds of all rounds, and the accuracy."""
        laps = np.array(self.laps)
        wall, cpu = np.median(laps[1:], axis=0)
        return {
            "first_round": laps[0, 0], "round": wall, "processor": cpu, "all_rounds": laps[:, 0].sum(),
            "accuracy": accuracy,
        }  # fmt: skip


def accuracy(models: Callable[[int], nn.Module], test: list[Arrays]) -> float:
    """Return the mean over clients of the accuracy of ``models(client)`` on that client's test rows."""
    scores = []
    with torch.no_grad():
        for i, (x, y) in enumerate(test):
            model = models(i)
            model.eval()
            scores.append(float((model(torch.from_numpy(x)).argmax(1).numpy() == y).mean()))
    return float(np.mean(scores))


def main(run: Callable[[Path], dict[str, Any]]) -> None:
    """Run one program on the problem of a folder and write ``result.json`` there (the driver reads it)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.write_text(json.dumps(run(arguments.folder)))
