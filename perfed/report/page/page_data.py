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
from perfed.report.runs import Run, main_metric, methods_of
from perfed.report.verdict import Verdict, verdict


@dataclass(frozen=True)
class Study:
    """Runs of one or several methods and seeds on one data set."""

    runs: tuple[Run, ...]
    metric: str | None
    found: Verdict | None = None

    @classmethod
    def of(cls, runs: Sequence[Run], found: Verdict | None = None) -> Study:
        """All that the page is about; ``found``: the verdict, if it is known already."""
        return cls(tuple(runs), main_metric(runs), found)

    @cached_property
    def methods(self) -> list[str]:
        """In the order of the runs."""
        return methods_of(self.runs)

    @cached_property
    def looks(self) -> dict[str, Look]:
        """A method's colour and dash, the same in every figure."""
        return looks(self.methods)

    @cached_property
    def table(self) -> ClientTable:
        """The main metric of each client."""
        return ClientTable.of(self.runs, self.metric)

    @property
    def known(self) -> Metric:
        """The main metric; only where there is one."""
        return metric_of(str(self.metric))

    @cached_property
    def reference(self) -> str:
        """What the others are compared with, as in the verdict; empty where nothing is compared."""
        return best_reference(self.table, self.known) if self.metric and len(self.table.of_method) > 1 else ""

    @cached_property
    def verdict(self) -> Verdict | None:
        """That on the runs; None where there is nothing to compare."""
        return self.found or verdict(self.runs)

    @property
    def others(self) -> list[str]:
        """The methods that are compared with the reference."""
        return [method for method in self.table.of_method if self.reference and method != self.reference]

    def members(self, method: str) -> list[Run]:
        """The runs of a method, by seed."""
        return [run for run in self.runs if run.method == method]


def thinned(length: int, most: int) -> NDArray[np.int64]:
    """At most so many places of ``length``, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, max(0, length - 1), min(length, most)).round().astype(np.int64))


def file_name(method: str) -> str:
    """A method's name for a file."""
    return method.replace(":", ".")
