"""What came of a comparison: its finished runs, the verdict on them, and which runs failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfed.errors import PerfedError
from perfed.report import Verdict
from perfed.report.curves import oracle
from perfed.report.runs import Run as FinishedRun


@dataclass(frozen=True)
class Failure:
    """A run that failed, and the first line of why."""

    method: str
    seed: int
    reason: str

    @classmethod
    def of(cls, method: str, seed: int, outcome: PerfedError) -> Failure:
        """That of an outcome of :meth:`Comparison.outcomes`."""
        why = str(outcome).removeprefix(f"{method}, seed {seed}: ")
        return cls(method, seed, next(iter(why.splitlines()), ""))


@dataclass(frozen=True)
class Conclusion:
    """What the finished runs of a comparison say.

    Attributes:
        runs: that have started.
        verdict: of two methods or more.
        report: its path.
        failed: a line per method of which runs failed; the verdict's warnings have them too.
    """

    runs: list[FinishedRun]
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


def failed_lines(failures: Sequence[Failure], seeds: int) -> list[str]:
    """One for each method: in how many of the seeds it failed, and why in the first."""
    by_method: dict[str, list[Failure]] = {}
    for failure in failures:
        by_method.setdefault(failure.method, []).append(failure)
    return [
        f"{method} failed in {len(own)} of {seeds} seed{'s' if seeds > 1 else ''}: {own[0].reason}"
        for method, own in by_method.items()
    ]
