"""Comparisons of methods over seeds on one experiment: what is run, where, and the results."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field

from perfed.data.reading import to_json_values
from perfed.errors import PerfedError
from perfed.experiment.blend import blended, candidates_of, check_blend, with_own_models
from perfed.experiment.config import Experiment, experiment_names, find_experiment, readable, validate
from perfed.experiment.estimators import TRIES, is_baseline
from perfed.experiment.sklearn_run import SklearnRun
from perfed.experiment.start import is_done, start
from perfed.methods.presets import split_method_name
from perfed.methods.titles import display_name
from perfed.plugins import BLEND, bare_name
from perfed.report import GatheredRuns, Verdict, comparison_rows, gather_runs, verdict, write_report
from perfed.report.curves import oracle
from perfed.report.run_results import RunResults
from perfed.run.directory import MARKER, RunDirectory, check_marker
from perfed.run.settings import Blend
from perfed.settings import describe_value, flatten_keys
from perfed.system import write_atomic


def federated(names: Sequence[str]) -> list[str]:
    """Return the methods among ``names``, without the baselines and without the blend."""
    return [name for name in names if not is_baseline(name) and name != BLEND]


@dataclass(frozen=True)
class Resources:
    """The choices that a user can make each time a study is worked on.

    Attributes:
        data_dir: the first folder in which data files are looked for.
        device: the device, in place of the experiments'.
        trust: whether modules named in run directories may be imported.
    """

    data_dir: Path | None = None
    device: torch.device | None = None
    trust: bool = True

    def with_device(self, table: dict[str, Any]) -> dict[str, Any]:
        """Return an experiment's table with the chosen device."""
        return table if self.device is None else {**table, "device": str(self.device)}


USUAL = Resources()
"""Data files in the default folders, and the devices of the experiments."""


@dataclass(frozen=True)
class ComparisonSpec:
    """Methods (and baselines) and seeds of one experiment: the content of a comparison's marker.

    Attributes:
        table: the experiment, without method and seed; the key ``experiment`` of the marker.
        methods, seeds: the methods and seeds, in the order in which they are run.
    """

    kind: ClassVar[str] = "comparison"

    table: Annotated[dict[str, Any], Field(alias="experiment")]
    methods: list[str]
    seeds: list[int]

    @property
    def keys(self) -> list[tuple[str, int]]:
        """The method and seed of all runs, in the order in which they begin."""
        return [(method, seed) for seed in self.seeds for method in self.methods]

    def experiment(self, method: str, seed: int) -> Experiment:
        """Return the experiment of one run; that of a baseline or a blend names no method."""
        return validate({**self.table, "seed": seed, **({"method": method} if federated([method]) else {})})

    def with_blend_candidates(self, resources: Resources = USUAL, earlier: Sequence[str] = ()) -> Self:
        """Return the comparison with the local models that are always candidates of its blend, if it has a blend.

        These are tuned inside the training samples, unless the experiment says otherwise.

        Args:
            resources: the location of the data, whose task decides which models are added.
            earlier: methods that the comparison already has; their settings do not change.
        """
        if BLEND not in (*self.methods, *earlier):
            return self
        experiment = validate({**self.table, "seed": self.seeds[0] if self.seeds else 0})
        task = experiment.data.load(experiment.seed, resources.data_dir).task
        methods = [*earlier, *(name for name in self.methods if name not in earlier)]
        names = [name for name in with_own_models(methods, task) if name in self.methods or name not in earlier]
        tries = {} if earlier else {"baseline_tries": TRIES}
        return replace(self, methods=names, table={**tries, **self.table})

    def prepare(self, resources: Resources = USUAL) -> Self:
        """Return the comparison for the chosen device, after checking that all methods can start on the data.

        The local models that a blend needs are added.

        Raises:
            PerfedError: bad settings or data.
        """
        spec = self.with_blend_candidates(resources)
        spec.check_starts(spec.seeds[0], resources)
        return replace(spec, table=resources.with_device(spec.table))

    def check(self) -> None:
        """Raise an error for settings that are wrong whatever the data are."""
        for method in federated(self.methods):
            self.experiment(method, 0)
        validate(self.table)

    def check_starts(self, seed: int, resources: Resources = USUAL) -> None:
        """Build every method's run without starting it, so that bad settings and data are reported before training."""
        experiments = {method: self.experiment(method, seed) for method in federated(self.methods)}
        self._check_policies()
        shared = validate({**self.table, "seed": seed})
        federation = shared.data.load(seed, resources.data_dir)
        for name in filter(is_baseline, self.methods):
            SklearnRun(name, shared, federation).check()
        if BLEND in self.methods:
            check_blend(self.methods, shared, federation)
        for method, experiment in experiments.items():
            try:
                start(experiment, federation=federation, device=resources.device)
            except PerfedError as error:
                raise PerfedError(f"{method}: {error}") from None

    def _check_policies(self) -> None:
        """Raise an error if a policy for all methods meets a method that brings one.

        The speed-up by the method's policy is measured against the same method without a policy.
        """
        policy = self.table.get("participation", {}).get("policy", "uniform")
        with_policy = [method for method in federated(self.methods) if split_method_name(method)[1]]
        if policy != "uniform" and 0 < len(with_policy) < len(federated(self.methods)):
            raise PerfedError(
                f"participation.policy = '{policy}' is for all methods, and {with_policy[0]} brings a policy of its "
                "own; participation.policy=uniform leaves the others without one"
            )


@dataclass(frozen=True)
class Failure:
    """A run that failed, and the first line of the reason."""

    method: str
    seed: int
    reason: str


@dataclass(frozen=True)
class Conclusion:
    """The results of a comparison.

    Attributes:
        runs: the runs that have started.
        verdict: the verdict on two methods or more.
        report: the path of the report.
        failed: a line for each method of which runs failed; they are among the verdict's warnings too.
    """

    runs: list[RunResults]
    verdict: Verdict | None
    report: Path
    failed: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """The sentences of the verdict; without one, the lines on failed runs."""
        return list(self.failed) if self.verdict is None else self.verdict.sentences

    @property
    def oracle(self) -> float | None:
        """The mean accuracy of the Bayes oracle, where the data have one."""
        return oracle(self.runs)


@dataclass(frozen=True)
class Comparison(ComparisonSpec):
    """A comparison in a directory, each run in ``<method>/seed-<n>/``.

    A folder is called ``module.NAME`` for a method ``module:NAME``.
    """

    path: Path

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

    @property
    def command(self) -> str:
        """The command that runs the comparison again; empty if its experiment is not a shipped one."""
        return command_of(self.table, self.methods, self.seeds)

    @property
    def origin(self) -> str:
        """The command, or the file with the settings."""
        return self.command or f"with the settings in {self.path / MARKER}"

    @property
    def begun(self) -> bool:
        """Whether a run has started."""
        return any(self.path.rglob("config.toml"))

    def directory(self, method: str, seed: int) -> Path:
        """Return the directory of a run."""
        return self.folders[method] / f"seed-{seed}"

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each method."""
        names = folder_names(self.methods)
        with_colons = {method: self.path / method for method in names}  # as earlier versions named them
        return {m: with_colons[m] if with_colons[m].is_dir() else self.path / names[m] for m in names}

    @cached_property
    def folds(self) -> dict[str, Comparison]:
        """The comparisons that the blend's weights are learned from, by name; none without a blend.

        Each holds out a fold of the training samples at every client.
        """
        if BLEND not in self.methods:
            return {}
        count, names = Blend.model_validate(self.table.get("blend", {})).folds, candidates_of(self.methods)
        folds = {}
        for i in range(count):
            table = {**self.table, "data": {**self.table["data"], "inner_fold": [i, count]}}
            place = self.path / "folds" / f"{i + 1}-of-{count}"
            folds[f"fold {i + 1} of {count}"] = Comparison(table, names, self.seeds, place)
        return folds

    def finished_candidates(self, seed: int) -> dict[str, list[Path]]:
        """Return the runs of each candidate of the blend that has finished all, the run on all samples first."""
        places = {
            name: [comparison.directory(name, seed) for comparison in (self, *self.folds.values())]
            for name in candidates_of(self.methods)
        }
        return {name: runs for name, runs in places.items() if all(map(is_done, runs))}

    def left(self) -> list[tuple[str, int]]:
        """Return the runs that are not finished; a blend of other candidates counts as unfinished."""
        return [key for key in self.keys if not is_done(self.directory(*key)) or self._has_other_candidates(*key)]

    def _has_other_candidates(self, method: str, seed: int) -> bool:
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

    def with_more(self, spec: ComparisonSpec, resources: Resources) -> Self:
        """Return the comparison with the methods and seeds of ``spec`` added; nothing is written.

        The experiment of ``spec`` may differ only in the tables of new methods.

        Raises:
            PerfedError: settings or data differ from those of the runs, or a method cannot start.
        """
        spec = spec.with_blend_candidates(resources, self.methods)
        added = [name for name in spec.methods if name not in self.methods]
        seeds = [seed for seed in spec.seeds if seed not in self.seeds]
        table = self._check_same(spec.table, added)
        after = replace(self, table=table, methods=[*self.methods, *added], seeds=[*self.seeds, *seeds])
        if added or seeds:
            self._check_data(resources)
            after.check_starts(after.seeds[-1], resources)
        return after

    def _check_same(self, after: dict[str, Any], added: list[str]) -> dict[str, Any]:
        """Return ``after`` with the device of the runs, if nothing but the tables of added methods differs."""
        was, now = flatten_keys(self.table), flatten_keys(after)
        new = {bare_name(name) for name in added}
        for key in dict.fromkeys([*was, *now]):
            is_new = key[0] == "methods" and len(key) > 1 and bare_name(key[1]) in new
            if was.get(key) != now.get(key) and key[0] not in ("method", "seed", "device") and not is_new:
                raise PerfedError(
                    f"{self.path}: {'.'.join(key)} is {describe_value(now.get(key))} and was "
                    f"{describe_value(was.get(key))} in the runs that are there; "
                    "give the same, or begin another comparison"
                )
        return {**after, **({"device": self.table["device"]} if "device" in self.table else {})}

    def _check_data(self, resources: Resources) -> None:
        """Raise an error if the clients differ from those of the finished runs."""
        for seed in self.seeds:
            places = [RunDirectory(self.directory(method, seed)) for method in federated(self.methods)]
            fingerprints = {place.newest()[1].get("data") for place in places if place.finished} - {None}
            if fingerprints:
                data = validate({**self.table, "seed": seed}).data.load(seed, resources.data_dir)
                if data.fingerprint not in fingerprints:
                    raise PerfedError(
                        f"{self.path}: the data have other clients, samples or targets than when its runs with "
                        f"seed {seed} were made; begin another comparison"
                    )
                return

    def conclude(self, gathered: GatheredRuns | None = None, failures: Sequence[Failure] | None = None) -> Conclusion:
        """Write ``comparison.json`` and ``report.html``.

        Args:
            gathered: the runs; if not given, all that have started.
            failures: the runs that failed; if not given, those in ``comparison.json`` that have not finished since.
        """
        check_marker(self.path)
        gathered = gathered or gather_runs(self.started())
        failures = self.failures() if failures is None else failures
        lines = failed_lines(failures, len(self.seeds))
        runs, plain_verdict = gathered.runs, verdict(gathered.runs)
        final_verdict = None if plain_verdict is None else plain_verdict.with_warnings(lines)
        content = {"runs": comparison_rows(runs), "verdict": None if final_verdict is None else final_verdict.to_dict()}
        content |= {"failed": [asdict(failure) for failure in failures]} if failures else {}
        write_atomic(self.path / "comparison.json", json.dumps(to_json_values(content), indent=2) + "\n")
        report = write_report(
            runs,
            self.path / "report.html",
            title=str(self.table.get("name", "comparison")),
            command=self.command,
            left_out=[*lines, *gathered.left_out],
            verdict=plain_verdict,
        )
        return Conclusion(runs, final_verdict, report, tuple(lines))

    def failures(self) -> list[Failure]:
        """Return the runs that failed when the comparison was last executed and have not finished since."""
        file = self.path / "comparison.json"
        if not file.is_file():
            return []
        with readable(file):
            failures = [Failure(**entry) for entry in json.loads(file.read_text(encoding="utf-8")).get("failed", [])]
            return [run for run in failures if not is_done(self.directory(run.method, run.seed))]


def folder_names(names: Sequence[str]) -> dict[str, str]:
    """Return a folder for each name, with dots for characters that some systems forbid; no two differ only in case.

    Example:
        >>> folder_names(["fedpac", "mine:FedPAC", "mine.fedpac"])
        {'fedpac': 'fedpac', 'mine:FedPAC': 'mine.FedPAC', 'mine.fedpac': 'mine.fedpac_'}
    """
    folders: dict[str, str] = {}
    for name in names:
        folder = re.sub(r"[^\w.+=-]", ".", name)
        while folder.casefold() in {used_folder.casefold() for used_folder in folders.values()}:
            folder += "_"
        folders[name] = folder
    return folders


def failed_lines(failures: Sequence[Failure], seeds: int) -> list[str]:
    """Return a line for each method: in how many of the seeds it failed, and the reason in the first."""
    by_method: dict[str, list[Failure]] = {}
    for failure in failures:
        by_method.setdefault(failure.method, []).append(failure)
    return [
        f"{display_name(method)} failed in {len(failed)} of {seeds} seed{'s' if seeds > 1 else ''}: {failed[0].reason}"
        for method, failed in by_method.items()
    ]


def command_of(table: Mapping[str, Any], methods: Sequence[str], seeds: Sequence[int]) -> str:
    """Return ``perfed compare`` with the settings in which ``table`` differs from the shipped experiment of its name.

    The command is empty for other experiments, whose settings only the marker has.

    Example:
        >>> table = find_experiment("digits-label-skew")
        >>> command_of({**table, "rounds": 3}, ["local", "fedpac"], [0, 1, 2])
        'perfed compare digits-label-skew --methods local,fedpac --seeds 0..2 rounds=3'
    """
    name = str(table.get("name"))
    if name not in experiment_names():
        return ""
    shipped = flatten_keys(find_experiment(name))
    shared = {
        key: value for key, value in flatten_keys(table).items() if key not in (("method",), ("seed",), ("device",))
    }
    changed = {".".join(key): value for key, value in shared.items() if shipped.get(key, "") != value}
    settings = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changed.items()]
    run = f"{seeds[0]}..{seeds[-1]}" if [*seeds] == [*range(seeds[0], seeds[-1] + 1)] else ",".join(map(str, seeds))
    return shlex.join(["perfed", "compare", name, "--methods", ",".join(methods), "--seeds", run, *settings])
