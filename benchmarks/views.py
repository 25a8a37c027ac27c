"""Why does no federation pay where clients see digits in views of their own? What there is to gain, and what links it.

``python benchmarks/views.py`` trains for every cell what :data:`ROWS` names, and keeps each seed's mean accuracy in
``docs/results/views.json``; a cell that is kept is not trained again. ``python docs/build_docs.py --render`` writes the
table of ``docs/when.md`` from it.

Clients and images are those of the map "flic-digits" (:mod:`maps`); "other features" are six of the kinds that data set
mfeat of the UCI repository has, made here of the same images. All but the first row know what no federation knows: how
others' images look in one's own view, of all of them or of some that nobody is trained or tested on, or a body, a head
and anchors that were made of all images. What a row has to choose (:data:`CHOICES`) is chosen on a quarter of the
training rows of two seeds, at least one of a class; then it is trained on all of them over five seeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from maps import SEEDS, TUNING, drawn, pool
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.neural_network import MLPClassifier
from torch import Tensor
from usage import usage

from perfed.data.partition.shards import make_generator
from perfed.datasets.digits import VIEWS, view_matrix
from perfed.methods.flic.bures import bures_w2
from perfed.methods.flic.gaussians import Gaussians

KEPT = Path(__file__).parent.parent / "docs/results/views.json"
CELLS = {
    **{f"views, 20 clients, 4 classes, {k} a class": ("views", 20, 4, k) for k in (3, 10)},
    "other features, 24 clients, 4 classes, 3 a class": ("features", 24, 4, 3),
}
COMMON = (10, 30, 100)
ROWS = ("own", "body", "body, anchors", *(f"{k} common" for k in COMMON), "all")
CS, WEIGHTS = (0.01, 0.1, 1.0, 10.0), (0.1, 1.0)
STEPS, DECAYS, PULLS = 400, (0.0, 1e-2, 1e-1), (1e-4, 1e-3, 1e-2)
CHOICES: dict[str, list[tuple[float, ...]]] = {
    "own": list(product(CS)),
    "body": list(product(DECAYS, (0.0,))),
    "body, anchors": list(product(DECAYS, PULLS)),
    **{row: list(product(CS, WEIGHTS)) for row in ROWS[3:]},
}

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def fourier(x: Array) -> Array:
    """Magnitudes of the discrete Fourier transform, which know nothing of where the digit is."""
    return np.asarray(np.abs(np.fft.rfft2(x.reshape(-1, 8, 8))).reshape(len(x), -1))


def profiles(x: Array) -> Array:
    """Sums over rows and columns, and from each side how far the digit is away."""
    images = x.reshape(-1, 8, 8)
    dark = images > 0.4
    sides = [np.where(dark.any(a), side.argmax(a), 8) for a in (1, 2) for side in (dark, np.flip(dark, a))]
    return np.concatenate([images.sum(1), images.sum(2), *sides], 1)


def components(x: Array) -> Array:
    """The sixteen largest principal components of all training images."""
    images: Array = pool("digits")["x_train"]
    centre = images.mean(0)
    return np.asarray((x - centre) @ np.linalg.svd(images - centre)[2][:16].T)


def blocks(x: Array) -> Array:
    """Means of 2x2 pixels."""
    return x @ view_matrix("blocks", 16, np.random.default_rng(0))


def moments(x: Array) -> Array:
    """Central moments up to the fifth order."""
    mass, (u, v) = x.sum(1)[:, None], (g.reshape(1, -1) / 4 for g in np.indices((8, 8)))
    du, dv = (g - (x * g).sum(1)[:, None] / mass for g in (u, v))
    return np.stack([(x * du**p * dv**q).sum(1) / mass[:, 0] for p, q in np.ndindex(6, 6) if 2 <= p + q <= 5], 1)


def shapes(x: Array) -> Array:
    """Six numbers on the shape: ink, dark pixels, edges both ways, height and width."""
    images = x.reshape(-1, 8, 8)
    dark = images > 0.4
    edges = [np.abs(np.diff(images, axis=a)).sum((1, 2)) for a in (1, 2)]
    return np.stack([x.sum(1), dark.sum((1, 2)), *edges, dark.any(2).sum(1), dark.any(1).sum(1)], 1)


FEATURES = (fourier, profiles, components, blocks, moments, shapes)


def linear_view(name: str, rng: np.random.Generator) -> Callable[[Array], Array]:
    """A view of "digits-views"."""
    matrix = view_matrix(name, int(rng.integers(10, 40, endpoint=True)), rng)
    return lambda x: x @ matrix


@dataclass(frozen=True)
class Site:
    """A client: all images as it sees them, and which are its own.

    Attributes:
        x: training images of the pool ``(n, p)``, standardised by themselves.
        train: rows of the pool that are its own, class after class.
        judged: inputs and classes on which it is judged.
    """

    x: Array
    train: Ints
    judged: tuple[Array, Ints]

    @property
    def y(self) -> Ints:
        """Classes of its own rows."""
        return pool("digits")["y_train"][self.train]


Sites = tuple[list[Site], Ints]


@cache
def sites(cell: str, seed: int, cut: bool) -> Sites:
    """The clients, and images of nobody; ``cut``: judged on a quarter of the training rows of each class."""
    kind, clients, classes, per_class = CELLS[cell]
    data, rng, found = pool("digits"), make_generator(seed, "images"), []
    rows = drawn("digits", clients, classes, per_class, seed, rng)
    for number, own in enumerate(rows):
        see = FEATURES[number % 6] if kind == "features" else linear_view(VIEWS[number % 4], rng)
        x, x_test = (see(data[f"x_{split}"]) for split in ("train", "test"))
        mean, deviation = x.mean(0), x.std(0)
        scale = np.where(deviation > 1e-6, 1 / deviation.clip(1e-6), 0)
        x, x_test = (x - mean) * scale, (x_test - mean) * scale
        train, judged = own["train"], (x_test[own["test"]], data["y_test"][own["test"]])
        if cut:
            by_class, last = train.reshape(classes, per_class), max(1, round(per_class / 4))
            train, held = by_class[:, :-last].reshape(-1), by_class[:, -last:].reshape(-1)
            judged = x[held], data["y_train"][held]
        found.append(Site(x, train, judged))
    nobodys = np.setdiff1d(np.arange(len(data["y_train"])), np.concatenate([own["train"] for own in rows]))
    return found, make_generator(seed, "common images").permutation(nobodys)


@cache
def of_others(cell: str, seed: int, cut: bool, mine: int, common: int) -> tuple[Array, Ints]:
    """Others' rows of the classes that a site holds: as it sees them, or (``common`` > 0) as a linear map has them.

    The map is ridge regression of the own view on the other's, over so many images that are nobody's.
    """
    (clients, nobodys), y = sites(cell, seed, cut), pool("digits")["y_train"]
    me, shared, found, labels = clients[mine], nobodys[:common], [], []
    for number, other in enumerate(clients):
        rows = other.train[np.isin(y[other.train], me.y)]
        if number != mine and len(rows) > 0:
            x = me.x[rows]
            if common:
                x = RidgeCV(np.logspace(-2, 4, 7)).fit(other.x[shared], me.x[shared]).predict(other.x[rows])
            found.append(x)
            labels.append(y[rows])
    return np.concatenate(found), np.concatenate(labels)


def by_rows(row: str, choice: tuple[float, ...], cell: str, seed: int, cut: bool) -> float:
    """Mean accuracy of logistic regression on own rows, and on others' with a weight each."""
    scores = []
    for mine, me in enumerate(sites(cell, seed, cut)[0]):
        x, y, weights = me.x[me.train], me.y, np.ones(len(me.train))
        if row != "own":
            more, labels = of_others(cell, seed, cut, mine, 0 if row == "all" else int(row.split()[0]))
            weights = np.concatenate([weights, np.full(len(labels), choice[1])])
            x, y = np.concatenate([x, more]), np.concatenate([y, labels])
        model = LogisticRegression(C=choice[0], max_iter=2000).fit(x, y, weights)
        scores.append(model.score(*me.judged))
    return float(np.mean(scores))


@cache
def made_of_all() -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights of a network of all training images, and each class's mean and factor of the covariance there."""
    x, y = pool("digits")["x_train"], pool("digits")["y_train"]
    deviation = x.std(0)
    x = (x - x.mean(0)) * np.where(deviation > 1e-6, 1 / deviation.clip(1e-6), 0)
    net = MLPClassifier((64,), alpha=0.1, max_iter=500, random_state=0).fit(x, y)
    layers = [np.asarray(part) for pair in zip(net.coefs_, net.intercepts_, strict=True) for part in pair]
    means = np.stack([x[y == k].mean(0) for k in range(10)])
    covariances = np.stack([np.cov(x[y == k].T) + 1e-4 * np.eye(64) for k in range(10)])
    return [tensor(part) for part in layers], tensor(means), tensor(np.linalg.cholesky(covariances))


def tensor(values: NDArray[Any]) -> Tensor:
    """In float32."""
    return torch.tensor(values, dtype=torch.float32)


def by_body(choice: tuple[float, ...], cell: str, seed: int, cut: bool) -> float:
    """Mean accuracy of the network of all images behind linear maps from the views, which learn from own rows alone.

    With the second of ``choice`` FLIC's distance of each class's images to its anchor counts, and the anchors are the
    Gaussians of all images. Clients are side by side, their views filled up with noughts.
    """
    (first, bias, second, bias_2), means, factors = made_of_all()
    clients, (decay, pull) = sites(cell, seed, cut)[0], choice
    width, classes = max(me.x.shape[1] for me in clients), [np.unique(me.y) for me in clients]
    held = torch.stack([torch.full((10,), -torch.inf).index_fill(0, torch.from_numpy(own), 0.0) for own in classes])
    x = torch.stack([padded(me.x[me.train], width) for me in clients])
    y = torch.from_numpy(np.stack([me.y for me in clients]))
    sets = torch.from_numpy(np.stack(classes)).reshape(-1)
    size = y.shape[1] // len(classes[0])
    torch.manual_seed(seed)
    embedding = (torch.randn(len(clients), width, 64) / width**0.5).requires_grad_()
    offset = torch.zeros(len(clients), 1, 64, requires_grad=True)

    def network(z: Tensor) -> Tensor:
        return (z @ first + bias).relu() @ second + bias_2

    optimiser = torch.optim.AdamW([embedding, offset], lr=1e-2, weight_decay=decay)
    for _ in range(STEPS):
        z = x @ embedding + offset
        logits = network(z) + held[:, None]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
        if pull:
            away = bures_w2(z.reshape(-1, size, 64), [size] * len(sets), Gaussians(means[sets], factors[sets]))
            loss = loss + pull * away.sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    scores = []
    with torch.no_grad():
        for number, me in enumerate(clients):
            logits = network(padded(me.judged[0], width) @ embedding[number] + offset[number]) + held[number]
            scores.append(np.mean(logits.argmax(-1).numpy() == me.judged[1]))
    return float(np.mean(scores))


def padded(x: Array, width: int) -> Tensor:
    """With noughts to ``width`` columns."""
    return tensor(np.pad(x, ((0, 0), (0, width - x.shape[1]))))


def scored(cell: str, row: str) -> dict[str, Any]:
    """Accuracy of each seed, and what was chosen."""

    def score(choice: tuple[float, ...], seed: int, cut: bool) -> float:
        return by_body(choice, cell, seed, cut) if row.startswith("body") else by_rows(row, choice, cell, seed, cut)

    tries = {choice: np.mean([score(choice, seed, True) for seed in TUNING]) for choice in CHOICES[row]}
    best = max(tries, key=lambda choice: tries[choice])
    return {"accuracy": [round(score(best, seed, False), 4) for seed in SEEDS], "chosen": best}


def main() -> None:
    """Train the cells that are not kept yet."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for cell in CELLS:
        if cell not in kept:
            found = {}
            for row in ROWS:
                started = time.perf_counter()
                found[row] = of = scored(cell, row)
                seconds = time.perf_counter() - started
                print(f"{cell}: {row} {np.mean(of['accuracy']):.4f} {of['chosen']}, {seconds:.0f} s", flush=True)
            kept[cell] = found
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    usage(__doc__)
    main()
