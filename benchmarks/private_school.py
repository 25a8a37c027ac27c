"""School under privacy of rows: FedAvg, Local and MR-MTL at epsilon 6, beside Liu et al. (2022), figure 3c.

    python benchmarks/private_school.py

Their protocol: 139 schools, 80/20 by scikit-learn's split of the seed (100, 101, ...), inputs standardised by each
school's training rows, target (y - 1) / 69, a linear model that starts at zero, all schools in each round, one epoch,
mini-batches of 32, SGD with rate .01 on half the squared error, gradients of rows cut to 1, delta 1e-3. Test MSE, mean
over test rows, after the last round. Half the squared error with rate .01 and gradients cut to 1 is what the squared
error is with rate .005 and 2. Their accountant takes shuffled mini-batches for Poisson samples, and finds a noise for
each school. Ours counts each pass as a release of every row. ``replay`` is their program in plain numpy.
These are the three commands of their README. Numbers are kept in ``docs/results/private-school.json``; what is there
is not run again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from noise_by_client import NoiseByClient, privately_by_client, rdp_noise
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from usage import usage

from perfed import Federation, Model, Run, build_method, linear
from perfed.privacy.accountant import Releases, compute_epsilon, find_noise_multiplier
from perfed.privacy.apply import make_private
from perfed.privacy.settings import Privacy
from perfed.run.settings import Evaluation
from perfed.training.plan import Plan

Array = NDArray[np.float64]
FILE = Path(__file__).parent.parent / "docs/results/private-school.json"
PUBLISHED = {"fedavg": 0.02564, "local": 0.02628, "mr-mtl": 0.02394}
SEEDS = range(100, 105)
ROUNDS, BATCH, EPSILON, DELTA = 200, 32, 6.0, 1e-3
CLIP, TRAINING = 2.0, {"optimizer": "sgd", "lr": 0.005, "batch_size": BATCH, "local_epochs": 1}
ORDERS = [1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512]


def federation(seed: int) -> Federation:
    """The schools as the authors' program splits them."""
    with np.load(Path(os.environ["PERFED_DATA"]) / "school.npz") as found:
        x, y, school = found["x"], (found["y"] - 1) / 69, found["school"]
    arrays: dict[str, Any] = {}
    for number in np.unique(school):
        rows = school == number
        x_train, x_test, y_train, y_test = train_test_split(x[rows], y[rows], test_size=0.2, random_state=seed)
        scale = StandardScaler().fit(x_train)
        arrays[f"{number:03d}"] = {
            "x_train": scale.transform(x_train),
            "y_train": y_train[:, None],
            "x_test": scale.transform(x_test),
            "y_test": y_test[:, None],
        }
    return Federation.from_arrays(arrays, num_classes=None)


@cache
def their_noise(rows: int) -> float:
    """The noise multiplier of a school: RDP, steps of whole mini-batches in 201 rounds, as if of Poisson samples."""
    size = min(BATCH, rows)
    steps = rows // size * (ROUNDS + 1)
    return rdp_noise(EPSILON, DELTA, size / rows, steps, ORDERS)


@cache
def poisson_noise(rows: int) -> float:
    """The noise multiplier of a school whose mini-batches are Poisson samples, its count of rows included."""
    steps = ROUNDS * -(-rows // BATCH)
    return rdp_noise(EPSILON, DELTA, min(1.0, BATCH / rows), steps, ORDERS, whole=1)


def zeros(shape: tuple[int, ...]) -> nn.Module:
    """A linear layer to one output that starts at zero."""
    layer = linear(1)(shape)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def ours(name: str, seed: int, *, accounting: Literal["none", "theirs", "poisson", "full"]) -> float:
    """Test MSE of perfed's run: without privacy, with their noises, with Poisson samples, or in passes."""
    clients = federation(seed)
    rows = {client.id: len(client.train) for client in clients}
    method = build_method(name, TRAINING | ({"lam": 2.0} if name == "mr-mtl" else {}))
    if accounting == "full":
        budget = Privacy(epsilon=EPSILON, delta=DELTA, clip=CLIP)
        method = make_private(method, budget, ROUNDS, [*rows.values()], name=name).method
    elif accounting == "theirs":
        noises = {i: their_noise(n) for i, n in rows.items()}
        method = privately_by_client(method, NoiseByClient(clip=CLIP, by_id=noises))
    elif accounting == "poisson":
        noises = {i: poisson_noise(n) for i, n in rows.items()}
        counts = max(noises.values())
        method = privately_by_client(method, NoiseByClient(clip=CLIP, noise=counts, poisson=True, by_id=noises))
    run = Run(
        clients,
        method,
        Model(head=zeros),
        name=name,
        rounds=ROUNDS,
        seed=seed,
        evaluation=Evaluation(every=ROUNDS, weights="samples"),
        plan=Plan("stacked", 0, threads=1),
    )
    return float(run.execute()["metrics"]["mse"]["mean"])


def replay(name: str, seed: int, *, whole: bool = True) -> float:
    """Test MSE of their program, in numpy: ``whole`` mini-batches alone, 201 rounds, means weighted by rows."""
    draw, schools = np.random.default_rng(seed), [_with_ones(client) for client in federation(seed)]
    sizes = [len(y) for _, y, _, _ in schools]
    mean = np.zeros(schools[0][0].shape[1])
    models = np.zeros((len(schools), len(mean)))
    for _ in range(ROUNDS + 1):
        for at, (x, y, _, _) in enumerate(schools):
            start = mean if name == "fedavg" else models[at]
            pull = mean if name == "mr-mtl" else None
            models[at] = _their_pass(start, x, y, pull, draw, whole)
        mean = np.average(models, axis=0, weights=sizes)
    ends = [mean] * len(schools) if name == "fedavg" else models
    errors = [(x @ w - y) ** 2 for (_, _, x, y), w in zip(schools, ends, strict=True)]
    return float(np.concatenate(errors).mean())


def repeated(name: str, seed: int) -> float:
    """Test MSE of their program with the seeds that its own repetitions have: 100, 1100, ..."""
    return replay(name, SEEDS[0] + 1000 * (seed - SEEDS[0]))


def _with_ones(client: Any) -> tuple[Array, Array, Array, Array]:
    def rows(split: Any) -> tuple[Array, Array]:
        x = split.x.double().numpy()
        return np.append(x, np.ones((len(x), 1)), 1), split.y.double().numpy()[:, 0]

    return (*rows(client.train), *rows(client.test))


def _their_pass(w: Array, x: Array, y: Array, pull: Array | None, draw: np.random.Generator, whole: bool) -> Array:
    """A pass over the rows in mini-batches; the pull to the mean is in each row's gradient, which is cut to 1."""
    size, order, noise = min(BATCH, len(y)), draw.permutation(len(y)), their_noise(len(y))
    for first in range(0, len(y) // size * size if whole else len(y), size):
        rows = order[first : first + size]
        each = (x[rows] @ w - y[rows])[:, None] * x[rows]
        if pull is not None:
            each = each + w - pull
        cut = each * np.minimum(1, 1 / np.linalg.norm(each, axis=1).clip(1e-15))[:, None]
        w = w - 0.01 * (cut.sum(0) + noise * draw.standard_normal(len(w))) / size
    return w


def honest() -> list[float]:
    """What their noise costs each school with each pass counted as a release of every row."""
    return [compute_epsilon(their_noise(len(c.train)), Releases(ROUNDS + 1), DELTA) for c in federation(SEEDS[0])]


WAYS: dict[str, Callable[[str, int], float]] = {
    "their program, replayed": replay,
    "their program, replayed with their seeds": repeated,
    "their program, the last mini-batch too": partial(replay, whole=False),
    "ours, their accounting": partial(ours, accounting="theirs"),
    "ours, passes": partial(ours, accounting="full"),
    "ours, Poisson samples": partial(ours, accounting="poisson"),
    "ours, without privacy": partial(ours, accounting="none"),
}


def main() -> None:
    """Run what is not kept yet, print means and standard deviations over seeds, and keep the numbers."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orders that do not converge are left out
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"scores": {}}
    kept["scores"] = {way: kept["scores"].get(way, {}) for way in WAYS}
    for way, score in WAYS.items():
        for name in PUBLISHED:
            found = kept["scores"].setdefault(way, {}).setdefault(name, [])
            found += [score(name, seed) for seed in SEEDS[len(found) :]]
            print(f"{way:38s} {name:8s} {np.mean(found):.5f} +- {np.std(found):.5f}", flush=True)
            FILE.write_text(json.dumps(kept, indent=1) + "\n")
    sizes = [len(client.train) for client in federation(SEEDS[0])]
    noises = {"theirs": [their_noise(n) for n in sizes], "poisson": [poisson_noise(n) for n in sizes]}
    spread = {way: [min(of), float(np.median(of)), max(of)] for way, of in (noises | {"honest": honest()}).items()}
    passes = find_noise_multiplier(EPSILON, DELTA, Releases(ROUNDS + 1))
    kept |= {"published": PUBLISHED, "noise of passes": passes, "least, median, most": spread}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    print(passes, spread)


if __name__ == "__main__":
    usage(__doc__)
    main()
