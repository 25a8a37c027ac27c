"""Connection to a Ray cluster or to a new Ray instance on this machine."""

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
    """Connect to Ray, and return whether this call has connected, so that the run has to disconnect at its end.

    An existing connection of this process is used as it is.

    Raises:
        PerfedError: there is no cluster at the address, Ray cannot be started, or this process is connected to another
            cluster.
    """
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if where.address not in ("", "auto", here):
            raise PerfedError(f"Ray address {where.address}: this Python is connected with the Ray at {here} already")
        return False
    address = where.address or os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto"):
        check_answers(address)
    with _silence_ray():
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


def plan_workers(where: Cluster, threads: int, device: torch.device, waiting: int = 0) -> tuple[int, float]:
    """Return the number of workers and the number of GPUs of each.

    Args:
        where: the requested number of workers.
        threads: the number of threads of each worker.
        device: the device on which they compute.
        waiting: the number of workers that exist already.

    Raises:
        PerfedError: there are not enough free cores, or no free GPU for a device of type "cuda".
    """
    gpus = count_free("GPU") if device.type == "cuda" else 0
    if device.type == "cuda" and gpus == 0:
        raise PerfedError(f"device = '{device}': Ray has no free GPU here")
    fit = count_free() // threads + waiting
    workers = where.workers or max(1, min(fit, gpus or fit))
    if workers * threads > ray.cluster_resources().get("CPU", 0) or not has_room((workers - waiting) * threads):
        need = f"{workers} Ray worker{'s' if workers > 1 else ''} with plan.threads = {threads}"
        raise PerfedError(f"{need} need {workers * threads} free cores; there are {count_free() + waiting * threads}")
    return workers, min(1.0, gpus / workers)


def count_free(kind: str = "CPU") -> int:
    """Return the number of free cores or GPUs."""
    return int(ray.available_resources().get(kind, 0))


def has_room(cores: int) -> bool:
    """Return whether so many cores are free now or soon, since Ray notices the end of a worker with a delay."""
    until = time.monotonic() + _FREE_SECONDS
    while count_free() < cores:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def check_answers(address: str) -> None:
    """Check that something answers at ``HOST:PORT``, since Ray itself would try for minutes.

    Raises:
        PerfedError: nothing answers.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise PerfedError(f"no Ray cluster answers at {address}: {error}") from None


@contextmanager
def _silence_ray() -> Iterator[None]:
    """Disable Ray's log messages, usage statistics and SIGTERM handler inside the ``with`` block."""
    logger, before = logging.getLogger("ray"), logging.getLogger("ray").level
    logger.setLevel(logging.ERROR)
    is_set = _STATISTICS in os.environ
    os.environ.setdefault(_STATISTICS, "0")
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        if not is_set:
            del os.environ[_STATISTICS]
        logger.setLevel(before)
