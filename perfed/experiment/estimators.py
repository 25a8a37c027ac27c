"""scikit-learn's models by name, a Cox model in their manner, and the strengths of each that are tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, clone, is_classifier, is_regressor
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.svm import SVC

from perfed.data.files import optional_package
from perfed.data.labels import Task
from perfed.errors import PerfedError
from perfed.plugins import POOLED, SKLEARN, known_as, own_module

LEAVES = (1, 5)
"""Fewest samples in a leaf of a random forest: the forest takes what is better out of bag, where nothing is tuned."""

TRIES = 5
"""Values of the strength of a named model that are tried on validation data, unless the experiment says how many."""


class Cox(BaseEstimator):  # type: ignore[misc]
    """The maximum of the Cox partial log-likelihood (ties: Efron) less ``n penalizer |b|^2 / 2``.

    ``n`` is the number of samples, ``b`` the coefficients of the columns in units of their standard deviation. Columns
    that are constant have the coefficient 0; without an event, or without any other column, all hazards are the same.

    Args:
        penalizer: how strongly coefficients are held near 0. Without it (lifelines' default) there is no maximum where
            a column tells who has the event first.

    Attributes:
        events_: events among the samples that it was fitted to.

    Raises:
        PerfedError: lifelines is not installed; names the extra.

    Source: Cox 1972; Efron 1977; lifelines' ``CoxPHFitter``.
    """

    def __init__(self, penalizer: float = 0.1) -> None:
        self.penalizer = penalizer
        optional_package("lifelines", "a Cox model", extra="tables")

    def fit(self, x: NDArray[Any], y: NDArray[Any]) -> Self:
        """Fit to inputs ``(samples, columns)`` and times and events ``(samples, 2)``.

        Raises:
            ValueError: lifelines finds no maximum.
        """
        pandas = optional_package("pandas", "a Cox model", extra="tables")
        self.events_ = int(np.count_nonzero(y[:, 1]))
        self._varies = np.ptp(x, axis=0) > 0
        self._fitted = None
        if self.events_ and self._varies.any():
            table = pandas.DataFrame(x[:, self._varies].astype(np.float64))
            table = table.rename(columns=str).assign(time=y[:, 0], event=y[:, 1])
            model = optional_package("lifelines", "a Cox model", extra="tables").CoxPHFitter(penalizer=self.penalizer)
            self._fitted = model.fit(table, "time", "event")
        return self

    def predict(self, x: NDArray[Any]) -> NDArray[np.float64]:
        """Return log hazards ``(samples, 1)``, up to a constant."""
        return np.asarray(x.astype(np.float64) @ self.coefficients[:, None])

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """Of the columns as they are given, ``(columns,)``."""
        found = np.zeros(len(self._varies))
        if self._fitted is not None:
            found[self._varies] = self._fitted.params_.to_numpy()
        return found


@dataclass(frozen=True)
class _Known:
    """A model with a name of its own.

    Attributes:
        makers: by task, from a seed to the model.
        setting: how strongly it is held back from fitting the training samples; empty where nothing is fitted.
        strongest, default, weakest: ends of what is tried of it, and what it is otherwise. Whole numbers stay such.
    """

    makers: dict[Task, Callable[[int], Any]]
    setting: str = ""
    strongest: float = 1.0
    default: float = 1.0
    weakest: float = 1.0

    def values(self, number: int) -> tuple[float, ...]:
        """Return so many, the default first; those on either side of it are equally far apart as factors."""
        away = number - 1 if self.weakest == self.default else number // 2
        found = [
            *np.geomspace(self.strongest, self.default, away + 1)[:-1],
            *np.geomspace(self.default, self.weakest, number - away)[1:],
        ]
        return (self.default, *(_whole if isinstance(self.default, int) else _short)(sorted(found), self.default))


def _whole(values: Sequence[float], least: float) -> list[int]:
    """Different whole numbers above ``least``."""
    found = [int(least)]
    for value in values:
        found.append(max(int(value), found[-1] + 1))
    return found[1:]


def _short(values: Sequence[float], other: float) -> list[float]:
    """``values`` with as few digits as leave them different from each other and from ``other``."""
    for digits in range(1, 17):
        found = [float(f"{value:.{digits}g}") for value in values]
        if len({*found, other}) > len(values):
            return found
    return list(values)


# GradientBoosting and not HistGradientBoosting: that one puts no fewer than 20 samples into a leaf and so says the same
# for every sample of a client that has under 40; the exact splits of this one cost nothing with a few hundred samples.
# Its trees are shallow, for those of scikit-learn's depth, 3, over-fit a site's few rows.
_KNOWN = {
    "logistic": _Known({"classification": lambda seed: LogisticRegression(max_iter=1000)}, "C", 0.01, 1.0, 100.0),
    "ridge": _Known({"regression": lambda seed: Ridge()}, "alpha", 100.0, 1.0, 0.01),
    "cox": _Known({"survival": lambda seed: Cox()}, "penalizer", 10.0, 0.1, 0.001),
    "svc": _Known({"classification": lambda seed: SVC()}, "C", 0.01, 1.0, 100.0),
    "random-forest": _Known(
        {
            "classification": lambda seed: RandomForestClassifier(random_state=seed),
            "regression": lambda seed: RandomForestRegressor(random_state=seed),
        },
        "min_samples_leaf",
        10,
        1,
        1,
    ),
    "gradient-boosting": _Known(
        {
            "classification": lambda seed: GradientBoostingClassifier(max_depth=2, random_state=seed),
            "regression": lambda seed: GradientBoostingRegressor(max_depth=2, random_state=seed),
        },
        "learning_rate",
        0.01,
        0.1,
        1.0,
    ),
    "majority": _Known({"classification": lambda seed: DummyClassifier()}),
    "mean": _Known({"regression": lambda seed: DummyRegressor()}),
}


_IS_FOR = {"classification": is_classifier, "regression": is_regressor}


def is_baseline(name: str) -> bool:
    """Return whether ``name`` stands for scikit-learn models and not for a method."""
    return name.startswith((SKLEARN, POOLED))


def is_pooled(name: str) -> bool:
    """Return whether ``name`` stands for one model on the samples of all clients together."""
    return name.startswith(POOLED)


def baseline_names() -> list[str]:
    """Return the models per client that have a name of their own."""
    return [SKLEARN + name for name in _KNOWN]


def baseline_id(name: str) -> str:
    """Return the baseline ``name`` as files have it, whatever the case of a model with a name of its own.

    Raises:
        PerfedError: there is none; says what is allowed.

    Example:
        >>> baseline_id("sklearn:SVC"), baseline_id("sklearn:sklearn.svm.SVC")
        ('sklearn:svc', 'sklearn:sklearn.svm.SVC')
    """
    bare = _bare(name)
    known = known_as(bare, _KNOWN)
    if known is None:
        _class_of(name)
    return f"{name.removesuffix(bare)}{known or bare}"


def tries(name: str, number: int) -> tuple[str, tuple[float, ...]] | None:
    """Return the setting of the baseline ``name`` that is tried, and ``number`` values of it, the default first, which
    so is taken unless another is better; ``None`` for a class of any other name, and where there is nothing to try.
    """
    known = _KNOWN.get(_bare(name))
    return (known.setting, known.values(number)) if known is not None and known.setting else None


def new_model(name: str, task: Task, seed: int) -> Any:
    """Return the untrained model of the baseline ``name``: scikit-learn's defaults, and the seed where it draws.

    Raises:
        PerfedError: none of that name, or none for such targets; says what is allowed.
    """
    known = _KNOWN.get(_bare(name))
    if known is not None and task in known.makers:
        return known.makers[task](seed)
    if known is None and task in _IS_FOR and _IS_FOR[task](model := _instance(name, seed)):
        return model
    prefix = POOLED if is_pooled(name) else SKLEARN
    own = ", ".join(prefix + other for other, item in _KNOWN.items() if task in item.makers)
    kind = task if task == "survival" else f"a {task}"
    raise PerfedError(f"{name} is not for {kind}, which these data are; allowed: {own}")


def trained(name: str, model: Any, x: NDArray[Any], y: NDArray[Any], tuned: bool) -> Any:
    """Return the model of the baseline ``name``, trained on ``x`` ``(samples, features)``.

    A random forest that is not ``tuned`` has leaves of at least one sample or five (:data:`LEAVES`), whichever is
    better on the samples that each tree was not given, by Brier score or squared error (Breiman 2001, section 3.1). No
    fixed number is good everywhere: five is better on noisy sites and much worse where a class has few samples.
    """
    if _bare(name) == "random-forest" and not tuned:
        model.set_params(min_samples_leaf=max(LEAVES, key=lambda leaf: _out_of_bag(model, leaf, x, y)))
    return model.fit(x, y)


def _out_of_bag(forest: Any, leaf: int, x: NDArray[Any], y: NDArray[Any]) -> float:
    """How near such a forest is to the samples that its trees were not given: minus the mean squared distance."""
    fitted = clone(forest).set_params(min_samples_leaf=leaf, oob_score=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all trees may have been given one of few samples, whatever the leaf
        fitted.fit(x, y)
    if is_regressor(forest):
        return -float(np.mean((fitted.oob_prediction_ - y) ** 2))
    return -float(np.mean((fitted.oob_decision_function_ - (y[:, None] == fitted.classes_)) ** 2))


def _bare(name: str) -> str:
    return name.removeprefix(SKLEARN).removeprefix(POOLED)


def _instance(name: str, seed: int) -> Any:
    try:
        model = _class_of(name)()
    except TypeError as error:
        raise PerfedError(f"{name}: cannot be made without settings: {error}") from None
    return model.set_params(random_state=seed) if "random_state" in model.get_params() else model


def _class_of(name: str) -> type[BaseEstimator]:
    module, _, attribute = _bare(name).rpartition(".")
    if not module:
        raise PerfedError(f"unknown scikit-learn model '{name}'; allowed: {', '.join(_allowed(name))}")
    try:
        found = getattr(own_module(module), attribute)
    except Exception as error:  # whatever a user's module does
        raise PerfedError(f"{name}: no class '{attribute}' of a module '{module}': {error}") from None
    if not (isinstance(found, type) and issubclass(found, BaseEstimator)):
        raise PerfedError(f"{name}: '{attribute}' of '{module}' is no estimator of scikit-learn's kind")
    return found


def _allowed(name: str) -> Sequence[str]:
    prefix = POOLED if is_pooled(name) else SKLEARN
    return [*(prefix + own for own in _KNOWN), f"{prefix}module.Class"]
