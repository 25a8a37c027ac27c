"""Building methods from plain settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

import perfed.methods.presets  # noqa: F401 - registers methods and presets
from perfed.errors import PerfedError, summarise_validation_error
from perfed.method.extension import Extension, extension_class
from perfed.method.method import Method
from perfed.method.registry import entry


def setting_names(method: str) -> set[str]:
    """Return the names of the settings allowed in ``[methods.NAME]``: the method's and those of its extensions."""
    registered = entry(method)
    names = set(registered.method.model_fields)
    for extension in registered.extensions:
        names |= set(extension.model_fields)
    return names


def build_method(
    name: str, settings: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None
) -> Method:
    """Return a registered method, built from plain settings.

    Args:
        name: name of the method.
        settings: the hyper-parameters of the method and of its extensions; ``extensions`` may list further extensions
            by name.
        training: settings that every method has (optimiser, learning rate, ...); ``settings`` take precedence.

    Raises:
        PerfedError: a setting is unknown, or its value is not allowed; the message names ``methods.NAME.key`` or
            ``training.key``.

    Example:
        >>> method = build_method("fedpac", {"lr": 0.03, "alignment": 0.5}, {"batch_size": 10})
        >>> method.lr, method.batch_size, method.extensions[0].alignment
        (0.03, 10, 0.5)
    """
    registered = entry(name)
    if registered.base and training is None:
        raise PerfedError(
            f"'{name}' is the method '{registered.base}' under the policy '{registered.policy}': build "
            f"'{registered.base}' and give the run participation = Participation(policy='{registered.policy}')"
        )
    for key in training or {}:
        if key not in Method.model_fields or key == "extensions":
            allowed = sorted(set(Method.model_fields) - {"extensions"})
            raise PerfedError(f"unknown key 'training.{key}'; allowed: {', '.join(allowed)}")
    settings = settings or {}
    merged = {**(registered.defaults or {}), **(training or {}), **settings}
    extra = merged.pop("extensions", [])
    if not isinstance(extra, list | tuple) or not all(isinstance(name, str) for name in extra):
        raise PerfedError(f"methods.{name}.extensions: must be a list of names (given: {extra!r})")
    classes: list[type[Extension]] = [*registered.extensions, *(extension_class(t) for t in extra)]
    for cls in classes:
        if classes.count(cls) > 1:
            raise PerfedError(f"methods.{name}.extensions: '{cls.name}' is listed twice; allowed: once")
    method_values = {key: value for key, value in merged.items() if key in registered.method.model_fields}
    extension_values = {key: value for key, value in merged.items() if key not in method_values}
    extensions = []
    for cls in classes:
        values = {key: extension_values.pop(key) for key in list(extension_values) if key in cls.model_fields}
        extensions.append(_validate(cls, values, f"methods.{name}"))
    if extension_values:
        allowed = sorted(set(registered.method.model_fields).union(*(cls.model_fields for cls in classes)))
        raise PerfedError(f"unknown key 'methods.{name}.{next(iter(extension_values))}'; allowed: {', '.join(allowed)}")
    origin = f"methods.{name}" if set(method_values) <= set(settings) else f"training or methods.{name}"
    method: Method = _validate(registered.method, {**method_values, "extensions": tuple(extensions)}, origin)
    return method


def _validate(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise summarise_validation_error(error, where) from None
