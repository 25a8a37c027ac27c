"""What all runs have in common, whether they train a method in rounds or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from perfed.client_model.site_model import SiteModel
from perfed.data.client import Client
from perfed.data.federation import Federation
from perfed.run.callbacks.progress import Progress
from perfed.training.plan import Plan


class AnyRun(Protocol):
    """A run of a method, of scikit-learn's models or of a blend: it is executed, and then has a model for each client.

    Attributes:
        name: the name of the method, baseline or blend.
        seed: the seed of everything random.
        federation: the clients.
        path: the directory of the results; ``None`` if they are not written.
        rounds: the number of rounds; 0 for a run whose progress is counted in clients.
        done: the last finished round; -1 before the preparation.
        resumed: the round after which a resumed run continues.
        notes: remarks on the run so far.
        plan: how the work is divided.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def seed(self) -> int: ...  # noqa: D102

    @property
    def federation(self) -> Federation: ...  # noqa: D102

    @property
    def path(self) -> Path | None: ...  # noqa: D102

    @property
    def rounds(self) -> int: ...  # noqa: D102

    @property
    def done(self) -> int: ...  # noqa: D102

    @property
    def resumed(self) -> int | None: ...  # noqa: D102

    @property
    def notes(self) -> Sequence[str]: ...  # noqa: D102

    @property
    def plan(self) -> Plan: ...  # noqa: D102

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Train to the end, write the results, and return the summary.

        Args:
            progress: called with the number of rounds (or clients) that are done, the number of all, and the mean
                accuracy if it is known.
        """

    def site(self, client: str, trust: bool = False) -> SiteModel:
        """Return the model of a client, or of a site that has joined; ``trust``: whether its files may run code."""

    def join(self, client: Client, rounds: int | None = None) -> SiteModel:
        """Return the model of a new client, after ``rounds`` of training (default: as many as the run has done)."""
