"""A folder of images with a table of their labels and domains, such as FairFace."""

from __future__ import annotations

from collections.abc import Sequence
from csv import DictReader
from csv import Error as CsvError
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfed.data.augment import CropFlip
from perfed.data.files import optional_package
from perfed.data.partition.shards import Indices, select_test_samples
from perfed.datasets.catalogue import Positive, TestFraction
from perfed.datasets.options import change_defaults
from perfed.datasets.pool import Pool
from perfed.datasets.pooled import pooled_dataset
from perfed.errors import PerfedError

# The means and deviations of ImageNet, for networks trained on it.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pooled_dataset("faces", options=change_defaults(partition="domain-mixed", clients=5, samples=500))
def faces(
    seed: int,
    data_dir: Path | None,
    *,
    folder: str = "",
    csv: str = "",
    test_csv: str = "",
    file: str = "file",
    label: str = "age",
    domain: str = "race",
    split: str = "",
    test_fraction: TestFraction = 0.2,
    image_size: Positive = 64,
    flip: bool = False,
) -> Pool:
    """Images in a folder of yours, with a CSV table of labels and domains (FairFace); needs Pillow.

    ``csv`` is a table with a heading, whose columns ``file`` (a path), ``label`` and ``domain`` are read as text. All
    paths, including that of the table, are relative to ``folder``. Test images are the rows of another table
    ``test_csv``, or the rows with ``test`` rather than ``train`` in the column ``split``; without either, the fraction
    ``test_fraction`` of each label and domain is drawn.

    Inputs are colour images ``(3, image_size, image_size)`` with pixels in [0, 1], normalised with ImageNet's means and
    deviations; only the images of clients are read. ``flip``: training images are mirrored with probability 1/2.
    Classes and domains are the sorted values of the training rows. :class:`perfed.datasets.options.PartitionOptions`
    has the further options.

    Raises:
        PerfedError: if Pillow is not installed, a file or column is missing, a value is empty or occurs in test rows
            only, a file has two rows, there are fewer than two classes, or an image cannot be read.

    Source: Karkkainen and Joo 2021 (FairFace); Zhong et al. 2023 (FedDAR), section 5.
    """
    if test_csv and split:
        raise PerfedError("data.test_csv and data.split both say which images are for testing; give one of them")
    if not folder or not Path(folder).is_dir():
        raise PerfedError(f"data.folder = '{folder}' is not a folder; it must be the one that holds the images")
    optional_package("PIL.Image", "reading images")
    columns = {"file": file, "label": label, "domain": domain, **({"split": split} if split else {})}
    rows = _read_rows(Path(folder), "csv", csv, columns)
    if test_csv:
        test_rows = _read_rows(Path(folder), "test_csv", test_csv, columns)
        rows, aside = rows + test_rows, np.arange(len(rows) + len(test_rows)) >= len(rows)
    elif split:
        aside = np.array([row.split == "test" for row in rows])
    else:
        keys = np.unique(np.array([[row.label, row.domain] for row in rows]), axis=0, return_inverse=True)[1]
        aside = select_test_samples(keys.ravel(), test_fraction, seed=seed)
    _check_unique_files(rows)
    parts = {"train": [rows[i] for i in np.flatnonzero(~aside)], "test": [rows[i] for i in np.flatnonzero(aside)]}
    for name, part in parts.items():
        if not part and split:
            raise PerfedError(f"data.split = '{split}': no row says '{name}'; some must")
        if not part:
            few = f"the {len(rows)} rows have too few of a label and domain together"
            raise PerfedError(f"data.test_fraction = {test_fraction}: no image is left for '{name}'; {few}")
    classes, domains = (sorted({getattr(row, key) for row in parts["train"]}) for key in ("label", "domain"))
    if len(classes) < 2:
        raise PerfedError(f"data.label = '{label}': all training rows say '{classes[0]}'; two classes are needed")
    fields: dict[str, Any] = {}
    for name, part in parts.items():
        fields[f"x_{name}"] = Photos(part, image_size)
        fields[f"y_{name}"] = _index_values(part, "label", label, classes)
        fields[f"domain_{name}"] = _index_values(part, "domain", domain, domains)
    return Pool(
        **fields,
        num_classes=len(classes),
        mean=MEAN,
        std=STD,
        class_names=tuple(classes),
        domain_names=tuple(domains),
        augment=CropFlip(padding=0) if flip else None,
    )


class _Row(NamedTuple):
    """An image: where it is listed, its file, and its values in the table."""

    where: str
    file: Path
    label: str
    domain: str
    split: str = ""


class Photos:
    """Images in files, in one size and in colour, which are read on access."""

    def __init__(self, rows: Sequence[_Row], size: int) -> None:
        self.rows = rows
        self.size = size

    def __getitem__(self, index: Indices, /) -> NDArray[np.uint8]:
        """Return the images at ``index``, ``(n, 3, size, size)`` uint8.

        Raises:
            PerfedError: if a file cannot be read.
        """
        pillow = optional_package("PIL.Image", "reading images")
        pixels = np.empty((len(index), 3, self.size, self.size), dtype=np.uint8)
        for place, row in enumerate(self.rows[i] for i in index):
            try:
                with pillow.open(row.file) as image:
                    resized = image.convert("RGB").resize((self.size, self.size), pillow.Resampling.BILINEAR)
                    pixels[place] = np.asarray(resized).transpose(2, 0, 1)
            except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
                reason = str(error).partition("\n")[0]
                raise PerfedError(f"{row.where}: image '{row.file}' cannot be read ({reason})") from None
        return pixels


def _read_rows(folder: Path, key: str, name: str, columns: dict[str, str]) -> list[_Row]:
    """Return the checked rows of a table; ``columns`` maps options to the names of columns."""
    path = folder / name
    if not name or not path.is_file():
        raise PerfedError(f"data.{key} = '{name}' is not a file in '{folder}'; it must be the table of the images")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = DictReader(stream)
            headings = reader.fieldnames or []
            for option, column in columns.items():
                if column not in headings:
                    raise PerfedError(
                        f"data.{option} = '{column}': '{name}' has no such column; "
                        f"it has {', '.join(headings) or 'none'}"
                    )
            rows = [_parse_row(folder, f"'{name}', line {reader.line_num}", line, columns) for line in reader]
    except (OSError, UnicodeDecodeError, CsvError) as error:
        raise PerfedError(f"data.{key} = '{name}' cannot be read: {str(error).partition(chr(10))[0]}") from None
    if not rows:
        raise PerfedError(f"data.{key} = '{name}' has no rows below its heading")
    return rows


def _parse_row(folder: Path, where: str, line: dict[str, str | None], columns: dict[str, str]) -> _Row:
    values = {option: (line[column] or "").strip() for option, column in columns.items()}
    for option, column in columns.items():
        if not values[option]:
            raise PerfedError(f"{where}: column '{column}' is empty")
    if values.get("split", "train") not in ("train", "test"):
        raise PerfedError(f"{where}: column '{columns['split']}' says '{values['split']}'; it must be train or test")
    file = folder / values.pop("file")
    if not file.is_file():
        raise PerfedError(f"{where}: there is no image '{file}'")
    return _Row(where, file, **values)


def _check_unique_files(rows: Sequence[_Row]) -> None:
    first: dict[Path, _Row] = {}
    for row in rows:
        if row.file in first:
            raise PerfedError(f"{row.where}: image '{row.file}' is already in {first[row.file].where}")
        first[row.file] = row


def _index_values(rows: Sequence[_Row], key: str, column: str, names: Sequence[str]) -> Indices:
    """Return the position among ``names`` of each row's value."""
    place = {name: number for number, name in enumerate(names)}
    for row in rows:
        if getattr(row, key) not in place:
            raise PerfedError(
                f"{row.where}: column '{column}' says '{getattr(row, key)}', which no training row does; those say "
                f"{', '.join(names)}"
            )
    return np.array([place[getattr(row, key)] for row in rows], dtype=np.int64)
