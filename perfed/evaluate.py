"""How good each client's own model is, and what that says over clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from perfed.cohort import Cohort
from perfed.method import Method
from perfed.step import sample_losses

Metrics = dict[str, dict[str, float]]


@torch.no_grad()
def score(method: Method, cohort: Cohort, split: str) -> Metrics:
    """Metrics of each client of ``cohort`` on its own ``split``: client id -> metric -> value.

    Classification: ``accuracy`` (fraction) and ``loss`` (cross-entropy); regression: ``mse``. Clients without data in
    the split are left out.
    """
    samples = cohort.samples(split)
    loss = torch.zeros(cohort.n, dtype=torch.float64)
    correct = torch.zeros(cohort.n, dtype=torch.float64)
    for x, index, valid in cohort.windows(samples):
        outputs = method.predict(cohort, x)
        y = samples.y[index]
        loss += (sample_losses(outputs, y, cohort.num_classes) * valid).sum(1).cpu().double()
        if cohort.num_classes is not None:
            correct += ((outputs.argmax(2) == y) & valid).sum(1).cpu().double()
    found: Metrics = {}
    for row, client in enumerate(cohort.ids):
        count = int(samples.counts[row])
        if count == 0:
            continue
        value = float(loss[row]) / count
        if cohort.num_classes is None:
            found[client] = {"mse": value}
        else:
            found[client] = {"accuracy": float(correct[row]) / count, "loss": value}
    return found


def spread(values: Iterable[float], weights: Iterable[float] | None = None) -> dict[str, float]:
    """``mean`` (weighted if ``weights`` are given), ``std`` (of the population), ``min``, 10th percentile, ``max``."""
    array = np.array(list(values), dtype=np.float64)
    weight = None if weights is None else np.array(list(weights), dtype=np.float64)
    return {
        "mean": float(np.average(array, weights=weight)),
        "std": float(array.std()),
        "min": float(array.min()),
        "p10": float(np.percentile(array, 10)),
        "max": float(array.max()),
    }


def summarise(metrics: Mapping[str, Mapping[str, float]], weights: Mapping[str, float] | None = None) -> dict[str, Any]:
    """:func:`spread` of every metric over clients; ``weights`` by client id."""
    names = next(iter(metrics.values()), {})
    clients = sorted(metrics)
    share = None if weights is None else [weights[c] for c in clients]
    return {name: spread([metrics[c][name] for c in clients], share) for name in names}
