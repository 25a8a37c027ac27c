"""Studies: named comparisons of methods and seeds in one directory, with one marker file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, get_args

from pydantic import TypeAdapter, ValidationError

from perfed.errors import PerfedError, summarise_validation_error
from perfed.experiment.comparison import (
    USUAL,
    Comparison,
    ComparisonSpec,
    Conclusion,
    Failure,
    Resources,
    federated,
    folder_names,
)
from perfed.experiment.factory import Key, RunFactory, label_run
from perfed.experiment.jobs import Execute, execute_in_turn
from perfed.experiment.overrides import override
from perfed.experiment.planned import name_in_errors
from perfed.experiment.published import Leaderboard
from perfed.experiment.search import Choice, Search, label_search_run, read_results, record_choices
from perfed.plugins import BLEND
from perfed.report.campaign import Part
from perfed.report.page.campaign import write_campaign
from perfed.run.directory import MARKER, RunDirectory, check_marker, read_marker, write_marker

Outcome = dict[str, Any] | PerfedError
"""The summary of a run, or why it failed."""


@dataclass(frozen=True)
class Campaign:
    """Comparisons in folders of one directory: those of a campaign's file, or of a sweep.

    Attributes:
        key: the setting in which the comparisons of a sweep differ, whose names are ``key=value``; otherwise empty.
        comparisons: the folder of each comparison, by name, in the order in which they are run.
    """

    kind: ClassVar[str] = "campaign"

    key: str
    comparisons: dict[str, str]


Spec = ComparisonSpec | Search | Campaign | Leaderboard
"""The specification of a study: the content of its marker file."""

Planned = ComparisonSpec | Leaderboard | Mapping[str, ComparisonSpec]
"""The specification from which a study can be created: a comparison, search or leaderboard, or comparisons by name."""

_SPECS: dict[str, TypeAdapter[Any]] = {spec.kind: TypeAdapter(spec) for spec in get_args(Spec)}


@dataclass(frozen=True)
class Study:
    """Named comparisons of methods and seeds in one directory.

    Attributes:
        path: the directory.
        spec: the specification, which is the content of the marker file.
    """

    path: Path
    spec: Spec

    @classmethod
    def create(cls, path: Path, spec: Planned, resources: Resources = USUAL, key: str = "") -> Self:
        """Check that all methods can start on the data, then create the directory and write the marker.

        Args:
            path: the directory.
            spec: the specification. Several comparisons by name form a campaign; if ``path`` already contains one, its
                runs are kept and new comparisons, methods and seeds are added. The seeds and rows of a leaderboard may
                change.
            resources: the resources of the check, and the device of the runs.
            key: the setting in which the comparisons of a sweep differ.

        Raises:
            PerfedError: the settings or data of a comparison are not valid, or ``path`` contains another study or runs
                with other settings. Nothing is written in this case.
        """
        if isinstance(spec, Mapping):
            return cls._create_campaign(path, spec, resources, key)
        study = cls(path, spec.prepare(resources))
        if isinstance(spec, Leaderboard) and read_marker(path)[0] == spec.kind:
            before = cls.read(path).spec
            if isinstance(before, Leaderboard) and (before.name, before.settings) != (spec.name, spec.settings):
                raise PerfedError(f"{path}: holds {before.name} with other settings; choose another --out")
        else:
            RunDirectory.create(path)
        study.write()
        return study

    @classmethod
    def _create_campaign(
        cls, path: Path, planned: Mapping[str, ComparisonSpec], resources: Resources, key: str
    ) -> Self:
        earlier: dict[str, Comparison] = {}
        if read_marker(path)[0] == Campaign.kind:
            before = cls.read(path)
            if before.key != key:
                content = f"a sweep over {before.key}" if before.key else "a campaign"
                raise PerfedError(f"--out {path}: holds {content}; choose another directory")
            before.check()
            earlier = before.comparisons
        folders = folder_names(list(dict.fromkeys([*earlier, *planned])))
        folders |= {name: comparison.path.name for name, comparison in earlier.items()}
        parts = []
        for name, spec in planned.items():
            folder = path / folders[name]
            with name_in_errors(name):
                exists = read_marker(folder)[0] == ComparisonSpec.kind
                comparison = read_comparison(folder).with_more(spec, resources) if exists else spec.prepare(resources)
                parts.append(cls(folder, comparison))
        study = cls(path, Campaign(key, {name: folders[name] for name in dict.fromkeys([*planned, *earlier])}))
        for directory in (study, *parts):
            if read_marker(directory.path)[0] != directory.spec.kind:
                RunDirectory.create(directory.path)
        for directory in (*parts, study):
            directory.write()
        return study

    def write(self) -> None:
        """Write the marker file."""
        kind = self.spec.kind
        write_marker(self.path, kind, _SPECS[kind].dump_python(self.spec, by_alias=True))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the study in ``path``.

        Raises:
            PerfedError: there is no study, or its marker is damaged or has changed since it was written.
        """
        kind, content = read_marker(path)
        if not kind:
            raise PerfedError(f"{path}: no comparison or other study is there ({MARKER} is missing)")
        check_marker(path)
        try:
            return cls(path, _SPECS[kind].validate_python(content))
        except ValidationError as error:
            raise PerfedError(f"{path / MARKER}: cannot be read: {summarise_validation_error(error, '')}") from None

    @property
    def key(self) -> str:
        """The setting in which the comparisons of a sweep differ; empty for other studies."""
        return self.spec.key if isinstance(self.spec, Campaign) else ""

    @cached_property
    def comparisons(self) -> dict[str, Comparison]:
        """The comparisons that have directories, by name; the comparison of a study with only one has the name ""."""
        spec = self.spec
        if isinstance(spec, Search | Leaderboard):
            return {}
        if isinstance(spec, ComparisonSpec):
            return {"": Comparison(spec.table, spec.methods, spec.seeds, self.path)}
        return {name: read_comparison(self.path / folder) for name, folder in spec.comparisons.items()}

    def check(self, resources: Resources = USUAL) -> None:
        """Raise an error if the study cannot be resumed.

        Raises:
            PerfedError: a marker has changed or contradicts the runs in its directory, or the data of a search cannot
                be read.
        """
        if isinstance(self.spec, Search):
            self.spec.check_data(resources)
        for comparison in self.comparisons.values():
            comparison.check_files()

    # The runs ----------------------------------------------------------------------------------------------

    def runs(self, resources: Resources = USUAL) -> RunFactory:
        """Return the factory that builds the runs."""
        if isinstance(self.spec, Search):
            return RunFactory(self.spec.comparisons, resources, label_search_run)
        return RunFactory({label: part for label, (_, part) in self._parts.items()}, resources)

    @cached_property
    def _parts(self) -> dict[str, tuple[str, Comparison]]:
        """The comparisons, and the folds from which blends are learnt, by label, with the name of their comparison."""
        parts = {}
        for name, comparison in self.comparisons.items():
            parts[name] = name, comparison
            parts |= {f"{name}: {fold}".removeprefix(": "): (name, part) for fold, part in comparison.folds.items()}
        return parts

    @property
    def keys(self) -> list[Key]:
        """The comparison, method and seed of all runs in the order of execution.

        A search is executed method by method. Otherwise blends come last, because they combine the other runs.
        """
        keys = [(name, *key) for name, comparison in self.runs().comparisons.items() for key in comparison.keys]
        if isinstance(self.spec, Search):
            methods = self.spec.methods
            return sorted(keys, key=lambda key: methods.index(key[1]))
        return sorted(keys, key=lambda key: key[1] == BLEND)

    def list_unfinished(self) -> list[Key]:
        """Return the keys of the runs that have not finished."""
        if isinstance(self.spec, Search):
            points = read_results(self.spec, self.path)
            scored = {(" ".join(point["settings"]), point["method"]) for point in points}
            return [key for key in self.keys if key[:2] not in scored]
        unfinished = {(name, *key) for name, (_, comparison) in self._parts.items() for key in comparison.left()}
        return [key for key in self.keys if key in unfinished]

    @property
    def has_started(self) -> bool:
        """Whether a run has started."""
        return any(comparison.begun for comparison in self.comparisons.values())

    def execute_runs(
        self, resources: Resources = USUAL, execute: Execute = execute_in_turn
    ) -> Generator[tuple[Key, Outcome], None, None]:
        """Execute the runs that have not finished, and yield the key and outcome of each as it ends.

        A run that fails does not stop the others. Blends are executed last, because they combine the other runs.

        Args:
            resources: the resources of the runs.
            execute: executes the runs, one after the other or in parallel (:mod:`perfed.experiment.jobs`).
        """
        unfinished, factory = self.list_unfinished(), self.runs(resources)
        blends = [key for key in unfinished if key[1] == BLEND]
        for keys in filter(None, (unfinished[: len(unfinished) - len(blends)], blends)):
            with closing(execute(factory, keys)) as outcomes:
                yield from outcomes

    def execute(
        self,
        resources: Resources = USUAL,
        execute: Execute = execute_in_turn,
        tell: Callable[[str, Outcome], None] = lambda label, outcome: None,
    ) -> tuple[dict[str, Conclusion], list[PerfedError]]:
        """Execute the runs that have not finished, and conclude each comparison when the last of its runs has ended.

        Args:
            resources, execute: as in :meth:`execute_runs`.
            tell: called with the label and outcome of each run that ends.

        Returns:
            The conclusions of the comparisons that have started, by name, and the errors of the runs that failed.

        Raises:
            PerfedError: no run could start. The directory is removed in this case.
        """
        unfinished = Counter(self._parts[label][0] for label, *_ in self.list_unfinished())
        failed = dict[Key, PerfedError]()
        conclusions = {
            name: comparison.conclude(failures=())
            for name, comparison in self.comparisons.items()
            if not unfinished[name]
        }
        try:
            with closing(self.execute_runs(resources, execute)) as outcomes:
                for key, outcome in outcomes:
                    if isinstance(outcome, PerfedError):
                        failed[key] = outcome
                    tell(label_run(*key), _with_title(key, outcome) if isinstance(outcome, PerfedError) else outcome)
                    name = self._parts[key[0]][0]
                    unfinished[name] -= 1
                    if not unfinished[name] and self.comparisons[name].begun:
                        keys = [k for k in self.keys if k in failed and self._parts[k[0]][0] == name]
                        failures = [Failure(*k[1:], next(iter(str(failed[k]).splitlines()), "")) for k in keys]
                        conclusions[name] = self.comparisons[name].conclude(failures=failures)
                        self.conclude(conclusions)
        except PerfedError:
            self.remove_unstarted()
            raise
        if failed and self.remove_unstarted():
            raise _with_title(*next(iter(failed.items())))
        return conclusions, [_with_title(key, failed[key]) for key in self.keys if key in failed]

    def remove_unstarted(self) -> bool:
        """Remove the markers and the empty folders if no run has started, and return whether no run has started."""
        if self.has_started:
            return False
        for _, comparison in reversed(self._parts.values()):
            (comparison.path / MARKER).unlink(missing_ok=True)
            for folder in (*comparison.folders.values(), comparison.path / "folds", comparison.path):
                with suppress(OSError):  # the folder does not exist or is not empty
                    folder.rmdir()
        (self.path / MARKER).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()
        return True

    # Results -----------------------------------------------------------------------------------------------

    def conclude(self, conclusions: Mapping[str, Conclusion] | None = None) -> tuple[Path, list[Part]]:
        """Write ``report.html`` of a campaign or sweep; the report of a single comparison is not written here.

        Args:
            conclusions: the conclusions of the comparisons, by name; if not given, all that have started are concluded.

        Returns:
            The path of the report, and its parts in the order of the campaign.
        """
        if conclusions is None:
            started = {name: comparison for name, comparison in self.comparisons.items() if comparison.begun}
            conclusions = {name: comparison.conclude() for name, comparison in started.items()}
        if "" in self.comparisons:
            return self.path / "report.html", []
        parts = []
        for name, comparison in self.comparisons.items():
            if name in conclusions:
                conclusion = conclusions[name]
                page = f"{comparison.path.name}/{conclusion.report.name}"
                parts.append(Part(name, tuple(conclusion.runs), conclusion.verdict, page, tuple(conclusion.sentences)))
        waiting = Counter(self._parts[label][0] for label, *_ in self.list_unfinished())
        waiting.update(dict.fromkeys(self.comparisons, 0))
        title = self.path.resolve().name
        if self.key:
            experiment = next(iter(self.comparisons.values())).table.get("name", title)
            title = f"{experiment}: {self.key}"
        report = write_campaign(parts, self.path / "report.html", key=self.key, title=title, waiting=waiting)
        return report, parts

    def choose(self, resources: Resources = USUAL, execute: Execute = execute_in_turn) -> dict[str, Choice]:
        """Execute the runs of a search that have not finished, and write the chosen settings.

        Args:
            resources, execute: as in :meth:`execute_runs`.

        Returns:
            The choice of each method.

        Raises:
            PerfedError: no point of some method could be trained to the end, or another process works on the search.
        """
        assert isinstance(self.spec, Search)
        with RunDirectory(self.path).lock(), closing(self.execute_runs(resources, execute)) as outcomes:
            return record_choices(self.spec, self.path, outcomes)


def read_comparison(path: Path) -> Comparison:
    """Return the comparison in ``path``.

    Raises:
        PerfedError: there is no comparison, or its marker is damaged or has changed since it was written.
    """
    comparison = Study.read(path).comparisons.get("")
    if comparison is None:
        raise PerfedError(f"{path / MARKER}: cannot be read: it is not the marker of a comparison")
    return comparison


def _with_title(key: Key, error: PerfedError) -> PerfedError:
    name, method, seed = key
    return PerfedError(f"{name}: {method}, seed {seed}: {error}".removeprefix(": "))


def extend(
    path: Path,
    methods: Sequence[str],
    seeds: Sequence[int],
    experiment: dict[str, Any] | None,
    settings: Sequence[str],
    resources: Resources = USUAL,
) -> Study:
    """Add methods and seeds to the comparison in ``path`` and return it; finished runs stay as they are.

    Args:
        path: the directory of the comparison.
        methods, seeds: the new methods and seeds; existing ones may be among them.
        experiment: the experiment, if the user names it again; it must be the same.
        settings: assignments, which may concern new methods only.
        resources: as in :meth:`Study.create`.

    Raises:
        PerfedError: there is no comparison in ``path``, nothing is new, settings or data differ from those of its runs,
            or a method cannot start. Nothing is written in this case.
    """
    if read_marker(path)[0] != "comparison":
        raise PerfedError(f"--extend {path}: no comparison is there ({MARKER} is missing)")
    before = read_comparison(path)
    if {*methods} <= {*before.methods} and {*seeds} <= {*before.seeds}:
        raise PerfedError(
            f"--extend {path}: nothing to add; it has the methods {', '.join(before.methods)} and the seeds "
            f"{', '.join(map(str, before.seeds))}; name others with --methods and --seeds"
        )
    names = list(dict.fromkeys([*before.methods, *methods]))
    table = override(before.table if experiment is None else experiment, settings, federated(names))
    after = before.with_more(ComparisonSpec(table, [*methods], [*seeds]), resources)
    study = Study(path, after)
    study.write()
    return study
