"""The preprocessing of a site with scikit-learn, from parsed columns to inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.column import Column, Kind
from perfed.errors import PerfedError
from perfed.plugins import describe_user_error, import_user_module, refuse_exit
from perfed.tables.problems import Frame

_HUGE = 1e30  # stands for a missing value where the mask is made; below float32's largest number


def column_transformer(columns: Sequence[Column], shared: int | None = None) -> Any:
    """Return an unfitted ``ColumnTransformer`` for columns as ``TablePreprocessor.read`` returns them.

    Numbers and dates (in days): the median where missing, then mean 0 and deviation 1 (but :func:`set_scales`).
    Booleans: the more frequent value where missing. Categories: one input for each of ``levels``, none for all others,
    seen or not. A further input for each column that is ``masked`` is 1 where the value is missing; categories have
    "missing" as a level. It is made of estimators that skl2onnx can convert: of ``MissingIndicator`` it cannot, and
    drops ``add_indicator`` without a word, so that the mask is an imputed huge number behind a threshold.

    Args:
        columns: the columns that enter.
        shared: the number of the first columns, whose inputs come before those of the others.
    """
    shared_parts = _create_parts(columns[:shared])
    local = (
        [] if shared is None else [(f"own_{name}", *estimator) for name, *estimator in _create_parts(columns[shared:])]
    )
    from sklearn.compose import ColumnTransformer

    return ColumnTransformer([*shared_parts, *local], sparse_threshold=0.0)


def list_inputs(columns: Sequence[Column]) -> list[Column]:
    """Return the column of each input that :func:`column_transformer` creates."""
    kinds: tuple[Kind, ...] = ("number", "date", "boolean")
    plain = [column for kind in kinds for column in columns if column.kind == kind]
    levels = [column for column in columns if column.kind == "category" for _ in column.levels]
    return [*plain, *levels, *(column for column in columns if column.masked and column.kind != "category")]


def _create_parts(columns: Sequence[Column]) -> list[tuple[Any, ...]]:
    """Return name, estimator and columns of each part."""
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import Binarizer, OneHotEncoder, StandardScaler

    def create_imputer(strategy: str, **options: Any) -> Any:
        return SimpleImputer(strategy=strategy, keep_empty_features=True, **options)

    def create_scaler() -> Any:
        return Pipeline([("fill", create_imputer("median")), ("scale", StandardScaler())])

    constant = create_imputer("constant", fill_value=_HUGE)
    mask = Pipeline([("fill", constant), ("threshold", Binarizer(threshold=_HUGE / 2))])
    categories = [column for column in columns if column.kind == "category"]
    levels = [np.array(column.levels, dtype=object) for column in categories]
    one_hot = OneHotEncoder(categories=levels, handle_unknown="ignore", sparse_output=False)
    parts = [
        ("number", create_scaler(), [c.name for c in columns if c.kind == "number"]),
        ("date", create_scaler(), [c.name for c in columns if c.kind == "date"]),
        ("boolean", create_imputer("most_frequent"), [c.name for c in columns if c.kind == "boolean"]),
        ("category", one_hot, [c.name for c in categories]),
        ("missing", mask, [c.name for c in columns if c.masked and c.kind != "category"]),
    ]
    return [part for part in parts if part[2]]


def set_scales(transformer: Any, frame: Frame, columns: Sequence[Column], *, filled: bool = False) -> None:
    """Scale columns as all sites agreed, and leave other numbers unchanged if they are 0 or 1 in all rows.

    Standardised, a rare 1 would be a large input, which costs linear models a twentieth of their error on the schools.
    The scaler is scikit-learn's still, so that skl2onnx can convert it.

    Args:
        transformer: a fitted :func:`column_transformer`.
        frame: the training rows.
        columns: the columns that enter.
        filled: whether missing values are replaced by the agreed mean instead of the site's median, as those of absent
            columns always are.
    """
    agreed = {column.name: column.scale for column in columns if column.scale is not None}
    absent = {column.name for column in columns if column.absent}
    for part, pipeline, names in transformer.transformers_:
        if part.removeprefix("own_") not in ("number", "date"):
            continue
        scaler = pipeline["scale"]
        for position, name in enumerate(names):
            scale = agreed.get(name)
            if scale is None and part.endswith("number"):
                values = frame[name].to_numpy()
                scale = (0.0, 1.0) if ((values == 0) | (values == 1) | np.isnan(values)).all() else None
            if scale is not None:
                mean, deviation = scale
                scaler.mean_[position], scaler.scale_[position], scaler.var_[position] = mean, deviation, deviation**2
                if filled or name in absent:
                    pipeline["fill"].statistics_[position] = mean


def load_transformer(name: str) -> Any:
    """Return the transformer ``module:NAME`` of the user: a copy of an estimator, or the result of a function or class.

    Raises:
        PerfedError: the transformer cannot be imported, or has no ``fit`` and ``transform``.
    """
    from sklearn.base import clone

    module, colon, attribute = name.partition(":")
    if not colon:
        raise PerfedError(f"preprocess = '{name}' is not allowed; 'module:NAME' of a scikit-learn transformer is")
    try:
        imported = getattr(import_user_module(module), attribute)
        with refuse_exit():
            transformer = imported() if isinstance(imported, type) or not hasattr(imported, "fit") else clone(imported)
    except Exception as error:  # whatever a user's file does
        raise PerfedError(f"preprocess = '{name}': cannot be loaded: {describe_user_error(error) or error}") from None
    if not (hasattr(transformer, "fit") and hasattr(transformer, "transform")):
        raise PerfedError(
            f"preprocess = '{name}' gives a {type(transformer).__name__}; a scikit-learn transformer is needed"
        )
    return transformer


def transform_rows(transformer: Any, frame: Frame, where: str) -> NDArray[np.float64]:
    """Return the inputs ``(n, p)`` that the fitted ``transformer`` creates from ``frame``.

    Raises:
        PerfedError: the result is no table of numbers; the message starts with ``where``.
    """
    result = transformer.transform(frame)
    result = result.toarray() if hasattr(result, "toarray") else result
    try:
        array = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PerfedError(f"{where}: the preprocessing does not give numbers ({error})") from None
    if array.ndim != 2 or len(array) != len(frame):
        shape = f"({len(frame)}, columns)"
        raise PerfedError(f"{where}: the preprocessing gives an array of shape {array.shape}; {shape} is needed")
    return array


def find_output_names(transformer: Any) -> tuple[str, ...] | None:
    """Return the names of the inputs that a transformer creates, or ``None`` if it does not know them."""
    try:
        return tuple(map(str, transformer.get_feature_names_out()))
    except (AttributeError, ValueError):
        return None
