"""The outputs of the reported models for every evaluated sample, stored for intervals over the rows of a site."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfed.data.client import Split
from perfed.data.federation import Federation
from perfed.data.reading import read_arrays
from perfed.engine.evaluate import Outputs, concatenate_outputs
from perfed.errors import PerfedError

FOLDER = "predictions"

LARGEST_SIZE = 20_000_000
"""The largest number of values that a run stores."""

NOT_SAVED_NOTE = (
    f"predictions are not kept, as they are more than {LARGEST_SIZE:,} numbers: intervals of single sites are only "
    "over the seeds"
)


def exceeds_limit(federation: Federation, split: str, evaluations: int = 1) -> bool:
    """Return whether the outputs of so many evaluations on ``split`` have more than :data:`LARGEST_SIZE` values."""
    splits = [data for client in federation if (data := client.split(split)) is not None]
    width = federation.num_classes or (1 if federation.survival else max(prod(s.target_shape) for s in splits))
    return evaluations * width * sum(map(len, splits)) > LARGEST_SIZE


def build_arrays(parts: Sequence[Outputs], federation: Federation, split: str) -> dict[str, NDArray[Any]]:
    """Return the content of a file of predictions; samples are sorted by client, and keep the client's order.

    Args:
        parts: the outputs of one evaluation; the samples of each client are contiguous.
        federation: the clients with the data on which they were evaluated.
        split: the evaluated split.

    Returns:
        ``ids``, ``counts`` and ``marks`` ``(clients,)``: the id of each client, its number of samples, and a checksum
        of their inputs. ``targets`` ``(samples, ...)`` and ``outputs`` ``(samples, C)`` (logits, logarithms of
        probabilities, values or log hazards) in the unit of the data, in float32 if that changes no value.
    """
    outputs_of_all = concatenate_outputs(parts)
    client = outputs_of_all.client
    starts = np.flatnonzero(np.append(True, client[1:] != client[:-1]))
    ids, counts = client[starts], np.diff(np.append(starts, len(client)))
    order = np.argsort(ids)
    rows = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in order])
    splits = {client.id: client.split(split) for client in federation}
    marks = np.array([_hash_inputs(data) for i in order if (data := splits[str(ids[i])]) is not None], dtype=np.uint32)
    single = outputs_of_all.outputs.astype(np.float32)
    is_exact = np.array_equal(single, outputs_of_all.outputs, equal_nan=True)
    outputs = single if is_exact else outputs_of_all.outputs
    return {
        "ids": ids[order],
        "counts": counts[order],
        "marks": marks,
        "targets": outputs_of_all.y[rows],
        "outputs": outputs[rows],
    }


def _hash_inputs(split: Split) -> int:
    return zlib.crc32(np.ascontiguousarray(split.x.cpu().numpy()).data)


@dataclass(frozen=True)
class Predictions:
    """The predictions of one evaluation; the attributes are the arrays of :func:`build_arrays`."""

    ids: list[str]
    counts: NDArray[np.int64]
    marks: NDArray[np.uint32]
    targets: NDArray[Any]
    outputs: NDArray[np.float64]

    def sites(self) -> Iterator[tuple[str, int, slice]]:
        """Yield the id of each client, the checksum of its inputs, and the slice of its samples."""
        ends = np.cumsum(self.counts)
        for site, mark, start, end in zip(self.ids, self.marks.tolist(), ends - self.counts, ends, strict=True):
            yield site, mark, slice(int(start), int(end))

    def by_site(self) -> dict[str, tuple[NDArray[Any], NDArray[np.float64]]]:
        """Return the targets and outputs of each client by its id."""
        return {site: (self.targets[rows], self.outputs[rows]) for site, _, rows in self.sites()}


def read_predictions(run: Path, evaluations: int = 1) -> list[Predictions]:
    """Return the predictions of a run's last evaluations, whose mean its metrics are; an empty list if it kept none.

    Raises:
        PerfedError: a file cannot be read; the message names it.
    """
    return [parse(file) for file in list_files(run, evaluations)]


def list_files(run: Path, evaluations: int = 1) -> list[Path]:
    """Return the files with the predictions of a run's last evaluations, in the order of the rounds."""
    files = sorted((run / FOLDER).glob("round-*.npz"), key=lambda file: int(file.stem.removeprefix("round-")))
    return files[-evaluations:]


def parse(file: Path, content: bytes | None = None) -> Predictions:
    """Return the predictions in a file, whose ``content`` may have been read before.

    Raises:
        PerfedError: the file cannot be read; the message names it.
    """
    arrays = read_arrays(file, ("ids", "counts", "marks", "targets", "outputs"), content=content)
    ids, counts, marks, targets, outputs = arrays.values()
    shapes_match = ids.ndim == 1 and ids.shape == counts.shape == marks.shape and targets.ndim > 0 and outputs.ndim > 0
    types_match = ids.dtype.kind == "U" and counts.dtype.kind in "iu" and marks.dtype.kind in "iu"
    numbers = targets.dtype.kind in "biuf" and outputs.dtype.kind == "f"
    complete = shapes_match and types_match and numbers and bool((counts >= 0).all())
    if not (complete and int(counts.sum()) == len(targets) == len(outputs)):
        raise PerfedError(f"{file}: its arrays do not belong together")
    return Predictions(ids.tolist(), counts, marks, targets, outputs.astype(np.float64))
