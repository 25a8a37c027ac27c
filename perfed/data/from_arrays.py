"""One client from arrays, for classes, domains and a scale of targets that are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from torch import Tensor, is_floating_point

from perfed.data.client import SPLITS, Client, Split
from perfed.data.inputs import arrays_of
from perfed.data.labels import Classes, positions
from perfed.data.target_scale import TargetScale
from perfed.errors import PerfedError


def client_of(name: str, given: Mapping[str, Any], classes: Classes | None, scale: TargetScale | None) -> Client:
    """A client of ``classes``, ``None`` without classes, whose targets are standardised by ``scale``, if any.

    Args:
        name: its id.
        given: as :meth:`perfed.data.federation.Federation.from_arrays` takes it for one client.
        classes, scale: of the federation.

    Raises:
        PerfedError: arrays that :meth:`perfed.data.federation.Federation.from_arrays` refuses, or labels that are none
            of the classes.
    """
    parts, features = arrays_of(name, given, SPLITS)
    splits = {
        split: Split(x, _targets(f"client '{name}': {split}", y, classes, scale), domain)
        for split, (x, y, domain) in parts.items()
    }
    return Client(name, splits["train"], splits.get("test"), splits.get("validation"), features)


def _targets(where: str, y: Tensor | NDArray[Any], classes: Classes | None, scale: TargetScale | None) -> Tensor:
    if classes is None:
        if not isinstance(y, Tensor):
            raise PerfedError(f"{where} targets are texts; numbers are needed for regression")
        values = y if is_floating_point(y) else y.double()
        if scale is not None and values[0].numel() != len(scale.mean):
            raise PerfedError(
                f"{where} targets have shape {tuple(y.shape)}; those of others have {len(scale.mean)} values"
            )
        return values if scale is None else scale.down(values)
    labels = y.long().numpy() if isinstance(y, Tensor) else y
    if any(isinstance(label, str) for label in classes):
        labels = labels.astype(str)
    elif labels.dtype.kind == "U":
        raise PerfedError(f"{where} targets are texts; the classes are {', '.join(map(str, classes))}")
    return positions(where, labels, classes)
