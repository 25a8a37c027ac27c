"""Searches: a grid of settings, the same for every method, scored on validation data."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict

from perfed.data.federation import Federation
from perfed.data.held_out import TUNING_FRACTION
from perfed.data.reading import checked, read_json
from perfed.datasets.catalogue import Data
from perfed.engine.metrics import metric_of, shown
from perfed.errors import PerfedError
from perfed.experiment.chosen import chosen_table, judged
from perfed.experiment.compare import check_starts, method_table
from perfed.experiment.config import Experiment, readable, validate
from perfed.experiment.jobs import Execute, in_turn
from perfed.experiment.overrides import grid_points, override, parse_value, resolve
from perfed.experiment.start import start
from perfed.experiment.worker import Key
from perfed.machine import write_atomic
from perfed.method.registry import entry
from perfed.run.directory import RunDirectory
from perfed.run.run import Run

_OWN_FRACTION = TUNING_FRACTION / 2  # the half of it that a method has that uses validation data
_HELD_OUT_NOTE = (
    f"uses validation data, so chosen.toml has data.validation_fraction = {_OWN_FRACTION:g} for every method"
)


class _Point(BaseModel):
    """One of the list that the file ``grid.json`` holds."""

    model_config = ConfigDict(strict=True)

    method: str
    settings: list[str]
    metric: str
    mean: float | None


def read_grid(file: Path) -> list[dict[str, Any]]:
    """The points of ``grid.json`` with what was found there.

    Raises:
        PerfedError: it cannot be read, or a point lacks something.
    """
    results: list[dict[str, Any]] = read_json(file)
    checked(list[_Point], results, file)
    return results


def is_search(path: Path) -> bool:
    """Whether ``path`` is the directory of a search."""
    return (path / "search.toml").is_file()


@dataclass(frozen=True)
class Choice:
    """What a search chose for a method.

    Attributes:
        settings: the assignments.
        metric: that they were chosen by.
        mean: of the metric on validation data, over the seeds.
        notes: what to know of the choice, such as that it lies on the edge of the grid.
    """

    settings: list[str]
    metric: str
    mean: float
    notes: list[str]


@dataclass(frozen=True)
class Search:
    """A grid of settings for several methods; each point's runs are kept in memory, its scores in ``grid.json``.

    Attributes:
        path: where ``search.toml``, ``grid.json`` and ``chosen.toml`` are.
        table: the experiment as given, without method and seed.
        methods, seeds: what every point is tried with.
        points: the assignments of each point.
    """

    path: Path
    table: dict[str, Any]
    methods: list[str]
    seeds: list[int]
    points: list[list[str]]

    @classmethod
    def create(
        cls,
        path: Path,
        table: dict[str, Any],
        methods: list[str],
        seeds: list[int],
        grid: Sequence[str],
        data_dir: Path | None,
        device: torch.device | None,
    ) -> Search:
        """Check the grid, then make the directory; every method must know every key, or the budgets would differ.

        Raises:
            PerfedError: a bad grid or setting, or ``path`` is taken.
        """
        points = grid_points(grid)
        if device is not None:
            table = {**table, "device": str(device)}
        search = cls(path, table, methods, seeds, points)
        for method in methods:
            for point in points:
                try:
                    search.experiment(method, point, seeds[0])
                except PerfedError as error:
                    raise PerfedError(
                        f"--grid with method '{method}' (all methods get the same grid): {error}"
                    ) from None
        search._check_sections()
        search.check(data_dir, device)
        RunDirectory.create(path)
        content = {"methods": methods, "seeds": seeds, "points": points, "experiment": table}
        write_atomic(path / "search.toml", tomli_w.dumps(content))
        return search

    @classmethod
    def read(cls, path: Path) -> Search:
        """The search that :meth:`create` wrote."""
        with readable(path / "search.toml") as file:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            names, seeds = [str(name) for name in content["methods"]], [int(seed) for seed in content["seeds"]]
            points = [[str(assignment) for assignment in point] for point in content["points"]]
            return cls(path, dict(content["experiment"]), names, seeds, points)

    @property
    def held_out(self) -> dict[str, Any]:
        """The experiment, evaluated on validation data."""
        fraction = self.table["data"].get("validation_fraction") or TUNING_FRACTION
        data = {**self.table["data"], "validation_fraction": fraction}
        evaluation = {**self.table.get("evaluation", {}), "split": "validation"}
        return {**self.table, "data": data, "evaluation": evaluation}

    def experiment(self, method: str, settings: Sequence[str], seed: int) -> Experiment:
        """That of one run: ``settings`` on top of :attr:`held_out`."""
        return validate(method_table(override(self.held_out, settings, [method]), method, seed))

    @property
    def size(self) -> int:
        """Number of runs: every point with every method and seed."""
        return len(self.points) * len(self.methods) * len(self.seeds)

    def _check_sections(self) -> None:
        """Settings that all methods share, as the data's, cannot be chosen for each of several."""
        for key in (assignment.partition("=")[0] for assignment in self.points[0]):
            sections = {path[0] for method in self.methods for path in resolve(self.table, key, [method])}
            if len(self.methods) > 1 and not sections <= {"training", "methods", "model"}:
                raise PerfedError(
                    f"--grid {key}: is the same for all methods, so it cannot be chosen for each of several; "
                    "give one method, or a setting of the methods, the training or the model"
                )

    def check(self, data_dir: Path | None, device: torch.device | None) -> None:
        """Build every method's run at the first point without starting it, so that missing data are found first."""
        first = override(self.held_out, self.points[0], self.methods)
        check_starts(first, self.methods, self.seeds[0], data_dir, device)

    def execute(
        self,
        data_dir: Path | None = None,
        device: torch.device | None = None,
        execute: Execute = in_turn,
        begun: Callable[[int], None] = lambda runs: None,
    ) -> dict[str, Choice]:
        """Run the points that have no result yet, and write what was chosen.

        Args:
            data_dir: first folder in which data files are looked for.
            device: in place of the experiment's.
            execute: executes the runs, one after the other or side by side (:mod:`perfed.experiment.jobs`).
            begun: called once with the number of runs that earlier sittings did.

        Returns:
            What was chosen for each method.

        Raises:
            PerfedError: no point of some method could be trained to the end, or another process works on the search.
        """
        with RunDirectory(self.path).alone():
            results = self._results()
            tried = {(result["method"], tuple(result["settings"])) for result in results}
            begun(len(results) * len(self.seeds))
            points = itertools.product(self.methods, map(tuple, self.points))
            left = [(*point, seed) for point in points if point not in tried for seed in self.seeds]
            outcomes: dict[Key, dict[str, Any] | PerfedError] = {}
            with closing(execute(Recipe(self, data_dir, device), left)) as found:
                for (method, point, seed), outcome in found:
                    outcomes[method, point, seed] = outcome
                    of_seeds = {seed: outcomes.get((method, point, seed)) for seed in self.seeds}
                    if None not in of_seeds.values():
                        results.append(judged(method, point, of_seeds))
                        results.sort(key=self._place)
                        write_atomic(self.path / "grid.json", json.dumps(results, indent=2) + "\n")
            return self._choose(results)

    def _place(self, result: dict[str, Any]) -> tuple[int, int]:
        """Where a result is in ``grid.json``, whenever it was had."""
        return self.methods.index(result["method"]), self.points.index(result["settings"])

    def _results(self) -> list[dict[str, Any]]:
        """What earlier sittings found."""
        file = self.path / "grid.json"
        return read_grid(file) if file.exists() else []

    def _choose(self, results: list[dict[str, Any]]) -> dict[str, Choice]:
        """Each method's best point; ``chosen.toml`` has those of the methods that have one, ``grid.json`` its notes."""
        chosen: dict[str, Choice] = {}
        failed = ""
        for method in self.methods:
            mine = [result for result in results if result["method"] == method]
            good = [result for result in mine if result["mean"] is not None]
            if good:
                pick = max if metric_of(good[0]["metric"]).higher_is_better else min
                best = pick(good, key=lambda result: result["mean"])
                best["notes"] = self._edges(best)
                if self._lacks_validation(method, best["settings"]):
                    best["notes"].append(_HELD_OUT_NOTE)
                chosen[method] = Choice(best["settings"], best["metric"], best["mean"], best["notes"])
            else:
                failed = f"{method}: no point of the grid could be trained to the end; the first: "
                failed += f"{' '.join(mine[0]['settings'])}, {mine[0]['failed']}"
        if chosen:
            settings = {method: choice.settings for method, choice in chosen.items()}
            table = chosen_table(self.table, self.methods, settings, len(self.points))
            if any(self._lacks_validation(*one) for one in settings.items()):
                table["data"] = {**table["data"], "validation_fraction": _OWN_FRACTION}
            write_atomic(self.path / "chosen.toml", tomli_w.dumps(table))
            write_atomic(self.path / "grid.json", json.dumps(results, indent=2) + "\n")
        if failed:
            raise PerfedError(failed)
        return chosen

    def _edges(self, best: dict[str, Any]) -> list[str]:
        """Numbers of the point ``best`` that are the least or largest tried, where further ones would be allowed."""
        notes = []
        for column, assignment in enumerate(best["settings"]):
            key, _, text = assignment.partition("=")
            value, *tried = (parse_value(a.partition("=")[2]) for a in (assignment, *(p[column] for p in self.points)))
            if any(type(other) not in (int, float) for other in tried) or min(tried) == max(tried):
                continue
            for end, word, step in ((min(tried), "smallest", -1), (max(tried), "largest", 1)):
                if value == end and self._allows(best, f"{key}={_beyond(value, step)}"):
                    score = shown(best["metric"], best["mean"])
                    advice = "try smaller ones" if step < 0 else "try larger ones"
                    notes.append(f"{key} = {text} is the {word} value of the grid (validation {score}); {advice}")
        return notes

    def _allows(self, best: dict[str, Any], assignment: str) -> bool:
        """Whether the point ``best`` could have this value too."""
        try:
            self.experiment(best["method"], [*best["settings"], assignment], self.seeds[0])
        except PerfedError:
            return False
        return True

    def _lacks_validation(self, method: str, settings: list[str]) -> bool:
        """Whether ``method`` uses validation data that the search has held out for it, and the experiment would not."""
        chosen = override(self.table, settings, [method])["data"]
        return entry(method).method.uses_validation and not chosen.get("validation_fraction")


def _beyond(value: float, step: int) -> float:
    """The next number in the direction of ``step``: of whole ones the next whole one."""
    return value + step if isinstance(value, int) else math.nextafter(value, step * math.inf)


@dataclass
class Recipe:
    """Makes the runs of a search ready by method, point and seed, here or in another process; data that the next run
    has too are not read again.

    Attributes:
        search: whose runs they are.
        data_dir: first folder in which data files are looked for.
        device: in place of the experiment's.
    """

    search: Search
    data_dir: Path | None
    device: torch.device | None
    _data: tuple[tuple[int, Data], Federation] | None = field(default=None, init=False, repr=False)

    def label(self, method: str, point: tuple[str, ...], seed: int) -> str:
        """What people call a run."""
        return f"{method} {' '.join(point)} seed {seed}"

    def check(self) -> None:
        """Raises a :class:`PerfedError` where this process does not know what the runs are made of."""
        for method in self.search.methods:
            self.search.experiment(method, self.search.points[0], self.search.seeds[0])

    def __call__(self, method: str, point: tuple[str, ...], seed: int) -> Run:
        """The run, in memory."""
        experiment = self.search.experiment(method, point, seed)
        which = seed, experiment.data
        if self._data is None or self._data[0] != which:
            self._data = None  # before there are two
            self._data = which, experiment.data.load(seed, self.data_dir)
        return start(experiment, federation=self._data[1], device=self.device)
