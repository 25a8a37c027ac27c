"""The metrics of perfed, computed from targets and from the outputs of a model.

Targets are labels ``(samples,)``, values ``(samples, ...)`` or times and events ``(samples, 2)``; outputs are logits
``(samples, C)``, values or log hazards. With two classes, class 1 is the positive class; with more, the scores of
single classes are averaged over the classes that occur among the targets. A metric that is not defined is NaN, for
example a rank metric of samples of one class.
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
_PAIRS = 1_000_000  # the number of pairs that are compared at once


def accuracy(y: Targets, outputs: Outputs) -> float:
    """Return the fraction of samples whose class has the largest logit."""
    return float((outputs.argmax(1) == y).mean())


def is_correct(y: Targets, outputs: Outputs) -> Outputs:
    """Return 1.0 for each sample whose class has the largest logit, otherwise 0.0; the mean is :func:`accuracy`."""
    return np.asarray(outputs.argmax(1) == y, dtype=np.float64)


def balanced_accuracy(y: Targets, outputs: Outputs) -> float:
    """Return the mean over classes of the accuracy on the samples of a class."""
    from sklearn.metrics import recall_score

    return float(recall_score(y, outputs.argmax(1), labels=np.unique(y), average="macro"))


def auc(y: Targets, outputs: Outputs) -> float:
    """Return the area under the ROC curve; for more than two classes, the mean of one-versus-rest areas.

    It is the fraction of pairs of a positive and a negative sample in which the positive one has the larger score; a
    tie counts as half a pair (Mann and Whitney 1947).
    """
    return _average_rank_score(_fraction_of_ordered_pairs, y, outputs)


def average_precision(y: Targets, outputs: Outputs) -> float:
    """Return the average precision; for more than two classes, the mean of one-versus-rest values."""
    from sklearn.metrics import average_precision_score

    return _average_rank_score(average_precision_score, y, outputs)


def f1(y: Targets, outputs: Outputs) -> float:
    """Return F1; for more than two classes, the mean over classes. It is not defined without a positive sample."""
    from sklearn.metrics import f1_score

    positive = np.unique(y) if outputs.shape[1] > 2 else np.intersect1d(y, [1])
    return float(f1_score(y, outputs.argmax(1), labels=positive, average="macro")) if len(positive) else np.nan


def log_loss(y: Targets, outputs: Outputs) -> float:
    """Return the mean of ``-log p`` of the samples' classes; not defined if the probability of one is zero."""
    from sklearn import metrics

    if outputs.shape[1] < 2 or not np.isfinite(outputs[np.arange(len(y)), y]).all():
        return np.nan
    return float(metrics.log_loss(y, probabilities(outputs), labels=np.arange(outputs.shape[1])))


def log_losses(y: Targets, outputs: Outputs) -> Outputs:
    """Return ``-log p`` of each sample's class, with p clipped as in scikit-learn; the mean is :func:`log_loss`."""
    p = probabilities(outputs)[np.arange(len(y)), y]
    return np.asarray(-np.log(np.maximum(p, np.finfo(np.float64).eps)))


def brier(y: Targets, outputs: Outputs) -> float:
    """Return the mean squared error of the probability of class 1; for more classes, the sum over all classes."""
    from sklearn.metrics import mean_squared_error

    p, classes = probabilities(outputs), outputs.shape[1]
    return float(mean_squared_error(np.eye(classes)[y], p)) * (1 if classes == 2 else classes)


def brier_losses(y: Targets, outputs: Outputs) -> Outputs:
    """Return the squared error of each sample's probabilities, whose mean is :func:`brier`."""
    squares = np.square(np.eye(outputs.shape[1])[y] - probabilities(outputs)).sum(1)
    return np.asarray(squares / 2 if outputs.shape[1] == 2 else squares)


def calibration_error(y: Targets, outputs: Outputs) -> float:
    """Return the expected calibration error of the predicted class, with 15 bins (Guo et al. 2017, eq. 3)."""
    p = probabilities(outputs)
    confidence, right = p.max(1), outputs.argmax(1) == y
    bins = np.ceil(confidence * _BINS).astype(int)
    gaps = np.bincount(bins, right) - np.bincount(bins, confidence)
    return float(np.abs(gaps).sum() / len(y))


def mse(y: Targets, outputs: Outputs) -> float:
    """Return the mean squared error over samples and values."""
    return float(np.square(outputs.reshape(len(y), -1) - y.reshape(len(y), -1)).mean())


def squared_errors(y: Targets, outputs: Outputs) -> Outputs:
    """Return the mean squared error of each sample over its values; the mean over samples is :func:`mse`."""
    return np.asarray(np.square(outputs.reshape(len(y), -1) - y.reshape(len(y), -1)).mean(1))


def absolute_errors(y: Targets, outputs: Outputs) -> Outputs:
    """Return the mean absolute error of each sample over its values; the mean over samples is :func:`mae`."""
    return np.asarray(np.abs(outputs.reshape(len(y), -1) - y.reshape(len(y), -1)).mean(1))


def mae(y: Targets, outputs: Outputs) -> float:
    """Return the mean absolute error over samples and values."""
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(y.reshape(len(y), -1), outputs.reshape(len(y), -1)))


def r2(y: Targets, outputs: Outputs) -> float:
    """Return the coefficient of determination, averaged over values; not defined if one of them is constant."""
    from sklearn.metrics import r2_score

    values = y.reshape(len(y), -1)
    if len(values) < 2 or not np.ptp(values, axis=0).all():
        return np.nan
    return float(r2_score(values, outputs.reshape(len(y), -1)))


def c_index(y: Targets, outputs: Outputs) -> float:
    """Return Harrell's C: the fraction of comparable pairs in which the sample with the earlier event has more hazard.

    A pair is comparable if it is known which sample had the event first. At equal times, an event comes before a
    censored sample, and two events are not comparable. A tie in the hazard counts as half a pair. The metric is not
    defined without a comparable pair.

    Source: Harrell et al. 1982.
    """
    hazard, time, event = outputs.reshape(len(y)), y[:, 0], y[:, 1] > 0
    pairs = agreeing = 0.0
    events = np.flatnonzero(event)
    for chunk in np.array_split(events, max(1, len(events) * len(y) // _PAIRS)):
        t, h = time[chunk, None], hazard[chunk, None]
        later = (time > t) | ((time == t) & ~event)
        pairs += later.sum()
        agreeing += (later & (hazard < h)).sum() + (later & (hazard == h)).sum() / 2
    return float(agreeing / pairs) if pairs else np.nan


def probabilities(outputs: Outputs) -> Outputs:
    """Return the softmax of logits, ``(samples, C)``."""
    softmax: Outputs = scipy.special.softmax(outputs, axis=1)
    return softmax


def _fraction_of_ordered_pairs(positive: NDArray[np.bool_], score: NDArray[np.float64]) -> float:
    lower = np.sort(score[~positive])
    higher = score[positive]
    pairs = np.searchsorted(lower, higher, "left").sum() + np.searchsorted(lower, higher, "right").sum()
    return float(pairs / (2 * len(lower) * len(higher)))


def _average_rank_score(score: Callable[..., float], y: Targets, outputs: Outputs) -> float:
    """Return a rank metric of the margin of class 1; for more classes, the mean over classes by their probabilities."""
    labels = np.unique(y)
    if len(labels) < 2:
        return np.nan
    if outputs.shape[1] == 2:
        margin = np.nan_to_num(outputs[:, 1] - outputs[:, 0])
        return float(score(y == 1, margin))
    p = probabilities(outputs)
    return float(np.mean([score(y == label, p[:, label]) for label in labels]))
