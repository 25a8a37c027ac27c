"""A site's preprocessing: from columns as they are read to inputs, by scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.tables.kinds import Column, Kind
from perfed.data.tables.problems import Frame
from perfed.errors import PerfedError
from perfed.plugins import describe_user_error, import_user_module, refuse_exit

_HUGE = 1e30  # stands for a missing value where the mask is made; below float32's largest number


def column_transformer(columns: Sequence[Column], shared: int | None = None) -> Any:
    """A ``ColumnTransformer``, not fitted, for columns as ``TablePreprocessor.read`` gives them.

    Numbers and dates (in days): the median where missing, then mean 0 and deviation 1 (but :func:`set_scales`).
    Booleans: the more frequent value where missing. Categories: one input for each of ``levels``, none for all others,
    seen or not. A further input for each column that is ``masked`` is 1 where the value is missing; categories have
    "missing" as a level. It is made of estimators that skl2onnx can convert: of ``MissingIndicator`` it cannot, and
    drops ``add_indicator`` without a word, so that the mask is an imputed huge number behind a threshold.

    Args:
        columns: that enter.
        shared: how many of them, the first, have their inputs before those of the others.
    """
    first = _parts(columns[:shared])
    own = [] if shared is None else [(f"own_{name}", *rest) for name, *rest in _parts(columns[shared:])]
    from sklearn.compose import ColumnTransformer

    return ColumnTransformer([*first, *own], sparse_threshold=0.0)


def inputs_of(columns: Sequence[Column]) -> list[Column]:
    """The column of each input that :func:`column_transformer` makes of ``columns``."""
    kinds: tuple[Kind, ...] = ("number", "date", "boolean")
    plain = [column for kind in kinds for column in columns if column.kind == kind]
    levels = [column for column in columns if column.kind == "category" for _ in column.levels]
    return [*plain, *levels, *(column for column in columns if column.masked and column.kind != "category")]


def _parts(columns: Sequence[Column]) -> list[tuple[Any, ...]]:
    """Name, estimator and columns of each part."""
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
    return [part for part in parts if part[2]]


def set_scales(transformer: Any, frame: Frame, columns: Sequence[Column], *, filled: bool = False) -> None:
    """Scale columns by what all sites agreed on, and let other numbers that are 0 or 1 in all rows enter as they are.

    Standardised, a rare 1 would be a large input, which costs linear models a twentieth of their error on the schools.
    The scaler is scikit-learn's still, so that skl2onnx can convert it.

    Args:
        transformer: a :func:`column_transformer` that is fitted.
        frame: the rows that it is fitted on.
        columns: that enter.
        filled: whether the mean that was agreed on stands where a value is missing, and not the site's median; of
            columns that the site lacks it always does.
    """
    agreed = {column.name: column.scale for column in columns if column.scale is not None}
    absent = {column.name for column in columns if column.absent}
    for part, pipeline, names in transformer.transformers_:
        if part.removeprefix("own_") not in ("number", "date"):
            continue
        scaler = pipeline["scale"]
        for at, name in enumerate(names):
            scale = agreed.get(name)
            if scale is None and part.endswith("number"):
                values = frame[name].to_numpy()
                scale = (0.0, 1.0) if ((values == 0) | (values == 1) | np.isnan(values)).all() else None
            if scale is not None:
                scaler.mean_[at], scaler.scale_[at], scaler.var_[at] = scale[0], scale[1], scale[1] ** 2
                if filled or name in absent:
                    pipeline["fill"].statistics_[at] = scale[0]


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
        found = getattr(import_user_module(module), attribute)
        with refuse_exit():
            made = found() if isinstance(found, type) or not hasattr(found, "fit") else clone(found)
    except Exception as error:  # whatever a user's file does
        raise PerfedError(f"preprocess = '{name}': cannot be loaded: {describe_user_error(error) or error}") from None
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
