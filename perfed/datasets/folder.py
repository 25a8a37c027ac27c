"""A folder of the user's own with the arrays of each client, read when they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from perfed.data.federation import Federation
from perfed.data.lazy import HOLD
from perfed.datasets.catalogue import NonNegative, dataset
from perfed.errors import PerfedError


@dataset("folder", paths=("path",))
def folder(
    seed: int,
    data_dir: Path | None,
    *,
    path: str = "",
    task: Literal["auto", "classification", "regression", "survival"] = "auto",
    num_classes: NonNegative = 0,
    hold_megabytes: NonNegative = HOLD >> 20,
) -> Federation:
    """Arrays of your own, larger than memory: a file ID.npz, or a folder ID of .npy files, per client.

    See :meth:`perfed.data.federation.Federation.from_folder`; samples used last are held, up to ``hold_megabytes``.
    """
    if not path:
        raise PerfedError("data.path is needed: the folder with a file ID.npz or a folder ID per client")
    return Federation.from_folder(
        path,
        task=None if task == "auto" else task,
        num_classes=num_classes or None,
        hold=hold_megabytes << 20,
    )
