"""Several runs as one piece of work: comparisons over methods and seeds, and searches over settings."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch

from perfed.config import validate
from perfed.datasets import load
from perfed.errors import PerfedError
from perfed.experiment import resume, start
from perfed.overrides import override, resolve
from perfed.registry import entry, known_names
from perfed.report import TextTable, all_tables, comparison_rows, load_runs, write_report
from perfed.run import Run
from perfed.store import RunDirectory, write_atomic


def parse_names(text: str) -> list[str]:
    """Names of methods separated by commas, none twice."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise PerfedError(f"--methods: at least one is needed; allowed: {', '.join(known_names())}")
    for name in names:
        try:
            entry(name)
        except PerfedError as error:
            raise PerfedError(f"--methods: {error}") from None
    if len(set(names)) < len(names):
        raise PerfedError(f"--methods {text}: a method is named twice")
    return names


def parse_seeds(text: str) -> list[int]:
    """``"0..2"`` (inclusive), ``"0,3,5"`` or ``"7"``."""
    problem = PerfedError(f"--seeds {text}: must be like 0..2 (inclusive), 0,3,5 or 7")
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            seeds = list(range(first, last + 1))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise problem from None
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise problem
    return seeds


def is_comparison(path: Path) -> bool:
    """Whether ``path`` is the directory of a comparison."""
    return (path / "comparison.toml").is_file()


def _method_table(table: dict[str, Any], method: str, seed: int) -> dict[str, Any]:
    return {**table, "method": method, "seed": seed}


def _check(
    table: dict[str, Any], methods: list[str], seed: int, data_dir: Path | None, device: torch.device | None
) -> None:
    """Build every method's run without starting it, so that bad settings and data are found before any training."""
    experiments = [validate(_method_table(table, method, seed)) for method in methods]
    data = experiments[0]
    federation = load(data.data["name"], data.data_options, seed=seed, data_dir=data_dir)
    for experiment in experiments:
        try:
            start(experiment, federation=federation, device=device)
        except PerfedError as error:
            raise PerfedError(f"{experiment.method}: {error}") from None


@dataclass(frozen=True)
class Comparison:
    """Methods x seeds of one experiment, each run in ``DIR/<method>/seed-<n>/``.

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
        _check(table, methods, seeds[0], data_dir, device)
        RunDirectory.create(path)
        if device is not None:
            table = {**table, "device": str(device)}
        content = {"methods": methods, "seeds": seeds, "experiment": table}
        write_atomic(path / "comparison.toml", tomli_w.dumps(content))
        return cls(path, table, methods, seeds)

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """The comparison that :meth:`create` wrote."""
        try:
            content = tomllib.loads((path / "comparison.toml").read_text())
            names, seeds = [str(name) for name in content["methods"]], [int(seed) for seed in content["seeds"]]
            return cls(path, dict(content["experiment"]), names, seeds)
        except (tomllib.TOMLDecodeError, KeyError, OSError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise PerfedError(f"{path / 'comparison.toml'}: cannot be read: {error}") from None

    def abandoned(self) -> bool:
        """Whether no run could begin; the comparison is then taken back."""
        if any(self.path.rglob("config.toml")):
            return False
        (self.path / "comparison.toml").unlink(missing_ok=True)
        for place in (*(self.path / method for method in self.methods), self.path):
            with suppress(OSError):  # not there, or not empty
                place.rmdir()
        return True

    def directory(self, method: str, seed: int) -> Path:
        """Where a run is."""
        return self.path / method / f"seed-{seed}"

    def runs(self, data_dir: Path | None, device: torch.device | None) -> Iterator[tuple[str, int, Callable[[], Run]]]:
        """Method, seed, and what makes the run ready to execute, of the runs that are not finished."""
        for seed in self.seeds:
            for method in self.methods:
                where = self.directory(method, seed)
                if RunDirectory(where).finished:
                    continue
                if (where / "config.toml").exists():
                    yield method, seed, partial(resume, where, data_dir=data_dir, device=device)
                else:
                    experiment = validate(_method_table(self.table, method, seed))
                    yield method, seed, partial(start, experiment, data_dir=data_dir, out=where, device=device)

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

    def conclude(self) -> tuple[list[TextTable], float | None, Path]:
        """Write ``comparison.json`` and ``report.html`` of the runs that have started.

        Returns:
            The tables, the mean accuracy of the Bayes oracle where the data has one, and the report's path.
        """
        started = self.started()
        runs = load_runs(started)
        write_atomic(self.path / "comparison.json", json.dumps(comparison_rows(runs), indent=2) + "\n")
        report = write_report(runs, self.path / "report.html", title=str(self.table.get("name", "comparison")))
        oracles = [_oracle(place) for place in started]
        known = [value for value in oracles if value is not None]
        return all_tables(runs), float(np.mean(known)) if known else None, report


def _oracle(place: Path) -> float | None:
    file = place / "summary.json"
    value = json.loads(file.read_text()).get("oracle_accuracy") if file.exists() else None
    return None if value is None else float(value)


@dataclass(frozen=True)
class Search:
    """A grid of settings for several methods, the same for each; chosen on validation data.

    Attributes:
        path: where ``chosen.toml`` and ``grid.json`` go.
        table: the experiment, evaluated on validation data.
        original: the experiment as given.
        points: assignments of each grid point.
    """

    path: Path
    table: dict[str, Any]
    original: dict[str, Any]
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
        """Check the grid; every method must know every key, or the budgets would differ.

        Raises:
            PerfedError: a bad grid or setting, or ``path`` is taken.
        """
        axes = [_axis(entry) for entry in grid]
        if not axes:
            raise PerfedError("--grid: at least one key=v1,v2,... is needed")
        keys = [axis[0].partition("=")[0] for axis in axes]
        if len(set(keys)) < len(keys):
            raise PerfedError(f"--grid: a key is given twice; given: {', '.join(keys)}")
        if any(key.startswith("methods.") for key in keys):
            raise PerfedError(f"--grid {', '.join(keys)}: name settings alone; every method gets the same grid")
        data = {"validation_fraction": 0.25, **table["data"]}
        if data["validation_fraction"] == 0:
            data["validation_fraction"] = 0.25
        evaluation = {**table.get("evaluation", {}), "split": "validation"}
        held_out = {**table, "data": data, "evaluation": evaluation}
        points = [list(point) for point in itertools.product(*axes)]
        search = cls(path, held_out, table, methods, seeds, points)
        for method in methods:
            for point in points:
                try:
                    validate(_method_table(override(held_out, point, [method]), method, seeds[0]))
                except PerfedError as error:
                    raise PerfedError(
                        f"--grid with method '{method}' (all methods get the same grid): {error}"
                    ) from None
        for key in keys:
            sections = {path[0] for method in methods for path in resolve(table, key, [method])}
            if len(methods) > 1 and not sections <= {"training", "methods", "model"}:
                raise PerfedError(
                    f"--grid {key}: is the same for all methods, so it cannot be chosen for each of several; "
                    "give one method, or a setting of the methods, the training or the model"
                )
        _check(override(held_out, points[0], methods), methods, seeds[0], data_dir, device)
        RunDirectory.create(path)
        return search

    @property
    def size(self) -> int:
        """Number of runs."""
        return len(self.points) * len(self.methods) * len(self.seeds)

    def execute(
        self,
        data_dir: Path | None,
        device: torch.device | None,
        progress: Callable[[int, int, float | None], None] | None,
    ) -> dict[str, tuple[list[str], float]]:
        """Run the whole grid and write the results.

        Returns:
            Method -> chosen assignments and their mean validation score over seeds.
        """
        results: list[dict[str, Any]] = []
        done = 0
        for method in self.methods:
            for point in self.points:
                scores: list[float] = []
                failed = ""
                for seed in self.seeds:
                    table = override(self.table, point, [method])
                    experiment = validate(_method_table(table, method, seed))
                    try:
                        summary = start(experiment, data_dir=data_dir, device=device).execute()
                        scores.append(_validation_score(summary))
                    except PerfedError as error:  # a grid may hold rates that diverge
                        failed = f"seed {seed}: {error}"
                    done += 1
                    if progress is not None:
                        progress(done, self.size, scores[-1] if scores else None)
                found = {"mean": None, "failed": failed} if failed else {"mean": float(np.mean(scores))}
                results.append({"method": method, "settings": point, "scores": scores, **found})
                write_atomic(self.path / "grid.json", json.dumps(results, indent=2) + "\n")
        chosen: dict[str, tuple[list[str], float]] = {}
        failed = ""
        for method in self.methods:
            mine = [r for r in results if r["method"] == method]
            good = [r for r in mine if r["mean"] is not None]
            if good:
                best = max(good, key=lambda r: r["mean"])
                chosen[method] = (best["settings"], best["mean"])
            else:
                failed = f"{method}: no point of the grid could be trained to the end; the first: "
                failed += f"{' '.join(mine[0]['settings'])}, {mine[0]['failed']}"
        if chosen:
            self._write_chosen({method: settings for method, (settings, _) in chosen.items()})
        if len(chosen) < len(self.methods):
            raise PerfedError(failed)
        return chosen

    def _write_chosen(self, chosen: dict[str, list[str]]) -> None:
        """The experiment with each method's chosen settings in the method's own table."""
        given = self.original
        result = {**given, "methods": dict(given.get("methods", {}))}
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
        write_atomic(self.path / "chosen.toml", tomli_w.dumps(result))


def _changed(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if key not in old or old[key] != value}


def _axis(entry: str) -> list[str]:
    key, sign, values = entry.partition("=")
    parts = [value for value in values.split(",") if value]
    if not sign or not parts:
        raise PerfedError(f"--grid {entry}: must be key=v1,v2,...")
    return [f"{key}={value}" for value in parts]


def _validation_score(summary: dict[str, Any]) -> float:
    """Higher is better: accuracy, or minus the mean squared error."""
    if not summary["metrics"]:
        raise PerfedError("nothing was evaluated")
    if "accuracy" in summary:
        return float(summary["accuracy"]["mean"])
    return -float(summary["metrics"]["mse"]["mean"])
