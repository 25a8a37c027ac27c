"""The limits that a site's administrator sets for all studies, in ``policy.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from perfed.errors import PerfedError, shorten_list, suggest_name, summarise_validation_error
from perfed.experiment.config import Experiment
from perfed.privacy.apply import PrivateMethod
from perfed.settings import LISTED, STRICT
from perfed.sites.deploy.candidates import list_methods
from perfed.sites.deploy.spending import check_planned_run
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.refusal import RefusalReason, Refused
from perfed.tables.site_data import SiteData

_Names = Annotated[tuple[str, ...], LISTED]
_Violation = tuple[str, Sequence[str], str]
"""A key of the policy, what exceeds it (nothing if the policy is met), and what it allows."""


class Policy(BaseModel):
    """The limits of a site. They restrict what the rehearsal of a study permits, and never extend it.

    A key that is missing sets no limit.

    Example:
        >>> Policy.model_validate({"programs": ["train", "personalise"], "rounds": 50}).rounds
        50
    """

    model_config = STRICT

    methods: _Names | None = Field(None, description="methods that may run at this site; * stands for any characters")
    programs: _Names | None = Field(
        None, description="programs that may run at this site; those of the engine begin with ':'"
    )
    entries: _Names | None = Field(
        None, description="entries that replies, or sums of replies, may contain, named as on the site's page"
    )
    metrics: _Names | None = Field(None, description="metrics that may be sent")
    rounds: PositiveInt | None = Field(None, description="maximum number of rounds of a study")
    bytes: PositiveInt | None = Field(None, description="maximum size of the tensors of one reply in bytes")
    rows: PositiveInt | None = Field(
        None, description="minimum number of training rows with which this site takes part"
    )
    rows_per_class: PositiveInt | None = Field(
        None, description="minimum number of training rows of each class that has any"
    )
    epsilon: float | None = Field(
        None, gt=0, description="maximum epsilon of all runs of this site together, by [privacy]"
    )
    delta: float | None = Field(
        None, gt=0, lt=1, description="delta at which epsilon is computed; by default that of the study"
    )
    secure_aggregation: bool = Field(False, description="whether replies may only be sent under masks")

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the policy from ``file``.

        Raises:
            PerfedError: the file cannot be read, is not TOML, or has an unknown key or a value that is not allowed.
        """
        try:
            return cls.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except ValidationError as error:
            detail = error.errors()[0]
            unknown = detail["type"] == "extra_forbidden"
            hint = suggest_name(str(detail["loc"][-1]), cls.model_fields) if unknown else ""
            allowed = f"{hint}; allowed: {', '.join(cls.model_fields)}" if unknown else ""
            raise PerfedError(f"--policy {file}: {summarise_validation_error(error, '')}{allowed}") from None
        except (OSError, ValueError) as error:
            raise PerfedError(f"--policy {file}: cannot be read: {error}") from None

    def check(self, allow_list: AllowList) -> None:
        """Check that the rehearsal of a study needs nothing beyond the policy.

        Raises:
            Refused: the policy forbids something; the message names it, and the server is told the key of the policy.
        """
        _refuse_violations(self._compare_allow_list(allow_list))

    def check_study(self, study: Experiment) -> None:
        """Check that the settings of a study stay within the policy.

        Raises:
            Refused: as in :meth:`check`.
        """
        _refuse_violations(self._compare_settings(study))

    def check_budget(self, folder: Path, line: str, plan: PrivateMethod | None, data: SiteData, sites: int) -> None:
        """Check that a run stays within the epsilon that the policy allows for all runs of the site in ``folder``.

        If the policy does not set delta, that of the study must be at most one over the number of protected units
        (rows, or sites with ``unit = "client"``), because a larger one would allow a release to reveal one unit
        completely.

        Args:
            folder: folder of the site.
            line: name of the ledger line of the run; empty if the site has not joined it yet.
            plan: privacy plan of the run; ``None`` without a table ``[privacy]``.
            data: data of the site.
            sites: number of sites of the study.

        Raises:
            Refused: as in :meth:`check`.
        """
        if plan is None or self.epsilon is None:
            return
        if self.delta is None:
            count, units = (data.count_rows()[0], "rows") if plan.settings.unit == "sample" else (sites, "sites")
            excess = _list_excess(plan.settings.delta * count, 1.0) and [
                f"{plan.settings.delta:g}, with {count} {units}"
            ]
            _refuse_violations(
                iter([("delta", excess, f"at most one over the number of {units}, or delta of the policy")])
            )
        check_planned_run(folder, line, plan, self.epsilon, self.delta)

    def check_data(self, data: SiteData) -> None:
        """Check that the site has enough rows; the server is not told how many rows there are.

        Raises:
            Refused: as in :meth:`check`.
        """
        _refuse_violations(self._compare_rows(data))

    def _compare_settings(self, study: Experiment) -> Iterator[_Violation]:
        """Yield how the settings of a study compare with the policy, for each key that is set."""
        if self.methods is not None:
            yield "methods", _find_unmatched(list_methods(study), self.methods), _format_patterns(self.methods)
        if self.rounds is not None:
            yield "rounds", _list_excess(study.rounds, self.rounds), f"at most {self.rounds}"
        if self.epsilon is not None:
            privacy: Any = getattr(study, "privacy", None)
            spent = None if privacy is None else privacy.epsilon
            excess = ["the study sets no bound"] if spent is None else _list_excess(spent, self.epsilon)
            yield "epsilon", excess, f"at most {self.epsilon:g}"
        if self.secure_aggregation:
            missing = ["replies leave without masks"] if study.secure_aggregation is None else []
            yield "secure_aggregation", missing, "studies with the table [secure_aggregation]"

    def _compare_allow_list(self, allow_list: AllowList) -> Iterator[_Violation]:
        """Yield how the requirements of a rehearsal compare with the policy, for each key that is set."""
        for key, names, patterns in (
            ("programs", allow_list.programs, self.programs),
            ("entries", [*allow_list.entry_names, *([] if allow_list.discreet else ["loss"])], self.entries),
            ("metrics", allow_list.reported_metrics, self.metrics),
        ):
            if patterns is not None:
                yield key, _find_unmatched(names, patterns), _format_patterns(patterns)
        if self.bytes is not None:
            yield "bytes", _list_excess(allow_list.max_reply_bytes, self.bytes), f"at most {self.bytes}"

    def _compare_rows(self, data: SiteData) -> Iterator[_Violation]:
        """Yield how the numbers of rows compare with the policy, for each key that is set."""
        if self.rows is None and self.rows_per_class is None:
            return
        rows, classes = data.count_rows()
        if self.rows is not None:
            yield "rows", [f"{rows} to train on"] if rows < self.rows else [], f"at least {self.rows}"
        if self.rows_per_class is not None:
            minimum = self.rows_per_class
            small_classes = [f"{count} of class '{name}'" for name, count in (classes or {}).items() if count < minimum]
            yield "rows_per_class", small_classes, f"at least {self.rows_per_class} of each class that has some"


def _refuse_violations(comparisons: Iterator[_Violation]) -> None:
    """Raise :class:`Refused` for the first key of the policy that is exceeded."""
    for key, excess, allowed in comparisons:
        if excess:
            problem = "the policy of this site does not allow what the study needs"
            raise Refused(RefusalReason.POLICY, f"{problem}: {key}: {shorten_list(excess)}; allowed: {allowed}", key)


def _find_unmatched(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match none of the patterns."""
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _list_excess(number: float, maximum: float) -> list[str]:
    """Return ``number`` as a text in a list if it exceeds ``most``, and an empty list otherwise."""
    return [f"{number:g}" if isinstance(number, float) else str(number)] if number > maximum else []


def _format_patterns(patterns: Sequence[str]) -> str:
    return ", ".join(patterns) or "none"
