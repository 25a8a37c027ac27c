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
from perfed.experiment.jobs import Execute, in_turn
from perfed.experiment.overrides import override
from perfed.experiment.planned import problems_of
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
        key: the setting in which the comparisons of a sweep differ; they are called ``key=value``. Otherwise empty.
        comparisons: the folder of each comparison, by name, in the order in which they are run.
    """

    kind: ClassVar[str] = "campaign"

    key: str
    comparisons: dict[str, str]


Spec = ComparisonSpec | Search | Campaign | Leaderboard
"""What the marker of a study says."""

Planned = ComparisonSpec | Leaderboard | Mapping[str, ComparisonSpec]
"""What a study can be created from: a comparison or search, a leaderboard, or comparisons by name."""

_SPECS: dict[str, TypeAdapter[Any]] = {spec.kind: TypeAdapter(spec) for spec in get_args(Spec)}


@dataclass(frozen=True)
class Study:
    """Named comparisons of methods and seeds in one directory.

    Attributes:
        path: the directory.
        spec: what is run, as the marker file says it.
    """

    path: Path
    spec: Spec

    @classmethod
    def create(cls, path: Path, spec: Planned, resources: Resources = USUAL, key: str = "") -> Self:
        """Check that all methods can start on the data, then make the directory and write the marker.

        Args:
            path: the directory.
            spec: what is run. Several comparisons by name make a campaign; where ``path`` already holds one, the study
                keeps its runs and adds the comparisons, methods and seeds that are new. A leaderboard may get other
                seeds and rows.
            resources: the resources of the check, and the device of the runs.
            key: of a sweep, the setting in which the comparisons differ.

        Raises:
            PerfedError: bad settings or data of any comparison, or ``path`` holds something else, or runs with other
                settings. Nothing is written then.
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
            place = path / folders[name]
            with problems_of(name):
                continues = read_marker(place)[0] == ComparisonSpec.kind
                more = read_comparison(place).with_more(spec, resources) if continues else spec.prepare(resources)
                parts.append(cls(place, more))
        study = cls(path, Campaign(key, {name: folders[name] for name in dict.fromkeys([*planned, *earlier])}))
        for one in (study, *parts):
            if read_marker(one.path)[0] != one.spec.kind:
                RunDirectory.create(one.path)
        for one in (*parts, study):
            one.write()
        return study

    def write(self) -> None:
        """Write the marker file."""
        kind = self.spec.kind
        write_marker(self.path, kind, _SPECS[kind].dump_python(self.spec, by_alias=True))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the study in ``path``.

        Raises:
            PerfedError: there is none, or its marker is damaged or has changed since it was written.
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
        """The comparisons that have directories, by name; a comparison that is the whole study has the name ""."""
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
        """The comparisons, each followed by the folds that its blend is learned from; with the comparison's name."""
        parts = {}
        for name, comparison in self.comparisons.items():
            parts[name] = name, comparison
            parts |= {f"{name}: {fold}".removeprefix(": "): (name, part) for fold, part in comparison.folds.items()}
        return parts

    @property
    def keys(self) -> list[Key]:
        """Comparison, method and seed of all runs in their order: method by method in a search, otherwise blends last
        because they are made of the other runs.
        """
        keys = [(name, *key) for name, one in self.runs().comparisons.items() for key in one.keys]
        if isinstance(self.spec, Search):
            methods = self.spec.methods
            return sorted(keys, key=lambda key: methods.index(key[1]))
        return sorted(keys, key=lambda key: key[1] == BLEND)

    def left(self) -> list[Key]:
        """Return the keys of the runs that are not finished."""
        if isinstance(self.spec, Search):
            scored = {(" ".join(one["settings"]), one["method"]) for one in read_results(self.spec, self.path)}
            return [key for key in self.keys if key[:2] not in scored]
        unfinished = {(name, *key) for name, (_, one) in self._parts.items() for key in one.left()}
        return [key for key in self.keys if key in unfinished]

    @property
    def begun(self) -> bool:
        """Whether a run has started."""
        return any(comparison.begun for comparison in self.comparisons.values())

    def outcomes(
        self, resources: Resources = USUAL, execute: Execute = in_turn
    ) -> Generator[tuple[Key, Outcome], None, None]:
        """Execute the runs that are not finished, also after one has failed, and yield each as it ends.

        Args:
            resources: the resources of the runs.
            execute: executes the runs, one after the other or in parallel (:mod:`perfed.experiment.jobs`).
        """
        left, factory = self.left(), self.runs(resources)
        blends = [key for key in left if key[1] == BLEND]
        for keys in filter(None, (left[: len(left) - len(blends)], blends)):
            with closing(execute(factory, keys)) as outcomes:
                yield from outcomes

    def execute(
        self,
        resources: Resources = USUAL,
        execute: Execute = in_turn,
        tell: Callable[[str, Outcome], None] = lambda label, outcome: None,
    ) -> tuple[dict[str, Conclusion], list[PerfedError]]:
        """Execute the runs that are not finished, and conclude each comparison when the last of its runs has ended.

        Args:
            resources, execute: as in :meth:`outcomes`.
            tell: called with the label and outcome of each run that ends.

        Returns:
            The conclusions of the comparisons that have started, by name, and why runs failed.

        Raises:
            PerfedError: no run could begin. The directory is removed then.
        """
        left, failed = Counter(self._parts[label][0] for label, *_ in self.left()), dict[Key, PerfedError]()
        conclusions = {name: one.conclude(failures=()) for name, one in self.comparisons.items() if not left[name]}
        try:
            with closing(self.outcomes(resources, execute)) as outcomes:
                for key, outcome in outcomes:
                    if isinstance(outcome, PerfedError):
                        failed[key] = outcome
                    tell(label_run(*key), _with_title(key, outcome) if isinstance(outcome, PerfedError) else outcome)
                    name = self._parts[key[0]][0]
                    left[name] -= 1
                    if not left[name] and self.comparisons[name].begun:
                        keys = [k for k in self.keys if k in failed and self._parts[k[0]][0] == name]
                        failures = [Failure(*k[1:], next(iter(str(failed[k]).splitlines()), "")) for k in keys]
                        conclusions[name] = self.comparisons[name].conclude(failures=failures)
                        self.conclude(conclusions)
        except PerfedError:
            self.abandon()
            raise
        if failed and self.abandon():
            raise _with_title(*next(iter(failed.items())))
        return conclusions, [_with_title(key, failed[key]) for key in self.keys if key in failed]

    def abandon(self) -> bool:
        """Remove the directory if no run could begin; return whether that is so."""
        if self.begun:
            return False
        for _, one in reversed(self._parts.values()):
            (one.path / MARKER).unlink(missing_ok=True)
            for place in (*one.folders.values(), one.path / "folds", one.path):
                with suppress(OSError):  # not there, or not empty
                    place.rmdir()
        (self.path / MARKER).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()
        return True

    # What comes of them ------------------------------------------------------------------------------------

    def conclude(self, conclusions: Mapping[str, Conclusion] | None = None) -> tuple[Path, list[Part]]:
        """Write ``report.html`` of a campaign or sweep; a comparison that is the whole study has its own.

        Args:
            conclusions: those of the comparisons, by name; if not given, all that have started are concluded.

        Returns:
            The page, and its parts in the campaign's order.
        """
        if conclusions is None:
            conclusions = {name: one.conclude() for name, one in self.comparisons.items() if one.begun}
        if "" in self.comparisons:
            return self.path / "report.html", []
        parts = []
        for name, comparison in self.comparisons.items():
            if name in conclusions:
                conclusion = conclusions[name]
                page = f"{comparison.path.name}/{conclusion.report.name}"
                parts.append(Part(name, tuple(conclusion.runs), conclusion.verdict, page, tuple(conclusion.sentences)))
        waiting = Counter(self._parts[label][0] for label, *_ in self.left())
        waiting.update(dict.fromkeys(self.comparisons, 0))
        title = self.path.resolve().name
        if self.key:
            experiment = next(iter(self.comparisons.values())).table.get("name", title)
            title = f"{experiment}: {self.key}"
        report = write_campaign(parts, self.path / "report.html", key=self.key, title=title, waiting=waiting)
        return report, parts

    def choose(self, resources: Resources = USUAL, execute: Execute = in_turn) -> dict[str, Choice]:
        """Execute the runs of a search that are not finished, and write the chosen settings.

        Args:
            resources, execute: as in :meth:`outcomes`.

        Returns:
            The choice of each method.

        Raises:
            PerfedError: no point of some method could be trained to the end, or another process works on the search.
        """
        assert isinstance(self.spec, Search)
        with RunDirectory(self.path).lock(), closing(self.outcomes(resources, execute)) as outcomes:
            return record_choices(self.spec, self.path, outcomes)


def read_comparison(path: Path) -> Comparison:
    """Return the comparison in ``path``.

    Raises:
        PerfedError: there is none, or its marker is damaged or has changed since it was written.
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
    """Return the comparison in ``path`` with more methods and seeds; finished runs stay as they are.

    Args:
        path: the directory of the comparison.
        methods, seeds: the new ones; those that are there may be named too.
        experiment: the experiment, if the user names it again; it must be the same.
        settings: assignments, which may concern new methods only.
        resources: as in :meth:`Study.create`.

    Raises:
        PerfedError: no comparison there, nothing new, settings or data that are not those of its runs, or a method that
            cannot start. Nothing is written then.
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
