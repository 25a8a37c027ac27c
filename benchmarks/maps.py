"""When does it pay to federate? Gains over the best model per site, as a map of what data there are.

``python benchmarks/maps.py flic-digits|flic-mnist|flic-others|skew`` trains, for every cell of a map, its methods and
two scikit-learn models per client, and keeps their accuracies in ``docs/results/maps/``; a cell that is kept is not
trained again. ``python docs/build_docs.py --render`` writes the tables of ``docs/when.md`` from them.

Everybody gets the same: five strengths (weight decay of networks; C of logistic regression and of an SVC),
chosen on a quarter of the training rows, mean over two seeds, then five seeds on all training rows. Networks train for
20 rounds of ten epochs, of label skew 80 of five; ``late`` says what the last quarter of the rounds still brought.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC
from usage import usage

from perfed import Evaluation, Federation, Model, Run, build_method, load
from perfed.data.files import load_images
from perfed.data.held_out import with_validation
from perfed.data.partition.shards import draw_classes, make_generator
from perfed.datasets.digits import VIEWS, view_matrix
from perfed.model.presets import hidden_layer, linear, mlp
from perfed.training.plan import Plan

KEPT = Path(__file__).parent.parent / "docs/results/maps"
SEEDS, TUNING, HELD_OUT, LENGTH = range(5), range(2), 0.25, {False: (20, 10), True: (80, 5)}
DECAYS = (0.0, 1e-2, 3e-2, 1e-1, 3e-1)
FLIC = ("local", "hetfedrep", "flic-class", "flic-hl")
SKEW = ("local", "fedavg-ft", "fedrep", "fedpac")
TESTED = 50  # images of a class that a client is tested on, the same for all clients

Maker = Callable[[int], Federation]
CS = (1.0, 0.01, 0.1, 10.0, 100.0)
PER_SITE: dict[str, Callable[[float], Any]] = {
    "logistic": lambda strength: LogisticRegression(C=strength, max_iter=2000),
    "svc": lambda strength: SVC(C=strength),
}


@dataclass(frozen=True)
class Cell:
    """One place of a map.

    Attributes:
        name: of it, which its results are kept under.
        make: from a seed to the clients.
        methods: that are compared.
        embedding: the first stage's layers; empty for a linear one, ``None`` for none.
        depth: hidden layers of the shared body.
    """

    name: str
    make: Maker
    methods: tuple[str, ...] = FLIC
    embedding: tuple[int, ...] | None = (64,)
    depth: int = 1

    def model(self, method: str, classes: int) -> Model:
        """Of a method; Local's has no shared body where there is an embedding."""
        if self.embedding is None:
            return Model(body=mlp(hidden=(64,) * self.depth, out=32), head=linear(classes))
        first = mlp(hidden=self.embedding, out=64, final_activation=method == "local")
        body = (
            mlp(hidden=(64,) * (self.depth - 1), out=64, final_activation=True) if self.depth > 1 else hidden_layer(64)
        )
        return Model(embedding=first, body=None if method == "local" else body, head=linear(classes))

    def run(self) -> dict[str, Any]:
        """Accuracies over the seeds, and the strength that was chosen, by method."""
        whole = [self.make(seed) for seed in SEEDS]
        cut = [_cut(whole[seed], seed) for seed in TUNING]
        found: dict[str, Any] = {}
        for name in (*PER_SITE, *self.methods):
            started, strengths = time.perf_counter(), CS if name in PER_SITE else DECAYS
            tries = {
                s: np.mean([self.score(name, s, f, k, "validation")[0] for k, f in enumerate(cut)]) for s in strengths
            }
            best = max(tries, key=lambda strength: tries[strength])
            scores = [self.score(name, best, f, k, "test") for k, f in enumerate(whole)]
            found[name] = {"accuracy": [round(score, 4) for score, _ in scores], "strength": best}
            found[name]["late"] = round(float(np.mean([late for _, late in scores])), 4)
            seconds = time.perf_counter() - started
            print(f"{self.name}: {name} {np.mean([s for s, _ in scores]):.4f} ({best:g}), {seconds:.0f} s", flush=True)
        return found

    def score(self, name: str, strength: float, federation: Federation, seed: int, split: str) -> tuple[float, float]:
        """Mean accuracy over the clients, and how much of it the last quarter of the rounds brought."""
        if name in PER_SITE:
            return float(np.mean([_fitted(name, strength, client, split) for client in federation])), 0.0
        settings: dict[str, Any] = {"lr": 3e-3, "optimizer": "adam", "weight_decay": strength}
        rounds, epochs = LENGTH[self.embedding is None]
        settings |= {"batch_size": 100, "local_epochs": epochs}
        if name.startswith("flic"):
            settings |= {"pretrain_epochs": 100, "pretrain_batch_size": 100}
        model = self.model(name, federation.num_classes or 0)
        evaluation = Evaluation(split=split, every=rounds // 4, classes="held")
        run = Run(federation, build_method(name, settings), model, rounds=rounds, seed=seed, evaluation=evaluation,
                  plan=Plan(engine="stacked", threads=1))  # fmt: skip
        last = float(run.execute()["accuracy"]["mean"])
        curve = [record["accuracy"]["mean"] for record in run.history if "accuracy" in record]
        return last, last - curve[-2] if len(curve) > 1 else 0.0


def _fitted(name: str, strength: float, client: Any, split: str) -> float:
    part = client.split(split)
    if part is None:
        return float("nan")
    y = client.train.y.numpy()
    if len(np.unique(y)) == 1:
        return float(np.mean(part.y.numpy() == y[0]))
    model = PER_SITE[name](strength).fit(client.train.x.flatten(1).numpy(), y)
    return float(model.score(part.x.flatten(1).numpy(), part.y.numpy()))


def _cut(federation: Federation, seed: int) -> Federation:
    return replace(federation, clients=tuple(with_validation(client, HELD_OUT, True, seed) for client in federation))


@cache
def pool(name: str) -> dict[str, NDArray[Any]]:
    """8x8 images in [0, 1]: ``x_train``, ``y_train``, ``x_test``, ``y_test``; of MNIST means of neighbouring pixels."""
    if name == "digits":
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(y))
        parts = {"train": order[540:], "test": order[:540]}
        return {f"{a}_{s}": v[index] for s, index in parts.items() for a, v in (("x", x / 16), ("y", y))}
    data = load_images("mnist.npz", None, 28)
    found = {f"y_{split}": data[f"y_{split}"].astype(np.int64) for split in ("train", "test")}
    for split in ("train", "test"):
        framed = np.pad(data[f"x_{split}"], ((0, 0), (2, 2), (2, 2))) / 255
        found[f"x_{split}"] = framed.reshape(-1, 8, 4, 8, 4).mean((2, 4)).reshape(-1, 64)
    return found


def drawn(
    name: str, clients: int, classes: int, per_class: int, seed: int, rng: np.random.Generator
) -> list[dict[str, NDArray[np.int64]]]:
    """Rows of the pool for each client: its own ``train``, which nobody else holds, and ``test`` of its classes."""
    data, held = pool(name), draw_classes(10, clients, classes, seed=seed)
    rows: list[dict[str, list[NDArray[Any]]]] = [{"train": [], "test": []} for _ in range(clients)]
    for label in range(10):
        mine = rng.permutation(np.flatnonzero(data["y_train"] == label))
        test = np.flatnonzero(data["y_test"] == label)[:TESTED]
        for place, client in enumerate(rng.permutation(np.flatnonzero((held == label).any(1)))):
            own = mine[place * per_class : (place + 1) * per_class]
            if len(own) < per_class:
                raise ValueError(f"{name} has too few images for {clients} x {classes} x {per_class}")
            rows[client]["train"].append(own)
            rows[client]["test"].append(test)
    return [{split: np.concatenate(found) for split, found in parts.items()} for parts in rows]


def images(name: str, clients: int, classes: int, per_class: int, views: bool = True) -> Maker:
    """Clients that hold ``per_class`` images of each of ``classes`` digits, which nobody else holds.

    With ``views`` each sees its images as a client of data set "digits-views" does. All are tested on the same images
    of the digits that they hold.
    """

    def make(seed: int) -> Federation:
        data, rng = pool(name), make_generator(seed, "images")
        arrays: dict[str, dict[str, Any]] = {}
        for client, parts in enumerate(drawn(name, clients, classes, per_class, seed, rng)):
            view = np.eye(64)
            if views:
                view = view_matrix(VIEWS[client % 4], int(rng.integers(10, 40, endpoint=True)), rng)
            arrays[f"{client:03d}"] = of = {}
            for split, index in parts.items():
                of[f"x_{split}"] = (data[f"x_{split}"][index] @ view).astype(np.float32)
                of[f"y_{split}"] = data[f"y_{split}"][index]
            if views:
                mean, deviation = of["x_train"].mean(0), of["x_train"].std(0)
                varies = deviation > 1e-6
                scale = varies / np.where(varies, deviation, 1)
                of["x_train"], of["x_test"] = ((of[f"x_{s}"] - mean) * scale for s in ("train", "test"))
        return Federation.from_arrays(arrays, num_classes=10)

    return make


def thinned(name: str, per_class: int, **options: Any) -> Maker:
    """A shipped data set of whose training rows every client keeps at most ``per_class`` of each class."""

    def make(seed: int) -> Federation:
        federation, clients = load(name, options, seed=seed), []
        for client in federation:
            y, rng = client.train.y.numpy(), make_generator(seed, f"thinned {client.id}")
            kept = np.sort(np.concatenate([rng.permutation(np.flatnonzero(y == k))[:per_class] for k in np.unique(y)]))
            clients.append(replace(client, train=client.train.take(torch.from_numpy(kept))))
        return replace(federation, clients=tuple(clients))

    return make


def _views(name: str, clients: int, classes: int, per_class: int, **more: Any) -> Cell:
    said = "".join(", linear embedding" if value == () else f", {key} {value}" for key, value in more.items())
    return Cell(f"{clients} clients, {classes} classes, {per_class} a class{said}",
                images(name, clients, classes, per_class), **more)  # fmt: skip


def _skew(clients: int, classes: int, per_class: int) -> Cell:
    make = images("mnist", clients, classes, per_class, views=False)
    return Cell(f"{clients} clients, {classes} classes, {per_class} a class", make, SKEW, None)


DIGITS = [(20, 4, 3), (40, 4, 3), (80, 4, 3), (20, 4, 10), (40, 8, 3), (40, 2, 3), (150, 2, 3)]
SKEWED = [(20, 4, 3), (20, 4, 10), (60, 4, 3), (20, 2, 10), (20, 8, 10), (60, 4, 10), (20, 4, 30)]
MAPS: dict[str, list[Cell]] = {
    "flic-digits": [
        *(_views("digits", *numbers) for numbers in DIGITS),
        *(_views("digits", 40, 4, 3, depth=depth) for depth in (2, 3)),
        *(_views("digits", 40, 4, 3, embedding=layers) for layers in ((),)),
    ],
    "flic-mnist": [_views("mnist", n, 4, k) for n in (20, 60, 200) for k in (3, 10, 30)],
    "flic-others": [
        *(Cell(f"heart-disease, {k} a class", thinned("heart-disease", k), embedding=()) for k in (3, 10, 30)),
        *(Cell(f"wiki-crossmodal, {n} clients, {k} a class", thinned("wiki-crossmodal", k, clients=n), embedding=())
          for n, k in ((20, 3), (20, 10), (20, 30), (60, 3), (60, 10))),
        *(Cell(f"bci-common, {k} a class", thinned("bci-common", k)) for k in (3, 10, 30)),
    ],
    "skew": [_skew(*numbers) for numbers in SKEWED],
}  # fmt: skip


def main(names: list[str]) -> None:
    """Train the cells of the maps named that are not kept yet."""
    for name in names:
        file = KEPT / f"{name}.json"
        cells: dict[str, Any] = json.loads(file.read_text())["cells"] if file.exists() else {}
        for cell in MAPS[name]:
            if cell.name not in cells:
                cells[cell.name] = cell.run()
                KEPT.mkdir(parents=True, exist_ok=True)
                kept = {"command": f"python benchmarks/maps.py {name}", "cells": cells}
                file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    usage(__doc__)
    main(sys.argv[1:] or list(MAPS))
