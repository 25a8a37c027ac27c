"""Data sets of the Hugging Face hub, or of a local folder in its format, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfed.data.files import optional_package
from perfed.data.names import compose_text
from perfed.data.partition.shards import Indices, select_test_samples
from perfed.datasets.catalogue import TestFraction
from perfed.datasets.pool import Pool
from perfed.datasets.pooled import pooled_dataset
from perfed.errors import PerfedError


class _Table(NamedTuple):
    """The columns of one split, and the names of the classes if the data set declares them."""

    x: NDArray[Any]
    labels: list[Any]
    owners: list[str]
    class_names: tuple[str, ...]


@pooled_dataset("huggingface")
def huggingface(
    seed: int,
    data_dir: Path | None,
    *,
    path: str = "",
    config: str = "",
    train_split: str = "train",
    test_split: str = "test",
    test_fraction: TestFraction = 0.2,
    inputs: str | list[str] = "image",
    label: str = "label",
    client: str = "",
) -> Pool:
    """A data set of the Hugging Face hub by name, given to clients by a partition (needs perfed[datasets]).

    ``path`` and ``config`` are the arguments of ``datasets.load_dataset``: a name on the hub or a local folder, and the
    configuration. ``inputs`` is the name of the column of images or vectors, or a list of columns of numbers; ``label``
    is the column of the classes (integers or text), and ``client`` the column of the writer, user or site for
    ``partition = "natural"``. Without a ``test_split`` (empty text), the fraction ``test_fraction`` of the training
    samples of each client becomes test data, or of each class if there is no column of clients.

    Images are converted to ``(channels, height, width)`` in [-1, 1]: pixels in [0, 1] minus 0.5, divided by 0.5.
    Numbers are not changed. :class:`perfed.datasets.options.PartitionOptions` has the further options.

    Raises:
        PerfedError: if the package ``datasets`` is not installed, the data set cannot be loaded, or a column is missing
            or has the wrong type.
    """
    if not path:
        raise PerfedError("data.path is missing: the data set's name on the Hugging Face hub, or a local folder")
    if inputs == []:
        raise PerfedError("data.inputs = [] is not allowed; it must name at least one column")
    train = _read_table(path, config, train_split, inputs, label, client)
    if test_split:
        test = _read_table(path, config, test_split, inputs, label, client)
    else:
        train, test = _split_off_test(train, test_fraction, by_owner=bool(client), seed=seed)
    if train.x.shape[1:] != test.x.shape[1:]:
        raise PerfedError(f"'{path}': training inputs are {train.x.shape[1:]}, test inputs {test.x.shape[1:]}")
    where = f"'{path}', column '{label}'"
    class_names = train.class_names or _infer_class_names(train.labels)
    if not class_names:
        raise PerfedError(f"{where} holds no classes: integers or text are needed")
    owners = sorted({*train.owners, *test.owners})
    channels = train.x.shape[1] if train.x.dtype == np.uint8 else 1
    return Pool(
        train.x,
        _index_classes(train.labels, class_names, where),
        test.x,
        _index_classes(test.labels, class_names, where),
        num_classes=len(class_names),
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        class_names=class_names,
        owner_train=np.searchsorted(owners, train.owners) if client else None,
        owner_test=np.searchsorted(owners, test.owners) if client else None,
        owners=tuple(owners),
    )


def _load_split(path: str, config: str, split: str) -> Any:
    datasets = optional_package("datasets", "data set 'huggingface'")
    try:
        return datasets.load_dataset(path, name=config or None, split=split)
    except Exception as error:  # the package raises errors of many types: its own, network errors, file system errors
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise PerfedError(f"data set '{path}', split '{split}' cannot be loaded: {reason}") from None


def _read_table(path: str, config: str, split: str, inputs: str | list[str], label: str, client: str) -> _Table:
    table = _load_split(path, config, split)
    columns = [inputs] if isinstance(inputs, str) else inputs
    for key, column in [*(("inputs", name) for name in columns), ("label", label), ("client", client)]:
        if column and column not in table.column_names:
            available = ", ".join(table.column_names)
            raise PerfedError(f"data.{key} = '{column}': '{path}' has no such column; it has {available}")
    if len(table) == 0:
        raise PerfedError(f"data set '{path}', split '{split}' has no rows")
    where = f"'{path}', split '{split}'"
    x = _read_column(table, columns[0], where) if len(columns) == 1 else _read_columns(table, columns, where)
    owners = [compose_text(str(value)) for value in table[client]] if client else []
    declared = getattr(table.features.get(label), "names", None) or ()
    labels = [compose_text(value) if isinstance(value, str) else value for value in table[label]]
    return _Table(x, labels, owners, tuple(declared))


def _read_columns(table: Any, columns: Sequence[str], where: str) -> NDArray[np.float32]:
    return np.concatenate([_read_column(table, name, where).reshape(len(table), -1) for name in columns], axis=1)


def _read_column(table: Any, name: str, where: str) -> NDArray[Any]:
    """Return images as ``(n, channels, height, width)`` uint8, numbers as ``(n, ...)`` float32."""
    column: NDArray[Any] | None = None
    for row, value in enumerate(table[name]):
        pixels = _read_pixels(value)
        array = np.asarray(value) if pixels is None else pixels
        if pixels is None and array.dtype.kind not in "fiub":
            raise PerfedError(f"{where}: column '{name}', row {row}: neither an image nor numbers ({array.dtype})")
        if column is None:
            column = np.empty((len(table), *(array.shape or (1,))), dtype=np.float32 if pixels is None else np.uint8)
        if (pixels is None) != (column.dtype == np.float32) or (array.shape or (1,)) != column.shape[1:]:
            raise PerfedError(
                f"{where}: column '{name}', row {row} has shape {array.shape}, the rows before {column.shape[1:]}; all "
                "must be alike"
            )
        column[row] = array
    assert column is not None  # a split without rows has been refused
    return column


def _read_pixels(value: Any) -> NDArray[np.uint8] | None:
    """Return the pixels of an image as ``(channels, height, width)``; ``None`` for anything else."""
    if not hasattr(value, "convert"):  # only Pillow's images have it
        return None
    if value.mode not in ("L", "RGB"):
        value = value.convert("L" if value.mode == "1" else "RGB")
    pixels: NDArray[np.uint8] = np.asarray(value)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _infer_class_names(labels: list[Any]) -> tuple[str, ...]:
    """Return the names of undeclared classes: 0 to the largest number, or the sorted texts that occur."""
    numbers = [value for value in labels if isinstance(value, int)]
    if numbers:
        return tuple(str(number) for number in range(max(numbers) + 1))
    return tuple(sorted({value for value in labels if isinstance(value, str)}))


def _index_classes(labels: list[Any], names: Sequence[str], where: str) -> Indices:
    """Return classes as integers: integers unchanged, texts by their position among ``names``."""
    place = {name: number for number, name in enumerate(names)}
    classes = [value if isinstance(value, int) else place.get(value, -1) for value in labels]
    for row, (value, number) in enumerate(zip(labels, classes, strict=True)):
        if not 0 <= number < len(names):
            raise PerfedError(
                f"{where}, row {row}: {value!r} is not one of the {len(names)} classes of the training data"
            )
    return np.array(classes, dtype=np.int64)


def _split_off_test(table: _Table, fraction: float, *, by_owner: bool, seed: int) -> tuple[_Table, _Table]:
    """Return training and test samples, split by owner or by class; each keeps at least one training sample."""
    key = np.array([str(value) for value in (table.owners if by_owner else table.labels)])
    aside = select_test_samples(key, fraction, seed=seed)

    def select_rows(index: Indices) -> _Table:
        owners = [table.owners[i] for i in index] if table.owners else []
        return _Table(table.x[index], [table.labels[i] for i in index], owners, table.class_names)

    return select_rows(np.flatnonzero(~aside)), select_rows(np.flatnonzero(aside))
