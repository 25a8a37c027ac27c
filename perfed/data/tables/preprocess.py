"""A site's preprocessing: from columns as they are read to inputs, by scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.tables.kinds import Column
from perfed.data.tables.problems import Frame
from perfed.errors import PerfedError
from perfed.plugins import endings_refused, own_mistake, own_module

_HUGE = 1e30  # stands for a missing value where the mask is made; below float32's largest number


def column_transformer(columns: Sequence[Column]) -> Any:
    """A ``ColumnTransformer``, not fitted, for columns as ``TablePreprocessor.read`` gives them.

    Numbers and dates (in days): the median where missing, then mean 0 and deviation 1 (but :func:`keep_flags`).
    Booleans: the more frequent value where missing. Categories: one input for each of ``levels``, none for all others,
    seen or not. A further input for each column that is ``masked`` is 1 where the value is missing; categories have
    "missing" as a level. It is made of estimators that skl2onnx can convert: of ``MissingIndicator`` it cannot, and
    drops ``add_indicator`` without a word, so that the mask is an imputed huge number behind a threshold.
    """
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import Binarizer, OneHotEncoder, StandardScaler

    def filled(strategy: str, **more: Any) -> Any:
        return SimpleImputer(strategy=strategy, keep_empty_features=True, **more)

    def scaled() -> Any:
        return Pipeline([("fill", filled("median")), ("scale", StandardScaler())])

    constant = filled("constant", fill_value=_HUGE)
    mask = Pipeline([("fill", constant), ("threshold", Binarizer(threshold=_HUGE / 2))])
    categories = [column for column in columns if column.kind == "category"]
    levels = [np.array(column.levels, dtype=object) for column in categories]
    one_hot = OneHotEncoder(categories=levels, handle_unknown="ignore", sparse_output=False)
    parts = [
        ("number", scaled(), [c.name for c in columns if c.kind == "number"]),
        ("date", scaled(), [c.name for c in columns if c.kind == "date"]),
        ("boolean", filled("most_frequent"), [c.name for c in columns if c.kind == "boolean"]),
        ("category", one_hot, [c.name for c in categories]),
        ("missing", mask, [c.name for c in columns if c.masked and c.kind != "category"]),
    ]
    return ColumnTransformer([part for part in parts if part[2]], sparse_threshold=0.0)


def keep_flags(transformer: Any, frame: Frame) -> None:
    """Let numbers that are 0 or 1 in all rows of ``frame`` enter as they are: for a fitted :func:`column_transformer`.

    Standardised, a rare 1 would be a large input, which costs linear models a twentieth of their error on the schools.
    The scaler is scikit-learn's still, so that skl2onnx can convert it.
    """
    for name, pipeline, columns in transformer.transformers_:
        if name == "number":
            scaler, flags = pipeline["scale"], [bool(frame[c].dropna().isin((0.0, 1.0)).all()) for c in columns]
            scaler.mean_[flags], scaler.var_[flags], scaler.scale_[flags] = 0.0, 1.0, 1.0


def own_transformer(name: str) -> Any:
    """The transformer ``module:NAME`` of the user's: an estimator, of which a copy is returned, or what makes one.

    Raises:
        PerfedError: it cannot be imported, or has no ``fit`` and ``transform``.
    """
    from sklearn.base import clone

    module, colon, attribute = name.partition(":")
    if not colon:
        raise PerfedError(f"preprocess = '{name}' is not allowed; 'module:NAME' of a scikit-learn transformer is")
    try:
        found = getattr(own_module(module), attribute)
        with endings_refused():
            made = found() if isinstance(found, type) or not hasattr(found, "fit") else clone(found)
    except Exception as error:  # whatever a user's file does
        raise PerfedError(f"preprocess = '{name}': cannot be loaded: {own_mistake(error) or error}") from None
    if not (hasattr(made, "fit") and hasattr(made, "transform")):
        raise PerfedError(f"preprocess = '{name}' gives a {type(made).__name__}; a scikit-learn transformer is needed")
    return made


def outputs(transformer: Any, frame: Frame, where: str) -> NDArray[np.float64]:
    """What the fitted ``transformer`` makes of ``frame``, ``(n, p)``.

    Raises:
        PerfedError: no table of numbers; starts with ``where``.
    """
    made = transformer.transform(frame)
    made = made.toarray() if hasattr(made, "toarray") else made
    try:
        array = np.asarray(made, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PerfedError(f"{where}: the preprocessing does not give numbers ({error})") from None
    if array.ndim != 2 or len(array) != len(frame):
        shape = f"({len(frame)}, columns)"
        raise PerfedError(f"{where}: the preprocessing gives an array of shape {array.shape}; {shape} is needed")
    return array


def output_names(transformer: Any) -> tuple[str, ...] | None:
    """Names of the inputs that it makes, if it knows them."""
    try:
        return tuple(map(str, transformer.get_feature_names_out()))
    except (AttributeError, ValueError):
        return None
