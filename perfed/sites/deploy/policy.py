"""What a site's administrator allows at most, whatever a study needs: ``policy.toml``."""

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
from perfed.sites.deploy.candidates import methods_of
from perfed.sites.deploy.spending import check_planned
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.refusal import RefusalReason, Refused
from perfed.tables.site_data import SiteData

_Names = Annotated[tuple[str, ...], LISTED]
_Lacking = tuple[str, Sequence[str], str]
"""A key, what is needed beyond it, and what it allows."""


class Policy(BaseModel):
    """It narrows what the study's own rehearsal gives, and never widens it: a key that is not there allows all.

    Example:
        >>> Policy.model_validate({"programs": ["train", "personalise"], "rounds": 50}).rounds
        50
    """

    model_config = STRICT

    methods: _Names | None = Field(None, description="methods that may run here; * stands for any characters")
    programs: _Names | None = Field(None, description="programs that may run here; those of the engine begin with ':'")
    entries: _Names | None = Field(None, description="what may be in replies, or in sums of them, as the page names it")
    metrics: _Names | None = Field(None, description="metrics that may be told")
    rounds: PositiveInt | None = Field(None, description="most rounds of a study")
    bytes: PositiveInt | None = Field(None, description="most bytes of one reply's tensors")
    rows: PositiveInt | None = Field(None, description="fewest rows to train on with which this site takes part")
    rows_per_class: PositiveInt | None = Field(None, description="fewest of them of each class that has some")
    epsilon: float | None = Field(None, gt=0, description="most that all runs here may spend of it, by [privacy]")
    delta: float | None = Field(
        None, gt=0, lt=1, description="at which that is counted; that of the study if not given"
    )
    secure_aggregation: bool = Field(False, description="whether replies may leave under masks alone")

    @classmethod
    def read(cls, file: Path) -> Self:
        """The policy in ``file``.

        Raises:
            PerfedError: it cannot be read, is not TOML, or holds an unknown key or a value that is not allowed.
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

    def check(self, study: AllowList) -> None:
        """Refuse a study whose rehearsal needs more than the policy allows.

        Raises:
            Refused: it does; names what. The server is told the key.
        """
        _refuse(self._beyond(study))

    def check_study(self, study: Experiment) -> None:
        """Refuse a study that says itself that it needs more than the policy allows.

        Raises:
            Refused: as :meth:`check`.
        """
        _refuse(self._said(study))

    def check_budget(self, folder: Path, line: str, plan: PrivateMethod | None, data: SiteData, sites: int) -> None:
        """Refuse a run that would spend more than the policy allows over all runs of the site in ``folder``.

        Args:
            folder: of the site.
            line: name of the ledger's line of the run; empty where the site has not joined it yet.
            plan: of what it tells; ``None`` without a table ``[privacy]``.
            data: of the site.
            sites: how many the study has.

        Raises:
            Refused: as :meth:`check`; also for a delta that would give one of the rows (with ``unit = "client"``: the
                reply of one of the sites) away whole, where the policy does not say at which delta epsilon is counted.
        """
        if plan is None or self.epsilon is None:
            return
        if self.delta is None:
            count, units = (data.count_rows()[0], "rows") if plan.settings.unit == "sample" else (sites, "sites")
            beyond = _above(plan.settings.delta * count, 1.0) and [f"{plan.settings.delta:g}, with {count} {units}"]
            _refuse(iter([("delta", beyond, f"at most one over the number of {units}, or delta of the policy")]))
        check_planned(folder, line, plan, self.epsilon, self.delta)

    def check_data(self, data: SiteData) -> None:
        """Refuse to take part with so few rows; how many there are is not told.

        Raises:
            Refused: as :meth:`check`.
        """
        _refuse(self._few(data))

    def _said(self, study: Experiment) -> Iterator[_Lacking]:
        if self.methods is not None:
            yield "methods", _others(methods_of(study), self.methods), _list(self.methods)
        if self.rounds is not None:
            yield "rounds", _above(study.rounds, self.rounds), f"at most {self.rounds}"
        if self.epsilon is not None:
            privacy: Any = getattr(study, "privacy", None)
            spent = None if privacy is None else privacy.epsilon
            beyond = ["the study bounds none"] if spent is None else _above(spent, self.epsilon)
            yield "epsilon", beyond, f"at most {self.epsilon:g}"
        if self.secure_aggregation:
            lacking = ["replies leave without masks"] if study.secure_aggregation is None else []
            yield "secure_aggregation", lacking, "studies with the table [secure_aggregation]"

    def _beyond(self, study: AllowList) -> Iterator[_Lacking]:
        for key, needed, patterns in (
            ("programs", study.programs, self.programs),
            ("entries", [*study.entry_names, *([] if study.discreet else ["loss"])], self.entries),
            ("metrics", study.reported_metrics, self.metrics),
        ):
            if patterns is not None:
                yield key, _others(needed, patterns), _list(patterns)
        if self.bytes is not None:
            yield "bytes", _above(study.max_reply_bytes, self.bytes), f"at most {self.bytes}"

    def _few(self, data: SiteData) -> Iterator[_Lacking]:
        if self.rows is None and self.rows_per_class is None:
            return
        rows, classes = data.count_rows()
        if self.rows is not None:
            yield "rows", [f"{rows} to train on"] if rows < self.rows else [], f"at least {self.rows}"
        if self.rows_per_class is not None:
            fewest = self.rows_per_class
            few = [f"{count} of class '{name}'" for name, count in (classes or {}).items() if count < fewest]
            yield "rows_per_class", few, f"at least {self.rows_per_class} of each class that has some"


def _refuse(found: Iterator[_Lacking]) -> None:
    for key, lacking, allowed in found:
        if lacking:
            said = "the policy of this site does not allow what the study needs"
            raise Refused(RefusalReason.POLICY, f"{said}: {key}: {shorten_list(lacking)}; allowed: {allowed}", key)


def _others(needed: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in needed if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def _above(number: float, most: float) -> list[str]:
    return [f"{number:g}" if isinstance(number, float) else str(number)] if number > most else []


def _list(patterns: Sequence[str]) -> str:
    return ", ".join(patterns) or "none"
