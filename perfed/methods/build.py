"""Methods from plain settings."""

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
    """Names of the settings that ``[methods.NAME]`` may hold: the method's own and those of its extensions."""
    found = entry(method)
    names = set(found.method.model_fields)
    for extension in found.extensions:
        names |= set(extension.model_fields)
    return names


def build_method(
    name: str, settings: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None
) -> Method:
    """A registered method from plain settings.

    Args:
        name: of the method.
        settings: the method's hyper-parameters and those of its extensions; ``extensions`` may list further ones by
            name.
        training: settings that every method has (optimiser, learning rate, ...); ``settings`` win.

    Raises:
        PerfedError: unknown setting, or a value that is not allowed; names ``methods.NAME.key`` or ``training.key``.

    Example:
        >>> method = build_method("fedpac", {"lr": 0.03, "alignment": 0.5}, {"batch_size": 10})
        >>> method.lr, method.batch_size, method.extensions[0].alignment
        (0.03, 10, 0.5)
    """
    found = entry(name)
    if found.base and training is None:
        raise PerfedError(
            f"'{name}' is the method '{found.base}' under the policy '{found.policy}': build '{found.base}' and give "
            f"the run participation = Participation(policy='{found.policy}')"
        )
    for key in training or {}:
        if key not in Method.model_fields or key == "extensions":
            allowed = sorted(set(Method.model_fields) - {"extensions"})
            raise PerfedError(f"unknown key 'training.{key}'; allowed: {', '.join(allowed)}")
    settings = settings or {}
    merged = {**(found.defaults or {}), **(training or {}), **settings}
    extra = merged.pop("extensions", [])
    if not isinstance(extra, list | tuple) or not all(isinstance(name, str) for name in extra):
        raise PerfedError(f"methods.{name}.extensions: must be a list of names (given: {extra!r})")
    classes: list[type[Extension]] = [*found.extensions, *(extension_class(t) for t in extra)]
    for cls in classes:
        if classes.count(cls) > 1:
            raise PerfedError(f"methods.{name}.extensions: '{cls.name}' would be there twice; once is allowed")
    own = {key: value for key, value in merged.items() if key in found.method.model_fields}
    rest = {key: value for key, value in merged.items() if key not in own}
    extensions = []
    for cls in classes:
        mine = {key: rest.pop(key) for key in list(rest) if key in cls.model_fields}
        extensions.append(_checked(cls, mine, f"methods.{name}"))
    if rest:
        known = sorted(set(found.method.model_fields).union(*(cls.model_fields for cls in classes)))
        raise PerfedError(f"unknown key 'methods.{name}.{next(iter(rest))}'; allowed: {', '.join(known)}")
    where = f"methods.{name}" if set(own) <= set(settings) else f"training or methods.{name}"
    method: Method = _checked(found.method, {**own, "extensions": tuple(extensions)}, where)
    return method


def _checked(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise summarise_validation_error(error, where) from None
