"""A Ray to work on: one that is there, or one of the run's own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import torch

from perfed.engine.ray.where import Cluster
from perfed.errors import PerfedError

_STATISTICS = "RAY_USAGE_STATS_ENABLED"
_ANSWER_SECONDS = 10.0
_FREE_SECONDS = 10.0


def connect(where: Cluster, threads: int) -> bool:
    """Be connected with a Ray; whether it was started here, so that it ends with the run.

    One that Python is connected with is used as it is.

    Raises:
        PerfedError: there is none at the address, it cannot be started, or Python is connected with another.
    """
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if where.address not in ("", "auto", here):
            raise PerfedError(f"Ray address {where.address}: this Python is connected with the Ray at {here} already")
        return False
    address = where.address or os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto"):
        check_answers(address)
    with _quietly():
        try:
            if address:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            else:
                cores = where.workers * threads or None
                ray.init(
                    address="local",
                    num_cpus=cores,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise PerfedError(f"Ray {f'at {address}' if address else 'on this machine'}: {reason}") from None
    return True


def room(where: Cluster, threads: int, device: torch.device, there: int = 0) -> tuple[int, float]:
    """How many workers, and how many GPUs each of them has; so many of them are ``there`` already.

    Raises:
        PerfedError: more workers than there are free cores for, or no GPU where they are to compute on one.
    """
    gpus = free("GPU") if device.type == "cuda" else 0
    if device.type == "cuda" and gpus == 0:
        raise PerfedError(f"device = '{device}': Ray has no free GPU here")
    fit = free() // threads + there
    workers = where.workers or max(1, min(fit, gpus or fit))
    if workers * threads > ray.cluster_resources().get("CPU", 0) or not has_room((workers - there) * threads):
        need = f"{workers} Ray worker{'s' if workers > 1 else ''} with plan.threads = {threads}"
        raise PerfedError(f"{need} need {workers * threads} free cores; there are {free() + there * threads}")
    return workers, min(1.0, gpus / workers)


def free(kind: str = "CPU") -> int:
    """Cores, or GPUs, that nobody has."""
    return int(ray.available_resources().get(kind, 0))


def has_room(cores: int) -> bool:
    """Whether so many cores are free, or become so soon: Ray takes its time to see that a worker is gone."""
    until = time.monotonic() + _FREE_SECONDS
    while free() < cores:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def check_answers(address: str) -> None:
    """Whether something answers at ``HOST:PORT``; Ray itself would try for minutes.

    Raises:
        PerfedError: nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise PerfedError(f"no Ray cluster answers at {address}: {error}") from None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without Ray's advice, statistics of usage, and handler of SIGTERM."""
    logger, before = logging.getLogger("ray"), logging.getLogger("ray").level
    logger.setLevel(logging.ERROR)
    told = _STATISTICS in os.environ
    os.environ.setdefault(_STATISTICS, "0")
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        if not told:
            del os.environ[_STATISTICS]
        logger.setLevel(before)
