"""Clients that drop out in the rounds that a file lists."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from perfed.errors import PerfedError, shorten_list
from perfed.participation.clock import Rows
from perfed.participation.csv_rows import CsvPath, read_csv_rows
from perfed.participation.policy import Ask, Policy, PolicyContext, PolicySettings, register_policy, take_without


class DropoutTraceSettings(PolicySettings):
    """Clients drop out as a CSV file says: a row for each client and round (a number from 1, or * for every round)."""

    file: CsvPath = Field("", description="path of the CSV file, from the current folder; recorded as an absolute one")


@register_policy(
    "dropout_trace", settings=DropoutTraceSettings, example="participation.dropout_trace.file=dropouts.csv"
)
class DropoutTrace(Policy[DropoutTraceSettings]):
    """Clients drop out in the rounds that a CSV file lists; the replies of the others are used.

    The file has the columns ``round`` and ``client``, in any order, and may have others, which are ignored. Each row
    says that a client drops out of a round: a number from 1, or ``*`` for every round. Nobody drops out of rounds that
    the file does not mention, such as those after the end of a trace that is shorter than the run; rows of rounds after
    the end of the run are ignored. A round in which all invited clients drop out changes nothing.
    """

    strict = False

    def __init__(self, settings: DropoutTraceSettings, context: PolicyContext) -> None:
        super().__init__(settings, context)
        self.dropouts = self._read_file()
        lines = sorted((str(round_), sorted(clients)) for round_, clients in self.dropouts.items())
        self.state = {"trace": hashlib.sha256(repr(lines).encode()).hexdigest()}

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        """Use the replies of the clients that do not drop out."""
        clients = self.dropouts.get(round_, set()) | self.dropouts.get(None, set())
        dropped = np.array([row for row, client in enumerate(self.who.ids) if client in clients], np.int64)
        return take_without(ask(self.draw_invited(round_)), dropped)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse to continue a run whose trace has changed."""
        if state != self.state:
            raise PerfedError(f"{self.settings.file}: this run followed a trace with other dropouts")

    def _read_file(self) -> dict[int | None, set[str]]:
        """Return the clients that drop out, by round; ``None`` stands for every round."""
        if not self.settings.file:
            raise PerfedError(
                "participation.policy = 'dropout_trace' needs participation.dropout_trace.file, a CSV file"
            )
        where = f"participation.dropout_trace.file = '{self.settings.file}'"
        ids = set(self.who.ids)
        dropouts: dict[int | None, set[str]] = {}
        for place, row in read_csv_rows(self.settings.file, where, ("round", "client")):
            text, client = row["round"].strip(), row["client"].strip()
            if text != "*" and not (text.isascii() and text.isdigit() and int(text) >= 1):
                raise PerfedError(
                    f"{place}: round must be a whole number from 1, or * for every round (given: {text[:60]})"
                )
            if client not in ids:
                raise PerfedError(f"{place}: there is no client '{client[:60]}'; allowed: {shorten_list(self.who.ids)}")
            round_ = None if text == "*" else int(text)
            if client in dropouts.setdefault(round_, set()):
                raise PerfedError(f"{place}: repeats client '{client}' of round {text}; each may be listed once")
            dropouts[round_].add(client)
        return dropouts
