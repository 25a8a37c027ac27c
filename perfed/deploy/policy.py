"""What a site's administrator allows at most, whatever a study needs: ``policy.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, PositiveInt, ValidationError

from perfed.engine.flower.allowed import Allowed
from perfed.errors import PerfedError, did_you_mean, first_problem, shorten_list
from perfed.settings import LISTED, STRICT

_Names = Annotated[tuple[str, ...], LISTED]


class Policy(BaseModel):
    """It narrows what the study's own rehearsal gives, and never widens it: a key that is not there allows all.

    Attributes:
        programs: that may run here; those of the engine begin with a colon.
        entries: that may be in replies, as the site's page names them; ``*`` stands for any characters.
        metrics: that may be told.
        rounds: most of a study.
        bytes: most of one reply's tensors.

    Example:
        >>> Policy.model_validate({"programs": ["train", "personalise"], "rounds": 50}).rounds
        50
    """

    model_config = STRICT

    programs: _Names | None = None
    entries: _Names | None = None
    metrics: _Names | None = None
    rounds: PositiveInt | None = None
    bytes: PositiveInt | None = None

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
            hint = did_you_mean(str(detail["loc"][-1]), cls.model_fields) if unknown else ""
            allowed = f"{hint}; allowed: {', '.join(cls.model_fields)}" if unknown else ""
            raise PerfedError(f"--policy {file}: {first_problem(error, '')}{allowed}") from None
        except (OSError, ValueError) as error:
            raise PerfedError(f"--policy {file}: cannot be read: {error}") from None

    def check(self, study: Allowed) -> None:
        """Refuse a study that needs more than the policy allows.

        Raises:
            PerfedError: it does; names what.
        """
        for key, lacking, allowed in self._lacking(study):
            if lacking:
                raise PerfedError(
                    f"the policy of this site does not allow what the study needs: {key}: {shorten_list(lacking)}; "
                    f"allowed: {allowed}"
                )

    def _lacking(self, study: Allowed) -> Iterator[tuple[str, Sequence[str], str]]:
        """Of each key what the study needs beyond it, and what it allows."""
        for key, needed, patterns in (
            ("programs", study.programs, self.programs),
            ("entries", [*study.entries, "loss"], self.entries),
            ("metrics", study.measured, self.metrics),
        ):
            if patterns is not None:
                lacking = [name for name in needed if not any(fnmatchcase(name, pattern) for pattern in patterns)]
                yield key, lacking, ", ".join(patterns) or "none"
        for key, number, most in (("rounds", study.rounds, self.rounds), ("bytes", study.bytes, self.bytes)):
            if most is not None:
                yield key, [str(number)] if number > most else [], f"at most {most}"
