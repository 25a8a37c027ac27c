"""The two toy problems of FLIC: Gaussian classes in client-specific feature spaces.

Source: Rakotomamonjy et al. 2024 (TMLR), "Personalised Federated Learning on Heterogeneous Feature Spaces",
sections 5 and S3.2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfed.data.federation import Federation
from perfed.data.partition.shards import draw_classes, make_generator, share_among_holders, subsample_clients
from perfed.datasets.catalogue import (
    Fraction,
    NonNegative,
    Positive,
    PositiveReal,
    check_range,
    dataset,
    make_client_ids,
)

Array = NDArray[np.float64]
View = Callable[[Array, np.random.Generator], Array]
Covariance = Literal["identity", "random-diagonal"]

# Variances of "random-diagonal"; the paper does not give their distribution.
VARIANCE_RANGE = (0.5, 1.5)


class Gaussians(NamedTuple):
    """Gaussian classes around ``centres`` ``(classes, dim)`` with common ``variances`` ``(dim,)``."""

    centres: Array
    variances: Array

    def sample(self, per_class: int, rng: np.random.Generator) -> tuple[Array, NDArray[np.int64]]:
        """Return ``per_class`` samples of every class, ``(samples, dim)``, and their labels."""
        y = np.repeat(np.arange(len(self.centres)), per_class)
        noise = rng.standard_normal((len(y), len(self.variances)))
        return self.centres[y] + noise * np.sqrt(self.variances), y

    def bayes_accuracy(self, x: Array, y: NDArray[np.int64], classes: NDArray[np.int64]) -> float:
        """Return the share of ``x (samples, dim)`` whose nearest centre among ``classes`` is that of ``y``."""
        scaled = (x[:, None, :] - self.centres[classes]) / np.sqrt(self.variances)
        return float((classes[(scaled**2).sum(axis=2).argmin(axis=1)] == y).mean())


def _draw_gaussians(num_classes: int, dim: int, mean_std: float, covariance: Covariance, seed: int) -> Gaussians:
    rng = make_generator(seed, "toy centres")
    centres = mean_std * rng.standard_normal((num_classes, dim))
    variances = np.ones(dim) if covariance == "identity" else rng.uniform(*VARIANCE_RANGE, size=dim)
    return Gaussians(centres, variances)


def _build_federation(
    gaussians: Gaussians,
    draw_view: Callable[[np.random.Generator], View],
    classes: NDArray[np.int64],
    per_class: tuple[int, int],
    keep: tuple[float, float],
    seed: int,
) -> Federation:
    """Return a federation whose samples are distributed as in FLIC.

    ``draw_view`` draws a client's map of the coordinates.
    """
    check_range("keep_low", keep[0], "keep_high", keep[1])
    x_train, y_train = gaussians.sample(per_class[0], make_generator(seed, "toy train"))
    x_test, y_test = gaussians.sample(per_class[1], make_generator(seed, "toy test"))
    train = subsample_clients(share_among_holders(y_train, classes, seed=seed), low=keep[0], high=keep[1], seed=seed)
    test = share_among_holders(y_test, classes, seed=seed)
    clients, accuracies = {}, []
    for client, client_classes, train_rows, test_rows in zip(
        make_client_ids(len(classes)), classes, train, test, strict=True
    ):
        rng = make_generator(seed, f"toy view of {client}")
        transform = draw_view(rng)
        clients[client] = {
            "x_train": transform(x_train[train_rows], rng).astype(np.float32),
            "y_train": y_train[train_rows],
            "x_test": transform(x_test[test_rows], rng).astype(np.float32),
            "y_test": y_test[test_rows],
        }
        accuracies.append(gaussians.bayes_accuracy(x_test[test_rows], y_test[test_rows], client_classes))
    federation = Federation.from_arrays(clients, num_classes=len(gaussians.centres))
    return replace(federation, notes={"oracle_accuracy": float(np.mean(accuracies))})


@dataset("toy-noisy-features")
def toy_noisy_features(
    seed: int,
    data_dir: Path | None,
    *,
    clients: Positive = 100,
    classes_per_client: Positive = 3,
    num_classes: Positive = 20,
    dim: Positive = 5,
    mean_std: PositiveReal = 0.8,
    covariance: Covariance = "identity",
    train_per_class: Positive = 2000,
    test_per_class: Positive = 1000,
    keep_low: Fraction = 0.05,
    keep_high: Fraction = 1.0,
    noise_dims_low: NonNegative = 1,
    noise_dims_high: NonNegative = 10,
) -> Federation:
    """Gaussian classes in a few dimensions; every client appends its own number of pure-noise features.

    Class means are N(0, ``mean_std``² I), the covariance is the same for all classes. Samples of a class are
    shared equally among its holders; then a client keeps a part of its training samples, uniform between
    ``keep_low`` and ``keep_high``. Inputs are ``(dim + extra,)``; the number of extra columns, N(0, 1), is
    uniform in ``noise_dims_low``..``noise_dims_high``.

    ``notes["oracle_accuracy"]``: mean over clients of the accuracy of the Bayes rule that knows the means and
    the client's classes, on the client's test samples.

    Source: Rakotomamonjy et al. 2024 (TMLR), section S3.2.1.
    """
    check_range("noise_dims_low", noise_dims_low, "noise_dims_high", noise_dims_high)

    def draw_view(rng: np.random.Generator) -> View:
        extra = int(rng.integers(noise_dims_low, noise_dims_high, endpoint=True))
        return lambda x, noise: np.hstack([x, noise.standard_normal((len(x), extra))])

    gaussians = _draw_gaussians(num_classes, dim, mean_std, covariance, seed)
    classes = draw_classes(num_classes, clients, classes_per_client, seed=seed)
    per_class, keep = (train_per_class, test_per_class), (keep_low, keep_high)
    return _build_federation(gaussians, draw_view, classes, per_class, keep, seed)


@dataset("toy-linear-map")
def toy_linear_map(
    seed: int,
    data_dir: Path | None,
    *,
    clients: Positive = 100,
    classes_per_client: Positive = 3,
    num_classes: Positive = 20,
    dim: Positive = 5,
    mean_std: PositiveReal = 0.5,
    covariance: Covariance = "identity",
    train_per_class: Positive = 2000,
    test_per_class: Positive = 1000,
    keep_low: Fraction = 0.05,
    keep_high: Fraction = 1.0,
    mapped_dims_low: Positive = 3,
    mapped_dims_high: Positive = 100,
) -> Federation:
    """Gaussian classes in a few dimensions; every client sees them through its own random linear map.

    As :func:`toy_noisy_features`, but the inputs of a client are ``x L`` with one matrix L of N(0, 1)
    entries for its training and test samples, ``(dim, d)``, d uniform in ``mapped_dims_low``..``mapped_dims_high``.
    ``notes["oracle_accuracy"]`` is that of the Bayes rule on the original coordinates; a client with fewer
    than ``dim`` mapped dimensions cannot reach it.

    The arXiv version's problem: ``dim=30, mapped_dims_low=5, mapped_dims_high=30``, its appendix's:
    ``covariance="random-diagonal", mapped_dims_high=50``.

    Source: Rakotomamonjy et al. 2024 (TMLR), section S3.2.1.
    """
    check_range("mapped_dims_low", mapped_dims_low, "mapped_dims_high", mapped_dims_high)

    def draw_view(rng: np.random.Generator) -> View:
        mapped = int(rng.integers(mapped_dims_low, mapped_dims_high, endpoint=True))
        matrix = rng.standard_normal((dim, mapped))
        return lambda x, _: x @ matrix

    gaussians = _draw_gaussians(num_classes, dim, mean_std, covariance, seed)
    classes = draw_classes(num_classes, clients, classes_per_client, seed=seed)
    per_class, keep = (train_per_class, test_per_class), (keep_low, keep_high)
    return _build_federation(gaussians, draw_view, classes, per_class, keep, seed)
