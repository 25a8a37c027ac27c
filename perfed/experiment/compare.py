"""Comparisons: several methods and seeds of one experiment as one piece of work."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch

from perfed.data.federation import Federation
from perfed.errors import PerfedError
from perfed.experiment.baselines import Baseline
from perfed.experiment.command import command_of
from perfed.experiment.conclusion import Conclusion, Failure, failed_lines
from perfed.experiment.config import readable, validate
from perfed.experiment.estimators import is_baseline
from perfed.experiment.jobs import Execute, in_turn
from perfed.experiment.names import folder_names
from perfed.experiment.start import is_done, resume, start
from perfed.machine import write_atomic
from perfed.methods.presets import method_and_policy
from perfed.report import Gathered, comparison_rows, gathered, verdict, write_report
from perfed.run.directory import RunDirectory, plain
from perfed.run.run import Run


def is_comparison(path: Path) -> bool:
    """Whether ``path`` is the directory of a comparison."""
    return (path / "comparison.toml").is_file()


def federated(names: list[str]) -> list[str]:
    """The methods among ``names``, without the baselines."""
    return [name for name in names if not is_baseline(name)]


def method_table(table: dict[str, Any], method: str, seed: int) -> dict[str, Any]:
    """The experiment of one method and seed."""
    return {**table, "method": method, "seed": seed}


def check_starts(
    table: dict[str, Any], methods: list[str], seed: int, data_dir: Path | None, device: torch.device | None
) -> None:
    """Build every method's run without starting it, so that bad settings and data are found before any training."""
    experiments = [validate(method_table(table, method, seed)) for method in federated(methods)]
    _check_policies(table, federated(methods))
    shared = validate({**table, "seed": seed})
    federation = shared.data.load(seed, data_dir)
    for name in filter(is_baseline, methods):
        Baseline(name, shared, federation)
    for experiment in experiments:
        try:
            start(experiment, federation=federation, device=device)
        except PerfedError as error:
            raise PerfedError(f"{experiment.method}: {error}") from None


def _check_policies(table: dict[str, Any], methods: list[str]) -> None:
    """With a policy for all, a method without one of its own is no base for the speed-up of the same under a policy."""
    given = table.get("participation", {}).get("policy", "uniform")
    own = [method for method in methods if method_and_policy(method)[1]]
    if given != "uniform" and 0 < len(own) < len(methods):
        raise PerfedError(
            f"participation.policy = '{given}' is for all methods, and {own[0]} brings a policy of its own; "
            "participation.policy=uniform leaves the others without one"
        )


@dataclass(frozen=True)
class Comparison:
    """Methods (and baselines) x seeds of one experiment, each run in ``DIR/<method>/seed-<n>/``.

    A folder is called ``module.NAME`` for a method ``module:NAME``.

    Attributes:
        path: the comparison's directory.
        table: the experiment, without method and seed.
        methods, seeds: what is run, in this order.
    """

    path: Path
    table: dict[str, Any]
    methods: list[str]
    seeds: list[int]

    @classmethod
    def create(
        cls,
        path: Path,
        table: dict[str, Any],
        methods: list[str],
        seeds: list[int],
        data_dir: Path | None,
        device: torch.device | None,
    ) -> Comparison:
        """Check that every method can start on the data, then make the directory.

        Raises:
            PerfedError: bad settings of any method, bad data, or ``path`` already holds a run or comparison.
        """
        check_starts(table, methods, seeds[0], data_dir, device)
        RunDirectory.create(path)
        if device is not None:
            table = {**table, "device": str(device)}
        made = cls(path, table, methods, seeds)
        made.write()
        return made

    def write(self) -> None:
        """Write ``comparison.toml``, which says what is run."""
        content = {"methods": self.methods, "seeds": self.seeds, "experiment": self.table}
        write_atomic(self.path / "comparison.toml", tomli_w.dumps(content))

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """The comparison that :meth:`write` wrote."""
        with readable(path / "comparison.toml") as file:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            names, seeds = [str(name) for name in content["methods"]], [int(seed) for seed in content["seeds"]]
            return cls(path, dict(content["experiment"]), names, seeds)

    @property
    def command(self) -> str:
        """That makes it again; empty of an experiment that is not shipped."""
        return command_of(self.table, self.methods, self.seeds)

    @property
    def origin(self) -> str:
        """The command, or where the settings are."""
        return self.command or f"with the settings in {self.path / 'comparison.toml'}"

    @property
    def begun(self) -> bool:
        """Whether a run has."""
        return any(self.path.rglob("config.toml"))

    def abandoned(self) -> bool:
        """Whether no run could begin; the comparison is then taken back."""
        if self.begun:
            return False
        (self.path / "comparison.toml").unlink(missing_ok=True)
        for place in (*self._folders.values(), self.path):
            with suppress(OSError):  # not there, or not empty
                place.rmdir()
        return True

    def directory(self, method: str, seed: int) -> Path:
        """Where a run is."""
        return self._folders[method] / f"seed-{seed}"

    @property
    def _folders(self) -> dict[str, Path]:
        """The folder of each method."""
        named = folder_names(self.methods)
        there = {method: self.path / method for method in named}  # comparisons have had colons
        return {method: there[method] if there[method].is_dir() else self.path / named[method] for method in named}

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Method and seed of all runs, in the order in which they begin."""
        return [(method, seed) for seed in self.seeds for method in self.methods]

    def left(self) -> list[tuple[str, int]]:
        """Those of the runs that are not finished."""
        return [key for key in self.keys if not is_done(self.directory(*key))]

    def outcomes(
        self, data_dir: Path | None, device: torch.device | None, execute: Execute = in_turn
    ) -> Generator[tuple[str, int, dict[str, Any] | PerfedError], None, None]:
        """Do the runs that are not finished: method, seed, and its summary, or why it failed; the others go on.

        Args:
            data_dir: first folder in which data files are looked for.
            device: in place of the experiment's.
            execute: executes the runs, one after the other or side by side (:mod:`perfed.experiment.jobs`).

        Raises:
            PerfedError: no run could begin, of which nothing is left; says why the first could not.
        """
        failed = []
        try:
            with closing(execute(Recipe(self, data_dir, device), self.left())) as found:
                for (method, seed), outcome in found:
                    if isinstance(outcome, PerfedError):
                        failed.append(outcome := PerfedError(f"{method}, seed {seed}: {outcome}"))
                    yield method, seed, outcome
        except PerfedError:
            self.abandoned()
            raise
        if self.abandoned():
            raise failed[0]

    def started(self) -> list[Path]:
        """Directories of the runs that have started.

        Raises:
            PerfedError: there are none.
        """
        places = [self.directory(m, s) for m in self.methods for s in self.seeds]
        started = [place for place in places if (place / "config.toml").exists()]
        if not started:
            raise PerfedError(f"{self.path}: no run has started yet")
        return started

    def conclude(self, given: Gathered | None = None, failures: Sequence[Failure] | None = None) -> Conclusion:
        """Write ``comparison.json`` and ``report.html`` of the runs that have started, or of those given.

        ``failures``: the runs that failed; if not given, those that ``comparison.json`` knows and that are not done.
        """
        given = given or gathered(self.started())
        failures = self.failures() if failures is None else failures
        lines = failed_lines(failures, len(self.seeds))
        runs, found = given.runs, verdict(given.runs)
        judged = None if found is None else found.warned(lines)
        content = {"runs": comparison_rows(runs), "verdict": None if judged is None else judged.to_dict()}
        content |= {"failed": [asdict(failure) for failure in failures]} if failures else {}
        write_atomic(self.path / "comparison.json", json.dumps(plain(content), indent=2) + "\n")
        report = write_report(
            runs,
            self.path / "report.html",
            title=str(self.table.get("name", "comparison")),
            command=self.command,
            left_out=[*lines, *given.left_out],
            found=found,
        )
        return Conclusion(runs, judged, report, tuple(lines))

    def failures(self) -> list[Failure]:
        """The runs that failed when the comparison was last worked on, and have not finished since."""
        file = self.path / "comparison.json"
        if not file.is_file():
            return []
        with readable(file):
            known = [Failure(**entry) for entry in json.loads(file.read_text(encoding="utf-8")).get("failed", [])]
            return [of for of in known if not is_done(self.directory(of.method, of.seed))]


@dataclass
class Recipe:
    """Makes the runs of a comparison ready by method and seed, here or in another process; a seed's data are read once.

    Attributes:
        comparison: whose runs they are.
        data_dir: first folder in which data files are looked for.
        device: in place of the experiment's.
    """

    comparison: Comparison
    data_dir: Path | None
    device: torch.device | None
    _data: tuple[int, Federation] | None = field(default=None, init=False, repr=False)

    def label(self, method: str, seed: int) -> str:
        """What people call a run."""
        return f"{method} seed {seed}"

    def check(self) -> None:
        """Raises a :class:`PerfedError` where this process does not know what the runs are made of."""
        for method in federated(self.comparison.methods):
            validate(method_table(self.comparison.table, method, 0))

    def __call__(self, method: str, seed: int) -> Run | Baseline:
        """The run, where it was if it had begun."""
        where, table = self.comparison.directory(method, seed), self.comparison.table
        if is_baseline(method):
            return Baseline(method, validate({**table, "seed": seed}), self._federation(seed), where)
        if (where / "config.toml").exists():
            return resume(where, data_dir=self.data_dir, device=self.device)
        experiment = validate(method_table(table, method, seed))
        return start(experiment, federation=self._federation(seed), out=where, device=self.device)

    def _federation(self, seed: int) -> Federation:
        if self._data is None or self._data[0] != seed:
            self._data = None  # before there are two
            self._data = seed, validate({**self.comparison.table, "seed": seed}).data.load(seed, self.data_dir)
        return self._data[1]
