"""What the commands that train have in common: settings, devices, how they are interrupted."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from perfed.cli.console import CTRL_C, INTERRUPTED, Stopped
from perfed.cli.options import Training, Workers
from perfed.cli.progress import Work
from perfed.engine.ray.where import use_workers
from perfed.errors import PerfedError
from perfed.experiment.jobs import Execute, Jobs, in_turn
from perfed.machine import TERMINATED, by_sigterm
from perfed.training.device import usable_device
from perfed.training.plan import ENGINES


def default_out(name: str) -> Path:
    """Where results go that nobody names a place for."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def settings_of(engine: str | None, settings: list[str] | None) -> list[str]:
    """The settings, with the engine among them."""
    if engine is not None and engine not in ENGINES:
        raise PerfedError(f"--engine {engine}: unknown engine; allowed: {', '.join(ENGINES)}")
    return [*(settings or []), *([f'plan.engine="{engine}"'] if engine else [])]


def device_of(name: str | None) -> torch.device | None:
    """The device that ``--device`` names."""
    return None if name is None else usable_device(name, f"--device {name}")


@contextmanager
def resumable(
    directory: Path, data_dir: Path | None, device: str | None = None, ray: Workers | None = None
) -> Iterator[None]:
    """Use the workers that were asked for, and say after Ctrl-C or SIGTERM which command goes on."""
    workers = ray or Workers()
    use_workers(workers.number or 0, workers.address or "")
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        code = CTRL_C if isinstance(stop, KeyboardInterrupt) else TERMINATED if by_sigterm(stop) else stop.code
        if code not in (CTRL_C, TERMINATED):
            raise
        options: dict[str, object] = {"--data-dir": data_dir, "--device": device}
        options |= {"--workers": workers.number, "--ray-address": workers.address}
        words = [str(directory), *(word for name, value in options.items() if value for word in (name, str(value)))]
        raise Stopped(f"{INTERRUPTED[code]}; 'perfed resume {shlex.join(words)}' continues", code) from None


def executor(how: Training, work: Work) -> Execute:
    """What executes runs as the command line asks for, and shows how far they are."""
    return partial(in_turn, execute=work.execute) if how.jobs == 1 else Jobs(how.jobs, how.ray.address, work.told)


def shared_settings(engine: str | None, settings: list[str] | None) -> list[str]:
    """Settings of a command that runs several methods and seeds."""
    for assignment in settings or []:
        key = assignment.partition("=")[0].strip()
        if key in ("method", "seed"):
            raise PerfedError(f"'{assignment}': methods and seeds are given with --methods and --seeds here")
    return settings_of(engine, settings)
