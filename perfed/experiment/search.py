"""Searches: a grid of settings, the same for every method, scored on validation data."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict

from perfed.data.checksums import find_damage, read_checksums, refuse_damage, set_aside, write_checksums_of
from perfed.data.held_out import TUNING_FRACTION
from perfed.data.reading import checked, read_json
from perfed.engine.metrics import main_metric, metric_of, shown
from perfed.errors import PerfedError
from perfed.experiment.comparison import USUAL, ComparisonSpec, Resources
from perfed.experiment.config import readable
from perfed.experiment.factory import Key, RunFactory
from perfed.experiment.jobs import Execute, in_turn
from perfed.experiment.overrides import grid_points, override, parse_value, resolve
from perfed.method.registry import entry
from perfed.run.directory import MARKER, RunDirectory, check_marker, marker_of, write_marker
from perfed.system import write_atomic

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
    """Return the points of ``grid.json`` with what was found there.

    Raises:
        PerfedError: it cannot be read, has changed since it was written, or a point lacks something.
    """
    results: list[dict[str, Any]] = read_json(file)
    checked(list[_Point], results, file)
    refuse_damage(file.parent, find_damage(file.parent, read_checksums(file.parent)), "resume the search")
    return results


def _write_grid(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    write_atomic(file, json.dumps(results, indent=2) + "\n")
    write_checksums_of(file.parent, [file.name])


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
class Search(ComparisonSpec):
    """A grid of settings, a comparison for each point of it on validation data, and the choice of the best.

    Runs are kept in memory, scores in ``grid.json``.

    Attributes:
        points: the assignments of each point.
        path: where the marker, ``grid.json`` and ``chosen.toml`` are.
    """

    points: list[list[str]]
    path: Path

    @classmethod
    def create(
        cls,
        path: Path,
        planned: ComparisonSpec,
        grid: Sequence[str],
        resources: Resources = USUAL,
    ) -> Search:
        """Check the grid, then make the directory; every method must know every key, or the budgets would differ.

        Raises:
            PerfedError: a bad grid or setting, or ``path`` is taken.
        """
        points, methods, seeds = grid_points(grid), planned.methods, planned.seeds
        table = resources.with_device(planned.table)
        search = cls(table, methods, seeds, points, path)
        for method in methods:
            for point in points:
                try:
                    search.at(point, [method]).experiment(method, seeds[0])
                except PerfedError as error:
                    raise PerfedError(
                        f"--grid with method '{method}' (all methods get the same grid): {error}"
                    ) from None
        search._check_sections()
        search.check_data(resources)
        RunDirectory.create(path)
        write_marker(path, "search", {**search.content, "points": points})
        return search

    @classmethod
    def read(cls, path: Path) -> Search:
        """Return the search that :meth:`create` wrote."""
        content = marker_of(path)[1]
        check_marker(path)
        with readable(path / MARKER):
            points = [[str(assignment) for assignment in point] for point in content["points"]]
            return cls.of(content, points=points, path=path)

    @property
    def held_out(self) -> dict[str, Any]:
        """The experiment, evaluated on validation data."""
        fraction = self.table["data"].get("validation_fraction") or TUNING_FRACTION
        data = {**self.table["data"], "validation_fraction": fraction}
        evaluation = {**self.table.get("evaluation", {}), "split": "validation"}
        return {**self.table, "data": data, "evaluation": evaluation}

    @property
    def chosen(self) -> dict[str, Any]:
        """The experiment with each method's choice, when there is one: ``chosen.toml``."""
        return tomllib.loads((self.path / "chosen.toml").read_text(encoding="utf-8"))

    def at(self, settings: Sequence[str], methods: Sequence[str]) -> ComparisonSpec:
        """Return the comparison of ``methods`` with ``settings`` on top of :attr:`held_out`."""
        return ComparisonSpec(override(self.held_out, settings, methods), [*methods], self.seeds)

    @property
    def comparisons(self) -> dict[str, ComparisonSpec]:
        """That of each point."""
        return {" ".join(point): self.at(point, self.methods) for point in self.points}

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

    def check_data(self, resources: Resources) -> None:
        """Build every method's run at the first point without starting it, so that missing data are found first."""
        self.at(self.points[0], self.methods).check_starts(self.seeds[0], resources)

    def execute(
        self,
        resources: Resources = USUAL,
        execute: Execute = in_turn,
        begun: Callable[[int], None] = lambda runs: None,
    ) -> dict[str, Choice]:
        """Run the points that have no result yet, and write what was chosen.

        Args:
            resources: that the runs are made with.
            execute: executes the runs, one after the other or side by side (:mod:`perfed.experiment.jobs`).
            begun: called once with the number of runs that earlier sittings did.

        Returns:
            What was chosen for each method.

        Raises:
            PerfedError: no point of some method could be trained to the end, or another process works on the search.
        """
        with RunDirectory(self.path).alone():
            results = self._results()
            tried = {(result["method"], " ".join(result["settings"])) for result in results}
            begun(len(results) * len(self.seeds))
            points = {" ".join(point): point for point in self.points}
            left = [(name, method, seed) for method in self.methods for name in points for seed in self.seeds]
            factory = _Tries(self.comparisons, resources)
            outcomes: dict[Key, dict[str, Any] | PerfedError] = {}
            with closing(execute(factory, [key for key in left if (key[1], key[0]) not in tried])) as found:
                for key, outcome in found:
                    outcomes[key] = outcome
                    name, method, _ = key
                    of_seeds = {seed: outcomes.get((name, method, seed)) for seed in self.seeds}
                    if None not in of_seeds.values():
                        results.append(judged(method, points[name], of_seeds))
                        results.sort(key=self._place)
                        _write_grid(self.path / "grid.json", results)
            return self._choose(results)

    def _place(self, result: dict[str, Any]) -> tuple[int, int]:
        """Where a result is in ``grid.json``, whenever it was had."""
        return self.methods.index(result["method"]), self.points.index(result["settings"])

    def _results(self) -> list[dict[str, Any]]:
        """Return the results of earlier sessions; if the file is damaged, none, and its points are trained again."""
        file = self.path / "grid.json"
        if file.exists() and find_damage(self.path, read_checksums(self.path)):
            set_aside(file)
        results = read_grid(file) if file.exists() else []
        for result in results:
            if result["method"] not in self.methods or result["settings"] not in self.points:
                raise PerfedError(f"{file}: {' '.join(result['settings'])} is no point of the search in {self.path}")
        return results

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
            _write_grid(self.path / "grid.json", results)
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
            self.at([*best["settings"], assignment], [best["method"]]).experiment(best["method"], self.seeds[0])
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


class _Tries(RunFactory):
    """The runs of a search."""

    def label(self, name: str, method: str, seed: int) -> str:
        return f"{method} {name} seed {seed}"

    def check(self) -> None:
        next(iter(self.comparisons.values())).check()  # another process need not know more than that of the first


def chosen_table(
    given: Mapping[str, Any], methods: Sequence[str], chosen: Mapping[str, list[str]], points: int
) -> dict[str, Any]:
    """Return the experiment ``given`` with each method's chosen settings in its own table, and as many tries for
    models of scikit-learn as each method had: ``points``.
    """
    given = dict(given)
    result = {**given, "baseline_tries": points, "methods": dict(given.get("methods", {}))}
    if given.get("method") not in methods:
        result["method"] = methods[0]
    for method, assignments in chosen.items():
        picked = override(given, assignments, [method])
        own = dict(picked.get("methods", {}).get(method, {}))
        training, model = (_changed(picked.get(part, {}), given.get(part, {})) for part in ("training", "model"))
        # Chosen values that equal the experiment's too: a method under a policy would else take its base's choice.
        named = {assignment.partition("=")[0].removeprefix("training.") for assignment in assignments}
        training |= {key: value for key, value in picked.get("training", {}).items() if key in named}
        own = {**training, **own}
        if model:
            own["model"] = {**model, **own.get("model", {})}
        result["methods"][method] = own
        rest = {key: value for key, value in picked.items() if key not in ("training", "model", "methods")}
        result.update(_changed(rest, given))
    return result


def _changed(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if key not in old or old[key] != value}


def judged(method: str, point: list[str], outcomes: dict[int, Any]) -> dict[str, Any]:
    """Return one point's scores over seeds; ``mean`` is ``None`` where a run failed, as with rates that diverge."""
    scores, metric, failed = [], None, ""
    for seed, outcome in outcomes.items():
        try:
            if isinstance(outcome, PerfedError):
                raise outcome
            metric, value = _score(outcome)
            scores.append(value)
        except PerfedError as error:
            failed = f"seed {seed}: {error}"
    found = {"mean": None, "failed": failed} if failed else {"mean": float(np.mean(scores))}
    return {"method": method, "settings": point, "metric": metric, "scores": scores, **found}


def _score(summary: dict[str, Any]) -> tuple[str, float]:
    """Name and mean of the metric that points are compared by: ``evaluation.compare_by``, else the task's own."""
    name = main_metric(summary["metrics"], summary.get("evaluation", {}).get("compare_by", ""))
    if name is None:
        raise PerfedError("nothing was evaluated")
    return name, float(summary["metrics"][name]["mean"])
