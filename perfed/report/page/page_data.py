"""The data from which all sections of the page are built: the runs, the metric, the reference and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perfed.engine.metrics import Metric, metric_of
from perfed.report.against import best_reference
from perfed.report.page.style import Look, assign_looks
from perfed.report.paired import ClientTable
from perfed.report.run_results import RunResults, list_methods, main_metric
from perfed.report.verdict import Verdict
from perfed.report.verdict import verdict as compute_verdict


@dataclass(frozen=True)
class ReportData:
    """The runs of one or several methods and seeds on one data set, with the choices that all sections share.

    Attributes:
        runs: the runs, ordered by the rank of their method, so that tables and figures have the same order.
        metric: the metric by which the methods are compared; None if nothing was measured.
        reference: the method with which the others are compared, as in the verdict; empty if there is a single method.
        verdict: the verdict; None if fewer than two methods can be compared.
    """

    runs: tuple[RunResults, ...]
    metric: str | None
    reference: str
    verdict: Verdict | None = None

    @classmethod
    def from_runs(cls, runs: Sequence[RunResults], verdict: Verdict | None = None) -> ReportData:
        """Return the data of a page on ``runs``; the verdict is computed unless it is passed."""
        metric = main_metric(runs)
        if metric is None:
            return cls(tuple(runs), metric, "", verdict)
        metric_spec, table = metric_of(metric), ClientTable.from_runs(runs, metric)
        reference = best_reference(table, metric_spec) if len(table.of_method) > 1 else ""
        order = sorted(table.of_method, key=lambda method: -metric_spec.direction * table.mean(method))
        ranks = {method: rank for rank, method in enumerate(order)}
        ranked = sorted(runs, key=lambda run: ranks.get(run.method, len(ranks)))
        # The verdict uses the runs in their original order, since its reference may be the first method.
        return cls(tuple(ranked), metric, reference, verdict or compute_verdict(runs))

    @cached_property
    def methods(self) -> list[str]:
        """The names of the methods from the best to the worst; methods without the metric come last."""
        return list_methods(self.runs)

    @cached_property
    def looks(self) -> dict[str, Look]:
        """The colour and dash of each method in every figure; the reference is grey."""
        return assign_looks(sorted(self.methods, key=lambda method: method != self.reference))

    @cached_property
    def table(self) -> ClientTable:
        """The main metric of each client with each method and seed."""
        return ClientTable.from_runs(self.runs, self.metric)

    @property
    def metric_spec(self) -> Metric:
        """The main metric; only valid if ``metric`` is not None."""
        return metric_of(str(self.metric))

    @property
    def others(self) -> list[str]:
        """The methods that are compared with the reference."""
        return [method for method in self.table.of_method if self.reference and method != self.reference]

    def members(self, method: str) -> list[RunResults]:
        """Return the runs of a method."""
        return [run for run in self.runs if run.method == method]


def spread_indices(length: int, most: int) -> NDArray[np.int64]:
    """Return at most ``most`` evenly spaced indices below ``length``, which include the first and the last."""
    return np.unique(np.linspace(0, max(0, length - 1), min(length, most)).round().astype(np.int64))


def method_file_name(method: str) -> str:
    """Return the name of a method in a form that is allowed in file names."""
    return method.replace(":", ".")
