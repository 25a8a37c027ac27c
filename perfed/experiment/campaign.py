"""Campaigns: comparisons that are one piece of work, one after the other; a sweep's differ in one setting alone."""

from __future__ import annotations

import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch

from perfed.errors import PerfedError
from perfed.experiment import compare
from perfed.experiment.baselines import Baseline
from perfed.experiment.compare import Comparison, is_comparison
from perfed.experiment.conclusion import Conclusion, Failure
from perfed.experiment.config import readable
from perfed.experiment.extend import with_more
from perfed.experiment.jobs import Execute, in_turn
from perfed.experiment.names import folder_names
from perfed.experiment.planned import Planned, problems_of
from perfed.machine import write_atomic
from perfed.report.campaign import Part
from perfed.report.page.campaign import write_campaign
from perfed.run.directory import RunDirectory
from perfed.run.run import Run

Outcome = tuple[str, str, int, dict[str, Any] | PerfedError]
"""Comparison, method, seed; and the run's summary, or why it failed."""


def is_campaign(path: Path) -> bool:
    """Whether ``path`` is the directory of a campaign or a sweep."""
    return (path / "campaign.toml").is_file()


@dataclass(frozen=True)
class Campaign:
    """Comparisons in one directory, each in a folder of its own.

    Attributes:
        path: the directory.
        key: the setting in which the comparisons of a sweep differ; they are called ``key=value``. Else empty.
        comparisons: by name, in the order in which they are made.
    """

    path: Path
    key: str
    comparisons: dict[str, Comparison]

    @classmethod
    def create(
        cls,
        path: Path,
        planned: Mapping[str, Planned],
        data_dir: Path | None,
        device: torch.device | None,
        key: str = "",
    ) -> Campaign:
        """Check that all methods of all comparisons can start on the data, and make the directory.

        Where one is there, it goes on with what is done, and with whatever comparisons, methods and seeds are new.

        Raises:
            PerfedError: bad settings or data of any comparison, or ``path`` holds something else, or runs with other
                settings. No comparison is begun then.
        """
        before = cls.read(path) if is_campaign(path) else None
        if before is not None and before.key != key:
            held = f"a sweep over {before.key}" if before.key else "a campaign"
            raise PerfedError(f"--out {path}: holds {held}; choose another directory")
        old = {} if before is None else before.comparisons
        folders = {name: one.path.name for name, one in old.items()}
        folders = folder_names([*old, *(name for name in planned if name not in old)]) | folders
        made: dict[str, Comparison] = {}
        if before is None:
            RunDirectory.create(path)
        try:
            for name, plan in planned.items():
                with problems_of(name):
                    made[name] = _made(path / folders[name], plan, data_dir, device)
        except PerfedError:
            for comparison in (one for name, one in made.items() if name not in old):
                comparison.abandoned()
            with suppress(OSError):  # not empty
                path.rmdir()
            raise
        campaign = cls(path, key, made | {name: one for name, one in old.items() if name not in made})
        content = {"key": key, "comparisons": {name: one.path.name for name, one in campaign.comparisons.items()}}
        write_atomic(path / "campaign.toml", tomli_w.dumps(content))
        return campaign

    @classmethod
    def read(cls, path: Path) -> Campaign:
        """The campaign that :meth:`create` made."""
        with readable(path / "campaign.toml") as file:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            folders = {str(name): path / str(folder) for name, folder in content["comparisons"].items()}
            key = str(content["key"])
        return cls(path, key, {name: Comparison.read(folder) for name, folder in folders.items()})

    @property
    def size(self) -> int:
        """How many runs there are."""
        return sum(len(comparison.keys) for comparison in self.comparisons.values())

    def left(self, name: str | None = None) -> list[tuple[str, str, int]]:
        """The runs that are not finished, in the order in which they begin; of one comparison or all."""
        return [(at, *key) for at, one in self.comparisons.items() if name in (None, at) for key in one.left()]

    def outcomes(
        self, data_dir: Path | None, device: torch.device | None, execute: Execute = in_turn
    ) -> Generator[Outcome, None, None]:
        """Do the runs that are not finished, as :meth:`Comparison.outcomes` does those of one comparison.

        Raises:
            PerfedError: no run could begin; says why the first could not. What was made for it is taken back.
        """
        failed = []
        try:
            with closing(execute(Recipe(self, data_dir, device), self.left())) as found:
                for (name, method, seed), outcome in found:
                    if isinstance(outcome, PerfedError):
                        failed.append(outcome := PerfedError(f"{name}: {method}, seed {seed}: {outcome}"))
                    yield name, method, seed, outcome
        except PerfedError:
            self._abandoned()
            raise
        if failed and self._abandoned():
            raise failed[0]

    def _abandoned(self) -> bool:
        """Whether no run could begin; all is then taken back."""
        if any(comparison.begun for comparison in self.comparisons.values()):
            return False
        for comparison in self.comparisons.values():
            comparison.abandoned()
        (self.path / "campaign.toml").unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            self.path.rmdir()
        return True

    def concluded(self, name: str, failures: Sequence[Failure] | None = None) -> Conclusion | None:
        """What the runs of a comparison say, written into its folder; None where none has started."""
        comparison = self.comparisons[name]
        return comparison.conclude(failures=failures) if comparison.begun else None

    def conclude(self, found: Mapping[str, Conclusion]) -> tuple[Path, list[Part]]:
        """Write ``report.html`` of what comparisons say; its path, and what is in it, in the campaign's order."""
        parts = []
        for name, comparison in self.comparisons.items():
            if name in found:
                told = found[name]
                place = f"{comparison.path.name}/{told.report.name}"
                parts.append(Part(name, tuple(told.runs), told.verdict, place, tuple(told.sentences)))
        waiting = {name: len(self.left(name)) for name in self.comparisons}
        title = self.path.resolve().name
        if self.key:
            experiment = next(iter(self.comparisons.values())).table.get("name", title)
            title = f"{experiment}: {self.key}"
        page = write_campaign(parts, self.path / "report.html", key=self.key, title=title, waiting=waiting)
        return page, parts


def _made(where: Path, plan: Planned, data_dir: Path | None, device: torch.device | None) -> Comparison:
    """The comparison, where it was if it is there."""
    if is_comparison(where):
        return with_more(Comparison.read(where), plan.table, plan.methods, plan.seeds, data_dir, device)
    return Comparison.create(where, plan.table, plan.methods, plan.seeds, data_dir, device)


@dataclass
class Recipe:
    """Makes the runs of a campaign ready by comparison, method and seed, here or in another process.

    Attributes:
        campaign: whose runs they are.
        data_dir: first folder in which data files are looked for.
        device: in place of the experiments'.
    """

    campaign: Campaign
    data_dir: Path | None
    device: torch.device | None
    _now: tuple[str, compare.Recipe] | None = field(default=None, init=False, repr=False)

    def label(self, name: str, method: str, seed: int) -> str:
        """What people call a run."""
        return f"{name}: {method} seed {seed}"

    def check(self) -> None:
        """Raises a :class:`PerfedError` where this process does not know what the runs are made of."""
        for comparison in self.campaign.comparisons.values():
            compare.Recipe(comparison, self.data_dir, self.device).check()

    def __call__(self, name: str, method: str, seed: int) -> Run | Baseline:
        """The run, where it was if it had begun; the data of one comparison are kept at a time."""
        if self._now is None or self._now[0] != name:
            self._now = None
            self._now = name, compare.Recipe(self.campaign.comparisons[name], self.data_dir, self.device)
        return self._now[1](method, seed)
