"""The machine that a run is on: its devices and the installed version."""

from __future__ import annotations

from importlib import metadata

import torch

from perfed.errors import PerfedError

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def usable_device(name: str, where: str) -> torch.device:
    """The torch device called ``name``.

    Raises:
        PerfedError: there is no such kind, or this machine has none; starts with ``where``.
    """
    if name.partition(":")[0] not in _DEVICES:
        raise PerfedError(f"{where}: unknown device; allowed: {', '.join(_DEVICES)}, or one with a number")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PerfedError(f"{where}: {str(error).splitlines()[0]}") from None
    return device


def installed_version() -> str:
    """Version of perfed, "unknown" where it is not installed."""
    try:
        return metadata.version("perfed")
    except metadata.PackageNotFoundError:
        return "unknown"
