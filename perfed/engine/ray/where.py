"""Where Ray workers are: what does not change any result, and so is in no configuration."""

from __future__ import annotations

from dataclasses import dataclass

from perfed.errors import PerfedError


@dataclass(frozen=True)
class Cluster:
    """Number and place of the workers.

    Attributes:
        workers: how many; 0: as many as the free cores, or GPUs, allow.
        address: of a Ray cluster, ``HOST:PORT``, or ``auto``: that of this machine; empty: the environment's
            ``RAY_ADDRESS``, or else a Ray of its own on this machine, which ends with the run.
    """

    workers: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise PerfedError(f"workers = {self.workers}: must be at least 1, or 0 for as many as there is room for")
        host, colon, port = self.address.rpartition(":")
        if self.address not in ("", "auto") and not (host and "/" not in host and colon and port.isdigit()):
            raise PerfedError(f"Ray address '{self.address}': must be HOST:PORT, e.g. 10.0.0.1:6379, or auto")


_chosen = Cluster()


def use_workers(workers: int = 0, address: str = "") -> None:
    """From here on runs with ``plan.engine = "ray"`` have so many workers, there; no result depends on it.

    Args:
        workers, address: as in :class:`Cluster`.

    Raises:
        PerfedError: a negative number, or no address.

    Example:
        >>> use_workers(2, address="auto")
        >>> use_workers()  # the default again
    """
    global _chosen
    _chosen = Cluster(workers, address)


def chosen() -> Cluster:
    """What :func:`use_workers` was told last."""
    return _chosen
