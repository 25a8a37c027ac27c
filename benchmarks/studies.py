"""The three studies' scikit-learn rows with as many tries as the methods get, chosen on validation rows.

``python benchmarks/studies.py``: heart-disease, wiki-crossmodal and parkinsons, one model per site, six values of one
setting each. What is chosen has the best mean over the seeds on rows held out of the training rows, as with
``perfed tune``: one value for all sites (``perfed compare ... baseline_tries=6`` lets each site choose its own). It
is then trained on all of these and tested. Ridge and logistic regression take a minute,
forests of twenty or forty sites half an hour on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from usage import usage

from perfed.data.federation import Federation
from perfed.datasets import load

SEEDS = range(5)
HELD_OUT: dict[str, dict[str, Any]] = {
    "heart-disease": {"validation_fraction": 0.25},
    "wiki-crossmodal": {"validation_fraction": 0.25},
    "parkinsons": {"later_validation": 0.25},
}
LEAVES = (1, 2, 3, 5, 10, 20)

Maker = Callable[[Any, int], Any]
CLASSES: dict[str, tuple[tuple[float, ...], Maker]] = {
    "logistic, C": ((0.01, 0.03, 0.1, 0.3, 1, 3), lambda value, seed: LogisticRegression(C=value, max_iter=2000)),
    "random-forest, min_samples_leaf": (
        LEAVES,
        lambda value, seed: RandomForestClassifier(min_samples_leaf=value, random_state=seed),
    ),
}
VALUES: dict[str, tuple[tuple[float, ...], Maker]] = {
    "ridge, alpha": ((1, 10, 30, 100, 300, 1000), lambda value, seed: Ridge(alpha=value)),
    "random-forest, min_samples_leaf": (
        LEAVES,
        lambda value, seed: RandomForestRegressor(min_samples_leaf=value, random_state=seed),
    ),
}


def scores(federations: list[Federation], split: str, make: Maker, value: float) -> list[float]:
    """Per seed the mean over the clients of the accuracy, or squared error, of a model of each one's own."""
    found = []
    for seed, federation in zip(SEEDS, federations, strict=True):
        of_clients = []
        for client in federation:
            part = client.split(split)
            if part is not None:
                model = make(value, seed).fit(client.train.x.numpy(), client.train.y.numpy().ravel())
                predicted, y = model.predict(part.x.numpy()), part.y.numpy().ravel()
                values = federation.num_classes is None
                of_clients.append(np.mean((predicted - y) ** 2) if values else np.mean(predicted == y))
        found.append(float(np.mean(of_clients)))
    return found


def main() -> None:
    """Print a line per study and model."""
    for study, options in HELD_OUT.items():
        held_out, whole = ([load(study, given, seed=seed) for seed in SEEDS] for given in (options, {}))
        regression = whole[0].num_classes is None
        for name, (values, make) in (VALUES if regression else CLASSES).items():
            tries = {value: float(np.mean(scores(held_out, "validation", make, value))) for value in values}
            best = (min if regression else max)(tries, key=lambda value: tries[value])
            test = scores(whole, "test", make, best)
            print(f"{study}: {name} = {best}: {np.mean(test):.4f} ± {np.std(test, ddof=1):.4f}", flush=True)


if __name__ == "__main__":
    usage(__doc__)
    main()
