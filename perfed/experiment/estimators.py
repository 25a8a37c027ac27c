"""Named scikit-learn models, a Cox model with the same interface, and the values that tuning tries for each.

scikit-learn is imported only when a model is created, because most commands train none.
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
"""Candidates for the minimum leaf size of a random forest that is not tuned; the out-of-bag error decides."""

TRIES = 5
"""The number of values of a model's setting that tuning tries, unless the experiment has ``baseline_tries``."""


@dataclass(frozen=True)
class _NamedModel:
    """A model with a short name.

    Attributes:
        makers: the module and class of the model and its settings, by task; :data:`SEED` stands for the seed.
        setting: the parameter that regularises the model and is tuned; empty if the model has none.
        strongest, default, weakest: the value of this parameter with the strongest regularisation that is tried, the
            value without tuning, and the value with the weakest one. Integers remain integers.
    """

    makers: dict[Task, tuple[str, dict[str, Any]]]
    setting: str = ""
    strongest: float = 1.0
    default: float = 1.0
    weakest: float = 1.0

    def values(self, number: int) -> tuple[float, ...]:
        """Return ``number`` values of the setting: the default first, then values in geometric steps on both sides."""
        num_stronger = number - 1 if self.weakest == self.default else number // 2
        candidates = [
            *np.geomspace(self.strongest, self.default, num_stronger + 1)[:-1],
            *np.geomspace(self.default, self.weakest, number - num_stronger)[1:],
        ]
        round_values = _round_to_integers if isinstance(self.default, int) else _round_to_few_digits
        return (self.default, *round_values(sorted(candidates), self.default))


def _round_to_integers(values: Sequence[float], minimum: float) -> list[int]:
    """Round sorted values down to integers, raised where necessary so that all differ and are above ``minimum``."""
    integers = [int(minimum)]
    for value in values:
        integers.append(max(int(value), integers[-1] + 1))
    return integers[1:]


def _round_to_few_digits(values: Sequence[float], excluded: float) -> list[float]:
    """Round values to the fewest digits with which they still differ from each other and from ``excluded``."""
    for digits in range(1, 17):
        rounded = [float(f"{value:.{digits}g}") for value in values]
        if len({*rounded, excluded}) > len(values):
            return rounded
    return list(values)


# HistGradientBoosting is not used: its leaves have at least 20 samples, so that its predictions are constant for a
# client with fewer than 40. The exact splits of GradientBoosting are fast enough for a few hundred samples. The trees
# are shallower than scikit-learn's default depth of 3, which over-fits the few rows of a site.
_SEEDED = {"random_state": SEED}
_BOOSTED = {"max_depth": 2, **_SEEDED}
_NAMED_MODELS = {
    "logistic": _NamedModel(
        {"classification": ("sklearn.linear_model.LogisticRegression", {"max_iter": 1000})}, "C", 0.01, 1.0, 100.0
    ),
    "ridge": _NamedModel({"regression": ("sklearn.linear_model.Ridge", {})}, "alpha", 100.0, 1.0, 0.01),
    "cox": _NamedModel({"survival": ("perfed.experiment.cox.Cox", {})}, "penalizer", 10.0, 0.1, 0.001),
    "svc": _NamedModel({"classification": ("sklearn.svm.SVC", {})}, "C", 0.01, 1.0, 100.0),
    "random-forest": _NamedModel(
        {
            "classification": ("sklearn.ensemble.RandomForestClassifier", _SEEDED),
            "regression": ("sklearn.ensemble.RandomForestRegressor", _SEEDED),
        },
        "min_samples_leaf",
        10,
        1,
        1,
    ),
    "gradient-boosting": _NamedModel(
        {
            "classification": ("sklearn.ensemble.GradientBoostingClassifier", _BOOSTED),
            "regression": ("sklearn.ensemble.GradientBoostingRegressor", _BOOSTED),
        },
        "learning_rate",
        0.01,
        0.1,
        1.0,
    ),
    "majority": _NamedModel({"classification": ("sklearn.dummy.DummyClassifier", {})}),
    "mean": _NamedModel({"regression": ("sklearn.dummy.DummyRegressor", {})}),
}


def _create_model(name: str, settings: Mapping[str, Any], seed: int) -> Any:
    module, _, attribute = name.rpartition(".")
    kind = getattr(import_module(module), attribute)
    return kind(**{key: seed if value == SEED else value for key, value in settings.items()})


def _is_for(model: Any, task: Task) -> bool:
    from sklearn.base import is_classifier, is_regressor

    checks = {"classification": is_classifier, "regression": is_regressor}
    return task in checks and bool(checks[task](model))


def is_baseline(name: str) -> bool:
    """Return whether ``name`` denotes a scikit-learn model rather than a method."""
    return name.startswith((SKLEARN, POOLED))


def is_pooled(name: str) -> bool:
    """Return whether ``name`` denotes one model that is trained on the samples of all clients together."""
    return name.startswith(POOLED)


def baseline_names() -> list[str]:
    """Return the names of the models that are trained per client and have a short name."""
    return [SKLEARN + name for name in _NAMED_MODELS]


def baseline_id(name: str) -> str:
    """Return the canonical name of a baseline; short names are accepted in any case.

    Raises:
        PerfedError: there is no such model; the message lists the allowed names.

    Example:
        >>> baseline_id("sklearn:SVC"), baseline_id("sklearn:sklearn.svm.SVC")
        ('sklearn:svc', 'sklearn:sklearn.svm.SVC')
    """
    bare = _remove_prefix(name)
    short_name = match_name(bare, _NAMED_MODELS)
    if short_name is None:
        _import_class(name)
    return f"{name.removesuffix(bare)}{short_name or bare}"


def tries(name: str, number: int) -> tuple[str, tuple[float, ...]] | None:
    """Return the tuned setting of the baseline ``name`` and the values that are tried.

    Returns:
        The name of the setting, and ``number`` values of it. The default comes first, so that it is chosen unless
        another value is better. ``None`` for a class without a short name and for a model without such a setting.
    """
    model = _NAMED_MODELS.get(_remove_prefix(name))
    return (model.setting, model.values(number)) if model is not None and model.setting else None


def new_model(name: str, task: Task, seed: int) -> Any:
    """Return an untrained model of the baseline ``name`` with scikit-learn's defaults and the seed, if it uses one.

    Raises:
        PerfedError: there is no such model, or it does not support the task; the message lists the allowed names.
    """
    named_model = _NAMED_MODELS.get(_remove_prefix(name))
    if named_model is not None and task in named_model.makers:
        return _create_model(*named_model.makers[task], seed)
    if named_model is None and task != "survival" and _is_for(model := _create_instance(name, seed), task):
        return model
    prefix = POOLED if is_pooled(name) else SKLEARN
    allowed = ", ".join(prefix + short_name for short_name, model in _NAMED_MODELS.items() if task in model.makers)
    kind = task if task == "survival" else f"a {task}"
    raise PerfedError(f"{name} is not for {kind}, which these data are; allowed: {allowed}")


def trained(name: str, model: Any, x: NDArray[Any], y: NDArray[Any], tuned: bool) -> Any:
    """Train the model of the baseline ``name`` and return it.

    A random forest that is not tuned has leaves of at least one or five samples (:data:`LEAVES`), whichever has the
    better out-of-bag Brier score or squared error (Breiman 2001, section 3.1). No fixed size is good everywhere: five
    is better on noisy sites and much worse if a class has few samples.

    The thresholds of decision trees are moved to where new samples are not expected (:mod:`perfed.maths.thresholds`).

    Args:
        name: the name of the baseline.
        model: the untrained model.
        x: the inputs, ``(samples, features)``.
        y: the targets.
        tuned: whether the setting of the model was tuned.
    """
    if _remove_prefix(name) == "random-forest" and not tuned:
        fitted = max((_fit_out_of_bag(model, leaf, x, y) for leaf in LEAVES), key=lambda scored: scored[0])[1]
    else:
        fitted = model.fit(x, y)
    values = distinct_values(x)
    for tree in _trees_of(fitted, x.shape[1]):
        separate_values(tree, values)
    return fitted


def _trees_of(model: Any, columns: int) -> Iterator[Any]:
    """Yield the decision trees of a fitted model, or of a list of models, that have ``columns`` input columns."""
    if isinstance(model, list | np.ndarray):
        for part in model:
            yield from _trees_of(part, columns)
    elif hasattr(model, "tree_") and model.n_features_in_ == columns:
        yield model.tree_
    else:
        yield from _trees_of(getattr(model, "estimators_", []), columns)


def _fit_out_of_bag(forest: Any, leaf: int, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, Any]:
    """Fit a clone of ``forest`` with leaves of at least ``leaf`` samples, and score it out of bag.

    Returns:
        The negative mean squared error or Brier score on out-of-bag samples, and the fitted forest without its
        out-of-bag predictions.
    """
    from sklearn.base import clone, is_regressor

    fitted = clone(forest).set_params(min_samples_leaf=leaf, oob_score=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with few samples, one may be in the bag of every tree
        fitted.fit(x, y)
    fitted.set_params(oob_score=False)
    del fitted.oob_score_
    if is_regressor(forest):
        return -float(np.mean((vars(fitted).pop("oob_prediction_") - y) ** 2)), fitted
    probabilities = vars(fitted).pop("oob_decision_function_")
    return -float(np.mean((probabilities - (y[:, None] == fitted.classes_)) ** 2)), fitted


def _remove_prefix(name: str) -> str:
    return name.removeprefix(SKLEARN).removeprefix(POOLED)


def _create_instance(name: str, seed: int) -> Any:
    try:
        model = _import_class(name)()
    except TypeError as error:
        raise PerfedError(f"{name}: cannot be made without settings: {error}") from None
    return model.set_params(random_state=seed) if "random_state" in model.get_params() else model


def _import_class(name: str) -> Any:
    from sklearn.base import BaseEstimator

    module, _, attribute = _remove_prefix(name).rpartition(".")
    if not module:
        raise PerfedError(f"unknown scikit-learn model '{name}'; allowed: {', '.join(_list_allowed_names(name))}")
    try:
        estimator_class = getattr(import_user_module(module), attribute)
    except Exception as error:  # a user's module can raise any exception
        raise PerfedError(f"{name}: no class '{attribute}' of a module '{module}': {error}") from None
    if not (isinstance(estimator_class, type) and issubclass(estimator_class, BaseEstimator)):
        raise PerfedError(f"{name}: '{attribute}' of '{module}' is no estimator of scikit-learn's kind")
    return estimator_class


def _list_allowed_names(name: str) -> Sequence[str]:
    prefix = POOLED if is_pooled(name) else SKLEARN
    return [*(prefix + short_name for short_name in _NAMED_MODELS), f"{prefix}module.Class"]
