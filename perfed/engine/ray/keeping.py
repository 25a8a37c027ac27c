"""Reuse of Ray workers by consecutive runs, since starting a worker takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass
class Waiting:
    """The workers between two runs.

    Attributes:
        actors: the Ray actors, which are idle.
        threads: the number of torch threads of each.
        ours: whether this process started their Ray instance, which then ends with them.
    """

    actors: list[Any] = field(default_factory=list)
    threads: int = 0
    ours: bool = False

    def take(self, threads: int) -> list[Any]:
        """Remove and return the actors; actors with another number of threads are killed instead."""
        actors, self.actors = self.actors, []
        if threads != self.threads:
            for actor in actors:
                import_module("ray").kill(actor)
            actors = []
        self.threads = threads
        return actors

    def end(self) -> None:
        """Kill all actors, and shut down the Ray instance that was started for them."""
        if self.actors or self.ours:
            ray = import_module("ray")
            for actor in self.actors if ray.is_initialized() else ():
                ray.kill(actor)
            if self.ours:
                ray.shutdown()
        self.actors, self.ours = [], False


_current: Waiting | None = None


@contextmanager
def keep_workers() -> Iterator[None]:
    """Reuse workers between the runs of this process inside the ``with`` block; they keep nothing of earlier runs.

    A nested block uses the workers of the outer one.
    """
    global _current
    if _current is not None:
        yield
        return
    _current = waiting_workers = Waiting()
    try:
        yield
    finally:
        _current = None
        waiting_workers.end()


def get_waiting_workers() -> Waiting | None:
    """Return the waiting workers; ``None`` outside of :func:`keep_workers`."""
    return _current
