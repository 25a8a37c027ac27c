"""The number and place of Ray workers, which change no result and are therefore not part of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from perfed.errors import PerfedError


@dataclass(frozen=True)
class Cluster:
    """The number of workers and the address of their Ray cluster.

    Attributes:
        workers: the number of workers; 0 for as many as the free cores or GPUs allow.
        address: the address ``HOST:PORT`` of a Ray cluster, or ``auto`` for the cluster of this machine. If it is
            empty, the environment variable ``RAY_ADDRESS`` is used, or otherwise a new Ray instance is started on this
            machine, which ends with the run.
    """

    workers: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise PerfedError(f"workers = {self.workers}: must be at least 1, or 0 for as many as there is room for")
        host, colon, port = self.address.rpartition(":")
        if self.address not in ("", "auto") and not (host and "/" not in host and colon and port.isdigit()):
            raise PerfedError(f"Ray address '{self.address}': must be HOST:PORT, e.g. 10.0.0.1:6379, or auto")


_cluster = Cluster()


def use_workers(workers: int = 0, address: str = "") -> None:
    """Set the number and place of workers for later runs with ``plan.engine = "ray"``; no result depends on it.

    Args:
        workers, address: as in :class:`Cluster`.

    Raises:
        PerfedError: the number is negative, or the address is not valid.

    Example:
        >>> use_workers(2, address="auto")
        >>> use_workers()  # the default again
    """
    global _cluster
    _cluster = Cluster(workers, address)


def get_cluster() -> Cluster:
    """Return the cluster that :func:`use_workers` has set."""
    return _cluster
