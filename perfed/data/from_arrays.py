"""One client from arrays, for classes, domains and a scale of targets that are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from perfed.data.client import SPLITS, Client, Split
from perfed.data.inputs import arrays_of
from perfed.data.labels import Classes, as_classes
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
    values = as_classes(where, y, classes)
    if scale is None:
        return values
    if values[0].numel() != len(scale.mean):
        raise PerfedError(f"{where} targets have shape {tuple(y.shape)}; those of others have {len(scale.mean)} values")
    return scale.down(values)
