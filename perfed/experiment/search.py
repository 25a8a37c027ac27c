"""The search for settings: a grid that is the same for every method, scored on validation data."""

from __future__ import annotations

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict

from perfed.data.checksums import find_damage, read_checksums, refuse_damage, set_aside, write_checksums_of
from perfed.data.held_out import TUNING_FRACTION
from perfed.data.reading import checked, read_json
from perfed.engine.metrics import describe_metric, main_metric, metric_of
from perfed.errors import PerfedError
from perfed.experiment.comparison import USUAL, ComparisonSpec, Resources
from perfed.experiment.factory import Key
from perfed.experiment.overrides import find_setting_paths, grid_points, override, parse_value
from perfed.method.registry import entry
from perfed.system import write_atomic

_FRACTION_BESIDE_METHOD = TUNING_FRACTION / 2  # a method that uses validation data gets the other half
_VALIDATION_NOTE = (
    f"uses validation data, so chosen.toml has data.validation_fraction = {_FRACTION_BESIDE_METHOD:g} for every method"
)


class _Point(BaseModel):
    """An entry of the list in ``grid.json``."""

    model_config = ConfigDict(strict=True)

    method: str
    settings: list[str]
    metric: str | None
    mean: float | None


@dataclass(frozen=True)
class Choice:
    """The settings that a search chose for a method.

    Attributes:
        settings: the assignments.
        metric: the metric that decided.
        mean: the mean of this metric on validation data over the seeds.
        notes: remarks on the choice, such as that it lies on the edge of the grid.
    """

    settings: list[str]
    metric: str
    mean: float
    notes: list[str]


@dataclass(frozen=True)
class Search(ComparisonSpec):
    """A comparison on validation data for each point of a grid of settings.

    Its runs are kept in memory; ``grid.json`` has their scores and ``chosen.toml`` the best settings.

    Attributes:
        points: the assignments of each point.
    """

    kind: ClassVar[str] = "search"

    points: list[list[str]]

    @classmethod
    def from_grid(cls, comparison: ComparisonSpec, grid: Sequence[str]) -> Self:
        """Return the search for the best settings of each method of ``comparison``.

        Args:
            comparison: the methods, seeds and experiment.
            grid: the axes, such as ``"lr=1e-3,1e-2"``.

        Raises:
            PerfedError: an axis cannot be read.
        """
        return cls(comparison.table, comparison.methods, comparison.seeds, grid_points(grid))

    def prepare(self, resources: Resources = USUAL) -> Self:
        """Return the search for the chosen device, after checking all its settings and starting on its data.

        Every method must accept every key of the grid; otherwise the methods would have different budgets.

        Raises:
            PerfedError: a bad grid, setting or data.
        """
        search = replace(self, table=resources.with_device(self.table))
        for method in self.methods:
            for point in self.points:
                try:
                    search.compare_at(point, [method]).experiment(method, self.seeds[0])
                except PerfedError as error:
                    raise PerfedError(
                        f"--grid with method '{method}' (all methods get the same grid): {error}"
                    ) from None
        search._check_sections()
        search.check_data(resources)
        return search

    @property
    def held_out(self) -> dict[str, Any]:
        """The experiment, evaluated on validation data."""
        fraction = self.table["data"].get("validation_fraction") or TUNING_FRACTION
        data = {**self.table["data"], "validation_fraction": fraction}
        evaluation = {**self.table.get("evaluation", {}), "split": "validation"}
        return {**self.table, "data": data, "evaluation": evaluation}

    def compare_at(self, settings: Sequence[str], methods: Sequence[str]) -> ComparisonSpec:
        """Return the comparison of ``methods`` with ``settings`` on top of :attr:`held_out`."""
        return ComparisonSpec(override(self.held_out, settings, methods), [*methods], self.seeds)

    @property
    def comparisons(self) -> dict[str, ComparisonSpec]:
        """The comparison at each point, by the point's assignments."""
        return {" ".join(point): self.compare_at(point, self.methods) for point in self.points}

    def _check_sections(self) -> None:
        """Refuse axes that all methods share, such as settings of the data, where several methods choose."""
        for key in (assignment.partition("=")[0] for assignment in self.points[0]):
            sections = {path[0] for method in self.methods for path in find_setting_paths(self.table, key, [method])}
            if len(self.methods) > 1 and not sections <= {"training", "methods", "model"}:
                raise PerfedError(
                    f"--grid {key}: is the same for all methods, so it cannot be chosen for each of several; "
                    "give one method, or a setting of the methods, the training or the model"
                )

    def check_data(self, resources: Resources) -> None:
        """Build every method's run at the first point without starting it, so that missing data are reported early."""
        self.compare_at(self.points[0], self.methods).check_starts(self.seeds[0], resources)

    def choose(self, results: Sequence[dict[str, Any]]) -> tuple[dict[str, Choice], list[str]]:
        """Return the best point of each method, and a line for each method that has none.

        The notes on a choice are also written into its entry of ``results``.
        """
        choices: dict[str, Choice] = {}
        failures: list[str] = []
        for method in self.methods:
            entries = [result for result in results if result["method"] == method]
            scored = [result for result in entries if result["mean"] is not None]
            if not scored:
                failures.append(
                    f"{method}: no point of the grid could be trained to the end; the first: "
                    f"{' '.join(entries[0]['settings'])}, {entries[0]['failed']}"
                )
                continue
            best = best_result(scored)
            best["notes"] = self._describe_edges(best)
            if self._lacks_validation(method, best["settings"]):
                best["notes"].append(_VALIDATION_NOTE)
            choices[method] = Choice(best["settings"], best["metric"], best["mean"], best["notes"])
        return choices, failures

    def chosen_experiment(self, choices: Mapping[str, Choice]) -> dict[str, Any]:
        """Return the experiment with the settings of ``choices``: the content of ``chosen.toml``."""
        settings = {method: choice.settings for method, choice in choices.items()}
        table = chosen_table(self.table, self.methods, settings, len(self.points))
        if any(self._lacks_validation(method, assignments) for method, assignments in settings.items()):
            table["data"] = {**table["data"], "validation_fraction": _FRACTION_BESIDE_METHOD}
        return table

    def _describe_edges(self, best: dict[str, Any]) -> list[str]:
        """Return a note for each value of ``best`` at the edge of the grid, if values beyond that edge are allowed."""
        notes = []
        for column, assignment in enumerate(best["settings"]):
            key, _, text = assignment.partition("=")
            value = parse_value(text)
            grid_values = [parse_value(point[column].partition("=")[2]) for point in self.points]
            if any(type(number) not in (int, float) for number in grid_values) or min(grid_values) == max(grid_values):
                continue
            for end, word, step in ((min(grid_values), "smallest", -1), (max(grid_values), "largest", 1)):
                if value == end and self._is_allowed(best, f"{key}={_next_number(value, step)}"):
                    score = describe_metric(best["metric"], best["mean"])
                    advice = "try smaller ones" if step < 0 else "try larger ones"
                    notes.append(f"{key} = {text} is the {word} value of the grid (validation {score}); {advice}")
        return notes

    def _is_allowed(self, best: dict[str, Any], assignment: str) -> bool:
        """Return whether the settings of ``best`` remain valid with ``assignment``."""
        try:
            self.compare_at([*best["settings"], assignment], [best["method"]]).experiment(best["method"], self.seeds[0])
        except PerfedError:
            return False
        return True

    def _lacks_validation(self, method: str, settings: list[str]) -> bool:
        """Return whether ``method`` uses validation data that only the search, not the experiment, holds out."""
        data = override(self.table, settings, [method])["data"]
        return entry(method).method.uses_validation and not data.get("validation_fraction")


def label_search_run(name: str, method: str, seed: int) -> str:
    """Return what the progress display calls a run of a search."""
    return f"{method} {name} seed {seed}"


def best_result(scored: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the point with the best mean, the first of several."""
    pick = max if metric_of(scored[0]["metric"]).higher_is_better else min
    return pick(scored, key=lambda result: result["mean"])


def _next_number(value: float, step: int) -> float:
    """Return the next number in the direction of ``step``; after an integer, the next integer."""
    return value + step if isinstance(value, int) else math.nextafter(value, step * math.inf)


# Files of a search -----------------------------------------------------------------------------------------


def read_grid(file: Path) -> list[dict[str, Any]]:
    """Return the points in ``grid.json`` with their scores.

    Raises:
        PerfedError: the file cannot be read, has changed since it was written, or a point lacks a key.
    """
    results = _parse_grid(file)
    refuse_damage(file.parent, find_damage(file.parent, read_checksums(file.parent)), "resume the search")
    return results


def _parse_grid(file: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = read_json(file)
    checked(list[_Point], results, file)
    return results


def _write_grid(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    write_atomic(file, json.dumps(results, indent=2) + "\n")
    write_checksums_of(file.parent, [file.name])


def read_results(search: Search, path: Path) -> list[dict[str, Any]]:
    """Return the points that have been scored; an empty list if ``grid.json`` is damaged, which trains all again."""
    file = path / "grid.json"
    if not file.exists() or find_damage(path, read_checksums(path)):
        return []
    results = _parse_grid(file)
    for result in results:
        if result["method"] not in search.methods or result["settings"] not in search.points:
            raise PerfedError(f"{file}: {' '.join(result['settings'])} is no point of the search in {path}")
    return results


def read_chosen(path: Path) -> dict[str, Any]:
    """Return the experiment with the settings that the search in ``path`` chose (``chosen.toml``)."""
    return tomllib.loads((path / "chosen.toml").read_text(encoding="utf-8"))


def record_choices(
    search: Search, path: Path, outcomes: Iterable[tuple[Key, dict[str, Any] | PerfedError]]
) -> dict[str, Choice]:
    """Write each point to ``grid.json`` when its last run ends, and finally the best points to ``chosen.toml``.

    Args:
        search: the search.
        path: the directory of the search.
        outcomes: pairs of the key of a run that ended and its summary or error.

    Returns:
        The choice of each method.

    Raises:
        PerfedError: no point of some method could be trained to the end.
    """
    file, results = path / "grid.json", read_results(search, path)
    if file.exists() and not results:
        set_aside(file)
    points = {" ".join(point): point for point in search.points}
    runs: dict[tuple[str, str], dict[int, dict[str, Any] | PerfedError]] = defaultdict(dict)
    for (name, method, seed), outcome in outcomes:
        runs[name, method][seed] = outcome
        if len(runs[name, method]) == len(search.seeds):
            results.append(score_point(method, points[name], {seed: runs[name, method][seed] for seed in search.seeds}))
            results.sort(key=lambda row: (search.methods.index(row["method"]), search.points.index(row["settings"])))
            _write_grid(file, results)
    choices, failures = search.choose(results)
    if choices:
        write_atomic(path / "chosen.toml", tomli_w.dumps(search.chosen_experiment(choices)))
        _write_grid(file, results)
    if failures:
        raise PerfedError(failures[-1])
    return choices


def chosen_table(
    experiment: Mapping[str, Any], methods: Sequence[str], choices: Mapping[str, list[str]], points: int
) -> dict[str, Any]:
    """Return ``experiment`` with each method's chosen settings in the method's table.

    Each scikit-learn model may try ``points`` values, as many as each method.
    """
    experiment = dict(experiment)
    table = {**experiment, "baseline_tries": points, "methods": dict(experiment.get("methods", {}))}
    if experiment.get("method") not in methods:
        table["method"] = methods[0]
    for method, assignments in choices.items():
        changed = override(experiment, assignments, [method])
        settings = dict(changed.get("methods", {}).get(method, {}))
        training, model = (
            _select_changes(changed.get(part, {}), experiment.get(part, {})) for part in ("training", "model")
        )
        # A chosen value is written even if it equals the experiment's: a method under a policy would otherwise take
        # the choice of its base.
        keys = {assignment.partition("=")[0].removeprefix("training.") for assignment in assignments}
        training |= {key: value for key, value in changed.get("training", {}).items() if key in keys}
        settings = {**training, **settings}
        if model:
            settings["model"] = {**model, **settings.get("model", {})}
        table["methods"][method] = settings
        other_settings = {key: value for key, value in changed.items() if key not in ("training", "model", "methods")}
        table.update(_select_changes(other_settings, experiment))
    return table


def _select_changes(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if key not in old or old[key] != value}


def score_point(method: str, point: list[str], outcomes: Mapping[int, dict[str, Any] | PerfedError]) -> dict[str, Any]:
    """Return a point's scores over seeds; ``mean`` is ``None`` where a run failed, for example because it diverged."""
    scores, metric, failed = [], None, ""
    for seed, outcome in outcomes.items():
        try:
            if isinstance(outcome, PerfedError):
                raise outcome
            metric, value = _read_score(outcome)
            scores.append(value)
        except PerfedError as error:
            failed = f"seed {seed}: {error}"
    mean = {"mean": None, "failed": failed} if failed else {"mean": float(np.mean(scores))}
    return {"method": method, "settings": point, "metric": metric, "scores": scores, **mean}


def _read_score(summary: dict[str, Any]) -> tuple[str, float]:
    """Return the metric that points are compared by (``evaluation.compare_by``, or the task's), and its mean."""
    name = main_metric(summary["metrics"], summary.get("evaluation", {}).get("compare_by", ""))
    if name is None:
        raise PerfedError("nothing was evaluated")
    return name, float(summary["metrics"][name]["mean"])
