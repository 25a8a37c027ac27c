"""Workers that wait for the next run, in the place of new ones: each takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass
class Waiting:
    """Workers between two runs.

    Attributes:
        actors: of Ray, which have nothing to do.
        threads: torch threads of each.
        ours: whether their Ray was started here, so that it ends with them.
    """

    actors: list[Any] = field(default_factory=list)
    threads: int = 0
    ours: bool = False

    def take(self, threads: int) -> list[Any]:
        """Return those of so many threads; others go."""
        taken, self.actors = self.actors, []
        if threads != self.threads:
            for actor in taken:
                import_module("ray").kill(actor)
            taken = []
        self.threads = threads
        return taken

    def end(self) -> None:
        """Let all go, and the Ray that was started for them."""
        if self.actors or self.ours:
            ray = import_module("ray")
            for actor in self.actors if ray.is_initialized() else ():
                ray.kill(actor)
            if self.ours:
                ray.shutdown()
        self.actors, self.ours = [], False


_now: Waiting | None = None


@contextmanager
def keep_workers() -> Iterator[None]:
    """In this time workers go on from one run to the next of this process, each with nothing left of the run before.

    Within another such time, that one's workers go on.
    """
    global _now
    if _now is not None:
        yield
        return
    _now = kept = Waiting()
    try:
        yield
    finally:
        _now = None
        kept.end()


def waiting() -> Waiting | None:
    """Return those that wait; ``None``: nobody is to be kept."""
    return _now
