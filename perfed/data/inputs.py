"""What users give as a client's data, made into tensors and a client: arrays, data frames and torch data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from perfed.data.names import compose_text, find_originals, refuse_control_characters
from perfed.errors import PerfedError

Parts = dict[str, tuple[Tensor, Tensor | NDArray[np.str_], Tensor | None]]
"""Inputs, targets and domain ids, by split."""


class ClientArrays(NamedTuple):
    """The arrays of one client; texts have composed accents (:func:`perfed.data.names.compose_text`).

    Attributes:
        parts: inputs, targets and domain ids by split, without empty splits.
        names: the names of the features; ``None`` without names.
        originals: the client's spelling of each label and each name whose composed form differs from it.
    """

    parts: Parts
    names: tuple[str, ...] | None
    originals: dict[str, str]


TWO_COLUMNS = "give real and imaginary parts as columns of their own"
"""The advice in messages about complex numbers."""

_LONG = 2000  # samples that are worth a progress bar


def as_tensor(value: Any, what: str, client: str) -> Tensor:
    """Convert a tensor, an array, a list or a data frame (with ``columns`` and ``to_numpy``) to a tensor.

    Floating-point types that NumPy lacks, such as bfloat16, become float32, and longer types than float64
    become float64.

    Raises:
        PerfedError: the values are sparse, masked, or not real numbers; the message names the client and the column.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise PerfedError(f"client '{client}': {what} is a sparse tensor; give {what}.to_dense()")
        if value.is_complex():
            raise PerfedError(f"client '{client}': {what} holds complex numbers; {TWO_COLUMNS}")
        return _convert_to_numpy_type(value if value.ndim else value.reshape(1))
    array = _as_array(value, what, client)
    if array.dtype.kind == "V" and np.can_cast(array.dtype, np.float32):  # bfloat16 of the package ml_dtypes
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf":
        _check_numbers(array, column_names(value), what, client)
        array = np.array(array.tolist())
    # torch has neither other byte orders nor longer numbers.
    array = array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), copy=False)
    # Read-only arrays are copied: a tensor can be written to.
    return torch.from_numpy(np.require(np.atleast_1d(array), requirements=["C", "W"]))


def _convert_to_numpy_type(tensor: Tensor) -> Tensor:
    """Return ``tensor``, converted to float32 if NumPy lacks its floating-point type."""
    numpy_types = (torch.float16, torch.float32, torch.float64)
    return tensor.float() if tensor.is_floating_point() and tensor.dtype not in numpy_types else tensor


def as_targets(value: Any, what: str, client: str) -> Tensor | NDArray[np.str_]:
    """Numbers as a tensor, or texts, which are labels, as an array.

    Raises:
        PerfedError: as :func:`as_tensor`.
    """
    if not isinstance(value, Tensor):
        array = _as_array(value, what, client)
        if array.dtype.kind == "U" or any(isinstance(label, str) for label in array.flat):
            for row, label in enumerate(array.flat):
                if not isinstance(label, str):
                    raise PerfedError(f"client '{client}': {what} holds {label!r} among texts, in row {row}")
            return array.astype(np.str_)
    return as_tensor(value, what, client)


def column_names(value: Any) -> tuple[str, ...] | None:
    """Names of the columns of a data frame; ``None`` for anything else."""
    columns = getattr(value, "columns", None)
    return None if columns is None or not hasattr(value, "to_numpy") else tuple(str(name) for name in columns)


def native_columns(frame: Any) -> Any:
    """Return a data frame with columns in the byte order of the machine, the only one that pandas supports."""
    foreign = [
        position
        for position, dtype in enumerate(getattr(frame, "dtypes", ()))
        if isinstance(dtype, np.dtype) and not dtype.isnative
    ]
    frame = frame.copy() if foreign else frame
    for position in foreign:
        values = frame.iloc[:, position].to_numpy()
        frame.isetitem(position, values.astype(values.dtype.newbyteorder("=")))
    return frame


def _as_array(value: Any, what: str, client: str) -> NDArray[Any]:
    if isinstance(value, Dataset):
        split = what.rpartition("_")[2]
        raise PerfedError(f"client '{client}': {what} is a torch Dataset; give it, inputs and targets, as '{split}'")
    if hasattr(value, "toarray") and hasattr(value, "nnz"):
        raise PerfedError(f"client '{client}': {what} is a sparse matrix; give {what}.toarray()")
    if isinstance(value, list | tuple) and any(isinstance(part, np.ma.MaskedArray) for part in value):
        value = np.ma.stack(value)
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        row, *column = np.argwhere(np.ma.getmaskarray(value))[0].tolist()
        at = f"in column {column[0]}, " if column else "in "
        raise PerfedError(f"client '{client}': {what} holds missing values (masked), {at}row {row}; fill them in")
    try:
        if column_names(value) is not None:
            value = native_columns(value)
        return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except (TypeError, ValueError) as error:
        raise PerfedError(f"client '{client}': {what} cannot become a tensor ({str(error).splitlines()[0]})") from None


def _check_numbers(array: NDArray[Any], names: Sequence[str] | None, what: str, client: str) -> None:
    """Refuse the first column that holds something else than real numbers."""
    table = array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1)
    for column in range(table.shape[1]):
        for row, value in enumerate(table[:, column]):
            if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
                continue
            at = f"in column {column}{f' ({names[column]!r})' if names else ''}, " if array.ndim > 1 else "in "
            if isinstance(value, complex | np.complexfloating):
                raise PerfedError(f"client '{client}': {what} holds complex numbers, {at}row {row}; {TWO_COLUMNS}")
            raise PerfedError(
                f"client '{client}': {what} holds {_kind(value)}, not numbers, {at}row {row}: {value!s:.40}; code "
                "categories as columns of numbers (scikit-learn's OneHotEncoder does) and dates as numbers of days, "
                "fill in what is missing and leave ids out"
            )


def _kind(value: Any) -> str:
    if isinstance(value, str | bytes):
        return "texts"
    if isinstance(value, np.datetime64 | np.timedelta64) or hasattr(value, "year"):
        return "dates"
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return "missing values"
    return f"objects ({type(value).__name__})"


# Torch data sets ---------------------------------------------------------------------------------------------


def parts_of(data: Any, what: str, client: str) -> tuple[Any, ...]:
    """Inputs, targets and, where samples have a third entry, domain ids of a map-style torch data set.

    Every sample is read once, in order; a random transform is drawn once.

    Raises:
        PerfedError: without a length, or samples that are not ``(inputs, target)`` or ``(inputs, target, domain id)``
            with inputs of one shape; names the client.
    """
    where = f"client '{client}': {what}"
    if isinstance(data, IterableDataset) or not isinstance(data, Dataset) or not hasattr(data, "__len__"):
        kind = "an iterable data set" if isinstance(data, IterableDataset) else f"a {type(data).__name__}"
        raise PerfedError(
            f"{where} is {kind}; a torch Dataset with a length is needed there, or arrays as x_{what} and y_{what}"
        )
    parts = data.tensors if isinstance(data, TensorDataset) else _read_samples(data, what, client)
    if len(parts) not in (2, 3):
        raise PerfedError(
            f"{where}: its samples have {len(parts)} entries; (inputs, target) or (inputs, target, domain id) is needed"
        )
    return tuple(parts)


def _read_samples(data: Any, what: str, client: str) -> list[Any]:
    where, size = f"client '{client}': {what}", len(data)
    if size == 0:
        return [torch.zeros(0), torch.zeros(0, dtype=torch.int64)]
    console = Console(stderr=True)
    quiet = size < _LONG or not (console.is_terminal or console.is_jupyter)
    inputs, rest = torch.zeros(0), []
    for i in track(range(size), description=where, console=console, transient=True, disable=quiet):
        sample = data[i]
        if not isinstance(sample, tuple | list) or not 2 <= len(sample) <= 3:
            raise PerfedError(f"{where}: sample {i} is a {type(sample).__name__}; (inputs, target) is needed")
        features = sample[0]
        try:
            array = isinstance(features, np.ndarray) and features.ndim > 0
            x = as_tensor(features, f"{what} sample {i}", client) if array else torch.as_tensor(features)
        except PerfedError:
            raise
        except (TypeError, ValueError, RuntimeError):
            raise PerfedError(
                f"{where}: the inputs of sample {i} are a {type(sample[0]).__name__}; a tensor or array is needed "
                "(torchvision: transform=ToTensor())"
            ) from None
        if i == 0:
            inputs = x.new_empty((size, *x.shape))
        if x.shape != inputs.shape[1:]:
            shapes = f"{tuple(x.shape)}, those of sample 0 {tuple(inputs.shape[1:])}"
            raise PerfedError(f"{where}: the inputs of sample {i} have shape {shapes}; all of a client need the same")
        inputs[i] = x
        rest.append(
            [_convert_to_numpy_type(entry).numpy() if isinstance(entry, Tensor) else entry for entry in sample[1:]]
        )
    if len({len(entries) for entries in rest}) > 1:
        raise PerfedError(f"{where}: some samples have a domain id and some have none; all need one, or none")
    return [inputs, *(np.asarray(column) for column in zip(*rest, strict=True))]


# A client's data ---------------------------------------------------------------------------------------------


def arrays_of(client: str, given: Any, splits: Sequence[str], only: str | None = None) -> ClientArrays:
    """Return the arrays that a user gives for one client, checked and converted.

    Args:
        client: its id.
        given: as :meth:`perfed.data.federation.Federation.from_arrays` takes it.
        splits: names of the splits, "train" among them.
        only: the split that is wanted; the arrays of others are not touched. Default: all.

    Raises:
        PerfedError: no mapping, missing or unknown keys, no training data, or what :func:`as_tensor` refuses.
    """
    arrays: Any = {"train": given} if isinstance(given, Dataset) else given
    if not isinstance(arrays, Mapping):
        raise PerfedError(
            f"client '{client}' is a {type(given).__name__}; a mapping is needed, such as {{'x_train': ..., "
            "'y_train': ..., 'x_test': ..., 'y_test': ...}, or a torch Dataset of its training samples"
        )
    allowed = {f"{part}{split}" for part in ("x_", "y_", "domain_", "") for split in splits} | {"feature_names"}
    for key in arrays:
        if key not in allowed:
            raise PerfedError(f"client '{client}': unknown key '{key}'; allowed: {', '.join(sorted(allowed))}")
    parts: Parts = {}
    given_names = arrays.get("feature_names")
    names = None if given_names is None else tuple(map(str, given_names))
    originals: dict[str, str] = {}
    source = "feature_names"
    for split in splits if only is None else (only,):
        keys = [f"{part}_{split}" for part in ("x", "y", "domain")]
        x, y, domain = _values(client, arrays, split, keys)
        if x is None:
            continue
        columns = column_names(x)
        if columns is not None and names is not None:
            check_names(f"client '{client}'", keys[0], columns, source, names)
        if columns is not None and names is None:
            names, source = columns, keys[0]
        xt, yt = as_tensor(x, keys[0], client), as_targets(y, keys[1], client)
        if not isinstance(yt, Tensor):
            yt = _compose_labels(yt, originals)
        if len(xt) or len(yt):
            ids = None if domain is None else domain_ids(as_tensor(domain, keys[2], client))
            parts[split] = (xt if torch.is_floating_point(xt) else xt.float(), yt, ids)
    if only is None and "train" not in parts:
        raise PerfedError(f"client '{client}' has no training data; 'x_train' and 'y_train' are needed")
    if names is not None:
        refuse_control_characters(f"client '{client}': column", names)
        originals |= find_originals(names)
        names = _compose_names(names, client)
    return ClientArrays(parts, names, originals)


def _compose_labels(labels: NDArray[np.str_], originals: dict[str, str]) -> NDArray[np.str_]:
    """Return labels in composed form, and add the spelling of each that was not composed to ``originals``."""
    different, positions = np.unique(labels, return_inverse=True)
    if not (spellings := find_originals(different.tolist())):
        return labels
    originals |= spellings
    return np.array([compose_text(label) for label in different.tolist()], np.str_)[positions].reshape(labels.shape)


def _compose_names(names: tuple[str, ...], client: str) -> tuple[str, ...]:
    composed = tuple(map(compose_text, names))
    if len(set(composed)) < len(set(names)):
        name = next(name for name, count in Counter(composed).items() if count > 1)
        raise PerfedError(f"client '{client}': several columns are called '{name}'; names must differ")
    return composed


def _values(client: str, arrays: Mapping[str, Any], split: str, keys: Sequence[str]) -> tuple[Any, Any, Any]:
    """Inputs, targets and domain ids of a split as given, ``None`` for what is not."""
    x, y, domain = (arrays.get(key) for key in keys)
    if arrays.get(split) is not None:
        for key in keys:
            if arrays.get(key) is not None:
                raise PerfedError(f"client '{client}': both '{split}' and '{key}' are given; one of them is needed")
        x, y, *rest = parts_of(arrays[split], split, client)
        return x, y, rest[0] if rest else None
    if (x is None) != (y is None):
        raise PerfedError(f"client '{client}': '{keys[0] if x is None else keys[1]}' is missing")
    return x, y, domain


def check_names(where: str, what: str, names: Sequence[str], other: str, expected: Sequence[str]) -> None:
    """Refuse columns that are not those expected, in that order; ``where``, ``what`` and ``other`` are for the message.

    Raises:
        PerfedError: names the first column that differs.
    """
    pairs = list(zip(map(compose_text, names), map(compose_text, expected), strict=False))
    if len(names) == len(expected) and all(name == expected_name for name, expected_name in pairs):
        return
    if len(names) != len(expected):
        problem = f"{len(names)} columns, {other} {len(expected)}"
    else:
        column = next(position for position, (name, expected_name) in enumerate(pairs) if name != expected_name)
        problem = f"'{names[column]}' in column {column}, {other} '{expected[column]}'"
    same = {*map(compose_text, names)} == {*map(compose_text, expected)}
    order = "; the same columns in one order are needed" if same else ""
    raise PerfedError(f"{where}: {what} has {problem}{order}")


def domain_ids(ids: Tensor) -> Tensor:
    """Integers as int64; others stay, to be refused: 0.5 is not cut to 0."""
    return ids if torch.is_floating_point(ids) else ids.long()
