"""What every section of the page starts from: the runs, and what is compared with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import Metric, metric_of
from perfed.report.against import best_reference
from perfed.report.page.style import Look, looks
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults, list_methods, main_metric
from perfed.report.verdict import Verdict, verdict


@dataclass(frozen=True)
class Study:
    """Runs of one or several methods and seeds on one data set.

    Attributes:
        runs: the best method's first, so that all that is made of them has the methods in the order of their ranks.
        metric: that runs are compared by.
        reference: what the others are compared with, as in the verdict; empty where nothing is compared.
        found: the verdict, if it is known already.
    """

    runs: tuple[RunResults, ...]
    metric: str | None
    reference: str
    found: Verdict | None = None

    @classmethod
    def of(cls, runs: Sequence[RunResults], found: Verdict | None = None) -> Study:
        """All that the page is about; ``found``: the verdict, if it is known already."""
        metric = main_metric(runs)
        if metric is None:
            return cls(tuple(runs), metric, "", found)
        known, table = metric_of(metric), ClientTable.from_runs(runs, metric)
        reference = best_reference(table, known) if len(table.of_method) > 1 else ""
        order = sorted(table.of_method, key=lambda method: -known.direction * table.mean(method))
        place = {method: number for number, method in enumerate(order)}
        ranked = sorted(runs, key=lambda run: place.get(run.method, len(place)))
        found = found or verdict(runs)  # which may depend on what was given first
        return cls(tuple(ranked), metric, reference, found)

    @cached_property
    def methods(self) -> list[str]:
        """The best first; those without the metric come last."""
        return list_methods(self.runs)

    @cached_property
    def looks(self) -> dict[str, Look]:
        """A method's colour and dash, the same in every figure; grey is the reference."""
        return looks(sorted(self.methods, key=lambda method: method != self.reference))

    @cached_property
    def table(self) -> ClientTable:
        """The main metric of each client."""
        return ClientTable.from_runs(self.runs, self.metric)

    @property
    def known(self) -> Metric:
        """The main metric; only where there is one."""
        return metric_of(str(self.metric))

    @property
    def others(self) -> list[str]:
        """The methods that are compared with the reference."""
        return [method for method in self.table.of_method if self.reference and method != self.reference]

    def members(self, method: str) -> list[RunResults]:
        """The runs of a method, by seed."""
        return [run for run in self.runs if run.method == method]


def thinned(length: int, most: int) -> NDArray[np.int64]:
    """At most so many places of ``length``, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, max(0, length - 1), min(length, most)).round().astype(np.int64))


def file_name(method: str) -> str:
    """A method's name for a file."""
    return method.replace(":", ".")
