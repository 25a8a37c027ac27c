"""The progress of a run and its sums over rounds, as plain data that checkpoints contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from perfed.engine.evaluate import Metrics
from perfed.engine.record import RoundRecord
from perfed.errors import PerfedError


@dataclass
class RunTotals:
    """Sums and latest values over the rounds of a run.

    Attributes:
        taken_part: number of rounds in which each client was used, by id; unused clients are omitted.
        replied: number and sum of the virtual seconds of each client's replies, by id.
        virtual_time: virtual seconds since the start.
        counts: numbers of clients that methods and policies count, by name of the event.
        recent: each client's metrics in the last evaluated rounds.
        recent_domains: metrics of each domain in the same rounds
            (:func:`perfed.engine.evaluate.compute_domain_metrics`).
        other: metrics of the last evaluated round that are not reported: after local training if those before it are
            reported, and vice versa.
        client_domains: metrics of each client in each domain, of the last evaluated round.
    """

    taken_part: dict[str, int] = field(default_factory=dict)
    replied: dict[str, list[float]] = field(default_factory=dict)
    virtual_time: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    recent: list[Metrics] = field(default_factory=list)
    recent_domains: list[Metrics] = field(default_factory=list)
    other: Metrics = field(default_factory=dict)
    client_domains: Metrics = field(default_factory=dict)

    def add(self, outcome: RoundRecord) -> None:
        """Add the time, participants, replies and counts of a round."""
        self.virtual_time += outcome.seconds
        for client in outcome.participants:
            self.taken_part[client] = self.taken_part.get(client, 0) + 1
        for client, seconds in outcome.replied.items():
            times, total = self.replied.get(client, (0, 0.0))
            self.replied[client] = [times + 1, total + seconds]
        for name, ids in outcome.counts.items():
            self.counts[name] = self.counts.get(name, 0) + len(ids)

    def add_evaluation(self, metrics: Metrics, domains: Metrics, last: int) -> None:
        """Add the metrics of an evaluated round; only the ``last`` evaluated rounds are kept."""
        self.recent = [*self.recent, metrics][-last:]
        self.recent_domains = [*self.recent_domains, domains][-last:]

    def never_used(self, ids: Sequence[str]) -> list[str]:
        """Return the ids of the clients that no round has used yet."""
        return [client for client in ids if client not in self.taken_part]

    @property
    def seconds(self) -> dict[str, float]:
        """The mean virtual seconds of each client's replies."""
        return {client: total / times for client, (times, total) in self.replied.items()}

    @property
    def metrics(self) -> Metrics:
        """The metrics of each client: means over the last evaluated rounds in which it was evaluated."""
        return _average_rounds(self.recent)

    @property
    def domains(self) -> Metrics:
        """The metrics of each domain: means over the last evaluated rounds."""
        return _average_rounds(self.recent_domains)

    def copy(self) -> RunTotals:
        """Return a copy that later rounds do not change."""
        return replace(self, taken_part={**self.taken_part}, replied={**self.replied}, counts={**self.counts})

    def to_dict(self) -> dict[str, Any]:
        """Return the totals as a dictionary of JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunTotals:
        """Return the totals from the result of :meth:`to_dict`.

        Raises:
            PerfedError: if the values were written by another version.
        """
        try:
            TypeAdapter(cls).validate_python(values)
            return cls(**values)
        except (TypeError, ValidationError):
            raise PerfedError("the checkpoint was written by another version of perfed; start the run again") from None


@dataclass
class RunProgress:
    """The progress of a run.

    Attributes:
        totals: sums over its rounds.
        done: the last finished round, or the one that is being finished; 0 is the preparation, -1 is before it.
        wall, training: seconds since the start, and seconds of training.
        stopped_by: name of the callback that ended the run; empty if none has.
    """

    totals: RunTotals = field(default_factory=RunTotals)
    done: int = -1
    wall: float = 0.0
    training: float = 0.0
    stopped_by: str = ""

    def copy(self) -> RunProgress:
        """Return a copy that later rounds do not change."""
        return replace(self, totals=self.totals.copy())


def _average_rounds(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> Metrics:
    rows: dict[str, list[Mapping[str, float]]] = {}
    for metrics in rounds:
        for name in metrics:
            rows.setdefault(name, []).append(metrics[name])
    return {name: _average_rows(rows[name]) for name in sorted(rows)}


def _average_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: float(np.mean([row[key] for row in rows if key in row])) for key in keys}
