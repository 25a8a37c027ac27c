"""What all tables of settings have in common."""

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
"""Values do not change, unknown keys and values of another type are errors, and numbers are finite."""


LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""For a setting that is a tuple: TOML has lists only."""


def unless(value: Any) -> Callable[[Any], bool]:
    """``exclude_if`` of a setting that is written down only where it is not ``value``, its default.

    For settings that came later: runs without them leave behind what they always did.
    """
    return lambda given: bool(given == value)


def leaves(table: Mapping[str, Any], where: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The values of nested tables by their paths.

    Example:
        >>> leaves({"rounds": 3, "data": {"name": "digits"}})
        {('rounds',): 3, ('data', 'name'): 'digits'}
    """
    found: dict[tuple[str, ...], Any] = {}
    for name, value in table.items():
        path = (*where, name)
        found |= leaves(value, path) if isinstance(value, Mapping) else {path: value}
    return found


def stated(value: Any) -> str:
    """A setting in a sentence; ``None``: it is not there."""
    return "not there" if value is None else repr(value)


LARGEST = 2**53
"""Largest integer in a setting; larger ones overflow in arrays and lose digits as floating-point numbers."""


def check_whole_numbers(settings: Any, where: str = "") -> None:
    """Raise an error if nested tables and lists contain an integer beyond :data:`LARGEST`, except for seeds.

    Args:
        settings: the settings in built-in types.
        where: the key of the settings, for the message.

    Raises:
        PerfedError: there is such an integer; the message names its key.

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
    """Settings that are written as they were given: the same keys in the same order, and no others."""

    model_config = STRICT

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        made = check(value)
        if isinstance(value, Mapping):
            made._given = {key: item for key, item in value.items() if item is not None}
        return made

    @property
    def given(self) -> dict[str, Any]:
        """The keys that were given, with their values, in their order."""
        return dict(self._given)

    @model_serializer
    def _as_given(self) -> dict[str, Any]:
        return self.given
