"""The exception that users of perfed see, and related functions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError

_LONG = 300  # largest number of characters of an input in a message


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
    """An error: a matrix of one client could not be factorised because its values have overflowed.

    Attributes:
        row: position of the client in its cohort.
        reason: the operation that failed.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row = row
        self.reason = reason


class ClientsDiverged(PerfedError):
    """An error: training at some clients resulted in numbers that are not finite.

    Attributes:
        where: the round.
        messages: a message by client id.
        note: a note on the previous exchange, such as a reply that was much larger than the others.
    """

    def __init__(self, where: str, messages: Mapping[str, str], note: str = "") -> None:
        super().__init__(where, messages, note)  # the arguments from which pickle creates a copy
        self.where = where
        self.messages = messages
        self.note = note

    def __str__(self) -> str:
        if len(self.messages) == 1:
            (happened,) = self.messages.values()
            return f"{self.where}: {happened}{self.note}; lower the learning rate or look at this client's data"
        who = shorten_list([f"'{client}'" for client in self.messages])
        first = next(iter(self.messages.values()))
        return (
            f"{self.where}: training diverged at {len(self.messages)} clients, {who} ({first}){self.note}; lower the "
            "learning rate or look at these clients' data"
        )


def shorten_list(names: Sequence[str], most: int = 8) -> str:
    """Return names joined by commas; if there are more than ``most``, the first of them and the number of the others.

    Example:
        >>> shorten_list(["north", "south", "west"], most=2)
        'north, south and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def suggest_name(name: str, known_names: Iterable[str]) -> str:
    """Return the most similar known name, as a remark to append to a message; empty if none is similar.

    Example:
        >>> suggest_name("rouns", ["rounds", "seed"])
        " (did you mean 'rounds'?)"
    """
    matches = difflib.get_close_matches(name, known_names, n=1)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def summarise_validation_error(error: ValidationError, where: str) -> PerfedError:
    """Return the first problem of a pydantic error in one line: key, problem and input."""
    detail = error.errors()[0]
    key = ".".join(str(part) for part in (where, *_clean_path(detail["loc"])) if str(part))
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return PerfedError(f"unknown key '{key}'")
    # One message per member of a union, e.g. an integer or the word 'validated'.
    same = [
        d
        for d in error.errors()
        if d["loc"][:1] == detail["loc"][:1] and _clean_path(d["loc"]) == _clean_path(detail["loc"])
    ]
    message = ", or: ".join(dict.fromkeys(_clean_message(d["msg"]) for d in same))
    # The message about a whole table describes it; there is no need to print it.
    is_table = detail["type"] == "value_error" and isinstance(detail["input"], Mapping)
    input_text = "" if detail["type"] == "missing" or is_table else f" (given: {_truncate(repr(detail['input']))})"
    return PerfedError(f"{key}: {message}{input_text}" if key else f"{message}{input_text}")


def _truncate(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _clean_message(text: str) -> str:
    text = re.sub(" or (an )?instance of .*", "", text.removeprefix("Value error, "))  # instances cannot occur in files
    return text[:1].lower() + text[1:]


def _clean_path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    # After the field's name pydantic lists the member of a union that it tried, such as ('lr', 'float').
    return tuple(
        part for part in loc if part not in ("float", "int", "str", "constrained-int") and "[" not in str(part)
    )
