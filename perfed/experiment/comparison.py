"""Comparisons: methods x seeds of one experiment, what they are to be, where they are, and what they say."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from perfed.errors import PerfedError
from perfed.experiment.blend import blended, candidates_of, check_blend, with_own_models
from perfed.experiment.config import Experiment, experiment_names, find_experiment, readable, validate
from perfed.experiment.estimators import TRIES, is_baseline
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import is_done, start
from perfed.methods.presets import method_and_policy
from perfed.methods.titles import display_name
from perfed.plugins import BLEND, bare_name
from perfed.report import GatheredRuns, Verdict, comparison_rows, gather_runs, verdict, write_report
from perfed.report.curves import oracle
from perfed.report.run_results import RunResults
from perfed.run.directory import MARKER, RunDirectory, check_marker, marker_of, plain, write_marker
from perfed.run.settings import Blend
from perfed.settings import describe_value, flatten_keys
from perfed.system import write_atomic


def federated(names: Sequence[str]) -> list[str]:
    """Return the methods among ``names``, without the baselines and without the blend."""
    return [name for name in names if not is_baseline(name) and name != BLEND]


@dataclass(frozen=True)
class Resources:
    """What whoever works on runs may choose anew each time.

    Attributes:
        data_dir: first folder in which data files are looked for.
        device: in place of the experiments'.
        trust: whether modules that run directories name may be imported.
    """

    data_dir: Path | None = None
    device: torch.device | None = None
    trust: bool = True

    def with_device(self, table: dict[str, Any]) -> dict[str, Any]:
        """Return an experiment's table with the device that was chosen."""
        return table if self.device is None else {**table, "device": str(self.device)}


USUAL = Resources()
"""Data files where they usually are, and the experiments' own devices."""


@dataclass(frozen=True)
class ComparisonSpec:
    """Methods (and baselines) x seeds of one experiment.

    Attributes:
        table: the experiment, without method and seed.
        methods, seeds: what is run, in this order.
    """

    table: dict[str, Any]
    methods: list[str]
    seeds: list[int]

    @classmethod
    def of(cls, content: Mapping[str, Any], **more: Any) -> Self:
        """Return what :attr:`content` was made of; ``more``: a subclass's own."""
        methods, seeds = [str(name) for name in content["methods"]], [int(seed) for seed in content["seeds"]]
        return cls(dict(content["experiment"]), methods, seeds, **more)

    @property
    def content(self) -> dict[str, Any]:
        """What a marker says of it."""
        return {"methods": self.methods, "seeds": self.seeds, "experiment": self.table}

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Method and seed of all runs, in the order in which they begin."""
        return [(method, seed) for seed in self.seeds for method in self.methods]

    def experiment(self, method: str, seed: int) -> Experiment:
        """Return the experiment of one run; a baseline and a blend are of no method."""
        return validate({**self.table, "seed": seed, **({"method": method} if federated([method]) else {})})

    def whole(self, resources: Resources = USUAL, had: Sequence[str] = ()) -> Self:
        """Return the comparison with the own models that a blend always has among its candidates, if it has a blend.

        Those are tuned inside the training samples, unless the experiment says otherwise.

        Args:
            resources: that tell the data, whose task says which models these are.
            had: methods that are there already, whose settings stay as they are.
        """
        if BLEND not in (*self.methods, *had):
            return self
        experiment = validate({**self.table, "seed": self.seeds[0] if self.seeds else 0})
        task = experiment.data.load(experiment.seed, resources.data_dir).task
        both = [*had, *(name for name in self.methods if name not in had)]
        names = [name for name in with_own_models(both, task) if name in self.methods or name not in had]
        tuned = {} if had else {"baseline_tries": TRIES}
        return replace(self, methods=names, table={**tuned, **self.table})

    def check(self) -> None:
        """Refuse settings that can be seen to be wrong without the data."""
        for method in federated(self.methods):
            self.experiment(method, 0)
        validate(self.table)

    def check_starts(self, seed: int, resources: Resources = USUAL) -> None:
        """Build every method's run without starting it, so that bad settings and data are found before any training."""
        experiments = {method: self.experiment(method, seed) for method in federated(self.methods)}
        self._check_policies()
        shared = validate({**self.table, "seed": seed})
        federation = shared.data.load(seed, resources.data_dir)
        for name in filter(is_baseline, self.methods):
            SklearnRun(name, shared, federation)
        if BLEND in self.methods:
            check_blend(self.methods, shared, federation)
        for method, experiment in experiments.items():
            try:
                start(experiment, federation=federation, device=resources.device)
            except PerfedError as error:
                raise PerfedError(f"{method}: {error}") from None

    def _check_policies(self) -> None:
        """With a policy for all, a method without one of its own is no base for the speed-up of the same under a
        policy.
        """
        given = self.table.get("participation", {}).get("policy", "uniform")
        own = [method for method in federated(self.methods) if method_and_policy(method)[1]]
        if given != "uniform" and 0 < len(own) < len(federated(self.methods)):
            raise PerfedError(
                f"participation.policy = '{given}' is for all methods, and {own[0]} brings a policy of its own; "
                "participation.policy=uniform leaves the others without one"
            )


@dataclass(frozen=True)
class Failure:
    """A run that failed, and the first line of why."""

    method: str
    seed: int
    reason: str


@dataclass(frozen=True)
class Conclusion:
    """What the finished runs of a comparison say.

    Attributes:
        runs: that have started.
        verdict: of two methods or more.
        report: its path.
        failed: a line per method of which runs failed; the verdict's warnings have them too.
    """

    runs: list[RunResults]
    verdict: Verdict | None
    report: Path
    failed: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """The verdict's; without one those on runs that failed."""
        return list(self.failed) if self.verdict is None else self.verdict.sentences

    @property
    def oracle(self) -> float | None:
        """Mean accuracy of the Bayes oracle, where the data have one."""
        return oracle(self.runs)


@dataclass(frozen=True)
class Comparison(ComparisonSpec):
    """A comparison in a directory, each run in ``<method>/seed-<n>/``.

    A folder is called ``module.NAME`` for a method ``module:NAME``.
    """

    path: Path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the comparison that :meth:`write` wrote.

        Raises:
            PerfedError: there is none, or its marker is damaged.
        """
        content = marker_of(path)[1]
        with readable(path / MARKER):
            return cls.of(content, path=path)

    def check_files(self) -> None:
        """Raise an error if the marker has changed since it was written, or contradicts the runs in the directory.

        Raises:
            PerfedError: it has or does; the message names the setting that differs.
        """
        check_marker(self.path)
        for method, seed in self.keys:
            file = self.directory(method, seed) / "config.toml"
            if not file.is_file():
                continue
            with readable(file):
                before = flatten_keys(tomllib.loads(file.read_text(encoding="utf-8")))
            now = flatten_keys(tomllib.loads(self.experiment(method, seed).to_toml()))
            for key in now.keys() & before.keys():
                of_all = key[0] in ("data", "model", "training") and key[1:] not in (("files",), ("test_files",))
                if of_all and now[key] != before[key]:
                    raise PerfedError(
                        f"{self.path / MARKER}: {'.'.join(key)} is {describe_value(now[key])}, and "
                        f"{describe_value(before[key])} in {file}; one of them is of another comparison"
                    )

    def write(self) -> None:
        """Write the marker, which says what is run."""
        write_marker(self.path, "comparison", self.content)

    @property
    def command(self) -> str:
        """That makes it again; empty of an experiment that is not shipped."""
        return command_of(self.table, self.methods, self.seeds)

    @property
    def origin(self) -> str:
        """The command, or where the settings are."""
        return self.command or f"with the settings in {self.path / MARKER}"

    @property
    def begun(self) -> bool:
        """Whether a run has."""
        return any(self.path.rglob("config.toml"))

    def directory(self, method: str, seed: int) -> Path:
        """Return where a run is."""
        return self.folders[method] / f"seed-{seed}"

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each method."""
        named = folder_names(self.methods)
        there = {method: self.path / method for method in named}  # comparisons have had colons
        return {method: there[method] if there[method].is_dir() else self.path / named[method] for method in named}

    @cached_property
    def folds(self) -> dict[str, Comparison]:
        """What the blend's weights are learnt from, by name: the same with a fold of the training samples held out
        everywhere; none without a blend.
        """
        if BLEND not in self.methods:
            return {}
        count, names = Blend.model_validate(self.table.get("blend", {})).folds, candidates_of(self.methods)
        found = {}
        for i in range(count):
            table = {**self.table, "data": {**self.table["data"], "inner_fold": [i, count]}}
            where = self.path / "folds" / f"{i + 1}-of-{count}"
            found[f"fold {i + 1} of {count}"] = Comparison(table, names, self.seeds, where)
        return found

    def finished_candidates(self, seed: int) -> dict[str, list[Path]]:
        """Return the runs of each of the blend's candidates, that on all training samples first, if all have ended."""
        places = {
            name: [one.directory(name, seed) for one in (self, *self.folds.values())]
            for name in candidates_of(self.methods)
        }
        return {name: own for name, own in places.items() if all(map(is_done, own))}

    def left(self) -> list[tuple[str, int]]:
        """Return those of the runs that are not finished; of a blend also where it is of other candidates."""
        return [key for key in self.keys if not is_done(self.directory(*key)) or self._is_of_others(*key)]

    def _is_of_others(self, method: str, seed: int) -> bool:
        if method != BLEND:
            return False
        return blended(self.directory(method, seed)) != candidates_of(self.methods)

    def started(self) -> list[Path]:
        """Return the directories of the runs that have started.

        Raises:
            PerfedError: there are none.
        """
        places = [self.directory(method, seed) for method in self.methods for seed in self.seeds]
        started = [place for place in places if (place / "config.toml").exists()]
        if not started:
            raise PerfedError(f"{self.path}: no run has started yet")
        return started

    def with_more(self, more: ComparisonSpec, resources: Resources) -> Self:
        """Return the comparison with those of the methods and seeds of ``more`` that it lacks; nothing is written.

        The experiment of ``more`` may differ in the tables of new methods alone.

        Raises:
            PerfedError: settings or data that are not those of the runs, or a method that cannot start.
        """
        more = more.whole(resources, self.methods)
        added = [name for name in more.methods if name not in self.methods]
        seeds = [seed for seed in more.seeds if seed not in self.seeds]
        table = self._same(more.table, added)
        after = replace(self, table=table, methods=[*self.methods, *added], seeds=[*self.seeds, *seeds])
        if added or seeds:
            self._check_data(resources)
            after.check_starts(after.seeds[-1], resources)
        return after

    def _same(self, after: dict[str, Any], added: list[str]) -> dict[str, Any]:
        """``after``, if it differs in nothing but the tables of the methods that were added, and the device."""
        was, now = flatten_keys(self.table), flatten_keys(after)
        new = {bare_name(name) for name in added}
        for key in dict.fromkeys([*was, *now]):
            own = key[0] == "methods" and len(key) > 1 and bare_name(key[1]) in new
            if was.get(key) != now.get(key) and key[0] not in ("method", "seed", "device") and not own:
                raise PerfedError(
                    f"{self.path}: {'.'.join(key)} is {describe_value(now.get(key))} and was "
                    f"{describe_value(was.get(key))} in the runs that are there; "
                    "give the same, or begin another comparison"
                )
        return {**after, **({"device": self.table["device"]} if "device" in self.table else {})}

    def _check_data(self, resources: Resources) -> None:
        """Refuse clients that are not those of the runs that have finished."""
        for seed in self.seeds:
            places = [RunDirectory(self.directory(method, seed)) for method in federated(self.methods)]
            known = {place.newest()[1].get("data") for place in places if place.finished} - {None}
            if known:
                data = validate({**self.table, "seed": seed}).data.load(seed, resources.data_dir)
                if data.fingerprint not in known:
                    raise PerfedError(
                        f"{self.path}: the data have other clients, samples or targets than when its runs with "
                        f"seed {seed} were made; begin another comparison"
                    )
                return

    def conclude(self, given: GatheredRuns | None = None, failures: Sequence[Failure] | None = None) -> Conclusion:
        """Write ``comparison.json`` and ``report.html`` of the runs that have started, or of those given.

        ``failures``: the runs that failed; if not given, those that ``comparison.json`` knows and that are not done.
        """
        check_marker(self.path)
        given = given or gather_runs(self.started())
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
        """Return the runs that failed when the comparison was last worked on, and have not finished since."""
        file = self.path / "comparison.json"
        if not file.is_file():
            return []
        with readable(file):
            known = [Failure(**entry) for entry in json.loads(file.read_text(encoding="utf-8")).get("failed", [])]
            return [of for of in known if not is_done(self.directory(of.method, of.seed))]


def folder_names(names: Sequence[str]) -> dict[str, str]:
    """Return a folder for each name: with a dot for signs that not every system allows, no two alike whatever the case.

    Example:
        >>> folder_names(["fedpac", "mine:FedPAC", "mine.fedpac"])
        {'fedpac': 'fedpac', 'mine:FedPAC': 'mine.FedPAC', 'mine.fedpac': 'mine.fedpac_'}
    """
    found: dict[str, str] = {}
    for name in names:
        folder = re.sub(r"[^\w.+=-]", ".", name)
        while folder.casefold() in {other.casefold() for other in found.values()}:
            folder += "_"
        found[name] = folder
    return found


def failed_lines(failures: Sequence[Failure], seeds: int) -> list[str]:
    """Return a line for each method: in how many of the seeds it failed, and why in the first."""
    by_method: dict[str, list[Failure]] = {}
    for failure in failures:
        by_method.setdefault(failure.method, []).append(failure)
    return [
        f"{display_name(method)} failed in {len(own)} of {seeds} seed{'s' if seeds > 1 else ''}: {own[0].reason}"
        for method, own in by_method.items()
    ]


def command_of(table: Mapping[str, Any], methods: Sequence[str], seeds: Sequence[int]) -> str:
    """Return ``perfed compare`` with what ``table`` has otherwise than the shipped experiment of its name.

    Empty for other experiments: what they were is in the marker.

    Example:
        >>> table = find_experiment("digits-label-skew")
        >>> command_of({**table, "rounds": 3}, ["local", "fedpac"], [0, 1, 2])
        'perfed compare digits-label-skew --methods local,fedpac --seeds 0..2 rounds=3'
    """
    name = str(table.get("name"))
    if name not in experiment_names():
        return ""
    shipped = flatten_keys(find_experiment(name))
    own = {key: value for key, value in flatten_keys(table).items() if key not in (("method",), ("seed",), ("device",))}
    changed = {".".join(key): value for key, value in own.items() if shipped.get(key, "") != value}
    settings = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items()]
    run = f"{seeds[0]}..{seeds[-1]}" if [*seeds] == [*range(seeds[0], seeds[-1] + 1)] else ",".join(map(str, seeds))
    return shlex.join(["perfed", "compare", name, "--methods", ",".join(methods), "--seeds", run, *settings])
