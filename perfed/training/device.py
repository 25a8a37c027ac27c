"""Devices that torch computes on."""

from __future__ import annotations

import os

import torch

from perfed.errors import PerfedError
from perfed.system import processor

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


def arithmetic(device: torch.device) -> str:
    """What the last digits of results depend on besides plan and cohort: processor, its instructions in use, torch."""
    parts = [processor(), torch.backends.cpu.get_cpu_capability()]
    if limit := os.environ.get("ONEDNN_MAX_CPU_ISA"):
        parts.append(f"oneDNN up to {limit}")
    if device.type != "cpu":
        parts.append(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    return ", ".join([*parts, f"torch {torch.__version__}"])
