"""Conversion of a client's data to tensors: arrays, data frames and torch data sets."""

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
    """The arrays of one client, whose texts have composed accents (:func:`perfed.data.names.compose_text`).

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

_LONG = 2000  # the number of samples from which on a progress bar is shown


def as_tensor(value: Any, name: str, client: str) -> Tensor:
    """Convert a tensor, an array, a list or a data frame (with ``columns`` and ``to_numpy``) to a tensor.

    Floating-point types that NumPy lacks, such as bfloat16, become float32, and longer types than float64
    become float64.

    Raises:
        PerfedError: the values are sparse, masked, or not real numbers; the message names the client and the column.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise PerfedError(f"client '{client}': {name} is a sparse tensor; give {name}.to_dense()")
        if value.is_complex():
            raise PerfedError(f"client '{client}': {name} holds complex numbers; {TWO_COLUMNS}")
        return _convert_to_numpy_type(value if value.ndim else value.reshape(1))
    array = _as_array(value, name, client)
    if array.dtype.kind == "V" and np.can_cast(array.dtype, np.float32):  # bfloat16 of the package ml_dtypes
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf":
        _check_numbers(array, column_names(value), name, client)
        array = np.array(array.tolist())
    # torch has neither other byte orders nor longer numbers.
    array = array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="), copy=False)
    # Read-only arrays are copied: a tensor can be written to.
    return torch.from_numpy(np.require(np.atleast_1d(array), requirements=["C", "W"]))


def _convert_to_numpy_type(tensor: Tensor) -> Tensor:
    """Return ``tensor``, converted to float32 if NumPy lacks its floating-point type."""
    numpy_types = (torch.float16, torch.float32, torch.float64)
    return tensor.float() if tensor.is_floating_point() and tensor.dtype not in numpy_types else tensor


def as_targets(value: Any, name: str, client: str) -> Tensor | NDArray[np.str_]:
    """Return numbers as a tensor, or texts, which are labels, as an array.

    Raises:
        PerfedError: for the reasons of :func:`as_tensor`.
    """
    if not isinstance(value, Tensor):
        array = _as_array(value, name, client)
        if array.dtype.kind == "U" or any(isinstance(label, str) for label in array.flat):
            for row, label in enumerate(array.flat):
                if not isinstance(label, str):
                    raise PerfedError(f"client '{client}': {name} holds {label!r} among texts, in row {row}")
            return array.astype(np.str_)
    return as_tensor(value, name, client)


def column_names(value: Any) -> tuple[str, ...] | None:
    """Return the names of the columns of a data frame; ``None`` for anything else."""
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


def _as_array(value: Any, name: str, client: str) -> NDArray[Any]:
    if isinstance(value, Dataset):
        split = name.rpartition("_")[2]
        raise PerfedError(f"client '{client}': {name} is a torch Dataset; give it, inputs and targets, as '{split}'")
    if hasattr(value, "toarray") and hasattr(value, "nnz"):
        raise PerfedError(f"client '{client}': {name} is a sparse matrix; give {name}.toarray()")
    if isinstance(value, list | tuple) and any(isinstance(part, np.ma.MaskedArray) for part in value):
        value = np.ma.stack(value)
    if isinstance(value, np.ma.MaskedArray) and value.mask.any():
        row, *column = np.argwhere(np.ma.getmaskarray(value))[0].tolist()
        place = f"in column {column[0]}, " if column else "in "
        raise PerfedError(f"client '{client}': {name} holds missing values (masked), {place}row {row}; fill them in")
    try:
        if column_names(value) is not None:
            value = native_columns(value)
        return np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    except (TypeError, ValueError) as error:
        raise PerfedError(f"client '{client}': {name} cannot become a tensor ({str(error).splitlines()[0]})") from None


def _check_numbers(array: NDArray[Any], names: Sequence[str] | None, name: str, client: str) -> None:
    """Raise an error for the first value that is not a real number."""
    table = array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1)
    for column in range(table.shape[1]):
        for row, value in enumerate(table[:, column]):
            if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
                continue
            place = f"in column {column}{f' ({names[column]!r})' if names else ''}, " if array.ndim > 1 else "in "
            if isinstance(value, complex | np.complexfloating):
                raise PerfedError(f"client '{client}': {name} holds complex numbers, {place}row {row}; {TWO_COLUMNS}")
            raise PerfedError(
                f"client '{client}': {name} holds {_kind(value)}, not numbers, {place}row {row}: {value!s:.40}; code "
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


def parts_of(data: Any, name: str, client: str) -> tuple[Any, ...]:
    """Return the inputs, targets and, if samples have a third entry, domain ids of a map-style torch data set.

    Every sample is read once, in order, so that a random transform is drawn once.

    Raises:
        PerfedError: the data set has no length, or its samples are not ``(inputs, target)`` or ``(inputs, target,
            domain id)`` with inputs of one shape; the message names the client.
    """
    where = f"client '{client}': {name}"
    if isinstance(data, IterableDataset) or not isinstance(data, Dataset) or not hasattr(data, "__len__"):
        kind = "an iterable data set" if isinstance(data, IterableDataset) else f"a {type(data).__name__}"
        raise PerfedError(
            f"{where} is {kind}; a torch Dataset with a length is needed there, or arrays as x_{name} and y_{name}"
        )
    parts = data.tensors if isinstance(data, TensorDataset) else _read_samples(data, name, client)
    if len(parts) not in (2, 3):
        raise PerfedError(
            f"{where}: its samples have {len(parts)} entries; (inputs, target) or (inputs, target, domain id) is needed"
        )
    return tuple(parts)


def _read_samples(data: Any, name: str, client: str) -> list[Any]:
    where, size = f"client '{client}': {name}", len(data)
    if size == 0:
        return [torch.zeros(0), torch.zeros(0, dtype=torch.int64)]
    console = Console(stderr=True)
    quiet = size < _LONG or not (console.is_terminal or console.is_jupyter)
    inputs, targets = torch.zeros(0), []
    for i in track(range(size), description=where, console=console, transient=True, disable=quiet):
        sample = data[i]
        if not isinstance(sample, tuple | list) or not 2 <= len(sample) <= 3:
            raise PerfedError(f"{where}: sample {i} is a {type(sample).__name__}; (inputs, target) is needed")
        features = sample[0]
        try:
            array = isinstance(features, np.ndarray) and features.ndim > 0
            x = as_tensor(features, f"{name} sample {i}", client) if array else torch.as_tensor(features)
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
        targets.append(
            [_convert_to_numpy_type(entry).numpy() if isinstance(entry, Tensor) else entry for entry in sample[1:]]
        )
    if len({len(entries) for entries in targets}) > 1:
        raise PerfedError(f"{where}: some samples have a domain id and some have none; all need one, or none")
    return [inputs, *(np.asarray(column) for column in zip(*targets, strict=True))]


# A client's data ---------------------------------------------------------------------------------------------


def arrays_of(client: str, data: Any, splits: Sequence[str], only: str | None = None) -> ClientArrays:
    """Return the arrays that a user gives for one client, checked and converted.

    Args:
        client: the id of the client.
        data: the data as :meth:`perfed.data.federation.Federation.from_arrays` accepts them.
        splits: the names of the splits, including "train".
        only: the only split that is needed; the arrays of others are not read. Default: all.

    Raises:
        PerfedError: the data are not a mapping, keys are missing or unknown, there are no training data, or for the
            reasons of :func:`as_tensor`.
    """
    arrays: Any = {"train": data} if isinstance(data, Dataset) else data
    if not isinstance(arrays, Mapping):
        raise PerfedError(
            f"client '{client}' is a {type(data).__name__}; a mapping is needed, such as {{'x_train': ..., "
            "'y_train': ..., 'x_test': ..., 'y_test': ...}, or a torch Dataset of its training samples"
        )
    allowed = {f"{part}{split}" for part in ("x_", "y_", "domain_", "") for split in splits} | {"feature_names"}
    for key in arrays:
        if key not in allowed:
            raise PerfedError(f"client '{client}': unknown key '{key}'; allowed: {', '.join(sorted(allowed))}")
    parts: Parts = {}
    feature_names = arrays.get("feature_names")
    names = None if feature_names is None else tuple(map(str, feature_names))
    originals: dict[str, str] = {}
    source = "feature_names"
    for split in splits if only is None else (only,):
        keys = [f"{part}_{split}" for part in ("x", "y", "domain")]
        x, y, domain = _select_arrays(client, arrays, split, keys)
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


def _select_arrays(client: str, arrays: Mapping[str, Any], split: str, keys: Sequence[str]) -> tuple[Any, Any, Any]:
    """Return the inputs, targets and domain ids of a split, ``None`` for arrays that are absent."""
    x, y, domain = (arrays.get(key) for key in keys)
    if arrays.get(split) is not None:
        for key in keys:
            if arrays.get(key) is not None:
                raise PerfedError(f"client '{client}': both '{split}' and '{key}' are given; one of them is needed")
        x, y, *domains = parts_of(arrays[split], split, client)
        return x, y, domains[0] if domains else None
    if (x is None) != (y is None):
        raise PerfedError(f"client '{client}': '{keys[0] if x is None else keys[1]}' is missing")
    return x, y, domain


def check_names(where: str, array: str, names: Sequence[str], reference: str, expected: Sequence[str]) -> None:
    """Check that names of columns are the expected ones, in the expected order.

    Args:
        where: the client in error messages.
        array: the array with ``names`` in error messages.
        names: the names.
        reference: the array with the expected names in error messages.
        expected: the expected names.

    Raises:
        PerfedError: the names differ; the message contains the first column that differs.
    """
    pairs = list(zip(map(compose_text, names), map(compose_text, expected), strict=False))
    if len(names) == len(expected) and all(name == expected_name for name, expected_name in pairs):
        return
    if len(names) != len(expected):
        problem = f"{len(names)} columns, {reference} {len(expected)}"
    else:
        column = next(position for position, (name, expected_name) in enumerate(pairs) if name != expected_name)
        problem = f"'{names[column]}' in column {column}, {reference} '{expected[column]}'"
    same = {*map(compose_text, names)} == {*map(compose_text, expected)}
    order = "; the same columns in one order are needed" if same else ""
    raise PerfedError(f"{where}: {array} has {problem}{order}")


def domain_ids(ids: Tensor) -> Tensor:
    """Return integers as int64; floating-point ids are returned unchanged, so that later checks refuse them."""
    return ids if torch.is_floating_point(ids) else ids.long()
