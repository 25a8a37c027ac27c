"""The facts of clients whose samples are read when they are used, found by looking at each client once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perfed.data.checks import check_ids
from perfed.data.client import Split
from perfed.data.facts import SPLITS, ClientFacts, SplitFacts
from perfed.data.inputs import arrays_of
from perfed.data.labels import Classes, Task, as_classes, coded
from perfed.errors import PerfedError

Arrays = Callable[[str], Any]
"""From a client's id to what :meth:`perfed.data.federation.Federation.from_arrays` takes for one client."""


@dataclass(frozen=True)
class FromArrays:
    """Reads the splits that the arrays of ``read`` hold.

    Attributes:
        read: gives a client's arrays, a mapping of which only the split that is used is touched.
        classes: what labels mean; ``None`` for values.
    """

    read: Arrays
    classes: Classes | None

    def __call__(self, clients: Sequence[str], split: str) -> list[Split]:
        """The samples of ``split`` of each client."""
        return [self._one(client, split) for client in clients]

    def _one(self, client: str, split: str) -> Split:
        parts, _ = arrays_of(client, _given(self.read, client, f"{split} samples"), SPLITS, only=split)
        if split not in parts:
            raise PerfedError(f"client '{client}': {split} samples: there are none, but its facts say that there are")
        x, y, domain = parts[split]
        return Split(x, as_classes(f"client '{client}': {split}", y, self.classes), domain)


@dataclass(frozen=True)
class _Seen:
    """Of one split: shapes, and how often each target (of labels) and each domain occurs."""

    where: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    samples: int
    labels: Any
    counts: NDArray[np.int64]
    domains: tuple[NDArray[np.int64], NDArray[np.int64]] | None
    events: int | None
    mark: int


def surveyed(
    ids: Iterable[str],
    look: Arrays,
    task: Task | None,
    num_classes: int | None,
    class_names: Sequence[str] | None,
) -> tuple[list[ClientFacts], Classes | None]:
    """Look at each client once, keep its facts, and code the labels as from all of them.

    Args:
        ids: of the clients.
        look: gives a client's arrays; of the inputs only shapes are used, and they may be on the device "meta".
        task, num_classes, class_names: as in :meth:`perfed.data.federation.Federation.from_source`.

    Raises:
        PerfedError: as :meth:`perfed.data.federation.Federation.from_arrays`; values without ``task``.
    """
    found: dict[str, tuple[dict[str, _Seen], tuple[str, ...] | None]] = {}
    for client in ids:
        if client in found:
            raise PerfedError(f"client id '{client}' occurs twice; ids must be unique")
        parts, names = arrays_of(client, _given(look, client, "its data"), SPLITS)
        seen = {name: _seen(f"client '{client}': {name}", task, *part) for name, part in parts.items()}
        found[client] = seen, names
    splits = [seen for parts, _ in found.values() for seen in parts.values()]
    classes = None
    if task not in ("regression", "survival"):
        _, classes = coded([(seen.where, seen.labels) for seen in splits], "classification", num_classes, class_names)
    samples = sum(seen.samples for seen in splits)
    facts = [
        ClientFacts(
            client,
            {name: _facts(seen, classes, samples) for name, seen in parts.items()},
            names,
            zlib.crc32(str([seen.mark for seen in parts.values()]).encode()),
        )
        for client, (parts, names) in found.items()
    ]
    return facts, classes


def _given(read: Arrays, client: str, what: str) -> Any:
    """What a user's function gives; its errors in one line."""
    try:
        return read(client)
    except PerfedError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise PerfedError(f"client '{client}': {what} cannot be read: {reason}") from error


def _seen(where: str, task: Task | None, x: Tensor, y: Tensor | NDArray[np.str_], domain: Tensor | None) -> _Seen:
    values = isinstance(y, Tensor) and y.is_floating_point()
    if task is None and values:
        raise PerfedError(f"{where} targets are floating-point numbers; say task = 'classification' or 'regression'")
    if len(x) != len(y) or (domain is not None and domain.shape != (len(x),)):
        raise PerfedError(f"{where} inputs, targets and domain ids must have the same length")
    array: NDArray[Any] = y.numpy() if isinstance(y, Tensor) else y
    labels, counts = np.zeros(0), np.zeros(0, np.int64)
    if task not in ("regression", "survival"):
        if array.ndim != 1:
            raise PerfedError(f"{where} labels have shape {array.shape}; ({len(x)},) is needed")
        labels, counts = np.unique(array, return_counts=True)
    elif not isinstance(y, Tensor):
        raise PerfedError(f"{where} targets are texts; numbers are needed for {task}")
    domains = None
    if domain is not None:
        check_ids(where.rpartition(":")[0], where.rpartition(" ")[2], domain, None)
        domains = np.unique(domain.numpy(), return_counts=True)
    events = int(array[:, 1].sum()) if task == "survival" and array.ndim == 2 and array.shape[1] == 2 else None
    shapes = (tuple(x.shape[1:]), tuple(y.shape[1:]))
    texts = labels.dtype.kind == "U"
    mark = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return _Seen(where, shapes, len(x), labels if texts else torch.from_numpy(labels), counts, domains, events, mark)


def _facts(seen: _Seen, classes: Classes | None, samples: int) -> SplitFacts:
    held = None
    if classes is not None:
        positions = as_classes(seen.where, seen.labels, classes).numpy()
        bad = positions[(positions < 0) | (positions >= len(classes))]
        if len(bad):
            raise PerfedError(f"{seen.where} label {bad[0]} is outside the classes 0..{len(classes) - 1}")
        held = _counted(positions, seen.counts)
    domains = None
    if seen.domains is not None:
        last = int(seen.domains[0][-1])
        if last >= samples:
            problem = "ids count the domains from 0, and there are fewer samples than that"
            raise PerfedError(f"{seen.where} domain id {last} is not allowed: {problem}")
        domains = _counted(*seen.domains)
    return SplitFacts(seen.samples, *seen.shapes, held, domains, seen.events)


def _counted(at: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[int, ...]:
    whole = np.zeros(int(at.max(initial=-1)) + 1, np.int64)
    whole[at] = counts
    return tuple(whole.tolist())
