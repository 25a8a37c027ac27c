"""The one exception a user of perfed has to know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError

_LONG = 300  # characters of what was given that a message shows


class PerfedError(ValueError):
    """Bad input or an impossible request: one line saying what, where and what is allowed.

    The command line prints the text and exits with code 2.

    Example:
        >>> from perfed import load
        >>> try:
        ...     load("digits", {"client": 3}, seed=0)
        ... except PerfedError as error:
        ...     print(error)
        data.client is not an option of 'digits'; its options: ...
    """


class Diverged(Exception):
    """A matrix of one client could not be factorised: its values have overflowed.

    Attributes:
        row: position of the client in its cohort.
        reason: what failed.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row = row
        self.reason = reason


class ClientsDiverged(PerfedError):
    """Training left numbers that are not finite, at some clients.

    Attributes:
        where: the round.
        found: by client id what happened there.
        before: what there is to say of the exchange before: a reply that was much larger than the others'.
    """

    def __init__(self, where: str, found: Mapping[str, str], before: str = "") -> None:
        super().__init__(where, found, before)  # which a copy in another process is made of
        self.where = where
        self.found = found
        self.before = before

    def __str__(self) -> str:
        if len(self.found) == 1:
            (happened,) = self.found.values()
            return f"{self.where}: {happened}{self.before}; lower the learning rate or look at this client's data"
        who = shorten_list([f"'{client}'" for client in self.found])
        first = next(iter(self.found.values()))
        return (
            f"{self.where}: training diverged at {len(self.found)} clients, {who} ({first}){self.before}; lower the "
            "learning rate or look at these clients' data"
        )


def shorten_list(names: Sequence[str], most: int = 8) -> str:
    """Names with commas; of more than ``most`` the first of them, and how many more there are.

    Example:
        >>> shorten_list(["north", "south", "west"], most=2)
        'north, south and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """What is put behind an unknown name, with a space: the known one that is most like it; empty if none is.

    Example:
        >>> did_you_mean("rouns", ["rounds", "seed"])
        " (did you mean 'rounds'?)"
    """
    near = difflib.get_close_matches(given, known, n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def first_problem(error: ValidationError, where: str) -> PerfedError:
    """The first problem of a pydantic error in one line: key, what is wrong, what was given."""
    detail = error.errors()[0]
    key = ".".join(str(part) for part in (where, *_path(detail["loc"])) if str(part))
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return PerfedError(f"unknown key '{key}'")
    # One message per member of a union, e.g. an integer or the word 'validated'.
    same = [d for d in error.errors() if d["loc"][:1] == detail["loc"][:1] and _path(d["loc"]) == _path(detail["loc"])]
    message = ", or: ".join(dict.fromkeys(_message(d["msg"]) for d in same))
    whole = detail["type"] == "value_error" and isinstance(detail["input"], Mapping)  # which its message speaks of
    given = "" if detail["type"] == "missing" or whole else f" (given: {_short(repr(detail['input']))})"
    return PerfedError(f"{key}: {message}{given}" if key else f"{message}{given}")


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _message(text: str) -> str:
    text = re.sub(" or (an )?instance of .*", "", text.removeprefix("Value error, "))  # which no file can hold
    return text[:1].lower() + text[1:]


def _path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    # Behind the field's name pydantic lists the member of a union it tried, e.g. ('lr', 'float').
    return tuple(
        part for part in loc if part not in ("float", "int", "str", "constrained-int") and "[" not in str(part)
    )
