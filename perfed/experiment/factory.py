"""The one maker of runs: by comparison, method and seed, federated or of scikit-learn, here or in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from perfed.data.federation import Federation
from perfed.datasets.catalogue import Data
from perfed.experiment.comparison import Comparison, ComparisonSpec
from perfed.experiment.config import Experiment
from perfed.experiment.estimators import is_baseline
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import resume, start
from perfed.run.run import Run

Key = tuple[str, str, int]
"""Name of a comparison, method and seed."""


@dataclass
class RunFactory:
    """Makes the runs of comparisons ready; data that the next run has too are not read again.

    Attributes:
        comparisons: by name, whose runs they are: in directories, or in memory where they have none.
        data_dir: first folder in which data files are looked for.
        device: in place of the experiments'.
    """

    comparisons: Mapping[str, ComparisonSpec]
    data_dir: Path | None = None
    device: torch.device | None = None
    _data: tuple[tuple[int, Data], Federation] | None = field(default=None, init=False, repr=False)

    def label(self, name: str, method: str, seed: int) -> str:
        """Return what people call a run."""
        return f"{name}: {method} seed {seed}" if name else f"{method} seed {seed}"

    def check(self) -> None:
        """Refuse what this process does not know of what the runs are made of.

        Raises:
            PerfedError: says what.
        """
        for comparison in self.comparisons.values():
            comparison.check()

    def __call__(self, name: str, method: str, seed: int) -> Run | SklearnRun:
        """Return the run, not executed, where it was if it had begun."""
        of = self.comparisons[name]
        where = of.directory(method, seed) if isinstance(of, Comparison) else None
        if is_baseline(method):
            experiment = of.experiment(method, seed)
            return SklearnRun(method, experiment, self._federation(experiment), where)
        if where is not None and (where / "config.toml").exists():
            return resume(where, data_dir=self.data_dir, device=self.device)
        experiment = of.experiment(method, seed)
        return start(experiment, federation=self._federation(experiment), out=where, device=self.device)

    def _federation(self, experiment: Experiment) -> Federation:
        which = experiment.seed, experiment.data
        if self._data is None or self._data[0] != which:
            self._data = None  # before there are two
            self._data = which, experiment.data.load(experiment.seed, self.data_dir)
        return self._data[1]
