"""What a data set is and which options it has, in words."""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin


@dataclass(frozen=True)
class Option:
    """One option of a data set: its name, what is allowed (in words) and its default."""

    name: str
    allowed: str
    default: Any


@dataclass(frozen=True)
class Description:
    """What a data set is: first line of its documentation, task, files it reads, options in order."""

    name: str
    summary: str
    task: str
    files: tuple[str, ...]
    options: tuple[Option, ...]


def in_words(hint: Any) -> str:
    """What an option of the type ``hint`` may be."""
    if get_origin(hint) is Annotated:
        base, *extra = get_args(hint)
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        limits = [limit for item in extra for limit in getattr(item, "metadata", (item,))]
        found = [f"{signs[k]} {getattr(v, k)}" for v in limits for k in signs if hasattr(v, k)]
        words, nothing = in_words(base), ", or not given"
        end = nothing if words.endswith(nothing) else ""
        return f"{words.removesuffix(end)} {' and '.join(found)}".strip() + end
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(value) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(in_words(member) for member in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return f"list of {in_words(get_args(hint)[0])}"
    return {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "not given"}.get(
        hint, str(hint)
    )
