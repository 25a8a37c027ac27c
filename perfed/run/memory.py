"""In place of a run directory: a run that is kept in memory only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from perfed.errors import PerfedError
from perfed.run.checkpoint_files import Checkpoint
from perfed.tree import Tree


class Memory:
    """What a run writes to and reads from its :class:`~perfed.run.directory.RunDirectory`; nothing is kept."""

    path = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process can work on the same run."""
        yield

    def abandon(self) -> None:
        """There is nothing to take back."""

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Not kept; the run's history has the record."""

    def truncate_rounds(self, last: int) -> tuple[list[dict[str, Any]], list[str]]:
        """No records, and no note."""
        return [], []

    def write_clients(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Not kept; the run has its metrics."""

    def write_holdings(self, content: Mapping[str, Any]) -> None:
        """Not kept; the run has its federation."""

    def write_sites(self, content: Mapping[str, Any]) -> None:
        """Not kept; the run has its federation."""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Not kept; the run has its summary."""

    def write_arrays(self, name: str, round_: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Not kept: arrays are for reports, which read directories."""

    def save(
        self,
        round_: int,
        server: Tree,
        clients: Mapping[str, Tree],
        changed: AbstractSet[str],
        progress: Mapping[str, Any],
    ) -> None:
        """Not kept: what memory holds is lost together with the run."""

    def load(self, keep: Callable[[Tree], Tree] = lambda state: state) -> Checkpoint | None:
        """There is no checkpoint to go back to.

        Raises:
            PerfedError: always.
        """
        raise PerfedError("this run has no directory, so that there is no checkpoint to go back to")
