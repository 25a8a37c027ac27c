"""scikit-learn's models by name, a Cox model in their manner, and the strengths of each that are tried.

Most commands train none of them: scikit-learn is imported when a model is made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.labels import Task
from perfed.errors import PerfedError
from perfed.maths.thresholds import distinct_values, separate_values
from perfed.plugins import POOLED, SKLEARN, import_user_module, match_name

SEED = "the seed"
LEAVES = (1, 5)
"""Fewest samples in a leaf of a random forest: the forest takes what is better out of bag, where nothing is tuned."""

TRIES = 5
"""Values of the strength of a named model that are tried on validation data, unless the experiment says how many."""


@dataclass(frozen=True)
class _Known:
    """A model with a name of its own.

    Attributes:
        makers: by task the module and class of the model, and its settings; :data:`SEED` stands for the seed.
        setting: how strongly it is held back from fitting the training samples; empty where nothing is fitted.
        strongest, default, weakest: ends of what is tried of it, and what it is otherwise. Whole numbers stay such.
    """

    makers: dict[Task, tuple[str, dict[str, Any]]]
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
_SEEDED = {"random_state": SEED}
_BOOSTED = {"max_depth": 2, **_SEEDED}
_KNOWN = {
    "logistic": _Known(
        {"classification": ("sklearn.linear_model.LogisticRegression", {"max_iter": 1000})}, "C", 0.01, 1.0, 100.0
    ),
    "ridge": _Known({"regression": ("sklearn.linear_model.Ridge", {})}, "alpha", 100.0, 1.0, 0.01),
    "cox": _Known({"survival": ("perfed.experiment.cox.Cox", {})}, "penalizer", 10.0, 0.1, 0.001),
    "svc": _Known({"classification": ("sklearn.svm.SVC", {})}, "C", 0.01, 1.0, 100.0),
    "random-forest": _Known(
        {
            "classification": ("sklearn.ensemble.RandomForestClassifier", _SEEDED),
            "regression": ("sklearn.ensemble.RandomForestRegressor", _SEEDED),
        },
        "min_samples_leaf",
        10,
        1,
        1,
    ),
    "gradient-boosting": _Known(
        {
            "classification": ("sklearn.ensemble.GradientBoostingClassifier", _BOOSTED),
            "regression": ("sklearn.ensemble.GradientBoostingRegressor", _BOOSTED),
        },
        "learning_rate",
        0.01,
        0.1,
        1.0,
    ),
    "majority": _Known({"classification": ("sklearn.dummy.DummyClassifier", {})}),
    "mean": _Known({"regression": ("sklearn.dummy.DummyRegressor", {})}),
}


def _made(name: str, settings: Mapping[str, Any], seed: int) -> Any:
    module, _, attribute = name.rpartition(".")
    kind = getattr(import_module(module), attribute)
    return kind(**{key: seed if value == SEED else value for key, value in settings.items()})


def _is_for(model: Any, task: Task) -> bool:
    from sklearn.base import is_classifier, is_regressor

    known = {"classification": is_classifier, "regression": is_regressor}
    return task in known and bool(known[task](model))


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
    known = match_name(bare, _KNOWN)
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
        return _made(*known.makers[task], seed)
    if known is None and task != "survival" and _is_for(model := _instance(name, seed), task):
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

    The thresholds of decision trees are moved to where new samples do not lie (:mod:`perfed.maths.thresholds`).
    """
    if _bare(name) == "random-forest" and not tuned:
        fitted = max((_out_of_bag(model, leaf, x, y) for leaf in LEAVES), key=lambda scored: scored[0])[1]
    else:
        fitted = model.fit(x, y)
    values = distinct_values(x)
    for tree in _trees_of(fitted, x.shape[1]):
        separate_values(tree, values)
    return fitted


def _trees_of(model: Any, columns: int) -> Iterator[Any]:
    """Yield the decision trees on ``columns`` columns that a fitted model, or several in a list, consist of."""
    if isinstance(model, list | np.ndarray):
        for part in model:
            yield from _trees_of(part, columns)
    elif hasattr(model, "tree_") and model.n_features_in_ == columns:
        yield model.tree_
    else:
        yield from _trees_of(getattr(model, "estimators_", []), columns)


def _out_of_bag(forest: Any, leaf: int, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, Any]:
    """How near such a forest is to the samples that its trees were not given, minus the mean squared distance; and the
    forest, without what it says of each of these.
    """
    from sklearn.base import clone, is_regressor

    fitted = clone(forest).set_params(min_samples_leaf=leaf, oob_score=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all trees may have been given one of few samples, whatever the leaf
        fitted.fit(x, y)
    fitted.set_params(oob_score=False)
    del fitted.oob_score_
    if is_regressor(forest):
        return -float(np.mean((vars(fitted).pop("oob_prediction_") - y) ** 2)), fitted
    said = vars(fitted).pop("oob_decision_function_")
    return -float(np.mean((said - (y[:, None] == fitted.classes_)) ** 2)), fitted


def _bare(name: str) -> str:
    return name.removeprefix(SKLEARN).removeprefix(POOLED)


def _instance(name: str, seed: int) -> Any:
    try:
        model = _class_of(name)()
    except TypeError as error:
        raise PerfedError(f"{name}: cannot be made without settings: {error}") from None
    return model.set_params(random_state=seed) if "random_state" in model.get_params() else model


def _class_of(name: str) -> Any:
    from sklearn.base import BaseEstimator

    module, _, attribute = _bare(name).rpartition(".")
    if not module:
        raise PerfedError(f"unknown scikit-learn model '{name}'; allowed: {', '.join(_allowed(name))}")
    try:
        found = getattr(import_user_module(module), attribute)
    except Exception as error:  # whatever a user's module does
        raise PerfedError(f"{name}: no class '{attribute}' of a module '{module}': {error}") from None
    if not (isinstance(found, type) and issubclass(found, BaseEstimator)):
        raise PerfedError(f"{name}: '{attribute}' of '{module}' is no estimator of scikit-learn's kind")
    return found


def _allowed(name: str) -> Sequence[str]:
    prefix = POOLED if is_pooled(name) else SKLEARN
    return [*(prefix + own for own in _KNOWN), f"{prefix}module.Class"]
