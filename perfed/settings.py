"""Common parts of all tables of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_serializer,
    model_validator,
)

from perfed.errors import PerfedError

STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
"""Model configuration: immutable values, finite numbers, and errors for unknown keys and values of another type."""


LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Validator for a setting that is a tuple, because TOML only has lists."""


def exclude_default(value: Any) -> Callable[[Any], bool]:
    """Return the ``exclude_if`` of a setting that is only written if it differs from ``value``, its default.

    It is meant for settings that were added later, so that the files of runs without them do not change.
    """
    return lambda setting: bool(setting == value)


def flatten_keys(table: Mapping[str, Any], where: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return the values of nested tables by their paths.

    Example:
        >>> flatten_keys({"rounds": 3, "data": {"name": "digits"}})
        {('rounds',): 3, ('data', 'name'): 'digits'}
    """
    values: dict[tuple[str, ...], Any] = {}
    for name, value in table.items():
        path = (*where, name)
        values |= flatten_keys(value, path) if isinstance(value, Mapping) else {path: value}
    return values


def describe_value(value: Any) -> str:
    """Return a setting as a part of a sentence; ``None`` means that it is not there."""
    return "not there" if value is None else repr(value)


LARGEST = 2**53
"""Largest integer in a setting; larger ones overflow in arrays and lose digits as floating-point numbers."""


def check_whole_numbers(settings: Any, where: str = "") -> None:
    """Raise an error if nested tables and lists contain an integer beyond :data:`LARGEST`, except for seeds.

    Args:
        settings: the settings in built-in types.
        where: the key of the settings, for the message.

    Raises:
        PerfedError: if there is such an integer; the message names its key.

    Example:
        >>> check_whole_numbers({"training": {"batch_size": 10**20}})
        Traceback (most recent call last):
        perfed.errors.PerfedError: training.batch_size: whole numbers must be between -2**53 and 2**53 (given: ...)
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if not str(key).endswith("seed"):
                check_whole_numbers(value, f"{where}.{key}" if where else str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            check_whole_numbers(value, where)
    elif isinstance(settings, int) and abs(settings) > LARGEST:
        digits = str(settings) if abs(settings) < 10**100 else "a number of more than 100 digits"
        raise PerfedError(f"{where}: whole numbers must be between -2**53 and 2**53 (given: {digits})")


class Table(BaseModel):
    """Settings that are written with the same keys as they were read, in the same order."""

    model_config = STRICT

    _explicit: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _record_explicit(cls, value: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        table = check(value)
        if isinstance(value, Mapping):
            table._explicit = {key: item for key, item in value.items() if item is not None}
        return table

    @property
    def explicit_settings(self) -> dict[str, Any]:
        """Return the explicit keys with their values, in order."""
        return dict(self._explicit)

    @model_serializer
    def _serialise(self) -> dict[str, Any]:
        return self.explicit_settings
