"""What the generated pages of the site have in common: docstrings as Markdown, tables of settings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from markdown_tables import table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from perfed.datasets.catalogue import describe_type


def from_docstring(text: str) -> str:
    """A docstring's words in Markdown: references are names in code, two backticks are one.

    Example:
        >>> from_docstring("By :class:`~perfed.method.Method`, ``a_i <- b``.")
        'By `Method`, `a_i <- b`.'
    """
    text = re.sub(r":\w+:`(?:[^`<]+<)?~?(?:[\w.]*\.)?(\w+)>?`", r"`\1`", text)
    return text.replace("``", "`")


def one_line(text: str) -> str:
    """A docstring's part in a cell of a table."""
    return cell(from_docstring(" ".join(text.split())))


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return text.replace("|", "\\|")


def value(of: Any) -> str:
    """A default as TOML has it, in code; of a setting that is not there nothing."""
    if of is None:
        return "not given"
    if isinstance(of, BaseModel):
        return "a table"
    return f"`{cell(json.dumps(of, default=str))}`"


def attributes(cls: type) -> dict[str, str]:
    """What a class's docstring says of each attribute, and of each argument of a constructor."""
    found: dict[str, str] = {}
    for section in re.findall(r"^(?:Attributes|Args):\n((?:    .*\n?|\n)+)", inspect.getdoc(cls) or "", re.MULTILINE):
        parts = re.split(r"^    (\w+(?:, \w+)*): ", section, flags=re.MULTILINE)[1:]
        for names, meaning in zip(parts[::2], parts[1::2], strict=True):
            found |= dict.fromkeys(names.split(", "), one_line(meaning))
    return found


def tables_in(field: FieldInfo) -> type[BaseModel] | None:
    """The table that a setting is, if it is one."""
    every = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((of for of in every if isinstance(of, type) and issubclass(of, BaseModel)), None)


def fields_of(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Name, default, what is allowed and meaning of each setting of a table that is not a table itself."""
    told = attributes(model)
    for name, field in model.model_fields.items():
        if tables_in(field) is None:
            allowed = re.sub(r"dict\[.*\]", "table", describe_type(field.rebuild_annotation()))
            default = "needed" if field.is_required() else value(field.get_default(call_default_factory=True))
            yield f"`{name}`", default, cell(allowed), one_line(field.description or "") or told.get(name, "")


def settings(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of settings as ``perfed show --json`` has them."""
    found = [
        (f"`{name}`", value(about["default"]), cell(about["allowed"]), one_line(about["description"] or ""))
        for name, about in rows.items()
    ]
    return table(("setting", "default", "allowed", "meaning"), found)
