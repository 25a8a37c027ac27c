"""How the metrics that come with perfed are computed: from the targets of some samples, and what a model says of them.

Targets are ``(samples,)`` labels, ``(samples, ...)`` values or ``(samples, 2)`` times and events; outputs are logits
``(samples, C)``, values or log hazards. Of two classes, class 1 is the positive one; of more, scores of single classes
are averaged over those that occur among the targets. NaN: not defined, as a rank metric of samples of one class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special  # type: ignore[import-untyped]
from numpy.typing import NDArray

Targets = NDArray[Any]
Outputs = NDArray[np.float64]

_BINS = 15
_PAIRS = 1_000_000  # at once


def accuracy(y: Targets, outputs: Outputs) -> float:
    """Fraction of samples whose class has the largest logit."""
    return float((outputs.argmax(1) == y).mean())


def right(y: Targets, outputs: Outputs) -> Outputs:
    """Of each sample 1.0 where its class has the largest logit, else 0.0: the mean is :func:`accuracy`."""
    return np.asarray(outputs.argmax(1) == y, dtype=np.float64)


def balanced_accuracy(y: Targets, outputs: Outputs) -> float:
    """Mean over the classes that occur of the accuracy on their samples."""
    from sklearn.metrics import recall_score

    return float(recall_score(y, outputs.argmax(1), labels=np.unique(y), average="macro"))


def auc(y: Targets, outputs: Outputs) -> float:
    """Area under the ROC curve; of more than two classes, each against the others.

    It is the fraction of pairs of a positive and a negative sample in which the positive one has the larger score, a
    tie being half a pair (Mann and Whitney 1947).
    """
    return _ranked(_pairs_in_order, y, outputs)


def average_precision(y: Targets, outputs: Outputs) -> float:
    """Average precision; of more than two classes, each against the others."""
    from sklearn.metrics import average_precision_score

    return _ranked(average_precision_score, y, outputs)


def f1(y: Targets, outputs: Outputs) -> float:
    """F1; of more than two classes the mean over those that occur. Not defined without a positive sample."""
    from sklearn.metrics import f1_score

    positive = np.unique(y) if outputs.shape[1] > 2 else np.intersect1d(y, [1])
    return float(f1_score(y, outputs.argmax(1), labels=positive, average="macro")) if len(positive) else np.nan


def log_loss(y: Targets, outputs: Outputs) -> float:
    """Mean of ``-log p`` of the samples' classes; not defined where one has no probability at all."""
    from sklearn import metrics

    if outputs.shape[1] < 2 or not np.isfinite(outputs[np.arange(len(y)), y]).all():
        return np.nan
    return float(metrics.log_loss(y, probabilities(outputs), labels=np.arange(outputs.shape[1])))


def log_losses(y: Targets, outputs: Outputs) -> Outputs:
    """Of each sample ``-log p`` of its class, p at least as large as scikit-learn takes it: see :func:`log_loss`."""
    p = probabilities(outputs)[np.arange(len(y)), y]
    return np.asarray(-np.log(np.maximum(p, np.finfo(np.float64).eps)))


def brier(y: Targets, outputs: Outputs) -> float:
    """Mean squared error of the probability of class 1; of more classes, the sum over all of them."""
    from sklearn.metrics import mean_squared_error

    p, classes = probabilities(outputs), outputs.shape[1]
    return float(mean_squared_error(np.eye(classes)[y], p)) * (1 if classes == 2 else classes)


def brier_losses(y: Targets, outputs: Outputs) -> Outputs:
    """Of each sample the squared error of the probabilities: see :func:`brier`."""
    squares = np.square(np.eye(outputs.shape[1])[y] - probabilities(outputs)).sum(1)
    return np.asarray(squares / 2 if outputs.shape[1] == 2 else squares)


def calibration_error(y: Targets, outputs: Outputs) -> float:
    """Expected calibration error of the predicted class in 15 bins of its probability (Guo et al. 2017, eq. 3)."""
    p = probabilities(outputs)
    confidence, right = p.max(1), outputs.argmax(1) == y
    which = np.ceil(confidence * _BINS).astype(int)
    gaps = np.bincount(which, right) - np.bincount(which, confidence)
    return float(np.abs(gaps).sum() / len(y))


def mse(y: Targets, outputs: Outputs) -> float:
    """Mean squared error, over samples and values."""
    return float(np.square(outputs.reshape(len(y), -1) - y.reshape(len(y), -1)).mean())


def squared_errors(y: Targets, outputs: Outputs) -> Outputs:
    """Of each sample the squared error, over its values: see :func:`mse`."""
    return np.asarray(np.square(outputs.reshape(len(y), -1) - y.reshape(len(y), -1)).mean(1))


def absolute_errors(y: Targets, outputs: Outputs) -> Outputs:
    """Of each sample the absolute error, over its values: see :func:`mae`."""
    return np.asarray(np.abs(outputs.reshape(len(y), -1) - y.reshape(len(y), -1)).mean(1))


def mae(y: Targets, outputs: Outputs) -> float:
    """Mean absolute error, over samples and values."""
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(y.reshape(len(y), -1), outputs.reshape(len(y), -1)))


def r2(y: Targets, outputs: Outputs) -> float:
    """Coefficient of determination, averaged over values; not defined where one of them is the same everywhere."""
    from sklearn.metrics import r2_score

    values = y.reshape(len(y), -1)
    if len(values) < 2 or not np.ptp(values, axis=0).all():
        return np.nan
    return float(r2_score(values, outputs.reshape(len(y), -1)))


def c_index(y: Targets, outputs: Outputs) -> float:
    """Harrell's C: of the pairs in which it is known who had the event first, how many had the larger hazard.

    Of a tie in time an event comes before a censored sample, and two events are no pair; a tie in the hazard is half a
    pair. Not defined without a pair.

    Source: Harrell et al. 1982.
    """
    hazard, time, event = outputs.reshape(len(y)), y[:, 0], y[:, 1] > 0
    pairs = agreeing = 0.0
    events = np.flatnonzero(event)
    for some in np.array_split(events, max(1, len(events) * len(y) // _PAIRS)):
        t, h = time[some, None], hazard[some, None]
        later = (time > t) | ((time == t) & ~event)
        pairs += later.sum()
        agreeing += (later & (hazard < h)).sum() + (later & (hazard == h)).sum() / 2
    return float(agreeing / pairs) if pairs else np.nan


def probabilities(outputs: Outputs) -> Outputs:
    """Softmax of logits, ``(samples, C)``."""
    found: Outputs = scipy.special.softmax(outputs, axis=1)
    return found


def _pairs_in_order(positive: NDArray[np.bool_], score: NDArray[np.float64]) -> float:
    lower = np.sort(score[~positive])
    higher = score[positive]
    pairs = np.searchsorted(lower, higher, "left").sum() + np.searchsorted(lower, higher, "right").sum()
    return float(pairs / (2 * len(lower) * len(higher)))


def _ranked(score: Callable[..., float], y: Targets, outputs: Outputs) -> float:
    """``score`` by the margin of class 1; of more classes, the mean over those that occur, by their probabilities."""
    held = np.unique(y)
    if len(held) < 2:
        return np.nan
    if outputs.shape[1] == 2:
        margin = np.nan_to_num(outputs[:, 1] - outputs[:, 0])
        return float(score(y == 1, margin))
    p = probabilities(outputs)
    return float(np.mean([score(y == label, p[:, label]) for label in held]))
