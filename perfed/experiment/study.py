"""Studies: named comparisons of methods x seeds that are one piece of work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from perfed.errors import PerfedError
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
from perfed.experiment.config import readable
from perfed.experiment.factory import Key, RunFactory
from perfed.experiment.jobs import Execute, in_turn
from perfed.experiment.overrides import override
from perfed.experiment.planned import problems_of
from perfed.plugins import BLEND
from perfed.report.campaign import Part
from perfed.report.page.campaign import write_campaign
from perfed.run.directory import MARKER, RunDirectory, check_marker, marker_of, write_marker

Outcome = dict[str, Any] | PerfedError
"""The summary of a run, or why it failed."""


@dataclass(frozen=True)
class Study:
    """Comparisons in one directory: one that is all of it, or several of a campaign or sweep in folders of their own.

    Attributes:
        path: the directory.
        comparisons: by name, in the order in which they are made; one that is all of the study has the name "".
        key: the setting in which the comparisons of a sweep differ; they are called ``key=value``. Else empty.
    """

    path: Path
    comparisons: dict[str, Comparison]
    key: str = ""

    @classmethod
    def create(
        cls,
        path: Path,
        planned: ComparisonSpec | Mapping[str, ComparisonSpec],
        resources: Resources = USUAL,
        key: str = "",
    ) -> Self:
        """Check that all methods of all comparisons can start on the data, and make the directory.

        Where a campaign or sweep is there, it goes on with what is done, and with whatever comparisons, methods and
        seeds are new.

        Raises:
            PerfedError: bad settings or data of any comparison, or ``path`` holds something else, or runs with other
                settings. Nothing is begun then.
        """
        if isinstance(planned, ComparisonSpec):
            made = cls(path, {"": _checked(planned, path, resources)})
            RunDirectory.create(path)
            made.write()
            return made
        before = cls.read(path) if marker_of(path)[0] == "campaign" else None
        if before is not None and before.key != key:
            held = f"a sweep over {before.key}" if before.key else "a campaign"
            raise PerfedError(f"--out {path}: holds {held}; choose another directory")
        old = {} if before is None else before.comparisons
        folders = folder_names([*old, *(name for name in planned if name not in old)])
        folders |= {name: one.path.name for name, one in old.items()}
        found: dict[str, Comparison] = {}
        for name, spec in planned.items():
            where = path / folders[name]
            with problems_of(name):
                if marker_of(where)[0] == "comparison":
                    found[name] = Comparison.read(where).with_more(spec, resources)
                else:
                    found[name] = _checked(spec, where, resources)
        new = [one.path for one in found.values() if not marker_of(one.path)[0]]
        for place in [*([path] if before is None else []), *new]:
            RunDirectory.create(place)
        made = cls(path, found | {name: one for name, one in old.items() if name not in found}, key)
        made.write()
        return made

    def write(self) -> None:
        """Write the markers: of each comparison, and of what they are together."""
        for comparison in self.comparisons.values():
            comparison.write()
        if "" not in self.comparisons:
            folders = {name: one.path.name for name, one in self.comparisons.items()}
            write_marker(self.path, "campaign", {"key": self.key, "comparisons": folders})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the study that :meth:`write` wrote.

        Raises:
            PerfedError: there is none, or a marker is damaged.
        """
        kind, content = marker_of(path)
        check_marker(path)
        if kind == "comparison":
            return cls._checked_files(path, {"": Comparison.read(path)})
        with readable(path / MARKER):
            folders = {str(name): path / str(folder) for name, folder in content["comparisons"].items()}
            key = str(content["key"])
        return cls._checked_files(path, {name: Comparison.read(folder) for name, folder in folders.items()}, key)

    @classmethod
    def _checked_files(cls, path: Path, comparisons: dict[str, Comparison], key: str = "") -> Self:
        for comparison in comparisons.values():
            comparison.check_files()
        return cls(path, comparisons, key)

    def runs(self, resources: Resources = USUAL) -> RunFactory:
        """Return what makes the runs ready."""
        return RunFactory(self._with_folds, resources)

    @cached_property
    def _owners(self) -> dict[str, str]:
        """The comparison that each of :attr:`_with_folds` is of."""
        return {each: name for name, one in self.comparisons.items() for each in (name, *_named_folds(name, one))}

    @cached_property
    def _with_folds(self) -> dict[str, Comparison]:
        """The comparisons, and behind each the folds that its blend is made of."""
        return {
            each: own
            for name, one in self.comparisons.items()
            for each, own in {name: one, **_named_folds(name, one)}.items()
        }

    @property
    def keys(self) -> list[Key]:
        """Comparison, method and seed of all runs, in the order in which they begin: blends are made of the others."""
        return _blends_last([(name, *key) for name, one in self._with_folds.items() for key in one.keys])

    def left(self) -> list[Key]:
        """Return those of the runs that are not finished."""
        return _blends_last([(name, *key) for name, one in self._with_folds.items() for key in one.left()])

    @property
    def begun(self) -> bool:
        """Whether a run has."""
        return any(comparison.begun for comparison in self.comparisons.values())

    def outcomes(
        self, resources: Resources = USUAL, execute: Execute = in_turn
    ) -> Generator[tuple[Key, Outcome], None, None]:
        """Do the runs that are not finished; those after a run that failed go on.

        Args:
            resources: that they are made with.
            execute: executes the runs, one after the other or side by side (:mod:`perfed.experiment.jobs`).

        Raises:
            PerfedError: no run could begin, of which nothing is left; says why the first could not.
        """
        failed = []
        try:
            left, factory = self.left(), self.runs(resources)
            blends = [key for key in left if key[1] == BLEND]
            for keys in filter(None, (left[: len(left) - len(blends)], blends)):
                with closing(execute(factory, keys)) as found:
                    for key, outcome in found:
                        if isinstance(outcome, PerfedError):
                            failed.append(outcome := PerfedError(f"{_title(*key)}: {outcome}"))
                        yield key, outcome
        except PerfedError:
            self.abandon()
            raise
        if failed and self.abandon():
            raise failed[0]

    def abandon(self) -> bool:
        """Take the study back if no run could begin; returns whether that is so."""
        if self.begun:
            return False
        for one in reversed(self._with_folds.values()):
            (one.path / MARKER).unlink(missing_ok=True)
            for place in (*one.folders.values(), one.path / "folds", one.path):
                with suppress(OSError):  # not there, or not empty
                    place.rmdir()
        (self.path / MARKER).unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()
        return True

    def execute(
        self,
        resources: Resources = USUAL,
        execute: Execute = in_turn,
        tell: Callable[[str, Outcome], None] = lambda label, outcome: None,
    ) -> tuple[dict[str, Conclusion], list[PerfedError]]:
        """Do the runs that are not finished, and write what each comparison says when the last of its runs has ended.

        Args:
            resources, execute: as in :meth:`outcomes`.
            tell: is told of every run that ends.

        Returns:
            What the comparisons say that have begun, by name, and why runs failed.
        """
        left, failed = Counter(self._owners[name] for name, *_ in self.left()), dict[Key, PerfedError]()
        label = self.runs().label
        found = {name: one.conclude(failures=()) for name, one in self.comparisons.items() if not left[name]}
        with closing(self.outcomes(resources, execute)) as outcomes:
            for key, outcome in outcomes:
                tell(label(*key), outcome)
                if isinstance(outcome, PerfedError):
                    failed[key] = outcome
                name = self._owners[key[0]]
                left[name] -= 1
                if not left[name] and self.comparisons[name].begun:
                    own = [k for k in self.keys if self._owners[k[0]] == name and k in failed]
                    failures = [_failure(k, failed[k]) for k in own]
                    found[name] = self.comparisons[name].conclude(failures=failures)
                    self.conclude(found)
        return found, [failed[key] for key in self.keys if key in failed]

    def conclude(self, found: Mapping[str, Conclusion] | None = None) -> tuple[Path, list[Part]]:
        """Write ``report.html`` of what the comparisons of a campaign say; one that is all of the study has its own.

        Args:
            found: what they say, by name; without it, it is written anew for all that have begun.

        Returns:
            The page, and what is in it, in the campaign's order.
        """
        if found is None:
            found = {name: one.conclude() for name, one in self.comparisons.items() if one.begun}
        if "" in self.comparisons:
            return self.path / "report.html", []
        parts = []
        for name, comparison in self.comparisons.items():
            if name in found:
                told = found[name]
                place = f"{comparison.path.name}/{told.report.name}"
                parts.append(Part(name, tuple(told.runs), told.verdict, place, tuple(told.sentences)))
        waiting = Counter(self._owners[name] for name, *_ in self.left())
        waiting.update(dict.fromkeys(self.comparisons, 0))
        title = self.path.resolve().name
        if self.key:
            experiment = next(iter(self.comparisons.values())).table.get("name", title)
            title = f"{experiment}: {self.key}"
        page = write_campaign(parts, self.path / "report.html", key=self.key, title=title, waiting=waiting)
        return page, parts


def _named_folds(name: str, one: Comparison) -> dict[str, Comparison]:
    return {f"{name}: {fold}" if name else fold: own for fold, own in one.folds.items()}


def _blends_last(keys: list[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: key[1] == BLEND)


def _checked(spec: ComparisonSpec, where: Path, resources: Resources) -> Comparison:
    """The comparison to be, whose first runs can start."""
    spec = spec.whole(resources)
    spec.check_starts(spec.seeds[0], resources)
    return Comparison(resources.with_device(spec.table), spec.methods, spec.seeds, where)


def _title(name: str, method: str, seed: int) -> str:
    return f"{name}: {method}, seed {seed}" if name else f"{method}, seed {seed}"


def _failure(key: Key, outcome: PerfedError) -> Failure:
    why = str(outcome).removeprefix(f"{_title(*key)}: ")
    return Failure(key[1], key[2], next(iter(why.splitlines()), ""))


def extend(
    path: Path,
    methods: Sequence[str],
    seeds: Sequence[int],
    experiment: dict[str, Any] | None,
    settings: Sequence[str],
    resources: Resources = USUAL,
) -> Study:
    """Add methods and seeds to the comparison in ``path``; runs that are done stay as they are.

    Args:
        path: of the comparison.
        methods, seeds: new ones and, if the user names them, those that are there.
        experiment: if it was given anew: it must be the same.
        settings: assignments; they may be about new methods alone.
        resources: as in :meth:`Study.create`.

    Raises:
        PerfedError: no comparison there, nothing new, settings or data that are not those of its runs, or a method that
            cannot start. Nothing is written then.
    """
    if marker_of(path)[0] != "comparison":
        raise PerfedError(f"--extend {path}: no comparison is there ({MARKER} is missing)")
    before = Comparison.read(path)
    if {*methods} <= {*before.methods} and {*seeds} <= {*before.seeds}:
        raise PerfedError(
            f"--extend {path}: nothing to add; it has the methods {', '.join(before.methods)} and the seeds "
            f"{', '.join(map(str, before.seeds))}; name others with --methods and --seeds"
        )
    names = list(dict.fromkeys([*before.methods, *methods]))
    table = override(before.table if experiment is None else experiment, settings, federated(names))
    after = before.with_more(ComparisonSpec(table, [*methods], [*seeds]), resources)
    check_marker(path)
    after.write()
    return Study(path, {"": after})
