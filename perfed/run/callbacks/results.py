"""The files that reports read: a line and arrays for each round, tables and the summary at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from perfed.run.callback import Callback, Running
from perfed.run.holdings import holdings, sites


def write_arrays(run: Running, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what is to be kept of the round that ``run`` has done: arrays by name, by the name of their folder."""
    if run.directory:
        for name, arrays in found.items():
            run.directory.write_arrays(name, run.done, {key: np.asarray(value) for key, value in arrays.items()})


class Results(Callback):
    """Writes a round's arrays and its line of ``rounds.jsonl``; at the end ``summary.json``, which finishes the run."""

    name = "results"

    def after_round(self, run: Running, record: dict[str, Any]) -> bool:
        """Write what methods showed, what models said, and the record."""
        write_arrays(run, {} if run.latest is None else run.latest.arrays)
        if run.directory:
            run.directory.append_round(record)
        return False

    def end(self, run: Running, summary: dict[str, Any]) -> None:
        """Write ``clients.csv``, ``federation.json``, of tables ``sites.json``, and the summary."""
        if run.directory:
            run.directory.write_clients(*run.client_table())
            run.directory.write_holdings(holdings(run.federation))
            if (found := sites(run.federation)) is not None:
                run.directory.write_sites(found)
            run.directory.write_summary(summary)
