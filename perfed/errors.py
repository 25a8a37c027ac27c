"""The one exception a user of perfed has to know."""

from __future__ import annotations

from pydantic import ValidationError


class PerfedError(ValueError):
    """Bad input or an impossible request: one line saying what, where and what is allowed.

    The command line prints the text and exits with code 2.
    """


def first_problem(error: ValidationError, where: str) -> PerfedError:
    """The first problem of a pydantic error in one line: key, what is wrong, what was given."""
    detail = error.errors()[0]
    key = ".".join(str(part) for part in (where, *_path(detail["loc"])) if str(part))
    if detail["type"] == "extra_forbidden":
        return PerfedError(f"unknown key '{key}'")
    message = detail["msg"].removeprefix("Value error, ")
    given = "" if detail["type"] == "missing" else f" (given: {detail['input']!r})"
    return PerfedError(f"{key}: {message[:1].lower() + message[1:]}{given}")


def _path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    # Behind the field's name pydantic lists the member of a union it tried, e.g. ('lr', 'float').
    return tuple(
        part for part in loc if part not in ("float", "int", "str", "constrained-int") and "[" not in str(part)
    )
